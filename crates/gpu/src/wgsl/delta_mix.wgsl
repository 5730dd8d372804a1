// Inputs of states, a head per 32 lanes. Workgroups: (four heads, token).
//
// Needs: delta_channels.wgsl, const Q_AT, K_AT, V_AT (columns of the plane), MIXED (columns of what is made), TOKENS_AT (in the words); the buffers
// words (u32), mixed (vec4<f32>).

struct Params { eps: f32, scale: f32, nothing: u32 }
var<immediate> p: Params;

const AT_ONCE: u32 = 4u;

@compute @workgroup_size(AT_ONCE * HEAD_LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let sub = index / HEAD_LANES;
    let lane = index % HEAD_LANES;
    let token = wg.y;
    // Lanes past the last head repeat it, and write nothing.
    let item = min(wg.x * AT_ONCE + sub, 2u * KEY_HEADS + VALUE_HEADS - 1u);
    let is_there = wg.x * AT_ONCE + sub == item;
    // Queries and keys by turns, then values.
    let is_value = item >= 2u * KEY_HEADS;
    let value = item - select(0u, 2u * KEY_HEADS, is_value);
    let head = select(item / 2u, value / PER_KEY, is_value);
    let chunks = select(KEY_CHUNKS, VALUE_CHUNKS, is_value);
    var channel = (item % 2u) * KEY_CHUNKS;
    var column = select(Q_AT, K_AT, item % 2u == 1u) / 4u + head * KEY_CHUNKS;
    if (is_value) {
        channel = 2u * KEY_CHUNKS + (value % PER_KEY) * VALUE_CHUNKS;
        column = V_AT / 4u + value * VALUE_CHUNKS;
    }
    let first = words[TOKENS_AT + 2u * token];
    let before = words[TOKENS_AT + 2u * token + 1u];
    var x: array<vec4<f32>, TURNS>;
    var squares = 0.0;
    for (var turn = 0u; turn < TURNS; turn++) {
        let c = min(turn * HEAD_LANES + lane, chunks - 1u);
        x[turn] = channel_of(token, first, before, head, channel + c, column + c);
        if (turn * HEAD_LANES + lane < chunks) {
            squares = add_squares(squares, x[turn]);
        }
    }
    parts[index] = squares;
    workgroupBarrier();
    if (!is_there) {
        return;
    }
    var to = token * (MIXED / 4u) + 2u * KEY_HEADS * KEY_CHUNKS + value * VALUE_CHUNKS;
    var factors = vec2(1.0);
    if (!is_value) {
        to = token * (MIXED / 4u) + item * KEY_CHUNKS;
        factors = factors_of(sub * HEAD_LANES, item % 2u == 1u);
    }
    for (var turn = 0u; turn < TURNS; turn++) {
        let c = turn * HEAD_LANES + lane;
        if (c < chunks) {
            mixed[to + c] = (x[turn] * vec4(factors.x)) * vec4(factors.y);
        }
    }
    if (is_value && lane == 0u && value % 2u == 0u) {
        let rates_at = 2u * KEY_HEADS * KEY_CHUNKS + VALUE_HEADS * VALUE_CHUNKS;
        mixed[token * (MIXED / 4u) + rates_at + value / 2u] = rates_of(token, value);
    }
}
