// Joins a token's splits: a team of lanes for a group of columns, which it may quantise. Workgroups: (groups, token).
//
// Needs: quantise.wgsl (const GROUP), attention_join.wgsl, const CELLS (groups of a token), PLANE, CODED; fn store_mixed, store_codes; gate_of, gated.

struct Params { first: u32, splits: u32, low: u32, nothing: u32 }
var<immediate> p: Params;

const THREADS: u32 = 64u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = p.first + wg.y;
    let count = splits_of(token);
    let group = wg.x * (THREADS / TEAM) + lane / TEAM;
    var x: array<vec4<f32>, WORDS>;
    for (var i = 0u; i < WORDS; i++) {
        let chunk = group * (GROUP / 4u) + TEAM * i + lane % TEAM;
        x[i] = vec4(0.0);
        if (chunk < HEADS * VALUE_WORDS) {
            // On its way while splits are joined.
            let gate = gate_of(token, chunk);
            x[i] = gated(joined(wg.y * p.splits, count, chunk / VALUE_WORDS, chunk % VALUE_WORDS), gate);
            if (PLANE) {
                store_mixed(token, chunk, x[i]);
            }
        }
    }
    if (CODED) {
        let coded = quantise(x);
        if (group < CELLS) {
            store_codes(token * CELLS + group, lane % TEAM, coded);
        }
    }
}
