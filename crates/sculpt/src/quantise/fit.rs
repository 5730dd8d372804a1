//! Level tables fitted to weights.
//!
//! Lloyd's algorithm (1982) on weights divided by the scale of their group, alternated with the search for those scales:
//! each level becomes the mean of the weights that it stands for, as the squared error of the weights themselves weighs
//! them. In the end the levels are rounded to signed bytes, the largest to 127.

use smoe_format::Table;
use smoe_format::half::f16_to_f32;
use smoe_kernels::{Kernels, Loops};

use super::MAX_GROUP;
use super::grid::TableGrid;
use super::search::{levels, search};

/// Rounds of search and means.
const ROUNDS: usize = 12;
/// The largest level.
const REACH: f32 = 127.0;

/// A table of `2^bits` levels for weights such as these, which are pieces of `width` weights, a multiple of 16, that will
/// share a scale; `None` if the format has no such tables.
pub(crate) fn fit_table(
    kernels: Kernels,
    (bits, group): (u8, usize),
    width: usize,
    weights: &[f32],
) -> Option<Table> {
    let levels = match bits {
        2 => fit::<4>(kernels, width, weights).to_vec(),
        3 => fit::<8>(kernels, width, weights).to_vec(),
        4 => fit::<16>(kernels, width, weights).to_vec(),
        _ => return None,
    };
    Table::new(bits, group, &levels)
}

fn fit<const K: usize>(kernels: Kernels, group: usize, weights: &[f32]) -> [i8; K] {
    let mut grid = TableGrid::new(first());
    for _ in 0..ROUNDS {
        let means = kernels.compiled(Round { grid, group, weights });
        grid = TableGrid::new(to_reach(means));
    }
    grid.levels().map(|level| level.round_ties_even() as i8)
}

/// Levels as a bell wants them, about: closer in the middle. One side reaches less far than the other, so that the sign
/// of a scale says on which side a group's largest weight is; the rounds find how much less.
fn first<const K: usize>() -> [f32; K] {
    std::array::from_fn(|i| {
        let x = 2.0 * i as f32 / (K - 1) as f32 - 1.0;
        let side = if x > 0.0 { 0.9 } else { 1.0 };
        REACH * side * (0.65 * x + 0.35 * x * x * x)
    })
}

/// The same levels with the largest where it belongs.
fn to_reach<const K: usize>(levels: [f32; K]) -> [f32; K] {
    let reach = levels.iter().fold(0.0f32, |a, l| a.max(l.abs()));
    if reach > 0.0 { levels.map(|level| level * (REACH / reach)) } else { first() }
}

/// One round: the means of what each level stands for; a level of nothing stays.
struct Round<'a, const K: usize> {
    grid: TableGrid<K>,
    group: usize,
    weights: &'a [f32],
}

impl<const K: usize> Loops for Round<'_, K> {
    type Out = [f32; K];

    #[inline(always)]
    fn run(self) -> [f32; K] {
        let (mut products, mut powers) = ([0.0f64; K], [0.0f64; K]);
        let importance = [1.0; MAX_GROUP];
        let mut coded = [0.0; MAX_GROUP];
        for weights in self.weights.chunks_exact(self.group) {
            let scale = search(self.grid, weights, &importance[..self.group]);
            let coded = &mut coded[..self.group];
            levels(self.grid, weights, scale.half, coded);
            let step = f64::from(f16_to_f32(scale.half));
            for (&w, &level) in weights.iter().zip(&*coded) {
                let mut code = 0;
                for i in 1..K {
                    code += usize::from(level >= self.grid.levels()[i]);
                }
                products[code] += step * f64::from(w);
                powers[code] += step * step;
            }
        }
        let mut means = *self.grid.levels();
        for i in 0..K {
            if powers[i] > 0.0 {
                means[i] = (products[i] / powers[i]) as f32;
            }
        }
        means
    }
}

#[cfg(test)]
mod tests {
    use smoe_testkit::random::Random;

    use super::*;

    /// Relative RMS error of weights under a table, by the format's own arithmetic and a fine search for scales.
    fn error(table: &Table, weights: &[f32]) -> f64 {
        let (mut error, mut power) = (0.0, 0.0);
        for weights in weights.chunks_exact(table.group()) {
            let spanning = f16_to_f32(table.spanning_scale(weights));
            let of = |scale: f32| -> f64 {
                weights
                    .iter()
                    .map(|&w| f64::from(w - table.dequantise(table.nearest(w, scale), scale)).powi(2))
                    .sum()
            };
            error += (-110..=110).map(|i| of(spanning * i as f32 / 100.0)).fold(f64::MAX, f64::min);
            power += weights.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>();
        }
        (error / power).sqrt()
    }

    #[test]
    fn fitted_levels_of_a_bell_err_less_than_even_ones_and_no_more_than_published_ones() {
        let mut random = Random::new(3);
        let mut bell = |n: usize| (0..n).map(|_| 0.03 * random.bell() as f32).collect::<Vec<_>>();
        let (sample, fresh) = (bell(64 * 1024), bell(64 * 200));
        for (bits, bound) in [(2, 0.320), (3, 0.163), (4, 0.080)] {
            let table = fit_table(Kernels::detect(), (bits, 64), 64, &sample).expect("fits");
            let found = error(&table, &fresh);
            assert!(found < bound, "{bits}: {found} {:?}", table.levels());
            assert!(table.levels().is_sorted());
            for kernels in Kernels::available() {
                assert_eq!(fit_table(kernels, (bits, 64), 64, &sample), Some(table), "{kernels:?}");
            }
            eprintln!("{bits} bits: {found:.4} {:?}", table.levels());
        }
    }

    #[test]
    fn weights_that_are_all_alike_have_a_table_too() {
        for weights in [vec![0.0; 640], vec![0.5; 640], Vec::new()] {
            assert!(fit_table(Kernels::detect(), (3, 64), 64, &weights).is_some());
        }
        assert!(fit_table(Kernels::detect(), (5, 64), 64, &[0.1; 64]).is_none());
    }
}
