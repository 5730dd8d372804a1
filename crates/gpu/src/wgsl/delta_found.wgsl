// Answers of states, for delta_exit.wgsl.
//
// Needs: delta_net.wgsl; the buffer out (vec2<f32>).

fn answer(token: u32, pair: u32, found: vec2<f32>) {
    out[(token * VALUE_HEADS + head) * (VALUE_DIM / 2u) + pair] = found;
}

fn end(lane: u32) {}
