// A row of the cache, as LANES lanes make it: the latent of keys and values is normed, the part beside it turned.
//
// Needs: norm_float.wgsl, rope_pairs.wgsl, rope_store.wgsl, const KV_RANK, KEY_DIM (of a row), HALF, STRIDE (of a token), KV_AT; the
// buffers plane (f32), rows (vec4<u32>), tables (u32), angles (vec2<f32>), norms (f32), cache (u32); fn eps().

const BLOCK: u32 = 32u;

var<workgroup> x: array<f32, WIDEST>;
var<workgroup> parts: array<f32, 16>;
var<workgroup> magnitudes: array<u32, LANES>;
var<private> row_at: u32;

fn put(sub: u32, w: u32, word: u32) {
    cache[row_at + w] = word;
}

/// Norms the first `count` values of `x` by weights from `weights` on, in the CPU's order: sixteen lanes, joined by a tree.
/// Called by a whole workgroup.
fn norm_first(count: u32, weights: u32, lane: u32) {
    workgroupBarrier();
    if (lane < 16u) {
        var sum = 0.0;
        for (var c = lane; c < count; c += 16u) {
            let v = x[c];
            sum = fma(v, v, sum);
        }
        parts[lane] = sum;
    }
    workgroupBarrier();
    var s: array<f32, 8>;
    for (var i = 0u; i < 8u; i++) {
        s[i] = parts[i] + parts[i + 8u];
    }
    let total = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    let inverse = inverse_rms(total, f32(count), eps());
    for (var c = lane; c < count; c += LANES) {
        x[c] = norms[weights + c] * (x[c] * inverse);
    }
}

fn keys_and_values(token: u32, lane: u32) {
    // Where the row goes is on its way at once.
    let row = rows[token];
    let block = tables[row.y + row.x / BLOCK];
    for (var c = lane; c < KEY_DIM; c += LANES) {
        x[c] = plane[token * STRIDE + KV_AT + c];
    }
    norm_first(KV_RANK, 0u, lane);
    for (var i = lane; i < HALF; i += LANES) {
        let i0 = KV_RANK + first_of(i);
        let i1 = KV_RANK + second_of(i);
        let x0 = x[i0];
        let x1 = x[i1];
        let turn = angles[row.x * HALF + i];
        x[i0] = fma(x0, turn.x, -(x1 * turn.y));
        x[i1] = fma(x1, turn.x, x0 * turn.y);
    }
    workgroupBarrier();
    if (TYPE == 2u) {
        var most = 0u;
        for (var c = lane; c < KEY_DIM; c += LANES) {
            // Magnitudes of floats order like their bits, NaN above infinity.
            most = max(most, bitcast<u32>(x[c]) & 0x7fffffffu);
        }
        magnitudes[lane] = most;
        workgroupBarrier();
    }
    row_at = (block * BLOCK + row.x % BLOCK) * ROW_WORDS;
    store_row(KEY_DIM, 0u, lane);
}
