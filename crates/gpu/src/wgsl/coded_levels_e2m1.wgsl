// What is multiplied in place of MXFP4's codes: magnitudes 0, 1, 2, 3, 4, 6, 8 and 12 by their three lowest bits and a sign by the
// fourth, 12 more than they are (LEAST): bytes that are never below zero take nothing from their neighbours. Half as many
// operations as choices by bits (EXP-GPU-09).

fn levels(codes: vec4<u32>) -> vec4<u32> {
    let low = codes & vec4(0x07070707u);
    // By how much codes from 4 on exceed 4.
    let above = codes & (((codes >> vec4(2u)) & vec4(0x01010101u)) * vec4(3u));
    // 4, 5, 6 and 7 are twice as far above 4, the last by two more.
    let magnitude = low + above + (above & (above << vec4(1u)) & vec4(0x02020202u));
    let sign = ((codes >> vec4(3u)) & vec4(0x01010101u)) * vec4(15u);
    return vec4(0x0c0c0c0cu) + magnitude - ((magnitude & sign) << vec4(1u));
}
