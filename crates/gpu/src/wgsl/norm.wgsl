// norm_row.wgsl of each of some tokens: one workgroup each.
//
// Needs: norm_row.wgsl, and what that needs but eps, residual, store_own; store_hidden, token_of, halted.

struct Params { eps: f32, zero: f32, residual: f32, nothing: u32 }
var<immediate> p: Params;

fn eps() -> f32 {
    return p.eps;
}

fn residual() -> f32 {
    return p.residual;
}

fn store_own(chunk: u32, v: vec4<f32>) {}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) width: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    let token = token_of(wg.x);
    // Nothing waits for it but what is written.
    let goes_on = !halted();
    var x: Held;
    var ahead: Ahead;
    take_row(&x, &ahead, token, lane);
    if (CHANGED && goes_on) {
        keep_row(&x, token, lane);
    }
    norm_row(&x, &ahead, wg.x, goes_on, lane, width, place);
}
