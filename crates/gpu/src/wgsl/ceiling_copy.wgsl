// A copy, four pieces of 16 bytes a lane. Workgroups: runs of 16 KiB.

@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> copy: array<vec4<u32>>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = wg.x * 1024u + lane;
    let a = source[i];
    let b = source[i + 256u];
    let c = source[i + 512u];
    let d = source[i + 768u];
    copy[i] = a;
    copy[i + 256u] = b;
    copy[i + 512u] = c;
    copy[i + 768u] = d;
}
