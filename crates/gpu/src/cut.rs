//! How coded kernels are cut for a device: [`Tuning`], and what follows from it for a kernel's text.

use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Uniform, Zero};

use crate::experts::TIMES;
use crate::memories::Memories;
use crate::quantise::{QUANTISE, Repeated, levels, tile_constants};
use crate::{ExpertLayout, Gpu, Weights};

/// Bytes of what a workgroup shares that are not for slots: arrays that are empty have an element.
const SPARE: u32 = 64;
/// Most chains of a lane: more would not stay in registers.
const CHAINS: u32 = 16;
/// Most lines of a tile that a lane holds its share of: a register file's worth.
const HELD: u32 = 34;
/// Blocks of rows that are many for a device, that are more than it has multiprocessors, and groups of a long row.
const MANY_BLOCKS: usize = 512;
const SOME_BLOCKS: usize = 160;
const LONG: usize = 48;
/// How codes lie, for every coded kernel.
pub(crate) const TILES: &str = include_str!("wgsl/coded_tiles.wgsl");
const OWN_X: &str = include_str!("wgsl/coded_own_x.wgsl");
/// Rows that workgroups quantise, of a plane.
pub(crate) const OWN_ROW: &str = include_str!("wgsl/coded_own_row.wgsl");
/// Lanes of a wide tile.
const WIDE: u32 = 32;
/// Bytes that a workgroup shares for a group of the 32 rows of such: an integer and a factor each.
const GROUP_TERMS: u32 = 8 * ROWS as u32;
/// Workgroups below which runs of blocks are not made longer.
const WORKGROUPS: usize = 256;

/// Which lanes share a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lanes {
    /// Four, as many tiles at once as there are such.
    Four,
    /// 32, with so many tiles on their way: of one token, and symmetric codes of 4 or 8 bits in groups of 64. A table's levels take so
    /// much arithmetic that exchanges come on top of it (EXP-GPU-13).
    Wide(u32),
}

/// How a coded kernel is cut, for each of its passes: what is timed to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Threads of a workgroup: 64, 128, 256 or 512.
    pub threads: u32,
    /// Which of them share a tile; `Four` where that says more than one token can have.
    pub lanes: Lanes,
}

/// Whether 32 lanes can share tiles of such codes.
fn can_widen(encoding: Encoding) -> bool {
    match encoding {
        Encoding::Uniform(uniform) => {
            uniform.zero() == Zero::Symmetric && uniform.group() == 64 && matches!(uniform.bits(), 4 | 8)
        }
        Encoding::Table(_) | Encoding::F32 | Encoding::F16 | Encoding::Bf16 => false,
    }
}

/// The same on a device, for rows of so many groups, whatever else a workgroup shares.
fn can_widen_on(gpu: &Gpu, encoding: Encoding, groups: usize) -> bool {
    // Terms, a row as int8, and what a norm of it needs.
    let shared = groups as u32 * (GROUP_TERMS + 64 + 8 + 16) + SPARE;
    gpu.has_wide_subgroups() && can_widen(encoding) && shared <= gpu.wide_shared_bytes()
}

impl Tuning {
    /// For `blocks` blocks of rows of so many groups each, and passes of so many tokens: 32 lanes a tile for one token where
    /// that can be.
    pub(crate) fn of(gpu: &Gpu, encoding: Encoding, blocks: usize, groups: usize, pass: u32) -> Self {
        if pass == 1 && can_widen_on(gpu, encoding, groups) {
            return Self::wide(blocks, groups);
        }
        Self::narrow(blocks, groups, pass)
    }

    /// The same for a lone token's gate or up, which meet.
    pub(crate) fn of_either(gpu: &Gpu, encoding: Encoding, blocks: usize, groups: usize) -> Self {
        if can_widen_on(gpu, encoding, groups) {
            return Self { threads: 512, lanes: Lanes::Wide(1) };
        }
        Self::narrow(blocks, groups, 1)
    }

