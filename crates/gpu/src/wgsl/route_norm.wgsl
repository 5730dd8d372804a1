// A router's input that each of its workgroups makes for itself, of the hidden states and what is added to them: a norm of
// one token would take as long alone. The first workgroup writes it for the experts; the last one, the sum that it is of.
//
// Needs: norm_row.wgsl and what that needs but eps, residual, store_own; float_own_x.wgsl, route_one.wgsl.

fn eps() -> f32 {
    return p.eps;
}

fn residual() -> f32 {
    return p.residual;
}

fn store_own(chunk: u32, v: vec4<f32>) {
    own[chunk] = v;
}

fn prepare(held: ptr<function, Held>, part: u32, lane: u32, width: u32, place: u32) {
    let goes_on = part == 0u && !(HALTS && weights[HALT] != 0.0);
    var ahead: Ahead;
    take_row(held, &ahead, 0u, lane);
    norm_row(held, &ahead, 0u, goes_on, lane, width, place);
    workgroupBarrier();
}

fn end(held: ptr<function, Held>, lane: u32) {
    if (!halted) {
        keep_row(held, 0u, lane);
    }
}
