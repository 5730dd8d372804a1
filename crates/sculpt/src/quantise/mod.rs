//! How weights become codes when more than rounding is wanted.
//!
//! [`grid`]: what codes stand for; [`fit`]: tables of levels; [`search`]: the scale of a group; [`factor`] and
//! [`feedback`]: errors made up for in later columns; [`worth`]: which channels deserve finer steps. Loops here are plain, and compiled for the machine's
//! vectors (`Kernels::compiled`); their bits are the same on every machine.

mod factor;
mod feedback;
mod fit;
mod grid;
mod search;
mod worth;

use smoe_format::tile::{self, ROWS};
use smoe_format::{Encoding, Uniform, Zero};
use smoe_kernels::{Kernels, Loops};

pub(crate) use factor::{Feedback, Square};
pub(crate) use feedback::encode_with_feedback;
pub(crate) use fit::fit_table;
use grid::{Grid, TableGrid, UniformGrid};
pub(crate) use worth::{Expert, Finesse, may_scale};

/// The longest group.
const MAX_GROUP: usize = 128;

/// Something to do with the grid of an encoding, whatever its type.
trait WithGrid {
    type Out;
    fn with<G: Grid>(self, grid: G) -> Self::Out;
}

/// Does it. A table has its levels in ascending order, or its codes would be others.
fn with_grid<W: WithGrid>(encoding: Encoding, work: W) -> W::Out {
    match encoding {
        Encoding::Table(table) => match table.bits() {
            2 => work.with(TableGrid::<4>::of(&table)),
            3 => work.with(TableGrid::<8>::of(&table)),
            _ => work.with(TableGrid::<16>::of(&table)),
        },
        Encoding::Uniform(uniform) => work.with(UniformGrid { max_code: uniform.max_code() }),
        Encoding::F32 | Encoding::F16 | Encoding::Bf16 => unreachable!("floats have no grid"),
    }
}

/// True if the codes of an encoding are searched by these rules.
pub(crate) fn is_searchable(encoding: Encoding) -> bool {
    match encoding {
        Encoding::Uniform(uniform) => uniform.zero() == Zero::Symmetric,
        Encoding::Table(table) => table.levels().is_sorted(),
        Encoding::F32 | Encoding::F16 | Encoding::Bf16 => false,
    }
}

/// Codes whole rows, each group by itself, its scale searched; `weights` is `[rows, cols]` and `out` its tiles, to be
/// overwritten.
///
/// # Panics
/// If a length does not match, or the encoding is not [searchable](is_searchable).
pub(crate) fn encode_searched(
    kernels: Kernels,
    encoding: Encoding,
    weights: &[f32],
    cols: usize,
    out: &mut [u8],
) {
    let layout = encoding.tiles().expect("codes lie in tiles");
    for (rows, block) in weights.chunks(ROWS * cols).zip(out.chunks_exact_mut(layout.block_bytes(cols))) {
        with_grid(encoding, Searched { kernels, layout, rows, cols, block });
    }
}

struct Searched<'a> {
    kernels: Kernels,
    layout: Uniform,
    rows: &'a [f32],
    cols: usize,
    block: &'a mut [u8],
}

impl WithGrid for Searched<'_> {
    type Out = ();

    fn with<G: Grid>(self, grid: G) {
        let Self { kernels, layout, rows, cols, block } = self;
        kernels.compiled(Block { grid, layout, rows, cols, block });
    }
}

/// The plain rule of the original, compiled for the machine.
pub(crate) fn encode_absmax(
    kernels: Kernels,
    uniform: Uniform,
    weights: &[f32],
    cols: usize,
    out: &mut [u8],
) {
    for (rows, block) in weights.chunks(ROWS * cols).zip(out.chunks_exact_mut(uniform.block_bytes(cols))) {
        kernels.compiled(Absmax { uniform, rows, cols, block });
    }
}

struct Absmax<'a> {
    uniform: Uniform,
    rows: &'a [f32],
    cols: usize,
    block: &'a mut [u8],
}

impl Loops for Absmax<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        self.uniform.encode_block(self.rows, self.cols, self.block);
    }
}

/// Up to 32 rows and their tiles.
struct Block<'a, G> {
    grid: G,
    layout: Uniform,
    rows: &'a [f32],
    cols: usize,
    block: &'a mut [u8],
}

impl<G: Grid> Loops for Block<'_, G> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Self { grid, layout, rows, cols, block } = self;
        let group = layout.group();
        block.fill(0);
        let mut codes = [0u8; ROWS * MAX_GROUP];
        let codes = &mut codes[..ROWS * group];
        let (mut weights, mut importance, mut levels) =
            ([0.0; MAX_GROUP], [0.0; MAX_GROUP], [0.0; MAX_GROUP]);
        for (g, tile) in block.chunks_exact_mut(layout.tile_bytes()).enumerate() {
            let width = group.min(cols - g * group);
            weights[width..].fill(0.0);
            importance[..width].fill(1.0);
            importance[width..].fill(0.0);
            for (row, codes) in rows.chunks_exact(cols).zip(codes.chunks_exact_mut(group)).enumerate() {
                let (values, codes) = codes;
                weights[..width].copy_from_slice(&values[g * group..g * group + width]);
                let scale = search::search(grid, &weights[..group], &importance[..group]);
                search::levels(grid, &weights[..group], scale.half, &mut levels[..group]);
                for (code, &level) in codes[..width].iter_mut().zip(&levels) {
                    *code = grid.code(level);
                }
                codes[width..].fill(0);
                layout.write_levels(tile, row, scale.half, 0);
            }
            tile::pack(codes, layout.bits(), group, &mut tile[..layout.code_bytes()]);
        }
    }
}