    /// The same for a lone token's down, whose workgroups quantise; if blocks are few, as of a shared expert, by what plain products of
    /// that size take, not measured.
    pub(crate) fn of_lone_down(gpu: &Gpu, encoding: Encoding, blocks: usize, groups: usize) -> Self {
        if can_widen_on(gpu, encoding, groups) {
            return match blocks {
                SOME_BLOCKS.. => Self { threads: 256, lanes: Lanes::Wide(1) },
                _ => Self { threads: 512, lanes: Lanes::Wide(2) },
            };
        }
        Self { threads: 128, lanes: Lanes::Four }
    }

    /// For one token's product with these weights.
    pub(crate) fn of_product(gpu: &Gpu, weights: &Weights) -> Self {
        let groups = weights.encoding().tiles().map_or(0, |tiles| tiles.groups(weights.cols()));
        Self::of(gpu, weights.encoding(), weights.rows().div_ceil(ROWS), groups, 1)
    }

    /// For a lone token's gates and ups, and downs, of two kinds of experts in a dispatch, of each kind: what the first takes by itself, 32 lanes
    /// a tile if either can, as the other's four lanes do in workgroups of any size. Where the second kind's rows are longer, two of its
    /// tiles are on their way (EXP-GPU-22). None where one kernel does not make gate and up.
    pub(crate) fn of_lone_experts(gpu: &Gpu, layouts: [&ExpertLayout; 2]) -> Option<[[Self; 2]; 2]> {
        let blocks = |rows: usize| rows.div_ceil(ROWS) * TIMES;
        let mut kinds = Vec::new();
        for layout in layouts {
            let (encoding, uniform, _) = layout.fused()?;
            let (down, tiles) = (layout.tensors[2].encoding, layout.tiles(2)?);
            let groups = [uniform.groups(layout.d_model()), tiles.groups(layout.d_expert())];
            kinds.push([
                (Self::of_either(gpu, encoding, 2 * blocks(layout.d_expert()), groups[0]), groups[0]),
                (Self::of_lone_down(gpu, down, blocks(layout.d_model()), groups[1]), groups[1]),
            ]);
        }
        Some([0, 1].map(|product| {
            let [(first, groups), (second, others)] = [kinds[0][product], kinds[1][product]];
            let best = if first.lanes == Lanes::Four { second } else { first };
            match best.lanes {
                Lanes::Wide(ahead) if others > groups => {
                    [best, Self { lanes: Lanes::Wide(ahead.max(2)), ..best }]
                }
                _ => [best, best],
            }
        }))
    }

    /// In workgroups of so many threads at least.
    pub(crate) fn in_workgroups_of(self, threads: u32) -> Self {
        Self { threads: self.threads.max(threads), ..self }
    }

    /// Of one token, 32 lanes a tile: what was fastest or nearly so for eight shapes (EXP-GPU-08).
    const fn wide(blocks: usize, groups: usize) -> Self {
        let (threads, ahead) = match (blocks, groups) {
            (2048.., _) => (256, 1),
            (SOME_BLOCKS..MANY_BLOCKS, _) => (512, 1),
            (_, LONG..) => (512, 2),
            _ => (512, 1),
        };
        Self { threads, lanes: Lanes::Wide(ahead) }
    }

    /// For `blocks` blocks of rows in a dispatch, each alone in its workgroup if it likes, of so many groups, and passes
    /// of so many tokens: what was fastest or nearly so for nine shapes (EXP-GPU-05). Where blocks fill a device, small
    /// workgroups do; where there are few, each is to be done at once.
    const fn narrow(blocks: usize, groups: usize, pass: u32) -> Self {
        let threads = match pass {
            1 if blocks >= MANY_BLOCKS => 64,
            1 | 2 if blocks >= SOME_BLOCKS => 128,
            1 | 2 if groups >= LONG => 256,
            1 | 2 if groups >= LONG / 2 => 128,
            4 => 128,
            8 if groups >= LONG => 128,
            _ => 64,
        };
        Self { threads, lanes: Lanes::Four }
    }

    /// For workgroups of so many tiles, of gate and up together (EXP-GPU-05).
    pub(crate) const fn of_pair(tiles: usize, pass: u32) -> Self {
        let threads = if tiles <= 128 && pass <= 4 { 256 } else { 128 };
        Self { threads, lanes: Lanes::Four }
    }
}

