//! One projection of a layer's experts: gate or up by itself, or down.

use smoe_format::Encoding;
use smoe_format::tile::ROWS;

use crate::beside::Launch;
use crate::coded::{CodedOp, PASSES, pass_of, passes};
use crate::cut::{Cut, OWN_ROW, Tuning};
use crate::experts::{LIST, TIMES};
use crate::float::FloatCut;
use crate::memories::Memories;
use crate::quantise::{Repeated, assert_plane, source};
use crate::tiling::{Tiled, Tiling};
use crate::{Access, CodedPlane, ExpertLayout, Gpu, GpuError, Op, Shader, Slice, Step, WorkList};

const PRODUCT: &str = include_str!("wgsl/experts_product.wgsl");
const CODED: &str = include_str!("wgsl/experts_coded.wgsl");
const FLOAT: &str = include_str!("wgsl/experts_float.wgsl");

/// The operand of a projection.
#[derive(Clone, Copy)]
pub(crate) enum X<'a> {
    /// And the f32 rows that a lone token has in its place.
    Coded(&'a CodedPlane, Option<&'a Slice>),
    Float(&'a Slice),
}

/// Whose rows are whose.
#[derive(Clone, Copy)]
pub(crate) enum Rows {
    /// x by the pairs' tokens, the output by place.
    Tokens,
    /// x by place, the output by pair.
    Places,
}

/// What a projection's kernel has behind its operands.
struct Tail<'a> {
    /// Text that adds biases.
    bias: String,
    memories: Memories,
    accesses: Vec<Access>,
    /// All of the kernel's.
    buffers: Vec<&'a Slice>,
}

impl<'a> Tail<'a> {
    fn new(
        layout: &'a ExpertLayout,
        projection: usize,
        operands: Vec<&'a Slice>,
        list: &'a WorkList,
        out: &'a Slice,
    ) -> Self {
        let mut buffers = operands;
        buffers.extend([&list.entries, &list.pairs, out]);
        let (bias, biases) = layout.bias(projection, buffers.len());
        buffers.extend(biases);
        let (memories, behind) = layout.memories(buffers.len());
        buffers.extend(behind);
        let mut accesses = vec![Access::Read, Access::Read, Access::Write];
        accesses.resize(accesses.len() + biases.into_iter().chain(behind).count(), Access::Read);
        Self { bias, memories, accesses, buffers }
    }
}

/// One projection of the experts of a list.
#[derive(Clone, Debug)]
pub(crate) enum Projection {
    /// `many` are for entries of many pairs, the largest cut first.
    Coded {
        passes: Vec<CodedOp>,
        many: Vec<(Op, Tiling)>,
        words: [u32; 5],
        rows: usize,
    },
    Float {
        passes: Vec<Op>,
        cut: FloatCut,
        words: [u32; 4],
        rows: usize,
    },
}

