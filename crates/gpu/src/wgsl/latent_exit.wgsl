// What stands between the splits of a lone token's attention over a latent and its outputs: each workgroup joins its head's splits,
// quantises what they come to, and multiplies it by rows of the head's matrix. Workgroups: (runs of blocks of a head's rows, 1, head).
//
// Needs: coded.wgsl or coded_wide.wgsl, coded_own.wgsl, attention_join.wgsl, the buffers rows (vec4<u32>) and out (f32).

struct Params { rows: u32, tiles: u32, blocks: u32, stride: u32, low: u32, nothing: u32 }
var<immediate> p: Params;

// First block of the head's rows.
var<private> first_block: u32;

fn own_four(head: u32, column: u32) -> vec4<f32> {
    return joined(0u, splits_of(0u), head, column / 4u);
}

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    // Heads' rows are whole blocks.
    let at = (*job).rows[0] * p.stride + 32u * (first_block + chain.block) + 2u * chain.pair;
    out[at] = sum.x;
    out[at + 1u] = sum.y;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let blocks = p.rows / 32u;
    first_block = wg.x * p.blocks;
    var job: Job;
    job.at = (wg.z * blocks + first_block) * p.tiles * TILE;
    job.split = 0xffffffffu;
    job.tiles = p.tiles;
    job.items = min(p.blocks, blocks - first_block) * p.tiles;
    job.count = 1u;
    job.rows[0] = wg.z;
    products(&job, lane);
}