/// The text and the constants that say what codes mean.
pub(crate) fn code_constants(encoding: Encoding, uniform: Uniform) -> (String, Vec<(&'static str, u32)>) {
    let (levels, least) = levels(encoding);
    let mut constants = tile_constants(uniform).to_vec();
    constants.extend([("LEAST", least), ("TABLE", u32::from(encoding != Encoding::Uniform(uniform)))]);
    (levels, constants)
}

/// A coded kernel's constants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) pass: u32,
    pub(crate) threads: u32,
    lanes: Lanes,
    /// Whether 32 lanes may be of several subgroups, which exchange by what they share.
    played: bool,
    /// Bytes that a workgroup may share for what becomes of tiles.
    room: u32,
    pub(crate) slots: u32,
    operand: Operand,
    memories: Memories,
}

/// What a coded kernel's tiles are multiplied by.
#[derive(Clone, Copy, Debug)]
enum Operand {
    /// An int8 plane.
    Plane,
    /// One f32 row that workgroups quantise themselves, and the kernel's other texts give.
    Own(Own),
    /// One int8 row that the kernel's other texts make, by workgroups, and so many bytes that they share for that.
    Made(Own, u32),
}

impl Operand {
    /// Bytes that a workgroup shares.
    const fn bytes(self) -> u32 {
        match self {
            Self::Plane => 0,
            Self::Own(own) => own.bytes(),
            Self::Made(own, more) => own.bytes() + more,
        }
    }

    const fn bindings(self) -> usize {
        match self {
            Self::Plane => 2,
            Self::Own(_) => 1,
            Self::Made(..) => 0,
        }
    }
}

/// An operand of one f32 row that workgroups quantise themselves.
#[derive(Clone, Copy, Debug)]
struct Own {
    cols: u32,
    groups: u32,
    group: u32,
    team: u32,
}

impl Own {
    const fn bytes(self) -> u32 {
        self.groups * (self.group + 8)
    }
}

/// The share of what a workgroup may share that such a row may take.
const OWN_SHARE: u32 = 4;

/// Bytes of a slot: integers and a cell a token; scales, minima.
fn slot_bytes(pass: u32, is_affine: bool) -> u32 {
    pass * (4 * ROWS as u32 + 8) + (1 + u32::from(is_affine)) * 2 * ROWS as u32
}

/// Whether workgroups can quantise a row of so many columns themselves.
pub(crate) fn can_own(gpu: &Gpu, uniform: Uniform, cols: usize) -> bool {
    let bytes = uniform.groups(cols) * (uniform.group() + 8);
    cols.is_multiple_of(4) && bytes <= (gpu.shared_bytes() / OWN_SHARE) as usize
}

impl Cut {
    pub(crate) fn new(gpu: &Gpu, uniform: Uniform, pass: u32, tuning: Tuning) -> Self {
        let Tuning { threads, lanes } = tuning;
        assert!(matches!(threads, 64 | 128 | 256 | 512) && lanes != Lanes::Wide(0), "{tuning:?}");
        let threads = threads.min(gpu.most_threads() as u32);
        Self::over(gpu, uniform, pass, threads, if pass == 1 { lanes } else { Lanes::Four }, Operand::Plane)
    }

    /// The same for one token whose f32 row workgroups quantise themselves: see [`can_own`]. What gives it (`own_four`) is among the
    /// kernel's other texts: [`OWN_ROW`], or one of its own.
    pub(crate) fn owning(gpu: &Gpu, uniform: Uniform, cols: usize, tuning: Tuning) -> Self {
        let cut = Self::new(gpu, uniform, 1, tuning);
        let (groups, group) = (uniform.groups(cols) as u32, uniform.group() as u32);
        // As many lanes a group as there are in one go: what a group takes besides its values each of them does.
        let team = (cut.threads / groups).clamp(4, gpu.team(uniform.group()) as u32);
        let own = Own { cols: cols as u32, groups, group, team: 1 << team.ilog2() };
        Self::over(gpu, uniform, 1, cut.threads, cut.lanes, Operand::Own(own))
    }

