// What is multiplied in place of MXFP4's codes: magnitudes 0, 1, 2, 3, 4, 6, 8 and 12 by their three lowest bits and a sign by the
// fourth, 12 more than they are (LEAST): bytes that are never below zero take nothing from their neighbours. Magnitudes fit where codes
// are, so eight are made at once; fewer operations than choices by bits (EXP-GPU-09).

// Of the lower and the upper four bits of each byte.
struct Pair {
    low: vec4<u32>,
    high: vec4<u32>,
}

fn level_pairs(codes: vec4<u32>) -> Pair {
    // By how much codes from 4 on exceed 4.
    let above = codes & (((codes >> vec4(2u)) & vec4(0x11111111u)) * vec4(3u));
    // 4, 5, 6 and 7 are twice as far above 4, the last by two more.
    let twice = above & (above << vec4(1u)) & vec4(0x22222222u);
    let magnitude = (codes & vec4(0x77777777u)) + above + twice;
    let negative = magnitude & (((codes >> vec4(3u)) & vec4(0x11111111u)) * vec4(15u));
    let mask = vec4(0x0f0f0f0fu);
    return Pair(
        vec4(0x0c0c0c0cu) + (magnitude & mask) - ((negative & mask) << vec4(1u)),
        vec4(0x0c0c0c0cu) + ((magnitude >> vec4(4u)) & mask) - (((negative >> vec4(4u)) & mask) << vec4(1u)),
    );
}

fn levels(codes: vec4<u32>) -> vec4<u32> {
    return level_pairs(codes).low;
}
