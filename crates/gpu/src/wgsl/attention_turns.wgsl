// Attention of one token that makes its query, and key and value of its own position, each workgroup for its query head:
// what rope.wgsl would do takes a dispatch more. The first of a kv head's workgroups leaves both in the cache; nobody
// uses what is read there meanwhile: that row is taken from here (`select`).
//
// Needs: rope_heads.wgsl and what that needs but rope_eps, put; the buffer cache (u32), which keys and values are of; const
// NARROW_WORDS (of four elements).

const TURNS_OWN: bool = true;

// The key's row, then the value's, as the cache has them.
var<workgroup> own_rows: array<u32, 2u * ROW_WORDS>;
var<private> leaves: bool;
var<private> own_at: u32;

fn rope_eps() -> f32 {
    return p.eps;
}

fn query_at(i: u32) -> vec4<f32> {
    return vec4(0.0);
}

fn put(sub: u32, w: u32, word: u32) {
    own_rows[(sub - 1u) * ROW_WORDS + w] = word;
    if (leaves) {
        cache[own_at + w] = word;
    }
}

/// Makes them, the query into `stage`. Called by a whole workgroup, which all goes on when they are there.
fn turn_own(row: vec4<u32>, part: u32, base: u32, lane: u32) {
    let sub = lane / LANES;
    let kv_head = part / GROUPS;
    // Lanes that have nothing to do repeat the value, and write nothing.
    let item = select(select(HEADS + KV_HEADS, HEADS, sub == 1u) + kv_head, part, sub == 0u);
    let h = head_of(item);
    turn_head(0u, row.x, h, sub, lane);
    if (sub == 1u || sub == 2u) {
        let position = row.x - base;
        leaves = part % GROUPS == 0u && position < SPLIT;
        let block = blocks[min(position, SPLIT - 1u) / BLOCK];
        own_at = (((2u * block + (sub - 1u)) * KV_HEADS + kv_head) * BLOCK + row.x % BLOCK) * ROW_WORDS;
        store_row(h.dim, sub, lane % LANES);
    }
    if (lane < QUERY_WORDS) {
        stage[lane] = vec4(x[4u * lane], x[4u * lane + 1u], x[4u * lane + 2u], x[4u * lane + 3u]);
    }
    workgroupBarrier();
}

fn own_key(chunk: u32) -> vec4<u32> {
    let at = min(4u * chunk, ROW_WORDS - 4u);
    return vec4(own_rows[at], own_rows[at + 1u], own_rows[at + 2u], own_rows[at + 3u]);
}

fn own_scale(plane: u32) -> f32 {
    if (TYPE < 2u) {
        return 1.0;
    }
    return bitcast<f32>(own_rows[plane * ROW_WORDS + ROW_WORDS - 1u]);
}