    /// The same for one token whose int8 row the kernel makes, sharing `more` bytes for that; none if all that is too much
    /// to be shared.
    pub(crate) fn making(
        gpu: &Gpu,
        uniform: Uniform,
        cols: usize,
        tuning: Tuning,
        more: u32,
    ) -> Option<Self> {
        let cut = Self::new(gpu, uniform, 1, tuning);
        let (groups, group) = (uniform.groups(cols) as u32, uniform.group() as u32);
        let operand = Operand::Made(Own { cols: cols as u32, groups, group, team: 0 }, more);
        let fits = operand.bytes() <= gpu.shared_bytes() / OWN_SHARE;
        fits.then(|| Self::over(gpu, uniform, 1, cut.threads, cut.lanes, operand))
    }

    fn over(gpu: &Gpu, uniform: Uniform, pass: u32, threads: u32, lanes: Lanes, operand: Operand) -> Self {
        let played = !gpu.has_wide_subgroups();
        let room = gpu.shared_bytes() - SPARE - operand.bytes();
        let slots = (threads / 4).min(room / slot_bytes(pass, uniform.zero() == Zero::Affine));
        let room = gpu.wide_shared_bytes() - SPARE - operand.bytes();
        Self { pass, threads, lanes, played, room, slots, operand, memories: Memories::One }
    }

    /// The same of weights that lie so.
    pub(crate) const fn in_memories(mut self, memories: Memories) -> Self {
        self.memories = memories;
        self
    }

    /// Buffers that the operand is bound by.
    pub(crate) const fn operand_bindings(self) -> usize {
        self.operand.bindings()
    }

    /// Tiles that 32 lanes have on their way, if they share each.
    fn wide(self, encoding: Encoding, groups: usize) -> Option<u32> {
        match self.lanes {
            Lanes::Wide(ahead) if can_widen(encoding) && self.wide_bytes(groups) <= self.room => {
                Some(ahead.min((groups as u32).div_ceil(self.threads / WIDE)))
            }
            _ => None,
        }
    }

    /// Bytes that a workgroup shares.
    pub(crate) fn shared(self, encoding: Encoding, groups: usize) -> u32 {
        let of_tiles = match self.wide(encoding, groups) {
            Some(_) => self.wide_bytes(groups),
            None => {
                let tiles = encoding.tiles();
                self.slots * slot_bytes(self.pass, tiles.is_some_and(|tiles| tiles.zero() == Zero::Affine))
            }
        };
        SPARE + self.operand.bytes() + of_tiles
    }

    /// The same for tiles that 32 lanes share.
    fn wide_bytes(self, groups: usize) -> u32 {
        groups as u32 * GROUP_TERMS + if self.played { 16 * self.threads } else { 0 }
    }

    /// Most blocks of rows that a workgroup can take.
    pub(crate) const fn most_blocks(self) -> u32 {
        CHAINS * self.threads / (self.pass * ROWS as u32 / 2)
    }

    /// Blocks of rows for a workgroup: as few as keep most slots of most rounds in use, as long as there are
    /// workgroups enough, with `times` such products in a dispatch.
    pub(crate) fn blocks(self, encoding: Encoding, groups: usize, all: usize, times: usize) -> u32 {
        if self.wide(encoding, groups).is_some() {
            return 1;
        }
        let slots = self.slots as usize;
        let use_of = |blocks: usize| {
            let items = blocks * groups;
            items as f64 / items.next_multiple_of(slots) as f64
        };
        let most = (all * times / WORKGROUPS).clamp(1, self.most_blocks() as usize);
        let mut best = 1;
        for blocks in 2..=most {
            if use_of(best) >= 0.9 {
                break;
            }
            if use_of(blocks) > use_of(best) {
                best = blocks;
            }
        }
        best as u32
    }

    /// Chains of a lane, in workgroups of so many blocks.
    fn chains(self, blocks: u32) -> u32 {
        let chains = (blocks * self.pass * ROWS as u32 / 2).div_ceil(self.threads);
        assert!(chains <= CHAINS, "{blocks} blocks a workgroup");
        chains
    }

