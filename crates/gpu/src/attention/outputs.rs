//! What becomes of the sums of attention: joined, gated, written as f32 or as int8.

use super::AttentionScratch;
use crate::draft::{Draft, demand, demand_coded};
use crate::rope::Rows;
use crate::shader::{Access, Op};
use crate::{CodedPlane, Gpu, GpuError, Slice};

const GATED: &str = include_str!("../wgsl/attention_gated.wgsl");
const UNGATED: &str = include_str!("../wgsl/attention_ungated.wgsl");
const COMBINE: &str =
    concat!(include_str!("../wgsl/attention_join.wgsl"), include_str!("../wgsl/attention_combine.wgsl"));

/// Numbers whose sigmoids outputs are multiplied with, `[tokens, stride]`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGate<'a> {
    /// f32; may be the plane that queries are made of.
    pub plane: &'a Slice,
    /// Columns of a token.
    pub stride: usize,
    /// The first of as many columns as outputs have.
    pub at: usize,
}

/// Where the outputs go; one of them at least.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOutputs<'a> {
    /// As f32, `[tokens, n_heads * value_dim]`.
    pub plane: Option<&'a Slice>,
    /// As int8.
    pub coded: Option<&'a CodedPlane>,
    /// What they are multiplied with before.
    pub gate: Option<AttentionGate<'a>>,
}

impl AttentionOutputs<'_> {
    pub(crate) fn check(&self, tokens: usize, width: usize) {
        self.plane.iter().for_each(|plane| demand(plane, tokens * width, "outputs of attention"));
        self.coded.iter().for_each(|coded| demand_coded(coded, tokens, width));
        if let Some(AttentionGate { plane, stride, at }) = self.gate {
            demand(plane, tokens * stride, "gates of attention");
            assert!(at + width <= stride, "columns {at} + {width} of {stride}");
        }
        assert!(self.plane.is_some() || self.coded.is_some(), "attention without outputs");
    }
}

/// What becomes of the sums: where they go, and what takes part in the softmax besides positions.
#[derive(Clone, Copy)]
pub(crate) struct Ending<'a> {
    pub(crate) n_heads: usize,
    pub(crate) value_dim: usize,
    pub(crate) sinks: Option<&'a Slice>,
    pub(crate) outputs: AttentionOutputs<'a>,
}

impl<'a> Ending<'a> {
    const fn width(&self) -> usize {
        self.n_heads * self.value_dim
    }

    /// Columns of a group of the outputs.
    pub(crate) fn group(&self) -> usize {
        self.outputs.coded.map_or(64, |coded| coded.group)
    }

    fn cells(&self) -> usize {
        self.width().div_ceil(self.group())
    }

    /// Workgroups of attention_combine.wgsl for a token.
    pub(crate) fn parts(&self, gpu: &Gpu) -> usize {
        self.cells().div_ceil(64 / gpu.team(self.group()))
    }

    /// What a kernel that leaves outputs needs; of a gate's plane that is bound already, its `name`.
    pub(crate) fn draft(&self, mut draft: Draft<'a>, name: Option<&str>) -> Draft<'a> {
        let Self { sinks, outputs, .. } = *self;
        draft = draft
            .constant("CELLS", self.cells())
            .flag("PLANE", outputs.plane.is_some())
            .flag("CODED", outputs.coded.is_some())
            .flag("SINKS", sinks.is_some());
        draft = match sinks {
            Some(sinks) => draft
                .buffer("sinks", "f32", Access::Read, sinks)
                .text("fn sink_of(head: u32) -> f32 { return sinks[head]; }\n"),
            None => draft.text("fn sink_of(head: u32) -> f32 { return 0.0; }\n"),
        };
        draft = match outputs.gate {
            Some(AttentionGate { plane, stride, at }) => {
                draft = match name {
                    Some(name) => {
                        draft.text("fn gate_at(i: u32) -> f32 { return ").text(name).text("[i]; }\n")
                    }
                    None => draft
                        .buffer("gates", "f32", Access::Read, plane)
                        .text("fn gate_at(i: u32) -> f32 { return gates[i]; }\n"),
                };
                draft.constant("GATE_STRIDE", stride).constant("GATE_AT", at).text(GATED)
            }
            None => draft.text(UNGATED),
        };
        draft = match outputs.plane {
            Some(plane) => draft.plane("mixed", self.width(), Access::Write, plane),
            None => draft.text("fn store_mixed(row: u32, chunk: u32, v: vec4<f32>) {}\n"),
        };
        match outputs.coded {
            Some(coded) => draft.coded(coded),
            None => draft.text("fn store_codes(cell: u32, quarter: u32, coded: Codes) {}\n"),
        }
    }

    /// The kernel that joins the splits of tokens.
    pub(crate) fn combine(
        &self,
        gpu: &Gpu,
        rows: Rows<'a>,
        scratch: &'a AttentionScratch,
    ) -> Result<Op, GpuError> {
        let (group, team, value_dim) = (self.group(), gpu.team(self.group()), self.value_dim);
        let draft = Draft::default()
            .float(group, team)
            .constant("HEADS", self.n_heads)
            .constant("VALUE_DIM", value_dim)
            .text(COMBINE)
            .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
            .buffer("sums", "vec4<f32>", Access::Read, &scratch.sums)
            .buffer("stats", "vec2<f32>", Access::Read, &scratch.stats);
        self.draft(draft, None).op(gpu, "attention: combine")
    }
}
