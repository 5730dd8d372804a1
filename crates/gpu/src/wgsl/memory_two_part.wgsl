// Needs: memory_two.wgsl, of vectors.

// One of a word's four.
fn part(at: u32, i: u32) -> u32 {
    if (is_behind) {
        return behind[at][i];
    }
    return stored[at][i];
}
