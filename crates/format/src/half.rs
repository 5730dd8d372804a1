//! Conversions between `f32` and the 16-bit floats that stand in a vault, bit-exact on every machine.
//!
//! All narrowing rounds to nearest, ties to even, keeps subnormals and turns a NaN into a quiet NaN: what
//! `vcvtps2ph`, NEON's `fcvtn` and `vcvtneps2bf16` (with subnormals kept) give. SIMD kernels are tested
//! against these functions over all 65,536 halves.

/// Widens an IEEE binary16 to `f32`; exact.
#[inline]
#[must_use]
pub fn f16_to_f32(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let magnitude = u32::from(half & 0x7fff);
    let bits = if magnitude >= 0x7c00 {
        // Infinity, or a NaN made quiet.
        let quiet = if magnitude > 0x7c00 { 0x0040_0000 } else { 0 };
        0x7f80_0000 | ((magnitude & 0x03ff) << 13) | quiet
    } else if magnitude >= 0x0400 {
        (magnitude << 13) + ((127 - 15) << 23)
    } else {
        // Subnormal: the magnitude counts units of 2^-24, which f32 holds exactly.
        return f32::from_bits(sign | (magnitude as f32 * 5.960_464_5e-8).to_bits());
    };
    f32::from_bits(sign | bits)
}

/// Narrows to IEEE binary16, to nearest, ties to even; overflow gives infinity.
#[inline]
#[must_use]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00 | ((magnitude >> 13) & 0x03ff) as u16;
    }
    if magnitude >= 0x4780_0000 {
        return sign | 0x7c00;
    }
    if magnitude < 0x3880_0000 {
        // Below 2^-14: adding 0.5 shifts the value so that f32's own rounding lands on units of 2^-24.
        let shifted = f32::from_bits(magnitude) + 0.5;
        return sign | (shifted.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let rounded = magnitude + 0x0fff + ((magnitude >> 13) & 1);
    sign | ((rounded - ((127 - 15) << 23)) >> 13) as u16
}

/// Widens a bfloat16 to `f32`; exact.
#[inline]
#[must_use]
pub fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// Narrows to bfloat16, to nearest, ties to even.
#[inline]
#[must_use]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return (bits >> 16) as u16 | 0x0040;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference of another shape: arithmetic on the fields, in f64.
    fn f16_value(half: u16) -> f64 {
        let sign = if half & 0x8000 != 0 { -1.0 } else { 1.0 };
        let exponent = i32::from((half >> 10) & 0x1f);
        let fraction = f64::from(half & 0x03ff);
        match exponent {
            0 => sign * fraction * 2f64.powi(-24),
            31 if fraction == 0.0 => sign * f64::INFINITY,
            31 => f64::NAN,
            _ => sign * (1024.0 + fraction) * 2f64.powi(exponent - 25),
        }
    }

    #[test]
    fn every_f16_widens_to_its_value_and_back() {
        for half in 0..=u16::MAX {
            let expected = f16_value(half);
            let wide = f16_to_f32(half);
            if expected.is_nan() {
                assert!(wide.is_nan() && f16_to_f32(f32_to_f16(wide)).is_nan());
                continue;
            }
            assert_eq!(f64::from(wide), expected, "{half:#06x}");
            assert_eq!(f32_to_f16(wide), half, "{half:#06x}");
        }
    }

    #[test]
    fn narrowing_to_f16_picks_the_nearest_and_the_even_one_at_a_tie() {
        for half in 0..0x7bffu16 {
            let (low, high) = (f16_value(half), f16_value(half + 1));
            let middle = ((low + high) / 2.0) as f32;
            let even = if half % 2 == 0 { half } else { half + 1 };
            assert_eq!(f32_to_f16(middle), even, "{half:#06x}");
            assert_eq!(f32_to_f16(f32::from_bits(middle.to_bits() - 1)), half);
            assert_eq!(f32_to_f16(f32::from_bits(middle.to_bits() + 1)), half + 1);
        }
        assert_eq!(f32_to_f16(65519.9), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
    }

    #[test]
    fn every_bf16_survives_a_round_trip() {
        for half in 0..=u16::MAX {
            let wide = bf16_to_f32(half);
            if wide.is_nan() {
                assert!(bf16_to_f32(f32_to_bf16(wide)).is_nan());
            } else {
                assert_eq!(f32_to_bf16(wide), half);
            }
        }
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
    }
}
