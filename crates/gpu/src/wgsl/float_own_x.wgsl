// The operand of float.wgsl: one row that the workgroup has made itself.
//
// Needs: const COLS, a multiple of 8.

var<workgroup> own: array<vec4<f32>, COLS / 4u>;

fn x_eight(token: u32, cols: u32, eight: u32) -> Eight {
    return Eight(own[2u * eight], own[2u * eight + 1u]);
}
