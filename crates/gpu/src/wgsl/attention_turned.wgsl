// Attention whose queries, keys and values are made by rope.wgsl.
//
// Needs: the buffer queries (vec4<f32>).

const TURNS_OWN: bool = false;

fn query_at(i: u32) -> vec4<f32> {
    return queries[i];
}

fn turn_own(row: vec4<u32>, part: u32, base: u32, lane: u32) {}

fn own_key(chunk: u32) -> vec4<u32> {
    return vec4(0u);
}

fn own_value(column: u32) -> Narrow {
    return Narrow();
}

fn own_scale(plane: u32) -> f32 {
    return 1.0;
}
