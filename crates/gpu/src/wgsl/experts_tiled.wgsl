// One projection of a layer's experts, of entries of many pairs. Workgroups: (runs of rows, entries, parts of an entry).
//
// Needs: coded_tiled.wgsl, coded_tiled_rows.wgsl, experts_product.wgsl, experts_bias.wgsl.

// Of an expert: `at` is where the matrix begins in its slot, `slot` what slots are apart, in pieces.
struct Params { rows: u32, tiles: u32, at: u32, slot: u32, nothing: u32 }
var<immediate> p: Params;

fn matrix_at() -> u32 {
    return start_of(e, p.slot) + p.at;
}

// Past the last token, the last.
fn input_row(token: u32) -> u32 {
    return x_row(min(token, max(e.count, 1u) - 1u));
}

fn out_at(token: u32) -> u32 {
    return out_row(token) * p.rows;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    e = entry(wg.y, wg.z);
    take_biases(wg.y);
    first_row = wg.x * ROWS;
    var job = Job(p.tiles, e.count);
    var sums = Sums();
    products(&job, &sums, lane);
    finish_tokens(&job, &sums, lane);
}
