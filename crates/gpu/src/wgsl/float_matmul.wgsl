// One float matrix times f32 tokens. Workgroups: (runs of rows, runs of tokens).
//
// Needs: float.wgsl.

struct Params { rows: u32, cols: u32, tokens: u32, stride: u32, offset: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(2) var<storage, read_write> out: array<f32>;

fn finish(job: ptr<function, Job>, row: u32, token: u32, sum: f32) {
    out[((*job).tokens[0] + token) * p.stride + p.offset + row] = sum;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let t = wg.y * TOKENS;
    var job: Job;
    job.rows = p.rows;
    job.cols = p.cols;
    job.used = p.cols;
    job.first = wg.x * TEAMS * ROWS;
    job.count = min(TOKENS, p.tokens - t);
    job.tokens = array<u32, 8>(t, t + 1u, t + 2u, t + 3u, t + 4u, t + 5u, t + 6u, t + 7u);
    var first: Weights;
    products(&job, &first, lane);
}
