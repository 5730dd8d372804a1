// The operand of coded.wgsl or coded_wide.wgsl: one f32 row, which each workgroup quantises for itself while its weights are
// on their way.
//
// Needs: coded_own_x.wgsl, quantise.wgsl, consts COLS (a multiple of 4), OWN (groups of a row); fn own_four(row, column), which gives four
// columns.

fn prepare(job: ptr<function, Job>, lane: u32) {
    for (var base = 0u; base < TEAM * OWN; base += THREADS) {
        let id = base + lane;
        // Lanes past the end repeat the last group, and write nothing.
        let group = min(id / TEAM, OWN - 1u);
        let part = id % TEAM;
        var values: array<vec4<f32>, WORDS>;
        for (var i = 0u; i < WORDS; i++) {
            let column = group * GROUP + part * (GROUP / TEAM) + 4u * i;
            if (column < COLS) {
                values[i] = own_four((*job).rows[0], column);
            }
        }
        let coded = quantise(values);
        if (id / TEAM < OWN) {
            for (var i = 0u; i < WORDS; i++) {
                own_codes[group * (GROUP / 4u) + part * WORDS + i] = coded.words[i];
            }
            if (part == 0u) {
                own_cells[group] = vec2(bitcast<u32>(coded.scale), bitcast<u32>(coded.sum));
            }
        }
    }
    workgroupBarrier();
}