    /// coded.wgsl or coded_wide.wgsl, for workgroups of so many blocks of so many groups: its constants and its text.
    pub(crate) fn core(
        self,
        encoding: Encoding,
        blocks: u32,
        groups: usize,
        repeated: Repeated,
    ) -> (Vec<(&'static str, u32)>, String) {
        let Some(uniform) = encoding.tiles() else { panic!("{encoding} weights have no codes") };
        let chains = self.chains(blocks);
        // Longer tiles are read where they are needed.
        let held = Some((uniform.tile_bytes() / 64) as u32).filter(|lines| *lines <= HELD).unwrap_or(0);
        let (levels, mut constants) = code_constants(encoding, uniform);
        constants.extend([("TOKENS", self.pass), ("THREADS", self.threads)]);
        let operand = match self.operand {
            Operand::Plane => include_str!("wgsl/coded_plane.wgsl").to_owned(),
            Operand::Own(own) => {
                let Own { cols, groups, group, team } = own;
                constants.extend([("COLS", cols), ("OWN", groups), ("GROUP", group), ("TEAM", team)]);
                [QUANTISE, OWN_X, include_str!("wgsl/coded_own.wgsl")].concat()
            }
            Operand::Made(own, _) => {
                constants.push(("OWN", own.groups));
                OWN_X.to_owned()
            }
        };
        let (binding, words) = self.memories.text();
        constants.extend(binding);
        let tiles = [TILES, words, self.memories.part(), include_str!("wgsl/coded_job.wgsl")].concat();
        let job = "job: ptr<function, Job>";
        if let Some(ahead) = self.wide(encoding, groups) {
            assert_eq!((blocks, self.pass), (1, 1), "blocks and tokens of a workgroup");
            let teams = self.threads / WIDE;
            let one_round = u32::from(groups as u32 <= ahead * teams);
            constants.extend([
                ("TILES_AHEAD", ahead),
                ("ROW_TILES", groups as u32),
                ("ONE_ROUND", one_round),
            ]);
            let exchange = match self.played {
                false => include_str!("wgsl/coded_wide_exchange.wgsl"),
                true => include_str!("wgsl/coded_wide_played.wgsl"),
            };
            let list = |what: &str| {
                let head = format!("{what}s({job}, window: ptr<function, Window>, first: u32, lane: u32)");
                repeated.calls(&head, ahead, |i| format!("{what}(job, window, first, lane, {i});"))
            };
            let wide = include_str!("wgsl/coded_wide.wgsl").to_owned();
            let lists = [list("load_tile"), list("take_tile")].concat();
            return (constants, [tiles, wide, exchange.to_owned(), operand, levels, lists].concat());
        }
        constants.extend([
            ("SLOTS", self.slots),
            ("CHAINS", chains),
            ("HELD", u32::from(held > 0)),
            ("ONE_ROUND", u32::from(blocks as usize * groups <= self.slots as usize)),
        ]);
        let lines = "lines: ptr<function, Lines>";
        let (integers, sums) = ("sums: ptr<function, Integers>", "sums: ptr<function, Sums>");
        let places = "at: u32, tile: u32";
        let text = [
            tiles,
            include_str!("wgsl/coded.wgsl").to_owned(),
            operand,
            levels,
            repeated.calls(&format!("load_lines({lines}, at: u32)"), held, |i| {
                format!("load_line(lines, at, {i});")
            }),
            repeated.calls(
                &format!("take_spans({job}, {lines}, {integers}, {places})"),
                uniform.group() as u32 / 16,
                |v| format!("take_span(job, lines, sums, at, tile, {v});"),
            ),
            repeated.tokens(
                &format!("add_tokens({job}, {integers}, span: ptr<function, Span>, tile: u32, v: u32)"),
                self.pass,
                |t| format!("add_span(job, sums, span, {t}, tile, v);"),
            ),
            repeated.tokens(
                &format!("hand_tokens({job}, {integers}, slot: u32, quarter: u32, tile: u32)"),
                self.pass,
                |t| format!("hand(job, sums, slot, quarter, tile, {t});"),
            ),
            repeated.calls(&format!("run_chains({job}, {sums}, lane: u32, first: u32)"), chains, |k| {
                format!("run_chain(job, sums, lane, first, {k});")
            }),
            repeated.calls(&format!("finish_chains({job}, {sums}, lane: u32)"), chains, |k| {
                format!("finish_chain(job, sums, lane, {k});")
            }),
        ];
        (constants, text.concat())
    }
}
