// What the activation makes of two f32 planes, to a third. Workgroups: (columns, row).
//
// Needs: quantise.wgsl (divide), experts_glu.wgsl, const THREADS.

struct Params { cols: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> gate: array<f32>;
@group(0) @binding(1) var<storage, read> up: array<f32>;
@group(0) @binding(2) var<storage, read_write> hidden: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let col = wg.x * THREADS + lane;
    if (col < p.cols) {
        let i = wg.y * p.cols + col;
        hidden[i] = glu(gate[i], up[i]);
    }
}
