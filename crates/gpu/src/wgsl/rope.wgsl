// A token's queries, keys and values, four heads a workgroup; queries to a plane of their own, keys and values to the cache.
// Workgroups: (four heads, token).
//
// Needs: rope_heads.wgsl and what that needs but rope_eps, put; the buffers rows (vec4<u32>), tables (u32), out (f32),
// cache (u32).

struct Params { eps: f32, nothing: u32 }
var<immediate> p: Params;

const BLOCK: u32 = 32u;

var<private> row_at: u32;

fn rope_eps() -> f32 {
    return p.eps;
}

fn put(sub: u32, w: u32, word: u32) {
    cache[row_at + w] = word;
}

@compute @workgroup_size(HEADS_AT_ONCE * LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let sub = index / LANES;
    let lane = index % LANES;
    let token = wg.y;
    // Lanes past the last head repeat it, and write nothing.
    let every = HEADS + 2u * KV_HEADS;
    let item = wg.x * HEADS_AT_ONCE + sub;
    let h = head_of(min(item, every - 1u));
    // What a key or value needs in the end is on its way at once.
    let row = rows[token];
    let block = tables[row.y + row.x / BLOCK];
    turn_head(token, row.x, h, sub, index);
    if (item >= every) {
        return;
    }
    if (h.query) {
        for (var c = lane; c < h.dim; c += LANES) {
            out[(token * HEADS + h.head) * HEAD_DIM + c] = x[sub * WIDEST + c];
        }
        return;
    }
    row_at = (((2u * block + select(0u, 1u, h.value)) * KV_HEADS + h.head) * BLOCK + row.x % BLOCK) * ROW_WORDS;
    store_row(h.dim, sub, lane);
}
