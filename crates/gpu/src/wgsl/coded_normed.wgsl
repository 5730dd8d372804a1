// A coded product of one token whose operand is a norm that each workgroup makes for itself while its weights are on their way:
// alone it would take a dispatch more. The first workgroup keeps the sum that it is of. Workgroups: runs of blocks of rows.
//
// Needs: norm_row.wgsl and what that needs but eps, residual, store_own, store_codes; coded_tiles.wgsl, coded.wgsl or
// coded_wide.wgsl; coded_own_x.wgsl; const BLOCKS (of a workgroup); the buffers kept (the plane of that sum) and out (f32).

struct Params { rows: u32, tiles: u32, offset: u32, eps: f32, residual: f32, zero: f32, nothing: u32 }
var<immediate> p: Params;

var<private> first_block: u32;

fn eps() -> f32 {
    return p.eps;
}

fn residual() -> f32 {
    return p.residual;
}

fn store_own(chunk: u32, v: vec4<f32>) {}

fn store_normed(row: u32, chunk: u32, v: vec4<f32>) {}

fn store_hidden(row: u32, chunk: u32, v: vec4<f32>) {
    store_kept(row, chunk, v);
}

// As norm_codes.wgsl, of a group whose lanes hold every TEAM-th word.
fn store_codes(cell: u32, part: u32, coded: Codes) {
    for (var i = 0u; i < WORDS; i++) {
        own_codes[cell * (GROUP / 4u) + TEAM * i + part] = coded.words[i];
    }
    if (part == 0u) {
        own_cells[cell] = vec2(bitcast<u32>(coded.scale), bitcast<u32>(coded.sum));
    }
}

var<private> subgroup_width: u32;
var<private> subgroup_place: u32;

fn prepare(job: ptr<function, Job>, lane: u32) {
    var x: Held;
    var ahead: Ahead;
    take_row(&x, &ahead, 0u, lane);
    if (first_block == 0u) {
        keep_row(&x, 0u, lane);
    }
    norm_row(&x, &ahead, 0u, true, lane, subgroup_width, subgroup_place);
    workgroupBarrier();
}

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    let row = 32u * (first_block + chain.block) + 2u * chain.pair;
    if (row < p.rows) {
        out[p.offset + row] = sum.x;
    }
    if (row + 1u < p.rows) {
        out[p.offset + row + 1u] = sum.y;
    }
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) width: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    subgroup_width = width;
    subgroup_place = place;
    first_block = wg.x * BLOCKS;
    var job: Job;
    job.at = first_block * p.tiles * TILE;
    job.split = 0xffffffffu;
    job.tiles = p.tiles;
    job.items = min(BLOCKS, (p.rows + 31u) / 32u - first_block) * p.tiles;
    job.count = 1u;
    products(&job, lane);
}
