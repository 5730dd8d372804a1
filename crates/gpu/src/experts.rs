//! The experts of a layer, all in one dispatch: the products of a work list.
//!
//! `hidden = quantise(activation(gate x, up x))` ([`GateUp`]), `y = down hidden` ([`Down`]), biases added to each product
//! where there are some. If gate and up are coded alike and down is coded, the first is one kernel; otherwise three, over f32
//! planes. Of one token that kernel leaves floats, more workgroups having a part in it, and down's workgroups quantise their
//! expert's each for itself. Entries of many pairs share tiles that are unpacked once (coded_tiled.wgsl).

use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Uniform};

use crate::beside::Launch;
use crate::coded::{PASSES, pass_of, passes};
use crate::cut::{Cut, Tuning, can_own};
use crate::hidden::LONE_PAIRS;
use crate::hidden::{Lone, Values};
use crate::projection::{Projection, Rows, X};
use crate::quantise::{GRID, QUANTISE, Repeated, TO_PLANE, assert_plane, source};
use crate::tiling::{Tiled, Tiling};
use crate::{Access, CodedPlane, ExpertLayout, Gpu, GpuError, Hidden, Op, Shader, Slice, Step, WorkList};

/// The work list.
pub(crate) const LIST: &str = include_str!("wgsl/experts.wgsl");
/// From sums of gate and up to hidden values.
const GATE_UP_HIDDEN: &str = include_str!("wgsl/experts_gate_up_hidden.wgsl");
/// Threads of a workgroup of what is no product.
const THREADS: u32 = 256;
/// Experts of a dispatch that the cut of their products reckons with: a single token's.
pub(crate) const TIMES: usize = 8;

/// A layer's input, in the forms that its experts need: int8 in every group size of coded gates and ups, f32 for
/// float ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertInput<'a> {
    /// `[tokens, d_model]` as codes.
    pub coded: &'a [&'a CodedPlane],
    /// `[tokens, d_model]` as f32.
    pub float: Option<&'a Slice>,
}

/// Whether the hidden values of a lone token stay floats that down quantises.
fn is_lone(gpu: &Gpu, layout: &ExpertLayout, top_k: usize) -> bool {
    top_k <= LONE_PAIRS && layout.fused().is_some_and(|(_, _, down)| can_own(gpu, down, layout.d_expert()))
}

/// `hidden[place] = activation(gate x, up x)` of each place of a work list, quantised if down is coded.
///
/// With coded gates and ups, the bits are those of the CPU's `expert_ffn` (as far as its
/// products and its quantising have them: see [`CodedMatmul`](crate::CodedMatmul) and
/// [`Quantise`](crate::Quantise)); float ones differ in the last bits. They depend neither on other pairs nor on
/// how many there are. Places of absent experts are left as they are, or undefined.
#[derive(Clone, Debug)]
pub struct GateUp {
    list: WorkList,
    how: How,
}

/// What is for one token.
#[derive(Clone, Debug)]
struct LoneOp {
    op: Op,
    words: [u32; 5],
    /// Bytes that a workgroup shares.
    shared: u32,
}

#[derive(Clone, Debug)]
enum How {
    /// `lone` is for one token, with words of its own.
    Fused {
        lone: Option<LoneOp>,
        passes: Vec<Op>,
        /// With the blocks of a part.
        many: Option<(Op, Tiling, u32)>,
        words: [u32; 6],
        blocks: u32,
        part: u32,
    },
    Apart {
        gate: Projection,
        up: Projection,
        hidden: Op,
        words: [u32; 2],
        parts: u32,
    },
}

impl GateUp {
    /// Over the records in `slots`, a run of whole slots: `x` is the layer's input, of `list.tokens` tokens.
    ///
    /// # Errors
    /// If the device refuses a kernel, or has no room for planes that two projections of unlike encodings need.
    ///
    /// # Panics
    /// If `x` lacks a form that gate or up needs, or a plane is too short.
    pub fn new(
        gpu: &Gpu,
        layout: &ExpertLayout,
        slots: &Slice,
        list: &WorkList,
        x: &ExpertInput<'_>,
        hidden: &Hidden,
    ) -> Result<Self, GpuError> {
        Self::tuned(gpu, layout, slots, list, x, hidden, None, None)
    }

    /// The same, cut as said for one token and for many, if the device can: for measurements.
    ///
    /// # Errors
    /// As [`Self::new`].
    ///
    /// # Panics
    /// As there, and if `tuning` or `tiling` is not one of those that its fields name.
    pub fn tuned(
        gpu: &Gpu,
        layout: &ExpertLayout,
        slots: &Slice,
        list: &WorkList,
        x: &ExpertInput<'_>,
        hidden: &Hidden,
        tuning: Option<Tuning>,
        tiling: Option<Tiling>,
    ) -> Result<Self, GpuError> {
        layout.assert_slots(slots);
        assert!(list.most_pairs() <= GRID, "{} pairs", list.most_pairs());
        let how = match layout.fused() {
            Some(codes) => {
                let tiling = tiling.unwrap_or(Tiling::GATE_UP);
                Self::fused(gpu, layout, slots, list, x, hidden, codes, tuning, tiling)?
            }
            None => Self::apart(gpu, layout, slots, list, x, hidden)?,
        };
        Ok(Self { list: list.clone(), how })
    }

