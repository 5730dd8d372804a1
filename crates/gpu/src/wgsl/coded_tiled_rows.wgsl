// Where a workgroup's rows lie, and where their sums go: ROWS rows of a matrix from FIRST_ROW on, whole blocks.
//
// Needs: coded_tiled.wgsl, immediates rows and tiles; var out, f32; fn matrix_at, where the matrix begins, in pieces; fn out_at, where
// the sums of a token do; fn biased.

var<private> first_row: u32;

// Past the last block, the last.
fn block_at(block: u32) -> u32 {
    return matrix_at() + min(first_row / 32u + block, (p.rows - 1u) / 32u) * p.tiles * TILE;
}

fn write(start: u32, four: u32, sums: vec4<f32>) {
    let row = first_row + 4u * four;
    let at = start + row;
    if (row < p.rows) {
        out[at] = biased(sums.x, row);
    }
    if (row + 1u < p.rows) {
        out[at + 1u] = biased(sums.y, row + 1u);
    }
    if (row + 2u < p.rows) {
        out[at + 2u] = biased(sums.z, row + 2u);
    }
    if (row + 3u < p.rows) {
        out[at + 3u] = biased(sums.w, row + 3u);
    }
}

fn finish_token(job: ptr<function, Job>, sums: ptr<function, Sums>, lane: u32, t: u32) {
    let token = t * TOKEN_LANES + lane / ROW_LANES;
    if (token < (*job).count) {
        let at = out_at(token);
        write(at, lane % ROW_LANES, (*sums)[t]);
        if (QUADS > 1u) {
            write(at, ROW_LANES + lane % ROW_LANES, (*sums)[(QUADS - 1u) * LANE_TOKENS + t]);
        }
    }
}
