// What stands between a lone token's projections and attention over a latent: of each head the first columns, which each workgroup
// quantises for itself, times the head's matrix; the others turned; and the row of the cache, if it is of the same projections.
// Workgroups: (runs of blocks of a head's rows, then what is turned; 1; the row of the cache, then heads).
//
// Needs: coded.wgsl or coded_wide.wgsl, coded_own.wgsl, heads_turn.wgsl and what that needs; latent_row.wgsl, or a fn
// keys_and_values(token, lane) that does nothing; const APPENDS (1 if there is a row to make).

struct Params { rows: u32, tiles: u32, blocks: u32, eps: f32, nothing: u32 }
var<immediate> p: Params;

const LANES: u32 = THREADS;

// First block of the head's rows.
var<private> first_block: u32;

fn eps() -> f32 {
    return p.eps;
}

fn own_four(head: u32, column: u32) -> vec4<f32> {
    let at = AT + head * HEAD_STRIDE + column;
    return vec4(plane[at], plane[at + 1u], plane[at + 2u], plane[at + 3u]);
}

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    // Heads' rows are whole blocks.
    let at = (*job).rows[0] * KEY_DIM + 32u * (first_block + chain.block) + 2u * chain.pair;
    queries[at] = sum.x;
    queries[at + 1u] = sum.y;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    if (wg.z < APPENDS) {
        if (wg.x == 0u) {
            keys_and_values(0u, lane);
        }
        return;
    }
    let head = wg.z - APPENDS;
    let blocks = p.rows / 32u;
    first_block = wg.x * p.blocks;
    if (first_block >= blocks) {
        for (var i = lane; i < HALF; i += THREADS) {
            turn(0u, head * HALF + i);
        }
        return;
    }
    var job: Job;
    job.at = (head * blocks + first_block) * p.tiles * TILE;
    job.split = 0xffffffffu;
    job.tiles = p.tiles;
    job.items = min(p.blocks, blocks - first_block) * p.tiles;
    job.count = 1u;
    job.rows[0] = head;
    products(&job, lane);
}
