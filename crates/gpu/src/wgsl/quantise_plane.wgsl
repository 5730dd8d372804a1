// To an int8 plane: TEAM lanes a group, workgroups over (groups, row).
//
// Needs: quantise.wgsl, fn values_at(row, column) of four columns, consts THREADS and OUT, the first binding of the plane.

struct Params { cols: u32, groups: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(OUT) var<storage, read_write> codes: array<u32>;
@group(0) @binding(OUT + 1u) var<storage, read_write> cells: array<vec2<u32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let id = wg.x * THREADS + lane;
    let part = id % TEAM;
    // Lanes past the end repeat the last group, and write nothing.
    let group = min(id / TEAM, p.groups - 1u);
    let column = group * GROUP + part * (GROUP / TEAM);
    var values: array<vec4<f32>, WORDS>;
    for (var i = 0u; i < WORDS; i++) {
        values[i] = values_at(wg.y, column + 4u * i);
    }
    let coded = quantise(values);
    if ((id / TEAM) < p.groups) {
        let cell = wg.y * p.groups + group;
        for (var i = 0u; i < WORDS; i++) {
            codes[cell * (GROUP / 4u) + part * WORDS + i] = coded.words[i];
        }
        if (part == 0u) {
            cells[cell] = vec2(bitcast<u32>(coded.scale), bitcast<u32>(coded.sum));
        }
    }
}
