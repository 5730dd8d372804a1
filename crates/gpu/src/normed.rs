//! A coded product of one token whose operand is a norm, both in one dispatch: [`NormMatmul`].

use smoe_format::tile::ROWS;

use crate::cut::{Cut, Tuning};
use crate::draft::{Draft, demand};
use crate::norm::{Delta, NORM_ROW, NormCut, add_delta};
use crate::quantise::{GRID, Repeated};
use crate::shader::{Access, Op};
use crate::{Columns, DeviceKind, Gpu, GpuError, Slice, Step, Weights};

/// Bytes that all workgroups together may read of hidden states and what is added: each reads them all, from a cache.
/// 160 workgroups and eight experts of 2,048 columns are 12 MiB, 288 and 4,096 are 42.
const READ: usize = 16 << 20;

/// What the norm is of.
#[derive(Clone, Copy, Debug)]
pub struct NormInput<'a> {
    /// `[1, cols]`.
    pub hidden: &'a Slice,
    /// What is added to them.
    pub delta: Delta<'a>,
    /// What is added is multiplied by it.
    pub residual: f32,
    /// `[1, cols]`: where the sum goes, another buffer, as all workgroups read `hidden`.
    pub kept: &'a Slice,
    /// `[cols]`, what the norm multiplies by.
    pub weight: &'a Slice,
    /// Of the norm.
    pub eps: f32,
}

/// `kept = fma(delta, residual, hidden)`, and `out[offset + r] = sum over k of W[r, k] * norm(kept)[k]` for coded weights and
/// the norm as int8: of one token, in one dispatch, with the bits of [`MixNorm`](crate::MixNorm) and
/// [`CodedMatmul`](crate::CodedMatmul).
#[derive(Clone, Debug)]
pub struct NormMatmul {
    op: Op,
    words: [u32; 6],
    workgroups: u32,
}

impl NormMatmul {
    /// None if the device shares or binds too little for it, or all workgroups together would have too much to read.
    ///
    /// # Errors
    /// If the device refuses the kernel.
    ///
    /// # Panics
    /// If the weights have no codes, a buffer is too short, or `kept` is `hidden`.
    pub fn new(
        gpu: &Gpu,
        weights: &Weights,
        norm: NormInput<'_>,
        out: &Columns,
    ) -> Result<Option<Self>, GpuError> {
        Self::tuned(gpu, weights, norm, out, None)
    }

    /// The same, cut as said: for measurements.
    ///
    /// # Errors
    /// As [`Self::new`].
    ///
    /// # Panics
    /// As there, and if `tuning` is not one of those that its fields name.
    pub fn tuned(
        gpu: &Gpu,
        weights: &Weights,
        norm: NormInput<'_>,
        out: &Columns,
        tuning: Option<Tuning>,
    ) -> Result<Option<Self>, GpuError> {
        let (rows, cols, encoding) = (weights.rows(), weights.cols(), weights.encoding());
        let uniform = encoding.tiles().unwrap_or_else(|| panic!("{encoding} weights have no codes"));
        let NormInput { hidden, delta, residual, kept, weight, eps } = norm;
        demand(hidden, cols, "hidden states");
        demand(kept, cols, "what is kept of them");
        demand(weight, cols, "weights of a norm");
        delta.check(1, cols);
        assert!(!kept.is(hidden), "hidden states are kept elsewhere");
        out.assert_room(1, rows);
        assert!(rows.div_ceil(ROWS) <= GRID, "the grid");
        let groups = uniform.groups(cols);
        let tuning = tuning.unwrap_or_else(|| Tuning::of(gpu, encoding, rows.div_ceil(ROWS), groups, 1));
        let threads = (tuning.threads as usize).min(gpu.most_threads());
        let Some(norm_cut) = NormCut::try_new(gpu, cols, Some(uniform.group()), Some(threads)) else {
            return Ok(None);
        };
        let Some(cut) = Cut::making(gpu, uniform, cols, tuning, norm_cut.shared_bytes()) else {
            return Ok(None);
        };
        let blocks = cut.blocks(encoding, groups, rows.div_ceil(ROWS), 1);
        let workgroups = rows.div_ceil(ROWS).div_ceil(blocks as usize);
        let bound = 5 + delta.bindings();
        // The cache of a processor's own GPU is no H200's, where this was measured.
        if gpu.facts().kind == DeviceKind::Integrated && !matches!(delta, Delta::None) {
            return Ok(None);
        }
        if bound > gpu.most_bindings() || workgroups * cols * 4 * (1 + delta.planes()) > READ {
            return Ok(None);
        }
        let mut draft = norm_cut
            .draft(Draft::default())
            .flag("NORMED", false)
            .flag("CODED", true)
            .flag("CHANGED", !matches!(delta, Delta::None))
            .constant("BLOCKS", blocks as usize)
            .declared(Access::Read, weights.slice())
            .plane("hidden", cols, Access::Read, hidden)
            .plane("weight", cols, Access::Read, weight);
        draft = add_delta(draft, delta, cols).plane("kept", cols, Access::Write, kept).buffer(
            "out",
            "f32",
            Access::Write,
            &out.plane,
        );
        let (constants, core) = cut.core(encoding, blocks, groups, Repeated::on(gpu)?);
        for (name, value) in constants.into_iter().filter(|(name, _)| *name != "THREADS") {
            draft = draft.constant(name, value as usize);
        }
        let op = draft
            .text(NORM_ROW)
            .text(&core)
            .text(include_str!("wgsl/coded_normed.wgsl"))
            .op(gpu, "norm and coded product")?;
        let [rows, groups, offset] = [rows, groups, out.offset].map(|n| n as u32);
        let words = [rows, groups, offset, eps.to_bits(), residual.to_bits(), 0];
        Ok(Some(Self { op, words, workgroups: workgroups as u32 }))
    }

    /// Records it.
    pub fn record(&self, step: &mut Step) {
        step.run(&self.op, &self.words, [self.workgroups, 1, 1]);
    }
}