    fn fused<'a>(
        gpu: &Gpu,
        layout: &'a ExpertLayout,
        slots: &'a Slice,
        list: &'a WorkList,
        x: &ExpertInput<'a>,
        hidden: &'a Hidden,
        (encoding, uniform, down): (Encoding, Uniform, Uniform),
        tuning: Option<Tuning>,
        tiling: Tiling,
    ) -> Result<How, GpuError> {
        let x = coded_operand(layout, 0, x, list.tokens);
        let plane = coded_hidden(layout, down, hidden, list.most_pairs());
        let groups = uniform.groups(layout.d_model());
        // Blocks of gate, and of up, that are whole groups of hidden values.
        let part = down.group().div_ceil(ROWS) as u32;
        let mut bindings = [[Access::Read; 5].as_slice(), &[Access::Write; 2]].concat();
        let (bias, biases) = layout.bias(0, bindings.len());
        bindings.extend(biases.map(|_| Access::Read));
        let (memories, behind) = layout.memories(bindings.len());
        bindings.extend(behind.map(|_| Access::Read));
        let glu = layout.glu();
        let buffers = |first: &'a Slice, second: &'a Slice| {
            let mut all = vec![slots, &x.codes, &x.cells, &list.entries, &list.pairs, first, second];
            all.extend(biases.into_iter().chain(behind));
            all
        };
        let passes = passes(list.tokens)
            .map(|pass| {
                let tuning = Tuning::of_pair(2 * part as usize * groups, pass);
                let cut = Cut::new(gpu, uniform, pass, tuning).in_memories(memories);
                assert!(cut.slots >= 2 * part, "{cut:?} for {part} blocks");
                let (mut constants, core) = cut.core(encoding, 2 * part, groups, Repeated::on(gpu)?);
                constants.extend([
                    ("GROUP", down.group() as u32),
                    ("TEAM", gpu.team(down.group()) as u32),
                    ("PART", part),
                    ("TOP_K", list.top_k as u32),
                    ("LIST", 3),
                    ("APART_BEHIND", layout.apart_behind()),
                ]);
                let own = [GATE_UP_HIDDEN, include_str!("wgsl/experts_gate_up.wgsl")];
                let parts = [QUANTISE, &core, LIST, &bias, &glu, own[0], own[1]];
                let kernel = gpu.kernel(&Shader {
                    name: "experts' gate and up",
                    source: source(gpu, &constants, &parts)?.into(),
                    bindings: &bindings,
                })?;
                gpu.bind(&kernel, &buffers(&plane.codes, &plane.cells))
            })
            .collect::<Result<_, _>>()?;
        // A part of many tokens is whole groups of hidden values too.
        let tiling = Tiling { rows: tiling.rows.max(2 * down.group() as u32), lane_rows: 8, ..tiling };
        let part_of_many = tiling.rows / (2 * ROWS as u32);
        let many = match Tiled::new(gpu, encoding, tiling).filter(|_| list.can_be_of_many()) {
            Some(tiled) => {
                let repeated = Repeated::on(gpu)?;
                let (mut constants, core) = tiled.core(memories, repeated);
                let (kept, rounds) = tiled.rounds(repeated);
                constants.extend([
                    ("GROUP", down.group() as u32),
                    ("TEAM", gpu.team(down.group()) as u32),
                    ("PART", part_of_many),
                    ("TOP_K", list.top_k as u32),
                    ("LIST", 3),
                    ("APART_BEHIND", layout.apart_behind()),
                    ("KEPT", kept),
                ]);
                let own = [GATE_UP_HIDDEN, include_str!("wgsl/experts_gate_up_tiled.wgsl"), &rounds];
                let parts = [QUANTISE, &core, LIST, &bias, &glu, own[0], own[1], own[2]];
                let kernel = gpu.kernel(&Shader {
                    name: "experts' gate and up, many tokens",
                    source: source(gpu, &constants, &parts)?.into(),
                    bindings: &bindings,
                })?;
                Some((gpu.bind(&kernel, &buffers(&plane.codes, &plane.cells))?, tiling, part_of_many))
            }
            None => None,
        };
        let [gate, up, _] = layout.tensors.map(|tensor| ExpertLayout::piece(tensor.offset as u64));
        let slot = ExpertLayout::piece(layout.slot_bytes);
        let rows = layout.d_expert() as u32;
        let words = [rows, groups as u32, gate, up, slot, plane.groups() as u32];
        let blocks = rows.div_ceil(ROWS as u32);
        let lone = match &hidden.values {
            Values::Coded(_, Lone { values, post }) if is_lone(gpu, layout, list.top_k) => {
                let all = 2 * layout.d_expert().div_ceil(ROWS) * TIMES;
                let tuning = tuning.unwrap_or_else(|| Tuning::of_either(gpu, encoding, all, groups));
                let cut = Cut::new(gpu, uniform, 1, tuning).in_memories(memories);
                let (mut constants, core) = cut.core(encoding, 1, groups, Repeated::on(gpu)?);
                constants.extend([
                    ("GROUP", 64),
                    ("TEAM", 4),
                    ("LIST", 3),
                    ("APART_BEHIND", layout.apart_behind()),
                ]);
                let own = include_str!("wgsl/experts_gate_up_lone.wgsl");
                let parts = [QUANTISE, &core, LIST, &bias, &glu, own];
                let kernel = gpu.kernel(&Shader {
                    name: "experts' gate and up, one token",
                    source: source(gpu, &constants, &parts)?.into(),
                    bindings: &bindings,
                })?;
                let op = gpu.bind(&kernel, &buffers(values, post))?;
                let words = [rows, groups as u32, gate, up, slot];
                Some(LoneOp { op, words, shared: cut.shared(encoding, groups) })
            }
            _ => None,
        };
        Ok(How::Fused { lone, passes, many, words, blocks, part })
    }

    fn apart(
        gpu: &Gpu,
        layout: &ExpertLayout,
        slots: &Slice,
        list: &WorkList,
        x: &ExpertInput<'_>,
        hidden: &Hidden,
    ) -> Result<How, GpuError> {
        let (cols, pairs) = (layout.d_expert(), list.most_pairs());
        let Some([gates, ups]) = &hidden.apart else { panic!("hidden values of a layout that is fused") };
        assert_plane(gates, pairs, cols);
        let projection = |i: usize, out: &Slice| {
            let x = if layout.tiles(i).is_some() {
                X::Coded(coded_operand(layout, i, x, list.tokens), None)
            } else {
                let Some(x) = x.float else { panic!("no f32 activations for {:?}", layout.tensors[i]) };
                assert_plane(x, list.tokens, layout.d_model());
                X::Float(x)
            };
            Projection::new(gpu, layout, i, slots, list, x, Rows::Tokens, out, None, None)
        };
        let (gate, up) = (projection(0, gates)?, projection(1, ups)?);
        let (group, groups, text, outputs) = match &hidden.values {
            Values::Coded(..) => {
                let Some(down) = layout.tiles(2) else { panic!("down takes floats") };
                let hidden = coded_hidden(layout, down, hidden, pairs).clone();
                let text = [include_str!("wgsl/experts_hidden_coded.wgsl"), TO_PLANE];
                (hidden.group, hidden.groups(), text, vec![hidden.codes, hidden.cells])
            }
            Values::Float(hidden) => {
                assert!(layout.tiles(2).is_none(), "down takes codes");
                assert_plane(hidden, pairs, cols);
                (64, 0, [include_str!("wgsl/experts_hidden_float.wgsl"), ""], vec![hidden.clone()])
            }
        };
        let team = gpu.team(group);
        let constants = [("GROUP", group as u32), ("TEAM", team as u32), ("THREADS", THREADS), ("OUT", 2)];
        let kernel = gpu.kernel(&Shader {
            name: "experts' hidden values",
            source: source(gpu, &constants, &[QUANTISE, &layout.glu(), text[0], text[1]])?.into(),
            bindings: &[[Access::Read; 2].as_slice(), &vec![Access::Write; outputs.len()]].concat(),
        })?;
        let buffers: Vec<&Slice> = [gates, ups].into_iter().chain(&outputs).collect();
        let hidden = gpu.bind(&kernel, &buffers)?;
        let lanes = if groups > 0 { team * groups } else { cols };
        let parts = (lanes as u32).div_ceil(THREADS);
        Ok(How::Apart { gate, up, hidden, words: [cols as u32, groups as u32], parts })
    }

    /// Of one token, where it has a kernel of its own.
    pub(crate) fn launch(&self) -> Option<Launch<'_>> {
        let How::Fused { lone: Some(LoneOp { op, words, shared }), blocks, .. } = &self.how else {
            return None;
        };
        let grid = [2 * *blocks, self.list.grid(1, 1)[0]];
        Some(Launch { op, words: words.to_vec(), grid, shared: *shared })
    }

    /// Records it for a list of `tokens` tokens.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        let list = &self.list;
        let pass = pass_of(tokens);
        let [entries, parts] = list.grid(tokens, PASSES[pass]);
        match &self.how {
            How::Fused { lone: Some(LoneOp { op, words, .. }), blocks, .. } if tokens == 1 => {
                step.run(op, words, [2 * *blocks, entries, 1]);
            }
            How::Fused { many: Some((op, tiling, part)), words, blocks, .. } if list.is_of_many(tokens) => {
                let [entries, parts] = list.grid(tokens, tiling.tokens);
                step.run(op, words, [blocks.div_ceil(*part), entries, parts]);
            }
            How::Fused { passes, words, blocks, part, .. } => {
                step.run(&passes[pass], words, [blocks.div_ceil(*part), entries, parts]);
            }
            How::Apart { gate, up, hidden, words, parts } => {
                gate.record(step, tokens, list);
                up.record(step, tokens, list);
                step.run(hidden, words, [*parts, (tokens * list.top_k) as u32, 1]);
            }
        }
    }
}

