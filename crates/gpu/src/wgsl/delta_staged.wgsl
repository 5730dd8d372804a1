// Inputs of states as delta_mix.wgsl left them.
//
// Needs: delta_net.wgsl, fn read_items, stage_items, which call the ones here; const MIXED; the buffer mixed (vec4<f32>).

fn read_item(ahead: ptr<function, Ahead>, run: Run, base: u32, lane: u32, j: u32) {
    let item = lane + THREADS * j;
    // What is not there repeats something that is.
    let token = min(base + item / STAGED, run.end - 1u) * (MIXED / 4u);
    let i = item % STAGED;
    var at = head / PER_KEY * 2u * KEY_CHUNKS + i;
    if (i >= 2u * KEY_CHUNKS) {
        let values = 2u * KEY_HEADS * KEY_CHUNKS;
        at = values + head * VALUE_CHUNKS + min(row_chunk + i - 2u * KEY_CHUNKS, VALUE_CHUNKS - 1u);
        if (i == STAGED - 1u) {
            at = values + VALUE_HEADS * VALUE_CHUNKS + head / 2u;
        }
    }
    (*ahead)[j] = mixed[token + at];
}

fn stage_item(ahead: ptr<function, Ahead>, lane: u32, j: u32) {
    let item = lane + THREADS * j;
    if (item < TILE * STAGED) {
        staged[item] = (*ahead)[j];
    }
}
