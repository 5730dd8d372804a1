// From sums of gate and up to hidden values, and their quantising: whole groups of GROUP hidden values.
//
// Needs: quantise.wgsl, experts.wgsl, experts_bias.wgsl, experts_glu.wgsl; fn gate_of and fn up_of, the sums of four rows that a
// workgroup has kept; consts THREADS, PART.

// `gate` and `up` are where the matrices begin in a slot, `slot` what slots are apart, in pieces.
struct Params { rows: u32, tiles: u32, gate: u32, up: u32, slot: u32, groups: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(5) var<storage, read_write> hidden_codes: array<u32>;
@group(0) @binding(6) var<storage, read_write> hidden_cells: array<vec2<u32>>;

// Groups of a part.
const GROUPS: u32 = 32u * PART / GROUP;

// First block of a workgroup's rows of either matrix, and how many there are.
var<private> first_block: u32;
var<private> blocks: u32;

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

// Those of `count` tokens whose sums are kept, the first of which has place `first`.
fn make_hidden(first: u32, count: u32, lane: u32) {
    let all = count * GROUPS;
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
            let column = vec4(32u * first_block + row) + vec4(0u, 1u, 2u, 3u);
            let hidden = hidden_of(gate_of(block, token, four), up_of(block, token, four), column);
            values[i] = select(vec4(0.0), hidden, column < vec4(p.rows));
        }
        let coded = quantise(values);
        let out_group = first_block * 32u / GROUP + group;
        if (id / TEAM < all && out_group < p.groups) {
            let cell = (first + token) * p.groups + out_group;
            for (var i = 0u; i < WORDS; i++) {
                hidden_codes[cell * (GROUP / 4u) + part * WORDS + i] = coded.words[i];
            }
            if (part == 0u) {
                hidden_cells[cell] = vec2(bitcast<u32>(coded.scale), bitcast<u32>(coded.sum));
            }
        }
    }
}
