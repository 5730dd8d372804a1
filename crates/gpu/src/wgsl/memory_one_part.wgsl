// Needs: memory_one.wgsl, of vectors.

// One of a word's four: loaded alone, where a vector would be loaded whole and then looked through (EXP-GPU-21).
fn part(at: u32, i: u32) -> u32 {
    return stored[at][i];
}
