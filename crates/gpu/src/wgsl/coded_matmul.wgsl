// One coded matrix times the tokens of a plane. Workgroups: (runs of blocks of rows, runs of tokens).
//
// Needs: coded.wgsl or coded_wide.wgsl, coded_plane.wgsl, const OUT (its binding).

struct Params { rows: u32, tiles: u32, blocks: u32, tokens: u32, stride: u32, offset: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(OUT) var<storage, read_write> out: array<f32>;

// First block of rows.
var<private> first_block: u32;

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    let row = 32u * (first_block + chain.block) + 2u * chain.pair;
    let at = ((*job).rows[0] + chain.token) * p.stride + p.offset + row;
    if (row < p.rows) {
        out[at] = sum.x;
    }
    if (row + 1u < p.rows) {
        out[at + 1u] = sum.y;
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    first_block = wg.x * p.blocks;
    let t = wg.y * TOKENS;
    var job: Job;
    job.at = first_block * p.tiles * TILE;
    job.split = 0xffffffffu;
    job.tiles = p.tiles;
    job.items = min(p.blocks, (p.rows + 31u) / 32u - first_block) * p.tiles;
    job.count = min(TOKENS, p.tokens - t);
    job.rows = array<u32, 8>(t, t + 1u, t + 2u, t + 3u, t + 4u, t + 5u, t + 6u, t + 7u);
    products(&job, lane);
}
