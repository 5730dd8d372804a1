//! Grids of levels: what the codes of a group may stand for, before its scale.

use std::ops::Range;

use smoe_format::Table;

/// Adding and taking away 1.5 * 2^23 rounds what is below 2^22 to integers, ties to even.
const UNITS: f32 = 12_582_912.0;

/// Levels in ascending order, in units of a *step*: a weight is `level * step`.
pub(crate) trait Grid: Copy + Sync {
    /// The scale that is stored, in steps.
    fn scale(self) -> f32;

    /// The largest magnitude of a level.
    fn reach(self) -> f32;

    /// True if the levels are the same with their signs turned, so that the sign of a scale means nothing.
    fn is_symmetric(self) -> bool;

    /// Largest magnitude of a group over the scale that is tried, from and to: where clipping has paid.
    fn clips(self) -> Range<f32>;

    /// The level nearest to a position; simple enough to become vectors in a loop.
    fn nearest(self, x: f32) -> f32;

    /// The code of a level of this grid.
    fn code(self, level: f32) -> u8;
}

/// The uniform levels `2 * code - m` of `b` bits, `m = 2^b - 1`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UniformGrid {
    /// `m`.
    pub max_code: u8,
}

impl Grid for UniformGrid {
    #[inline(always)]
    fn scale(self) -> f32 {
        f32::from(self.max_code)
    }

    #[inline(always)]
    fn reach(self) -> f32 {
        f32::from(self.max_code)
    }

    #[inline(always)]
    fn is_symmetric(self) -> bool {
        true
    }

    #[inline(always)]
    fn clips(self) -> Range<f32> {
        clips(self.max_code)
    }

    #[inline(always)]
    fn nearest(self, x: f32) -> f32 {
        let m = f32::from(self.max_code);
        let position = x * 0.5 + 0.5 * m;
        let position = if position > 0.0 { position } else { 0.0 };
        let position = if position < m { position } else { m };
        ((position + UNITS) - UNITS) * 2.0 - m
    }

    #[inline(always)]
    fn code(self, level: f32) -> u8 {
        (0.5 * (level + f32::from(self.max_code))) as u8
    }
}

/// The `K` levels of a table, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TableGrid<const K: usize> {
    levels: [f32; K],
    /// Half-way between each level and the one before; nothing reaches the first.
    bounds: [f32; K],
    reach: f32,
    symmetric: bool,
}

impl<const K: usize> TableGrid<K> {
    /// Of levels in any order.
    pub fn new(mut levels: [f32; K]) -> Self {
        levels.sort_by(f32::total_cmp);
        let mut bounds = [f32::INFINITY; K];
        for i in 1..K {
            bounds[i] = 0.5 * (levels[i - 1] + levels[i]);
        }
        Self {
            levels,
            bounds,
            reach: levels[0].abs().max(levels[K - 1].abs()),
            symmetric: (0..K).all(|i| levels[i] == -levels[K - 1 - i]),
        }
    }

    /// Of a table whose levels ascend.
    pub fn of(table: &Table) -> Self {
        let levels = table.levels();
        Self::new(std::array::from_fn(|i| f32::from(levels[i])))
    }

    pub const fn levels(&self) -> &[f32; K] {
        &self.levels
    }
}

impl<const K: usize> Grid for TableGrid<K> {
    #[inline(always)]
    fn scale(self) -> f32 {
        1.0
    }

    #[inline(always)]
    fn reach(self) -> f32 {
        self.reach
    }

    #[inline(always)]
    fn is_symmetric(self) -> bool {
        self.symmetric
    }

    #[inline(always)]
    fn clips(self) -> Range<f32> {
        clips((K - 1) as u8)
    }

    #[inline(always)]
    fn nearest(self, x: f32) -> f32 {
        let mut level = self.levels[0];
        for i in 1..K {
            level = if x > self.bounds[i] { self.levels[i] } else { level };
        }
        level
    }

    #[inline(always)]
    fn code(self, level: f32) -> u8 {
        let mut code = 0;
        for i in 1..K {
            code += u8::from(level >= self.levels[i]);
        }
        code
    }
}

/// The share of a group's largest magnitude that its scale should stand for, at least and at most: the fewer levels,
/// the more is clipped (EXP-QUANT-01).
#[inline(always)]
fn clips(max_code: u8) -> Range<f32> {
    match max_code {
        0..=3 => 0.45..0.90,
        4..=7 => 0.60..1.00,
        8..=15 => 0.74..1.06,
        _ => 0.84..1.04,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_of_a_table_are_the_nearest_and_have_their_codes() {
        let levels = [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0];
        let grid = TableGrid::new(levels);
        assert!(!grid.is_symmetric() && TableGrid::new([-3.0, 1.0, -1.0, 3.0]).is_symmetric());
        for i in -2000..300 {
            let x = i as f32 * 0.0937;
            let best = levels.iter().map(|l| (l - x).abs()).fold(f32::MAX, f32::min);
            assert!(((grid.nearest(x) - x).abs() - best).abs() < 1e-4, "{x}");
            assert_eq!(levels[usize::from(grid.code(grid.nearest(x)))], grid.nearest(x));
        }
    }

    #[test]
    fn uniform_levels_are_the_nearest_odd_integers() {
        for max_code in [3u8, 7, 15, 31, 63, 255] {
            let grid = UniformGrid { max_code };
            let m = i32::from(max_code);
            for i in -700..700 {
                let x = i as f32 * 0.41;
                let level = grid.nearest(x);
                let best =
                    (0..=m).map(|c| (2 * c - m) as f32).map(|l| (l - x).abs()).fold(f32::MAX, f32::min);
                assert!(((level - x).abs() - best).abs() < 1e-4, "{max_code} {x} {level}");
                assert_eq!(2.0 * f32::from(grid.code(level)) - m as f32, level);
            }
        }
    }
}
