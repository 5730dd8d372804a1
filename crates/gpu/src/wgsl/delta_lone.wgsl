// Inputs of states of a lone token, which each workgroup makes for itself, with the bits of delta_mix.wgsl: that would take a dispatch more. What
// the run leaves must not be what it began with, as workgroups read there what another would write.
//
// Needs: delta_channels.wgsl, delta_net.wgsl with a TILE of 1, const Q_AT, K_AT, V_AT.

fn read_items(ahead: ptr<function, Ahead>, run: Run, base: u32, lane: u32) {}

/// The query by 32 lanes, the key by 32, values by 32, the rates by one of the rest; lanes behind those leave what is remembered.
fn stage_items(ahead: ptr<function, Ahead>, run: Run, lane: u32) {
    let sub = lane / HEAD_LANES;
    let chunks = select(KEY_CHUNKS, ROW_CHUNKS, sub >= 2u);
    let key_head = head / PER_KEY;
    var x: array<vec4<f32>, TURNS>;
    var squares = 0.0;
    for (var turn = 0u; turn < TURNS && sub < 3u; turn++) {
        let c = min(turn * HEAD_LANES + lane % HEAD_LANES, chunks - 1u);
        var channel = sub * KEY_CHUNKS + c;
        var column = select(Q_AT, K_AT, sub == 1u) / 4u + key_head * KEY_CHUNKS + c;
        if (sub == 2u) {
            let own = min(row_chunk + c, VALUE_CHUNKS - 1u);
            channel = 2u * KEY_CHUNKS + (head % PER_KEY) * VALUE_CHUNKS + own;
            column = V_AT / 4u + head * VALUE_CHUNKS + own;
        }
        x[turn] = channel_of(run.first, run.first, run.before, key_head, channel, column);
        if (turn * HEAD_LANES + lane % HEAD_LANES < chunks) {
            squares = add_squares(squares, x[turn]);
        }
    }
    // Beside the others, while they wait for their inputs.
    if (REMEMBERS_EARLY && lane >= 4u * HEAD_LANES) {
        remember(run, run.end, run.to, lane - 4u * HEAD_LANES, THREADS - 4u * HEAD_LANES);
    }
    if (lane == 3u * HEAD_LANES) {
        staged[STAGED - 1u] = rates_of(run.first, head / 2u * 2u);
    }
    if (lane < 4u * HEAD_LANES) {
        parts[lane] = squares;
    }
    workgroupBarrier();
    var factors = vec2(1.0);
    if (sub < 2u) {
        factors = factors_of(sub * HEAD_LANES, sub == 1u);
    }
    for (var turn = 0u; turn < TURNS && sub < 3u; turn++) {
        let c = turn * HEAD_LANES + lane % HEAD_LANES;
        if (c < chunks) {
            staged[sub * KEY_CHUNKS + c] = (x[turn] * vec4(factors.x)) * vec4(factors.y);
        }
    }
}
