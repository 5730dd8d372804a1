// The runs of tiles that a workgroup of coded.wgsl or coded_wide.wgsl has, and who makes sums of them.

struct Job {
    // The first tile, and the one that item `split` would follow, in pieces.
    at: u32,
    split_at: u32,
    split: u32,
    // Tiles of a block of rows, and in all.
    tiles: u32,
    items: u32,
    // Tokens, and their rows of the plane.
    count: u32,
    rows: array<u32, 8>,
}

// A chain is sixteen lanes wide: (block of rows, token, pair of rows).
struct Chain {
    block: u32,
    token: u32,
    pair: u32,
}
