// Needs: experts_product.wgsl, experts_bias.wgsl, coded.wgsl and an operand of it.

// Of an expert: `at` is where the matrix begins in its slot, `slot` what slots are apart, in pieces.
struct Params { rows: u32, tiles: u32, blocks: u32, at: u32, slot: u32, nothing: u32 }
var<immediate> p: Params;

var<private> first_block: u32;
// On its way long before it is needed.
var<private> first_out_row: u32;

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    let row = 32u * (first_block + chain.block) + 2u * chain.pair;
    var at = first_out_row;
    if (TOKENS > 1u) {
        at = out_row(chain.token);
    }
    at = at * p.rows + row;
    if (row < p.rows) {
        out[at] = biased(sum.x, row);
    }
    if (row + 1u < p.rows) {
        out[at + 1u] = biased(sum.y, row + 1u);
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    e = entry(wg.y, wg.z);
    take_biases(wg.y);
    if (TOKENS == 1u) {
        first_out_row = out_row(0u);
    }
    first_block = wg.x * p.blocks;
    let items = min(p.blocks, (p.rows + 31u) / 32u - first_block) * p.tiles;
    var job: Job;
    job.at = start_of(e, p.slot) + p.at + first_block * p.tiles * TILE;
    job.split = 0xffffffffu;
    job.tiles = p.tiles;
    job.items = select(0u, items, e.count > 0u);
    job.count = e.count;
    job.rows = x_rows();
    products(&job, lane);
}
