// One float matrix of each head times that head's rows of tokens. Workgroups: (runs of rows, runs of tokens, head).
//
// Needs: float.wgsl, const HEADS.

struct Params { rows: u32, cols: u32, tokens: u32, stride: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(2) var<storage, read_write> out: array<f32>;

// The head's first row.
var<private> first_row: u32;

fn finish(job: ptr<function, Job>, row: u32, token: u32, sum: f32) {
    out[((*job).tokens[0] + token * HEADS) * p.stride + row - first_row] = sum;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    first_row = wg.z * p.rows;
    let token = wg.y * TOKENS;
    let t = token * HEADS + wg.z;
    var job: Job;
    job.rows = first_row + p.rows;
    job.cols = p.cols;
    job.used = p.cols;
    job.first = first_row + wg.x * TEAMS * ROWS;
    job.count = min(TOKENS, p.tokens - token);
    job.tokens = array<u32, 8>(t, t + HEADS, t + 2u * HEADS, t + 3u * HEADS, t + 4u * HEADS, t + 5u * HEADS, t + 6u * HEADS, t + 7u * HEADS);
    var first: Weights;
    products(&job, &first, lane);
}
