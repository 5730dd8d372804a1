// The exponential of crates/kernels/src/exp.rs, with its bits where fma is fused.

/// e^x by Cody and Waite's reduction: x = n ln 2 + r, a polynomial of r, n into the exponent.
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
