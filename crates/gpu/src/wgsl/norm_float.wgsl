// Float functions that have the CPU's bits. Every multiplication whose product is added to something is an explicit
// fma, so that nothing is left to the driver.
//
// Needs: quantise.wgsl (divide).

/// 1 / sqrt(sum / n + eps), each step rounded.
fn inverse_rms(sum: f32, n: f32, eps: f32) -> f32 {
    let x = divide(sum, n) + eps;
    let root = sqrt(x);
    let exact = divide(1.0, fma(fma(-root, root, x), 0.5 / root, root));
    // The corrections are not for zero, infinity and NaN.
    return select(1.0 / root, exact, x > 1.2e-38 && x < 3.4e38);
}

/// To the nearest half, the even one at a tie.
fn half_of(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    // Below 2^-14: adding 0.5 shifts the value so that f32's own rounding lands on units of 2^-24.
    let small = bitcast<u32>(bitcast<f32>(magnitude) + 0.5) - 0x3f000000u;
    let rounded = (magnitude + 0x0fffu + ((magnitude >> 13u) & 1u) - 0x38000000u) >> 13u;
    var half = select(rounded, small, magnitude < 0x38800000u);
    half = select(half, 0x7c00u, magnitude >= 0x47800000u);
    half = select(half, 0x7e00u | ((magnitude >> 13u) & 0x03ffu), magnitude > 0x7f800000u);
    return sign | half;
}

/// The value of a half; exact, also where the device takes subnormal halves for zero.
fn of_half(half: u32) -> f32 {
    let sign = (half & 0x8000u) << 16u;
    let magnitude = half & 0x7fffu;
    let normal = (magnitude << 13u) + 0x38000000u;
    let small = bitcast<u32>(f32(magnitude) * 5.9604645e-8);
    let quiet = select(0u, 0x00400000u, magnitude > 0x7c00u);
    let special = 0x7f800000u | ((magnitude & 0x03ffu) << 13u) | quiet;
    let bits = select(select(normal, small, magnitude < 0x0400u), special, magnitude >= 0x7c00u);
    return bitcast<f32>(sign | bits);
}
