//! The definition in plain Rust: codes of a tile to bytes, then integer dots.

use smoe_format::Zero;
use smoe_format::tile::ROWS;

use super::decode::{Codes, unpack};
use super::{Job, Sums};

pub(super) fn block(job: Job<'_>, tokens: usize, out: &mut Sums) {
    let (uniform, x) = (job.uniform, job.x);
    let group = uniform.group();
    let m = i32::from(uniform.max_code());
    let mut codes: Codes = [[[0; 4]; ROWS]; 32];
    out[..tokens].fill([0.0; ROWS]);
    for (g, tile) in job.tiles.chunks_exact(uniform.tile_bytes()).enumerate() {
        unpack(uniform, tile, &mut codes);
        let scales: [(f32, f32); ROWS] = std::array::from_fn(|row| uniform.scale(tile, row));
        for (t, out) in out[..tokens].iter_mut().enumerate() {
            let cell = g * x.step + t;
            let xs = &x.codes[cell * group..(cell + 1) * group];
            let (sx, sum) = (x.scales[cell], x.sums[cell]);
            let dots = match &job.levels {
                None => dots(&codes, xs, i32::from),
                Some(levels) => dots(&codes, xs, |code| i32::from(levels[usize::from(code)])),
            };
            for ((acc, &dot), &(scale, minimum)) in out.iter_mut().zip(&dots).zip(&scales) {
                *acc = match uniform.zero() {
                    _ if job.levels.is_some() => (dot as f32).mul_add(scale * sx, *acc),
                    Zero::Symmetric => ((2 * dot - m * sum) as f32).mul_add(scale * (sx / m as f32), *acc),
                    Zero::Affine => {
                        (sum as f32).mul_add(minimum * sx, (dot as f32).mul_add(scale * sx, *acc))
                    }
                };
            }
        }
    }
}

/// The dots of all rows of a tile with one token; `factor` is what a code is multiplied as.
fn dots(codes: &Codes, x: &[i8], factor: impl Fn(u8) -> i32) -> [i32; ROWS] {
    let mut dots = [0; ROWS];
    for (unit, x) in codes.iter().zip(x.as_chunks::<4>().0) {
        let x = x.map(i32::from);
        for (dot, codes) in dots.iter_mut().zip(unit) {
            let [a, b, c, d] = codes.map(&factor);
            *dot += (a * x[0] + b * x[1]) + (c * x[2] + d * x[3]);
        }
    }
    dots
}
