//! Activations on the device: f32 planes, and their int8 forms.

use smoe_format::Uniform;

use crate::{Gpu, GpuError, Slice};

/// int8 activations of up to `tokens` tokens: what coded weights are multiplied by.
///
/// `codes` is `[tokens, groups * group / 4]` words of four codes, columns past the end 0; `cells` is
/// `[tokens, groups]` pairs of words: the f32 scale, and the i32 sum of the codes.
#[derive(Clone, Debug)]
pub struct CodedPlane {
    /// Four codes a word.
    pub codes: Slice,
    /// Scale and sum per group.
    pub cells: Slice,
    /// Tokens that there is room for.
    pub tokens: usize,
    /// Columns, without padding.
    pub cols: usize,
    /// Columns that share a scale.
    pub group: usize,
}

impl CodedPlane {
    /// Room for `tokens` tokens of `cols` columns in groups of `group`.
    ///
    /// # Errors
    /// If the device has no room.
    pub fn new(gpu: &Gpu, tokens: usize, cols: usize, group: usize) -> Result<Self, GpuError> {
        let groups = cols.div_ceil(group);
        Ok(Self {
            codes: gpu.buffer("int8 activations", (tokens * groups * group) as u64)?,
            cells: gpu.buffer("scales of activations", (tokens * groups * 8) as u64)?,
            tokens,
            cols,
            group,
        })
    }

    /// Groups of a token.
    #[must_use]
    pub const fn groups(&self) -> usize {
        self.cols.div_ceil(self.group)
    }

    /// Whether a matrix of this encoding and so many columns can be multiplied by it.
    #[must_use]
    pub const fn suits(&self, uniform: Uniform, cols: usize) -> bool {
        self.cols == cols && self.group == uniform.group()
    }
}
