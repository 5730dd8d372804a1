// Gate, up and SwiGLU of one token's experts, a workgroup for 32 rows of either: as many and as small as those of a plain
// product, which fill a device best. Two workgroups meet: each posts its sums as atomic words, and the one that comes
// second makes hidden values of both. WGSL knows no order between what workgroups write but that of each atomic word; so a
// sum is its own proof that it is there: words are EMPTY until it is posted, and again when it was taken. The hidden values stay
// floats, which down quantises (coded_own.wgsl). Workgroups: (2 * block + 0 for gate or 1 for up, entries).
//
// Needs: coded.wgsl, coded_plane.wgsl, experts.wgsl, experts_glu.wgsl, const TOP_K.

// `gate` and `up` are where the matrices begin in a slot, `slot` what slots are apart, in pieces.
struct Params { rows: u32, tiles: u32, gate: u32, up: u32, slot: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(5) var<storage, read_write> hidden: array<f32>;
// By place and block: 32 sums of gate, 32 of up, and how many of the two workgroups have come.
@group(0) @binding(6) var<storage, read_write> post: array<atomic<u32>>;

// A NaN that no product makes here.
const EMPTY: u32 = 0xffffffffu;
const ROW: u32 = 65u;

var<workgroup> own: array<f32, 32>;
var<workgroup> before: u32;

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    own[2u * chain.pair] = sum.x;
    own[2u * chain.pair + 1u] = sum.y;
}

// Takes what another workgroup posted, or is about to.
fn taken(at: u32) -> f32 {
    var bits = EMPTY;
    while (bits == EMPTY) {
        bits = atomicLoad(&post[at]);
    }
    atomicStore(&post[at], EMPTY);
    return bitcast<f32>(bits);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let e = entry(wg.y);
    let block = wg.x / 2u;
    let is_up = wg.x % 2u;
    var job: Job;
    job.at = block * p.tiles * TILE + e.slot * p.slot + select(p.gate, p.up, is_up == 1u);
    job.split = 0xffffffffu;
    job.tiles = p.tiles;
    job.items = select(0u, p.tiles, e.count > 0u);
    job.count = e.count;
    job.rows[0] = pair_of(e, 0u) / TOP_K;
    products(&job, lane);
    workgroupBarrier();
    let meeting = (e.first * ((p.rows + 31u) / 32u) + block) * ROW;
    let works = lane < 32u && e.count > 0u;
    if (works) {
        let bits = bitcast<u32>(own[lane]);
        atomicStore(&post[meeting + 32u * is_up + lane], select(bits, 0x7fc00000u, bits == EMPTY));
    }
    workgroupBarrier();
    if (lane == 0u) {
        before = 0u;
        if (e.count > 0u) {
            before = atomicAdd(&post[meeting + 64u], 1u);
        }
    }
    if (workgroupUniformLoad(&before) == 1u && works) {
        let gate = taken(meeting + lane);
        let up = taken(meeting + 32u + lane);
        if (lane == 0u) {
            atomicStore(&post[meeting + 64u], 0u);
        }
        let row = 32u * block + lane;
        if (row < p.rows) {
            hidden[e.first * p.rows + row] = silu(gate) * up;
        }
    }
}
