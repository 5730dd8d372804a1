//! Where the residual stream begins: [`Embed`].

use smoe_format::tile::plane_widths;
use smoe_format::{Encoding, Zero};

use crate::draft::{Draft, demand};
use crate::shader::{Access, Op};
use crate::{Gpu, GpuError, Slice, Step};

const EMBED: &str = include_str!("wgsl/norm_embed.wgsl");

/// Rows of an embedding: `hidden[t] = table[ids[t]]`, as [`Encoding::decode_row`] decodes them, bit for bit. An id past the end of the table gives NaN.
#[derive(Clone, Debug)]
pub struct Embed {
    op: Op,
    tokens: usize,
    chunks: usize,
    scale: f32,
}

impl Embed {
    /// Of `table`, `rows x cols` in `encoding`, for up to `tokens` `ids` (u32), into `hidden`, `[tokens, cols]`.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If a buffer is too short, or the table has 2^32 values or more.
    pub fn new(
        gpu: &Gpu,
        tokens: usize,
        table: &Slice,
        encoding: Encoding,
        rows: usize,
        cols: usize,
        ids: &Slice,
        hidden: &Slice,
    ) -> Result<Self, GpuError> {
        let bytes = encoding.tensor_bytes(rows, cols).filter(|_| (rows * cols) >> 32 == 0);
        let Some(bytes) = bytes else { panic!("an embedding of {rows} x {cols}") };
        demand(table, bytes.div_ceil(4), "an embedding");
        demand(ids, tokens, "ids of tokens");
        demand(hidden, tokens * cols, "hidden states");
        let kind = match encoding {
            Encoding::F32 => 0,
            Encoding::F16 => 1,
            Encoding::Bf16 => 2,
            Encoding::Uniform(_) => 3,
            Encoding::Table(_) => panic!("an embedding of {encoding}"),
        };
        let mut draft = Draft::default().constant("ROWS", rows).constant("COLS", cols).constant("KIND", kind);
        // The same constants for floats, where nothing reads them.
        let uniform = match encoding {
            Encoding::Uniform(u) => Some(u),
            _ => None,
        };
        let [low, high] = uniform.map_or([4, 0], |u| plane_widths(u.bits())).map(usize::from);
        let group = uniform.map_or(64, |u| u.group());
        draft = draft
            .float(group, 4)
            .constant("GROUPS", cols.div_ceil(group))
            .constant("LOW", low)
            .constant("HIGH", high)
            .constant("MOST", uniform.map_or(1, |u| usize::from(u.max_code())))
            .constant("HIGH_AT", group * low)
            .constant("SCALES_AT", group * (low + high))
            .constant("TILE", uniform.map_or(0, |u| u.tile_bytes() / 4))
            .flag("AFFINE", uniform.is_some_and(|u| u.zero() == Zero::Affine));
        let op = draft
            .buffer("table", "u32", Access::Read, table)
            .buffer("ids", "u32", Access::Read, ids)
            .buffer("out", "f32", Access::Write, hidden)
            .text(EMBED)
            .op(gpu, "embed")?;
        Ok(Self { op, tokens, chunks: cols.div_ceil(4), scale: 1.0 })
    }

    /// The same, each value multiplied.
    #[must_use]
    pub const fn scaled(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// Records it for the first `tokens` ids.
    ///
    /// # Panics
    /// If there are more than it was made for.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let nan = f32::NAN.to_bits();
        step.run(&self.op, &[nan, self.scale.to_bits()], [self.chunks.div_ceil(64) as u32, tokens as u32, 1]);
    }
}
