// Gate, up and SwiGLU of one token's experts: a workgroup for 32 rows of both, so that there are enough to fill a
// device. The hidden values stay floats, which down quantises (coded_own.wgsl). Workgroups: (blocks of rows, entries).
//
// Needs: coded.wgsl, coded_plane.wgsl, experts.wgsl, experts_glu.wgsl, const TOP_K.

// `gate` and `up` are where the matrices begin in a slot, `slot` what slots are apart, in pieces.
struct Params { rows: u32, tiles: u32, gate: u32, up: u32, slot: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(5) var<storage, read_write> hidden: array<f32>;

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    let i = 8u * chain.block + (chain.pair >> 1u);
    if ((chain.pair & 1u) == 0u) {
        dots[i].x = sum.x;
        dots[i].y = sum.y;
    } else {
        dots[i].z = sum.x;
        dots[i].w = sum.y;
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let e = entry(wg.y);
    let start = wg.x * p.tiles * TILE + e.slot * p.slot;
    var job: Job;
    job.at = start + p.gate;
    job.split = p.tiles;
    job.split_at = start + p.up - p.tiles * TILE;
    job.tiles = p.tiles;
    job.items = select(0u, 2u * p.tiles, e.count > 0u);
    job.count = e.count;
    job.rows[0] = pair_of(e, 0u) / TOP_K;
    products(&job, lane);
    workgroupBarrier();
    let row = 32u * wg.x + lane;
    if (lane < 32u && row < p.rows && e.count > 0u) {
        let gate = dots[lane / 4u][lane % 4u];
        let up = dots[8u + lane / 4u][lane % 4u];
        hidden[e.first * p.rows + row] = silu(gate) * up;
    }
}
