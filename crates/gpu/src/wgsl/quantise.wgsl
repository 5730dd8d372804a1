// int8 activations (kernels' `Activations`, with its bits wherever the device's fma is fused): a team of TEAM
// neighbouring lanes of a subgroup shares a group of GROUP columns, each holds WORDS words of four columns.
//
// Needs: const GROUP, TEAM (a power of two): u32.

const WORDS: u32 = GROUP / (4u * TEAM);

/// a / b, rounded once, where neither a, b nor the quotient is subnormal: the device's own division may be
/// off by some ulps. Markstein's sequence: a reciprocal as good as rounded, then two corrections by the exact
/// remainder. Zeros may lose their sign.
fn divide(a: f32, b: f32) -> f32 {
    // Beyond 2^64 both are scaled by 2^-64, as reciprocals of the largest numbers are subnormal, and products with
    // them overflow; below 2^-64 by 2^64, as remainders of small ones are subnormal.
    let small = abs(a) < 5.421010862427522e-20 && abs(b) < 1.8446744073709552e19;
    let up = select(1.0, 1.8446744073709552e19, small);
    let large = abs(b) > 1.8446744073709552e19 || abs(a) > 1.8446744073709552e19 && abs(b) > 1.0;
    let scale = select(up, 5.421010862427522e-20, large);
    let n = a * scale;
    // A constant that is known when the kernel is compiled would be divided by in another way.
    let d = hide(b * scale);
    let near = 1.0 / d;
    let inverse = fma(fma(-d, near, 1.0), near, near);
    var q = n * inverse;
    q = fma(fma(-q, d, n), inverse, q);
    q = fma(fma(-q, d, n), inverse, q);
    // What overflows, or is not a number, has no remainder.
    let plain = a / b;
    let most = max(bitcast<u32>(plain) & 0x7fffffffu, bitcast<u32>(b) & 0x7fffffffu);
    return select(plain, q, most < 0x7f800000u);
}

struct Codes {
    words: array<u32, WORDS>,
    // absmax / 127, and the sum of all codes of the group: the same in all lanes of a team.
    scale: f32,
    sum: i32,
}

fn team_max(x: u32) -> u32 {
    var y = x;
    for (var step = 1u; step < TEAM; step *= 2u) {
        y = max(y, subgroupShuffleXor(y, step));
    }
    return y;
}

fn team_sum(x: i32) -> i32 {
    var y = x;
    for (var step = 1u; step < TEAM; step *= 2u) {
        y += subgroupShuffleXor(y, step);
    }
    return y;
}

// Called by whole subgroups.
fn quantise(x: array<vec4<f32>, WORDS>) -> Codes {
    var out: Codes;
    // Magnitudes of floats order like their bits, NaN above infinity.
    var most = vec4<u32>(0u);
    for (var i = 0u; i < WORDS; i++) {
        most = max(most, bitcast<vec4<u32>>(x[i]) & vec4(0x7fffffffu));
    }
    let bits = team_max(max(max(most.x, most.y), max(most.z, most.w)));
    let absmax = bitcast<f32>(bits);
    let inverse = divide(127.0, absmax);
    // Bits, as comparisons with infinity may be assumed away: overflows for what is as good as zero.
    let inverse_bits = bitcast<u32>(inverse);
    let usable = bits < 0x7f800000u && bits > 0u && inverse_bits < 0x7f800000u && inverse_bits > 0u;
    var sum = 0i;
    for (var i = 0u; i < WORDS; i++) {
        // The product is rounded first, then to an integer, even at a tie: `round` keeps a compiler from fusing
        // it with the sum that puts the integer into the lowest bits, 1.5 * 2^23.
        let shifted = bitcast<vec4<i32>>(round(x[i] * inverse) + vec4(12582912.0)) - vec4(0x4b400000i);
        let codes = select(vec4(0i), clamp(shifted, vec4(-127i), vec4(127i)), usable);
        sum += codes.x + codes.y + codes.z + codes.w;
        let b = bitcast<vec4<u32>>(codes) & vec4(0xffu);
        out.words[i] = b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
    }
    out.sum = team_sum(sum);
    // A group with an infinity or a NaN has that as its scale, so every sum over it is NaN.
    let unusable = select(0.0, absmax, bits >= 0x3f800000u);
    out.scale = select(unusable, divide(absmax, 127.0), usable);
    return out;
}