impl Projection {
    pub(crate) fn new(
        gpu: &Gpu,
        layout: &ExpertLayout,
        projection: usize,
        slots: &Slice,
        list: &WorkList,
        x: X<'_>,
        rows: Rows,
        out: &Slice,
        tuning: Option<Tuning>,
        tiling: Option<Tiling>,
    ) -> Result<Self, GpuError> {
        let name = ["experts' gate", "experts' up", "experts' down"][projection];
        let tensor = layout.tensors[projection];
        let (at, slot) = (tensor.offset as u64, layout.slot_bytes);
        let top_k = if matches!(rows, Rows::Tokens) { list.top_k as u32 } else { 0 };
        let by_pair = ("BY_PAIR", u32::from(matches!(rows, Rows::Places)));
        let apart = ("APART_BEHIND", layout.apart_behind());
        assert_plane(out, list.most_pairs(), tensor.rows);
        let words = [tensor.rows as u32, 0, 0, ExpertLayout::piece(at), ExpertLayout::piece(slot)];
        match (tensor.encoding, x) {
            (encoding @ (Encoding::Uniform(_) | Encoding::Table(_)), X::Coded(x, lone)) => {
                let Some(uniform) = encoding.tiles() else { unreachable!("codes are in tiles") };
                let groups = uniform.groups(tensor.cols);
                let shape = (tensor.rows, tensor.cols);
                let passes = passes(list.tokens)
                    .map(|pass| {
                        let blocks = tensor.rows.div_ceil(ROWS) * TIMES;
                        let (cut, operands, own) = if let Some(values) = lone.filter(|_| pass == 1) {
                            let blocks = tensor.rows.div_ceil(ROWS) * list.top_k;
                            let tuning =
                                tuning.unwrap_or_else(|| Tuning::of_lone_down(gpu, encoding, blocks, groups));
                            (Cut::owning(gpu, uniform, tensor.cols, tuning), vec![slots, values], OWN_ROW)
                        } else {
                            let tuning =
                                tuning.unwrap_or_else(|| Tuning::of(gpu, encoding, blocks, groups, pass));
                            (Cut::new(gpu, uniform, pass, tuning), vec![slots, &x.codes, &x.cells], "")
                        };
                        let at = operands.len() as u32;
                        let extra = [("LIST", at), ("OUT", at + 2), ("TOP_K", top_k), by_pair, apart];
                        let Tail { bias, memories, accesses, buffers } =
                            Tail::new(layout, projection, operands, list, out);
                        let (cut, parts) = (cut.in_memories(memories), [own, LIST, PRODUCT, &bias, CODED]);
                        CodedOp::new(
                            gpu, name, encoding, cut, shape, TIMES, &extra, &parts, &accesses, &buffers,
                        )
                    })
                    .collect::<Result<_, _>>()?;
                let repeated = Repeated::on(gpu)?;
                let tilings = tiling.as_ref().map_or(Tiling::of_experts(uniform), std::slice::from_ref);
                let many = tilings
                    .iter()
                    .filter_map(|tiling| Tiled::new(gpu, encoding, *tiling).filter(|_| list.can_be_of_many()))
                    .map(|tiled| {
                        let operands = vec![slots, &x.codes, &x.cells];
                        let Tail { bias, memories, accesses, buffers } =
                            Tail::new(layout, projection, operands, list, out);
                        let (mut constants, core) = tiled.core(memories, repeated);
                        constants.extend([("LIST", 3), ("OUT", 5), ("TOP_K", top_k), by_pair, apart]);
                        let text = [include_str!("wgsl/experts_tiled.wgsl"), &tiled.rows(repeated)];
                        let parts = [&core, LIST, PRODUCT, &bias, text[0], text[1]];
                        let kernel = gpu.kernel(&Shader {
                            name: &format!("{name}, many tokens"),
                            source: source(gpu, &constants, &parts)?.into(),
                            bindings: &[&[Access::Read; 3], &accesses[..]].concat(),
                        })?;
                        Ok((gpu.bind(&kernel, &buffers)?, tiled.tiling))
                    })
                    .collect::<Result<_, GpuError>>()?;
                let words = [words[0], groups as u32, 0, words[3], words[4]];
                Ok(Self::Coded { passes, many, words, rows: tensor.rows })
            }
            (Encoding::F32 | Encoding::F16 | Encoding::Bf16, X::Float(x)) => {
                let cut = FloatCut::new(tensor.rows * TIMES);
                let extra = [("LIST", 2), ("OUT", 4), ("TOP_K", top_k), by_pair, apart];
                let Tail { bias, memories, accesses, buffers } =
                    Tail::new(layout, projection, vec![slots, x], list, out);
                let parts = [LIST, PRODUCT, &bias, FLOAT];
                let matrix = (tensor.encoding, tensor.cols);
                let passes = passes(list.tokens)
                    .map(|pass| {
                        cut.op(gpu, name, matrix, pass, &extra, &parts, &accesses, &buffers, memories)
                    })
                    .collect::<Result<_, _>>()?;
                let words = [words[0], tensor.cols as u32, words[3], words[4]];
                Ok(Self::Float { passes, cut, words, rows: tensor.rows })
            }
            (encoding, _) => panic!("{name} is {encoding}, its operand is not"),
        }
    }

    /// Of one token, of codes.
    pub(crate) fn launch(&self, list: &WorkList) -> Option<Launch<'_>> {
        let Self::Coded { passes, words, rows, .. } = self else { return None };
        let CodedOp { op, blocks, shared } = &passes[0];
        let words = vec![words[0], words[1], *blocks, words[3], words[4]];
        let grid = [(rows.div_ceil(ROWS) as u32).div_ceil(*blocks), list.grid(1, 1)[0]];
        Some(Launch { op, words, grid, shared: *shared })
    }

    pub(crate) fn record(&self, step: &mut Step, tokens: usize, list: &WorkList) {
        let pass = pass_of(tokens);
        let [entries, parts] = list.grid(tokens, PASSES[pass]);
        match self {
            Self::Coded { many, words, rows, .. } if list.is_of_many(tokens) && !many.is_empty() => {
                let mean = tokens * list.top_k / list.n_experts;
                let fits = many.iter().find(|(_, tiling)| tiling.is_filled(mean));
                let (op, tiling) = fits.unwrap_or(&many[many.len() - 1]);
                let words = [words[0], words[1], words[3], words[4]];
                let [entries, parts] = list.grid(tokens, tiling.tokens);
                step.run(op, &words, [(*rows as u32).div_ceil(tiling.rows), entries, parts]);
            }
            Self::Coded { passes, words, rows, .. } => {
                let CodedOp { op, blocks, .. } = &passes[pass];
                let words = [words[0], words[1], *blocks, words[3], words[4]];
                step.run(op, &words, [(rows.div_ceil(ROWS) as u32).div_ceil(*blocks), entries, parts]);
            }
            Self::Float { passes, cut, words, rows } => {
                step.run(&passes[pass], words, [cut.grid(*rows), entries, parts]);
            }
        }
    }
}
