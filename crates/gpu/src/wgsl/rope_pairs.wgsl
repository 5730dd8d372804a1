// What rotation turns together.
//
// Needs: const HALF (pairs that are rotated), INTERLEAVED.

/// The elements of pair i.
fn first_of(i: u32) -> u32 {
    return select(i, 2u * i, INTERLEAVED);
}

fn second_of(i: u32) -> u32 {
    return select(i + HALF, 2u * i + 1u, INTERLEAVED);
}
