// One coded matrix of each head times that head's rows of tokens. Workgroups: (runs of blocks of rows, runs of tokens, head).
//
// Needs: coded.wgsl or coded_wide.wgsl, coded_plane.wgsl, const OUT (its binding), HEADS.

struct Params { rows: u32, tiles: u32, blocks: u32, tokens: u32, stride: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(OUT) var<storage, read_write> out: array<f32>;

// First block of the head's rows.
var<private> first_block: u32;

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    // Heads' rows are whole blocks.
    let at = ((*job).rows[0] + chain.token * HEADS) * p.stride + 32u * (first_block + chain.block) + 2u * chain.pair;
    out[at] = sum.x;
    out[at + 1u] = sum.y;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    first_block = wg.x * p.blocks;
    let blocks = p.rows / 32u;
    let token = wg.y * TOKENS;
    let t = token * HEADS + wg.z;
    var job: Job;
    job.at = (wg.z * blocks + first_block) * p.tiles * TILE;
    job.split = 0xffffffffu;
    job.tiles = p.tiles;
    job.items = min(p.blocks, blocks - first_block) * p.tiles;
    job.count = min(TOKENS, p.tokens - token);
    job.rows = array<u32, 8>(t, t + HEADS, t + 2u * HEADS, t + 3u * HEADS, t + 4u * HEADS, t + 5u * HEADS, t + 6u * HEADS, t + 7u * HEADS);
    products(&job, lane);
}
