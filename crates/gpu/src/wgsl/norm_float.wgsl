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

/// e^x, as crates/kernels/src/exp.rs defines it.
fn exponential(x: f32) -> f32 {
    let shifted = fma(x, 1.44269502, 12582912.0);
    let n = f32(bitcast<i32>(shifted) - 0x4b400000i);
    let r = fma(n, 0.000212194442, fma(n, -0.693359375, x));
    var e = fma(0.00140355248, r, 0.00837230124);
    e = fma(e, r, 0.0416655503);
    e = fma(e, r, 0.166664883);
    e = fma(e, r, 0.5);
    e = fma(e, r, 1.0);
    e = fma(e, r, 1.0);
    e = bitcast<f32>(bitcast<u32>(e) + (bitcast<u32>(shifted) << 23u));
    // By bits, as comparisons with infinity and NaN may be assumed away: 88.72284 and more, NaN with it;
    // then below -87.33654; then negative NaN.
    let bits = bitcast<u32>(x);
    e = select(e, x * 3.0e38, bits >= 0x42b17218u && bits < 0x80000000u);
    e = select(e, 0.0, bits > 0xc2aeac4fu);
    return select(e, x, bits > 0xff800000u);
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
