// Fused multiply-adds on a device without them (a program that plays one), from roundings to nearest: the
// algorithm of Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008). Exact unless a
// product's low half is subnormal. What is written here for one number is made for two and four by replacing
// the types.

// x, in a way that no compiler takes sums apart by.
fn held1(x: f32) -> f32 {
    return clamp(x, f32(-3.4028235e38), f32(3.4028235e38));
}

// A sum, and its exact rest.
struct Two1 {
    sum: f32,
    rest: f32,
}

fn two_sum1(x: f32, y: f32) -> Two1 {
    let sum = held1(x + y);
    let back = held1(sum - x);
    return Two1(sum, held1(x - held1(sum - back)) + held1(y - back));
}

// The upper half of the digits.
fn upper1(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) & u32(0xfffff000u));
}

fn fma1(a: f32, b: f32, c: f32) -> f32 {
    let plain = a * b;
    let product = held1(plain);
    let ah = upper1(a);
    let al = held1(a - ah);
    let bh = upper1(b);
    let bl = held1(b - bh);
    let low = held1(held1(held1(ah * bh - product) + ah * bl) + al * bh) + al * bl;
    let t = two_sum1(c, low);
    let v = two_sum1(product, t.sum);
    // What is left, rounded to odd: then the last rounding is as if of everything.
    let z = two_sum1(t.rest, v.rest);
    let bits = bitcast<u32>(z.sum);
    let away = (z.rest > f32(0.0)) == (z.sum > f32(0.0));
    let odd = select(bits - u32(1u), bits + u32(1u), away);
    let inexact = (z.rest != f32(0.0)) & ((bits & u32(1u)) == u32(0u));
    let fused = v.sum + bitcast<f32>(select(bits, odd, inexact));
    let finite = (abs(plain) < f32(1.0e38)) & (abs(c) < f32(1.0e38));
    return select(plain + c, fused, finite);
}
