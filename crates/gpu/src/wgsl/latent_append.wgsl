// A token's latents. That of keys and values becomes a row of the cache; that of queries, if there is one (latent_append_queries.wgsl), is
// normed and becomes the input of a product. Workgroups: (keys and values, then queries; token).
//
// Needs: latent_row.wgsl; fn queries(token, lane).

struct Params { eps: f32, nothing: u32 }
var<immediate> p: Params;

fn eps() -> f32 {
    return p.eps;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    if (wg.x == 0u) {
        keys_and_values(wg.y, lane);
    } else {
        queries(wg.y, lane);
    }
}
