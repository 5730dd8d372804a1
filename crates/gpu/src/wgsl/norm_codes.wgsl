// Writes what `quantise` made of a group whose quads hold every fourth word.

fn store_codes(cell: u32, quarter: u32, coded: Codes) {
    for (var i = 0u; i < WORDS; i++) {
        codes[cell * (GROUP / 4u) + 4u * i + quarter] = coded.words[i];
    }
    if (quarter == 0u) {
        cells[cell] = vec2(bitcast<u32>(coded.scale), bitcast<u32>(coded.sum));
    }
}
