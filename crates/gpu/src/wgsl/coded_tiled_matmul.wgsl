// One coded matrix times many tokens of a plane. Workgroups: (runs of rows, runs of tokens).
//
// Needs: coded_tiled.wgsl, coded_tiled_rows.wgsl, const OUT (its binding).

struct Params { rows: u32, tiles: u32, tokens: u32, stride: u32, offset: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(OUT) var<storage, read_write> out: array<f32>;

var<private> first_token: u32;

fn matrix_at() -> u32 {
    return 0u;
}

// Past the last token, the last.
fn input_row(token: u32) -> u32 {
    return min(first_token + token, p.tokens - 1u);
}

fn out_at(token: u32) -> u32 {
    return (first_token + token) * p.stride + p.offset;
}

fn biased(sum: f32, row: u32) -> f32 {
    return sum;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    first_row = wg.x * ROWS;
    first_token = wg.y * TOKENS;
    var job = Job(p.tiles, min(TOKENS, p.tokens - first_token));
    var sums = Sums();
    products(&job, &sums, lane);
    finish_tokens(&job, &sums, lane);
}
