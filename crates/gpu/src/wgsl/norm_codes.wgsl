// Writes what `quantise` made of a group whose lanes hold every TEAM-th word.

fn store_codes(cell: u32, part: u32, coded: Codes) {
    for (var i = 0u; i < WORDS; i++) {
        codes[cell * (GROUP / 4u) + TEAM * i + part] = coded.words[i];
    }
    if (part == 0u) {
        cells[cell] = vec2(bitcast<u32>(coded.scale), bitcast<u32>(coded.sum));
    }
}
