// Gate, up, activation and the quantising of the hidden values, of a layer's experts.
//
// A workgroup has an entry and PART blocks of 32 rows of gate and as many of up: whole groups of GROUP hidden
// values. Workgroups: (parts, entries).
//
// Needs: quantise.wgsl, coded.wgsl, coded_plane.wgsl, experts.wgsl, experts_bias.wgsl, experts_glu.wgsl, consts PART, TOP_K.

// `gate` and `up` are where the matrices begin in a slot, `slot` what slots are apart, in pieces.
struct Params { rows: u32, tiles: u32, gate: u32, up: u32, slot: u32, groups: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(5) var<storage, read_write> hidden_codes: array<u32>;
@group(0) @binding(6) var<storage, read_write> hidden_cells: array<vec2<u32>>;

// Groups of a part.
const GROUPS: u32 = 32u * PART / GROUP;

// Rows `4 * four ..+ 4` of a block of the products.
fn place_of(block: u32, token: u32, four: u32) -> u32 {
    return 8u * (block * TOKENS + token) + four;
}

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    let i = place_of(chain.block, chain.token, chain.pair >> 1u);
    if ((chain.pair & 1u) == 0u) {
        dots[i].x = sum.x;
        dots[i].y = sum.y;
    } else {
        dots[i].z = sum.x;
        dots[i].w = sum.y;
    }
}

// Of rows that are not there, anything.
fn hidden_of(gate: vec4<f32>, up: vec4<f32>, rows: vec4<u32>) -> vec4<f32> {
    let row = min(rows, vec4(p.rows - 1u));
    return vec4(
        glu(biased(gate.x, row.x), biased_up(up.x, row.x)),
        glu(biased(gate.y, row.y), biased_up(up.y, row.y)),
        glu(biased(gate.z, row.z), biased_up(up.z, row.z)),
        glu(biased(gate.w, row.w), biased_up(up.w, row.w)),
    );
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let e = entry(wg.y);
    take_biases(wg.y);
    let first_block = wg.x * PART;
    let blocks = min(PART, (p.rows + 31u) / 32u - first_block);
    var job: Job;
    let start = first_block * p.tiles * TILE + e.slot * p.slot;
    job.at = start + p.gate;
    job.split = blocks * p.tiles;
    job.split_at = start + p.up - job.split * TILE;
    job.tiles = p.tiles;
    job.items = select(0u, 2u * job.split, e.count > 0u);
    job.count = e.count;
    job.rows[0] = pair_of(e, 0u) / TOP_K;
    if (TOKENS > 1u) { job.rows[1] = pair_of(e, 1u) / TOP_K; }
    if (TOKENS > 2u) { job.rows[2] = pair_of(e, 2u) / TOP_K; job.rows[3] = pair_of(e, 3u) / TOP_K; }
    if (TOKENS > 4u) {
        job.rows[4] = pair_of(e, 4u) / TOP_K;
        job.rows[5] = pair_of(e, 5u) / TOP_K;
        job.rows[6] = pair_of(e, 6u) / TOP_K;
        job.rows[7] = pair_of(e, 7u) / TOP_K;
    }
    products(&job, lane);
    workgroupBarrier();
    let all = e.count * GROUPS;
    for (var base = 0u; base < TEAM * all; base += THREADS) {
        let id = base + lane;
        // Lanes past the end repeat the last group, and write nothing.
        let team = min(id / TEAM, all - 1u);
        let token = team / GROUPS;
        let group = team % GROUPS;
        let part = id % TEAM;
        var values: array<vec4<f32>, WORDS>;
        for (var i = 0u; i < WORDS; i++) {
            let row = group * GROUP + part * (GROUP / TEAM) + 4u * i;
            // What is past the last block is not there.
            let block = min(row / 32u, blocks - 1u);
            let four = (row % 32u) / 4u;
            let gate = dots[place_of(block, token, four)];
            let up = dots[place_of(blocks + block, token, four)];
            let column = vec4(32u * first_block + row) + vec4(0u, 1u, 2u, 3u);
            values[i] = select(vec4(0.0), hidden_of(gate, up, column), column < vec4(p.rows));
        }
        let coded = quantise(values);
        let out_group = first_block * 32u / GROUP + group;
        if (id / TEAM < all && out_group < p.groups) {
            let cell = (e.first + token) * p.groups + out_group;
            for (var i = 0u; i < WORDS; i++) {
                hidden_codes[cell * (GROUP / 4u) + part * WORDS + i] = coded.words[i];
            }
            if (part == 0u) {
                hidden_cells[cell] = vec2(bitcast<u32>(coded.scale), bitcast<u32>(coded.sum));
            }
        }
    }
}
