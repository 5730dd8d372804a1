// Rows of an f32 plane that workgroups quantise themselves (coded_own.wgsl).
//
// Needs: const COLS.

@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;

fn own_four(row: u32, column: u32) -> vec4<f32> {
    return x[(row * COLS + column) / 4u];
}
