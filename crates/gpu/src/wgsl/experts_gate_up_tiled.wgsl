// What experts_gate_up.wgsl does, of entries of many pairs: a lane has four rows of gate and the same four of up.
// Workgroups: (parts, entries, parts of an entry).
//
// Needs: coded_tiled.wgsl, experts_gate_up_hidden.wgsl, fn keep_tokens and fn finish_rounds, which tiling.rs appends; consts TOP_K, KEPT (of
// a lane's tokens: those whose sums there is room for at a time, where codes were).

var<private> e: Entry;

// Blocks of gate, then of up; past the last block, the last.
fn block_at(block: u32) -> u32 {
    let matrix = start_of(e, p.slot) + select(p.gate, p.up, block >= PART);
    return matrix + (first_block + min(block % PART, blocks - 1u)) * p.tiles * TILE;
}

// Past the last token, the last.
fn input_row(token: u32) -> u32 {
    return pair_of(e, token) / TOP_K;
}

fn gate_of(block: u32, token: u32, four: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(codes[token * FOURS + 8u * block + four]);
}

fn up_of(block: u32, token: u32, four: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(codes[token * FOURS + ROW_LANES + 8u * block + four]);
}

fn keep_token(sums: ptr<function, Sums>, lane: u32, round: u32, i: u32) {
    let at = (i * TOKEN_LANES + lane / ROW_LANES) * FOURS + lane % ROW_LANES;
    codes[at] = bitcast<vec4<u32>>((*sums)[round * KEPT + i]);
    codes[at + ROW_LANES] = bitcast<vec4<u32>>((*sums)[LANE_TOKENS + round * KEPT + i]);
}

fn finish_round(sums: ptr<function, Sums>, lane: u32, round: u32) {
    let first = round * KEPT * TOKEN_LANES;
    workgroupBarrier();
    keep_tokens(sums, lane, round);
    workgroupBarrier();
    make_hidden(e.first + first, min(max(e.count, first) - first, KEPT * TOKEN_LANES), lane);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    e = entry(wg.y, wg.z);
    take_biases(wg.y);
    first_block = wg.x * PART;
    blocks = min(PART, (p.rows + 31u) / 32u - first_block);
    var job = Job(p.tiles, e.count);
    var sums = Sums();
    products(&job, &sums, lane);
    finish_rounds(&sums, lane);
}
