// What products head by head take: of each head of a plane the first COLS columns, as f32 or int8, a row for each (token, head).
// Workgroups: (runs of lanes, token).
//
// Needs: norm_float.wgsl, const HEADS, STRIDE (of a token), AT, HEAD_STRIDE, COLS, CELLS (groups of a head), CODED; the buffer plane
// (f32); fn turn(token, id), which turns the other columns where that is wanted; fn store_part, store_codes.

struct Params { nothing: u32 }
var<immediate> p: Params;

const THREADS: u32 = 256u;
const CHUNKS: u32 = COLS / 4u;

fn four_of(token: u32, head: u32, column: u32) -> vec4<f32> {
    if (column >= COLS) {
        return vec4(0.0);
    }
    let at = token * STRIDE + AT + head * HEAD_STRIDE + column;
    return vec4(plane[at], plane[at + 1u], plane[at + 2u], plane[at + 3u]);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = wg.y;
    let id = wg.x * THREADS + lane;
    turn(token, id);
    if (CODED) {
        // Lanes past the end repeat the last group, and write nothing.
        let cell = min(id / TEAM, HEADS * CELLS - 1u);
        var x: array<vec4<f32>, WORDS>;
        for (var i = 0u; i < WORDS; i++) {
            x[i] = four_of(token, cell / CELLS, (cell % CELLS) * GROUP + 4u * (TEAM * i + id % TEAM));
        }
        let coded = quantise(x);
        if (id / TEAM < HEADS * CELLS) {
            store_codes(token * HEADS * CELLS + cell, id % TEAM, coded);
        }
    } else if (id < HEADS * CHUNKS) {
        store_part(token * HEADS + id / CHUNKS, id % CHUNKS, four_of(token, id / CHUNKS, 4u * (id % CHUNKS)));
    }
}
