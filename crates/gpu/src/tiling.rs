//! How coded products of many tokens are cut: [`Tiling`], and what follows from it for a kernel's text.

use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Uniform, Zero};

use crate::Gpu;
use crate::cut::{TILES, code_constants};
use crate::memories::Memories;
use crate::quantise::Repeated;

/// Bytes of what a workgroup shares that are not reckoned with: arrays that are empty have an element.
const SPARE: u32 = 64;

/// How a coded kernel of many tokens is cut: what is timed to choose (EXP-GPU-12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// Rows of a workgroup: whole blocks of 32. Of experts' gate and up, both together.
    pub rows: u32,
    /// Tokens of a workgroup.
    pub tokens: u32,
    /// Rows of a lane: 4 or 8. Of experts' gate and up 8, four of each.
    pub lane_rows: u32,
    /// Tokens of a lane.
    pub lane_tokens: u32,
    /// Columns of a stage, unless a group is longer.
    pub columns: u32,
    /// Tokens of a lane at which it may end where there are fewer, or at twice as many, and so on.
    pub run: u32,
}

impl Tiling {
    /// Of whole products, the largest first (EXP-GPU-12).
    pub(crate) const DENSE: [Self; 3] = [
        Self { rows: 64, tokens: 64, lane_rows: 4, lane_tokens: 8, columns: 128, run: 4 },
        Self { rows: 64, tokens: 32, lane_rows: 4, lane_tokens: 4, columns: 128, run: 2 },
        Self { rows: 32, tokens: 16, lane_rows: 4, lane_tokens: 2, columns: 128, run: 2 },
    ];
    /// Of experts' gate and up: of rows whole groups of down's hidden values, at least as many as here (EXP-GPU-12).
    pub(crate) const GATE_UP: Self =
        Self { rows: 128, tokens: 32, lane_rows: 8, lane_tokens: 4, columns: 128, run: 2 };
    /// Of other products of experts, the largest first.
    const EXPERTS: &'static [Self] = &[
        Self { rows: 64, tokens: 64, lane_rows: 4, lane_tokens: 8, columns: 128, run: 2 },
        Self { rows: 128, tokens: 32, lane_rows: 8, lane_tokens: 4, columns: 64, run: 2 },
    ];

    /// Of products of experts but gate and up together, the largest first: one where groups are short, whose ends lanes of four rows
    /// take better (EXP-GPU-12).
    pub(crate) const fn of_experts(uniform: Uniform) -> &'static [Self] {
        if uniform.group() < 64 { Self::EXPERTS.split_at(1).0 } else { Self::EXPERTS }
    }

    /// Whether so many tokens leave no half of it idle.
    pub(crate) const fn is_filled(self, tokens: usize) -> bool {
        2 * tokens > self.tokens as usize
    }

    /// Threads of a workgroup.
    #[must_use]
    pub const fn threads(self) -> u32 {
        self.rows / self.lane_rows * (self.tokens / self.lane_tokens)
    }

    fn assert_whole(self) {
        let Self { rows, tokens, lane_rows, lane_tokens, columns, run } = self;
        let whole = rows > 0
            && tokens > 0
            && rows.is_multiple_of(ROWS as u32)
            && matches!(lane_rows, 4 | 8)
            && lane_tokens > 0
            && tokens.is_multiple_of(lane_tokens)
            && columns.is_power_of_two()
            && (1..=lane_tokens).contains(&run);
        assert!(whole, "{self:?}");
    }
}

/// A tiling on a device, for an encoding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiled {
    pub(crate) tiling: Tiling,
    encoding: Encoding,
    /// Groups of a stage.
    stage: u32,
    /// Of what is shared.
    buffers: u32,
}

impl Tiled {
    /// None if the device cannot: too many threads, or too much to be shared.
    ///
    /// # Panics
    /// If the encoding has no codes, or the tiling is not one that its fields name.
    pub(crate) fn new(gpu: &Gpu, encoding: Encoding, tiling: Tiling) -> Option<Self> {
        tiling.assert_whole();
        let Some(uniform) = encoding.tiles() else { panic!("{encoding} weights have no codes") };
        let stage = (tiling.columns / uniform.group() as u32).max(1);
        let tiled = |buffers| Self { tiling, encoding, stage, buffers };
        let threads = tiling.threads();
        // A lane brings at most one piece of scales a stage.
        let fits = |tiled: &Self| tiled.shared_bytes() + SPARE <= gpu.shared_bytes();
        let can = threads as usize <= gpu.most_threads() && threads >= tiling.rows / 8 * stage;
        [2, 1].map(tiled).into_iter().find(|tiled| can && fits(tiled))
    }

    fn shared_bytes(&self) -> u32 {
        let Some(uniform) = self.encoding.tiles() else { return 0 };
        let Tiling { rows, tokens, .. } = self.tiling;
        let columns = self.stage * uniform.group() as u32;
        let affine = u32::from(uniform.zero() == Zero::Affine);
        let scales = (1 + affine) * self.stage * rows * 4;
        self.buffers * (self.kept() * 16 / self.buffers + tokens * (columns + self.stage * 8) + scales)
    }

    /// Pieces of four numbers that shared codes have room for.
    pub(crate) fn kept(&self) -> u32 {
        let group = self.encoding.tiles().map_or(0, |uniform| uniform.group() as u32);
        self.buffers * self.stage * (group / 4) * (self.tiling.rows / 4 + 4)
    }

