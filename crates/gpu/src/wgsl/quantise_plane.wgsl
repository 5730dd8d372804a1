// f32 plane to int8 plane: four lanes a group, workgroups over (groups, token).
//
// Needs: quantise.wgsl, const THREADS.

struct Params { cols: u32, groups: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> codes: array<u32>;
@group(0) @binding(2) var<storage, read_write> cells: array<vec2<u32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let id = wg.x * THREADS + lane;
    let quarter = id & 3u;
    // Lanes past the end repeat the last group, and write nothing.
    let group = min(id >> 2u, p.groups - 1u);
    let column = group * GROUP + quarter * (GROUP / 4u);
    var values: array<vec4<f32>, WORDS>;
    for (var i = 0u; i < WORDS; i++) {
        for (var j = 0u; j < 4u; j++) {
            let c = column + 4u * i + j;
            if (c < p.cols) {
                values[i][j] = x[wg.y * p.cols + c];
            }
        }
    }
    let coded = quantise(values);
    if ((id >> 2u) < p.groups) {
        let cell = wg.y * p.groups + group;
        for (var i = 0u; i < WORDS; i++) {
            codes[cell * (GROUP / 4u) + quarter * WORDS + i] = coded.words[i];
        }
        if (quarter == 0u) {
            cells[cell] = vec2(bitcast<u32>(coded.scale), bitcast<u32>(coded.sum));
        }
    }
}