/// The codes that a projection takes.
fn coded_operand<'a>(
    layout: &ExpertLayout,
    projection: usize,
    x: &ExpertInput<'a>,
    tokens: usize,
) -> &'a CodedPlane {
    let tensor = layout.tensors[projection];
    let suits = |plane: &&&CodedPlane| {
        layout.tiles(projection).is_some_and(|uniform| plane.suits(uniform, tensor.cols))
    };
    match x.coded.iter().find(suits) {
        Some(plane) => {
            assert!(plane.tokens >= tokens, "{} tokens of {tokens}", plane.tokens);
            plane
        }
        None => panic!("no int8 activations for {tensor:?}"),
    }
}

/// The codes that down takes.
fn coded_hidden<'a>(
    layout: &ExpertLayout,
    down: Uniform,
    hidden: &'a Hidden,
    pairs: usize,
) -> &'a CodedPlane {
    match &hidden.values {
        Values::Coded(plane, _) if plane.suits(down, layout.d_expert()) && plane.tokens >= pairs => plane,
        other => panic!("{other:?} for {pairs} pairs of {down:?}"),
    }
}

/// `y[pair] = down hidden[place]` of each place of a work list.
///
/// The bits of coded products are those of [`CodedMatmul`](crate::CodedMatmul), of float ones as for
/// [`FloatMatmul`](crate::FloatMatmul). Rows of absent experts are left as they are.
#[derive(Clone, Debug)]
pub struct Down {
    list: WorkList,
    product: Projection,
}