    /// coded_tiled.wgsl, of weights that lie so: its constants and its text.
    pub(crate) fn core(&self, memories: Memories, repeated: Repeated) -> (Vec<(&'static str, u32)>, String) {
        let Some(uniform) = self.encoding.tiles() else { panic!("{} weights have no codes", self.encoding) };
        let Tiling { rows, tokens, lane_rows, lane_tokens, run, .. } = self.tiling;
        let (stage, threads, group) = (self.stage, self.tiling.threads(), uniform.group() as u32);
        let codes = (rows / 8 * (group / 4) * stage).div_ceil(threads);
        let inputs = (tokens * (group / 16) * stage).div_ceil(threads);
        let cells = (tokens * stage).div_ceil(threads);
        // Tokens of a lane where it may end.
        let ends: Vec<u32> =
            std::iter::successors(Some(run), |n| Some(2 * n)).take_while(|n| *n < lane_tokens).collect();
        let ways = [&ends[..], &[lane_tokens]].concat();
        let (levels, mut constants) = code_constants(self.encoding, uniform);
        constants.extend([
            ("THREADS", threads),
            ("ROWS", rows),
            ("TOKENS", tokens),
            ("QUADS", lane_rows / 4),
            ("LANE_TOKENS", lane_tokens),
            ("STAGE", stage),
            ("BUFFERS", self.buffers),
            ("CODE_ITEMS", codes),
            ("INPUT_ITEMS", inputs),
            ("CELL_ITEMS", cells),
        ]);
        let (job, places) = ("job: ptr<function, Job>", "places: ptr<function, Places>");
        let (ahead, integers) = ("ahead: ptr<function, Ahead>", "integers: ptr<function, Integers>");
        let items = [("code", codes), ("input", inputs), ("cell", cells)].map(|(what, n)| {
            let place = format!("place_{what}s({job}, {places}, lane: u32)");
            let load = format!("load_{what}s({ahead}, {places}, first: u32, last: u32, lane: u32)");
            let store = format!("store_{what}s({ahead}, buffer: u32, lane: u32)");
            [
                repeated.calls(&place, n, |k| format!("place_{what}(job, places, lane, {k});")),
                repeated.calls(&load, n, |k| format!("load_{what}(ahead, places, first, last, lane, {k});")),
                repeated.calls(&store, n, |k| format!("store_{what}(ahead, buffer, lane, {k});")),
            ]
            .concat()
        });
        let sums = "sums: ptr<function, Sums>";
        let begin = repeated.calls(&format!("begin_tokens({integers})"), lane_tokens, |t| {
            format!("begin_token(integers, {t});")
        });
        let ways: String = ways
            .iter()
            .map(|&n| {
                let multiply = format!("multiply_tokens_n({integers}, span: ptr<function, Span>, at: u32)");
                let add = format!("add_tokens_n({integers}, {sums}, group: ptr<function, Group>, at: u32)");
                let way = [
                    include_str!("wgsl/coded_tiled_multiply.wgsl"),
                    &repeated.calls(&multiply, n, |t| format!("multiply_token(integers, span, at, {t});")),
                    &repeated.calls(&add, n, |t| format!("add_token(integers, sums, group, at, {t});")),
                ];
                way.concat().replace("_n(", &format!("_{n}("))
            })
            .collect();
        let choices: String = ends
            .iter()
            .map(|n| {
                let is_it = format!("if ((*job).count <= {n}u * TOKEN_LANES)");
                format!("    {is_it} {{ multiply_{n}(integers, sums, buffer, groups, lane); return; }}\n")
            })
            .collect();
        let multiply = format!(
            "fn multiply({job}, {integers}, {sums}, buffer: u32, groups: u32, lane: u32) {{\n{choices}    \
             multiply_{lane_tokens}(integers, sums, buffer, groups, lane);\n}}\n"
        );
        let (binding, words) = memories.text();
        constants.extend(binding);
        let tiled = include_str!("wgsl/coded_tiled.wgsl");
        let text = [TILES, words, tiled, &levels, &items.concat(), &begin, &ways, &multiply];
        (constants, text.concat())
    }

    /// For experts_gate_up_tiled.wgsl: of a lane's tokens those whose sums there is room for at a time, and its lists.
    pub(crate) fn rounds(&self, repeated: Repeated) -> (u32, String) {
        let Tiling { rows, tokens, lane_tokens, .. } = self.tiling;
        let room = self.kept() / (tokens / lane_tokens * rows / 4);
        let kept = (1..=lane_tokens.min(room)).rev().find(|n| lane_tokens.is_multiple_of(*n)).unwrap_or(1);
        let sums = "sums: ptr<function, Sums>";
        let keep = format!("keep_tokens({sums}, lane: u32, round: u32)");
        let finish = format!("finish_rounds({sums}, lane: u32)");
        let lists = [
            repeated.calls(&keep, kept, |i| format!("keep_token(sums, lane, round, {i});")),
            repeated.calls(&finish, lane_tokens / kept, |r| format!("finish_round(sums, lane, {r});")),
        ];
        (kept, lists.concat())
    }

    /// What writes sums, coded_tiled_rows.wgsl.
    pub(crate) fn rows(&self, repeated: Repeated) -> String {
        let head = "finish_tokens(job: ptr<function, Job>, sums: ptr<function, Sums>, lane: u32)";
        let finish =
            repeated.calls(head, self.tiling.lane_tokens, |t| format!("finish_token(job, sums, lane, {t});"));
        [include_str!("wgsl/coded_tiled_rows.wgsl"), &finish].concat()
    }
}
