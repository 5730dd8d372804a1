// Gate, up and activation of one token's experts, a workgroup for 32 rows of either: as many and as small as those of a plain
// product, which fill a device best. Gate and up of a row meet in an atomic word, which is EMPTY before and after: whoever
// comes first leaves its sum there, whoever comes second finds it, and makes the hidden value of both. It stays a float, which
// down quantises (coded_own.wgsl). Workgroups: (2 * block + 0 for gate or 1 for up, entries).
//
// Needs: coded.wgsl, coded_plane.wgsl, experts.wgsl, experts_bias.wgsl, experts_glu.wgsl.

// `gate` and `up` are where the matrices begin in a slot, `slot` what slots are apart, in pieces.
struct Params { rows: u32, tiles: u32, gate: u32, up: u32, slot: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(5) var<storage, read_write> hidden: array<f32>;
// By place, a word for each row of its blocks.
@group(0) @binding(6) var<storage, read_write> post: array<atomic<u32>>;

// A NaN that no product makes here.
const EMPTY: u32 = 0xffffffffu;

var<private> first_place: u32;
var<private> block: u32;
var<private> is_up: bool;

// With its bias; of rows that are not there, anything.
fn whole(row: u32, sum: f32) -> f32 {
    let at = min(row, p.rows - 1u);
    if (is_up) {
        return biased_up(sum, at);
    }
    return biased(sum, at);
}

fn leave(row: u32, sum: f32) -> u32 {
    let bits = bitcast<u32>(sum);
    let words = (p.rows + 31u) / 32u * 32u;
    return atomicExchange(&post[first_place * words + row], select(bits, 0x7fc00000u, bits == EMPTY));
}

fn make(row: u32, sum: f32, found: u32) {
    if (found == EMPTY) {
        return;
    }
    let words = (p.rows + 31u) / 32u * 32u;
    atomicStore(&post[first_place * words + row], EMPTY);
    let other = bitcast<f32>(found);
    if (row < p.rows) {
        hidden[first_place * p.rows + row] = glu(select(sum, other, is_up), select(other, sum, is_up));
    }
}

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    let row = 32u * block + 2u * chain.pair;
    let x = whole(row, sum.x);
    let y = whole(row + 1u, sum.y);
    let first = leave(row, x);
    let second = leave(row + 1u, y);
    make(row, x, first);
    make(row + 1u, y, second);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let e = entry(wg.y, 0u);
    take_biases(wg.y);
    first_place = e.first;
    block = wg.x / 2u;
    is_up = wg.x % 2u == 1u;
    var job: Job;
    job.at = block * p.tiles * TILE + start_of(e, p.slot) + select(p.gate, p.up, is_up);
    job.split = 0xffffffffu;
    job.tiles = p.tiles;
    job.items = select(0u, p.tiles, e.count > 0u);
    job.count = e.count;
    // The token is the first one, whatever its pair.
    job.rows[0] = 0u;
    products(&job, lane);
}