impl Down {
    /// Over the records in `slots`, a run of whole slots: `y` is `[list.most_pairs(), d_model]` f32, its rows by
    /// pair.
    ///
    /// # Errors
    /// If the device refuses a kernel.
    ///
    /// # Panics
    /// If `hidden` is not what down takes, or a plane is too short.
    pub fn new(
        gpu: &Gpu,
        layout: &ExpertLayout,
        slots: &Slice,
        list: &WorkList,
        hidden: &Hidden,
        y: &Slice,
    ) -> Result<Self, GpuError> {
        Self::tuned(gpu, layout, slots, list, hidden, y, None, None)
    }

    /// The same, coded products cut as said: for measurements.
    ///
    /// # Errors
    /// As [`Self::new`].
    ///
    /// # Panics
    /// As there, and if `tuning` or `tiling` is not one of those that its fields name.
    pub fn tuned(
        gpu: &Gpu,
        layout: &ExpertLayout,
        slots: &Slice,
        list: &WorkList,
        hidden: &Hidden,
        y: &Slice,
        tuning: Option<Tuning>,
        tiling: Option<Tiling>,
    ) -> Result<Self, GpuError> {
        layout.assert_slots(slots);
        assert!(list.most_pairs() <= GRID, "{} pairs", list.most_pairs());
        let x = match (layout.tiles(2), &hidden.values) {
            (Some(down), values) => {
                let plane = coded_hidden(layout, down, hidden, list.most_pairs());
                match values {
                    Values::Coded(_, lone) if is_lone(gpu, layout, list.top_k) => {
                        X::Coded(plane, Some(&lone.values))
                    }
                    _ => X::Coded(plane, None),
                }
            }
            (None, Values::Float(hidden)) => {
                assert_plane(hidden, list.most_pairs(), layout.d_expert());
                X::Float(hidden)
            }
            (None, Values::Coded(..)) => panic!("down takes floats"),
        };
        let product = Projection::new(gpu, layout, 2, slots, list, x, Rows::Places, y, tuning, tiling)?;
        Ok(Self { list: list.clone(), product })
    }

    /// Of one token, of codes.
    pub(crate) fn launch(&self) -> Option<Launch<'_>> {
        self.product.launch(&self.list)
    }

    /// Records it for a list of `tokens` tokens.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        self.product.record(step, tokens, &self.list);
    }
}
