// route_one.wgsl over logits that another kernel has made.
//
// Needs: route_one.wgsl; the buffer logits (f32).

fn logit_of(expert: u32) -> f32 {
    return logits[expert];
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) width: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    route(lane, width, place);
}
