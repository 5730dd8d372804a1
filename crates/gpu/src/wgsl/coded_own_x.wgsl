// The operand of coded.wgsl or coded_wide.wgsl: a row of int8 that each workgroup has of its own, of OWN groups.
//
// Needs: const GROUP, OWN.

var<workgroup> own_codes: array<u32, OWN * GROUP / 4u>;
var<workgroup> own_cells: array<vec2<u32>, OWN>;

// It is there once it is prepared.
const X_AHEAD: bool = false;

fn x_codes_of(job: ptr<function, Job>, token: u32, tile: u32, v: u32) -> vec4<u32> {
    let at = (tile * SPANS + v) * 4u;
    return vec4(own_codes[at], own_codes[at + 1u], own_codes[at + 2u], own_codes[at + 3u]);
}

fn x_word_of(job: ptr<function, Job>, tile: u32, word: u32) -> u32 {
    return own_codes[tile * SPANS * 4u + word];
}

fn x_cell_of(job: ptr<function, Job>, token: u32, tile: u32) -> vec2<u32> {
    return own_cells[tile];
}
