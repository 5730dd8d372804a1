// The operand of coded.wgsl or coded_wide.wgsl: an int8 plane.

@group(0) @binding(1) var<storage, read> x_codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> x_cells: array<vec2<u32>>;

// It is there before the weights are.
const X_AHEAD: bool = true;

fn x_codes_of(job: ptr<function, Job>, token: u32, tile: u32, v: u32) -> vec4<u32> {
    return x_codes[((*job).rows[token] * (*job).tiles + tile) * SPANS + v];
}

// A word of the first token's.
fn x_word_of(job: ptr<function, Job>, tile: u32, word: u32) -> u32 {
    return x_codes[((*job).rows[0] * (*job).tiles + tile) * SPANS + word / 4u][word % 4u];
}

fn x_cell_of(job: ptr<function, Job>, token: u32, tile: u32) -> vec2<u32> {
    return x_cells[(*job).rows[token] * (*job).tiles + tile];
}

fn prepare(job: ptr<function, Job>, lane: u32) {}
