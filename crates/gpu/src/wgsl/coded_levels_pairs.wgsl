
// Of the lower and the upper four bits of each byte.
struct Pair {
    low: vec4<u32>,
    high: vec4<u32>,
}

fn level_pairs(codes: vec4<u32>) -> Pair {
    let mask = vec4(0x0f0f0f0fu);
    return Pair(levels(codes & mask), levels((codes >> vec4(4u)) & mask));
}
