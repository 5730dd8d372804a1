// The end of attention over one of several splits: what attention_combine.wgsl needs of it.
//
// Needs: attention.wgsl; the buffers sums (vec4<f32>), stats (vec2<f32>).

fn end_query(unit: u32, query: u32, head: u32, most: f32, sum: f32) {
    stats[unit * HEADS + head] = vec2(most, sum);
}

fn end_sum(unit: u32, query: u32, head: u32, word: u32, sum: vec4<f32>) {
    sums[(unit * HEADS + head) * VALUE_WORDS + word] = sum;
}

fn hand_out(token: u32, head: u32, count: u32, lane: u32) {}
