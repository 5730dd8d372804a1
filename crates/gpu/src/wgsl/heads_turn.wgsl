// Turns what follows the first columns of each head, into the queries of latent attention, behind what the product leaves there.
//
// Needs: heads_input.wgsl, rope_pairs.wgsl, const KV_RANK, KEY_DIM; the buffers rows (vec4<u32>), angles (vec2<f32>), queries (f32).

fn turn(token: u32, id: u32) {
    if (id >= HEADS * HALF) {
        return;
    }
    let head = id / HALF;
    let i = id % HALF;
    let source = token * STRIDE + AT + head * HEAD_STRIDE + COLS;
    let to = (token * HEADS + head) * KEY_DIM + KV_RANK;
    let x0 = plane[source + first_of(i)];
    let x1 = plane[source + second_of(i)];
    let angle = angles[rows[token].x * HALF + i];
    queries[to + first_of(i)] = fma(x0, angle.x, -(x1 * angle.y));
    queries[to + second_of(i)] = fma(x1, angle.x, x0 * angle.y);
}
