// Needs: experts_product.wgsl, experts_bias.wgsl, float.wgsl.

// Of an expert: `at` is where the matrix begins in its slot, `slot` what slots are apart, in units of 16 bytes.
struct Params { rows: u32, cols: u32, at: u32, slot: u32, nothing: u32 }
var<immediate> p: Params;

fn finish(job: ptr<function, Job>, row: u32, token: u32, sum: f32) {
    out[out_row(token) * p.rows + row] = biased(sum, row);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    e = entry(wg.y, wg.z);
    take_biases(wg.y);
    var job: Job;
    job.at = (start_of(e, p.slot) + p.at) * (16u / UNIT);
    job.rows = p.rows;
    job.cols = p.cols;
    job.used = select(0u, p.cols, e.count > 0u);
    job.first = wg.x * TEAMS * ROWS;
    job.count = e.count;
    job.tokens = x_rows();
    var first: Weights;
    products(&job, &first, lane);
}
