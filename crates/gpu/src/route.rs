//! Choosing: experts by router logits ([`Route`]), tokens by logits ([`Argmax`]).

use smoe_format::spec::{GroupScore, MoeSpec, RouterKind};

use crate::draft::{Draft, demand, demand_coded};
use crate::float::{self, FloatCut, Operand, SOME_EXPERTS};
use crate::memories::Memories;
use crate::norm::{Delta, Halt, NORM_ROW, NormCut, add_delta};
use crate::quantise::assert_plane;
use crate::shader::{Access, Op};
use crate::{CodedPlane, Gpu, GpuError, Slice, Step, Weights, WorkList};

const ROUTE: &str = include_str!("wgsl/route.wgsl");
const ONE: &str = include_str!("wgsl/route_one.wgsl");
const ALONE: &str = include_str!("wgsl/route_alone.wgsl");
const ROUTER: &str = include_str!("wgsl/route_router.wgsl");
const PLAIN: &str = include_str!("wgsl/route_plain.wgsl");
const NORMED: &str = include_str!("wgsl/route_norm.wgsl");
/// Bytes that workgroups share besides a row of their own and what ranking takes: sums.
const SHARED: usize = 4 << 10;
/// A logit that is not there yet.
const EMPTY: u32 = u32::MAX;
const KEYS: &str = include_str!("wgsl/route_keys.wgsl");
const LIST: &str = include_str!("wgsl/route_list.wgsl");
const GROUP: &str = include_str!("wgsl/route_group.wgsl");
const ARGMAX: &str = include_str!("wgsl/route_argmax.wgsl");

/// Scores that a workgroup keeps.
const ROOM: usize = 1024;
/// Tokens of a workgroup at most.
const FEW: usize = 8;
/// Threads of a workgroup.
const THREADS: usize = float::THREADS as usize;
/// Keys of other experts that a lane reads at once; lanes that share a ranking at most.
const RUN: usize = 8;
const SPREAD: usize = 4;

/// What a dispatch of [`Route`] does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    /// The router's product and all, for one token.
    Router,
    /// All, for one token.
    One,
    /// All, for a few.
    Few,
    /// Weights and ids only.
    Choose,
}

/// What [`Route`] reads.
#[derive(Clone, Copy, Debug)]
pub struct RouteInputs<'a> {
    /// Router logits, `[tokens, n_experts]`.
    pub logits: &'a Slice,
    /// Added to the logits, `[n_experts]`.
    pub bias: Option<&'a Slice>,
    /// Added to the scores when experts are ranked, `[n_experts]`.
    pub correction: Option<&'a Slice>,
    /// The router, of float weights, and its input, `[tokens, cols]` f32: then one token's logits are made by the kernel that
    /// routes it, and are not read, where the device binds as much.
    pub router: Option<(&'a Weights, &'a Slice)>,
    /// What makes that input: of one token it is made in the same dispatch then, where that can be ([`Route::norms`]).
    pub norm: Option<RouterNorm<'a>>,
    /// Where each expert lies, `[n_experts]` u32; [`WorkList::ABSENT`] if it is not there.
    pub slots: &'a Slice,
}

/// What a [`MixNorm`](crate::MixNorm) does: `hidden = fma(added + bias, residual, hidden)`, or of `before`, and its norm to the router's input, and as int8.
#[derive(Clone, Copy, Debug)]
pub struct RouterNorm<'a> {
    /// `[tokens, cols]`: where the sum goes.
    pub hidden: &'a Slice,
    /// `[1, cols]`: what they were, if that is elsewhere.
    pub before: Option<&'a Slice>,
    /// `[cols]`, what the norm multiplies by.
    pub weight: &'a Slice,
    /// `[tokens, cols]`.
    pub added: &'a Slice,
    /// `[cols]`.
    pub bias: Option<&'a Slice>,
    /// Of the norm.
    pub eps: f32,
    /// What is added is multiplied by it.
    pub residual: f32,
    /// The norm as int8.
    pub coded: Option<&'a CodedPlane>,
}

/// What [`Route`] writes.
#[derive(Clone, Copy, Debug)]
pub struct RouteOutputs<'a> {
    /// `[tokens, top_k]` u32, ascending per token. Pair `token * top_k + j` is the token's j-th expert.
    pub ids: &'a Slice,
    /// `[tokens, top_k]` f32, of those experts.
    pub weights: &'a Slice,
    /// Entries, experts ascending, and pairs by expert, ascending within one. Word 1 of the entries becomes the
    /// number of those whose expert is not there, word 2 that of experts.
    pub list: &'a WorkList,
    /// Takes the logits, bias included, for who reads those of many layers at once: `[tokens, n_experts]` f32 of the
    /// tokens of a step, as the so-manieth of such blocks.
    pub seen: Option<(&'a Slice, usize)>,
}

/// From router logits to the work list of the experts' kernels.
///
/// Scores are the softmax or the sigmoids of the logits; the `top_k` largest (after correction, within the best
/// groups) are chosen, the lower id at ties; their scores, divided by their sum in the order of the ranking if the
/// family does so, and scaled, are the weights. Scores, ids and weights are
/// the CPU's, bit for bit, but for scores below 1.2e-38, which may count as 0. A token whose logits are not all
/// numbers has NaN for its weights.
///
/// One dispatch for a few tokens (8 of up to 128 experts), two for more.
#[derive(Clone, Debug)]
pub struct Route {
    /// All in one, for one token, from its input on if there is such a kernel, with the workgroups of that; and for up to
    /// `few`.
    router: Option<(Op, u32)>,
    /// That kernel makes its input; eps and residual of the norm.
    norm: Option<[f32; 2]>,
    one: Op,
    whole: Op,
    choose: Op,
    group: Op,
    few: usize,
    tokens: usize,
    n_experts: usize,
    list: WorkList,
    scale: f32,
    /// What the halt becomes if experts are not there; 0 if there is none.
    number: f32,
    /// Which block of the logits of layers is its own.
    block: usize,
}

impl Route {
    /// For up to `tokens` tokens of a model.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If a buffer is too short, there are more than 1024 experts, or more than 32 per token, or `moe` does not
    /// hold together.
    pub fn new(
        gpu: &Gpu,
        tokens: usize,
        moe: &MoeSpec,
        inputs: RouteInputs<'_>,
        outputs: RouteOutputs<'_>,
    ) -> Result<Self, GpuError> {
        Self::halting(gpu, tokens, moe, inputs, outputs, None)
    }

    /// The same, and where experts are not there, the halt, a word behind the weights in their buffer, becomes
    /// `number`, which is not 0: of so few tokens as one dispatch takes ([`Self::few`]). While it is not 0 nothing is
    /// written, and the work list is empty: so a layer that follows in vain computes no experts.
    ///
    /// # Errors
    /// As [`Self::new`].
    ///
    /// # Panics
    /// As there, or if the halt is elsewhere or `number` 0.
    pub fn halting(
        gpu: &Gpu,
        tokens: usize,
        moe: &MoeSpec,
        inputs: RouteInputs<'_>,
        outputs: RouteOutputs<'_>,
        halt: Option<(Halt<'_>, f32)>,
    ) -> Result<Self, GpuError> {
        let MoeSpec { n_experts, top_k, .. } = *moe;
        let RouteInputs { logits, bias, correction, router, norm, slots } = inputs;
        let RouteOutputs { ids, weights, list, seen } = outputs;
        let (work, pairs) = (&list.entries, &list.pairs);
        let n = tokens * top_k;
        assert!((1..=ROOM).contains(&n_experts), "{n_experts} experts");
        assert!((1..=n_experts.min(32)).contains(&top_k), "{top_k} of {n_experts} experts");
        let (groups, top_groups, score) =
            moe.groups.map_or((1, 1, GroupScore::Best), |g| (g.n, g.top, g.score));
        assert!(n_experts.is_multiple_of(groups), "{groups} groups of {n_experts} experts");
        assert!(
            (1..=groups).contains(&top_groups) && top_k <= n_experts / groups * top_groups,
            "{top_k} experts in {top_groups} groups"
        );
        demand(logits, tokens * n_experts, "router logits");
        bias.iter().for_each(|bias| demand(bias, n_experts, "bias of a router"));
        correction.iter().for_each(|bias| demand(bias, n_experts, "correction of scores"));
        demand(slots, n_experts, "slots of experts");
        demand(ids, n, "ids of experts");
        demand(weights, n, "routing weights");
        let suits = list.tokens >= tokens && list.top_k == top_k && list.n_experts == n_experts;
        assert!(suits, "a work list of other tokens or experts");
        list.assert_room(tokens);
        if let Some((seen, block)) = seen {
            demand(seen, (block + 1) * tokens * n_experts, "logits of layers");
        }
        if let Some((halt, number)) = halt {
            demand(weights, halt.at + 1, "routing weights and a halt");
            assert!(halt.words.is(weights) && halt.at >= n && number != 0.0, "{halt:?}, {number}");
        }

        let few = (ROOM / n_experts).clamp(1, FEW);
        let spread = (THREADS / n_experts).clamp(1, SPREAD);
        let spread = 1 << spread.ilog2();
        // Of each 32 experts, where there are many: no more than are chosen.
        let kept = if n_experts > SOME_EXPERTS { top_k } else { 0 };
        let router = router.map(|(matrix, x)| {
            assert_eq!(matrix.rows(), n_experts, "rows of a router");
            assert_plane(x, tokens, matrix.cols());
            (matrix, x, FloatCut::of_router(n_experts))
        });
        // Router, input, logits on their way, ids, weights, logits for others, slots, work, pairs.
        let bound =
            8 + usize::from(seen.is_some()) + usize::from(bias.is_some()) + usize::from(correction.is_some());
        let norm = match (norm, router) {
            (Some(norm), Some((matrix, _, cut))) if cut.is_one_team() && matrix.cols().is_multiple_of(8) => {
                let RouterNorm { hidden, before, weight, added, bias, coded, .. } = norm;
                let cols = matrix.cols();
                demand(hidden, tokens * cols, "hidden states");
                before.iter().for_each(|before| demand(before, cols, "hidden states"));
                demand(weight, cols, "weights of a norm");
                demand(added, tokens * cols, "what is added");
                bias.iter().for_each(|bias| demand(bias, cols, "a bias"));
                coded.iter().for_each(|coded| demand_coded(coded, tokens, cols));
                let more = 3
                    + usize::from(before.is_some())
                    + usize::from(bias.is_some())
                    + 2 * usize::from(coded.is_some());
                let ranking = 12 * n_experts + 8 * n_experts.div_ceil(32) * kept;
                let fits = bound + more <= gpu.most_bindings()
                    && 4 * cols + ranking + SHARED <= gpu.shared_bytes() as usize;
                fits.then_some(norm)
            }
            _ => None,
        };
        let post = match router {
            None => None,
            Some(_) => {
                let post = gpu.buffer("logits on their way", 4 * (n_experts as u64 + 1))?;
                gpu.write(&post, 0, bytemuck::cast_slice(&vec![EMPTY; n_experts]));
                Some(post)
            }
        };
        let choose = |does: Does| {
            let listed = does != Does::Choose;
            let mut draft = match (does, router) {
                (Does::Router, Some((matrix, x, cut))) => {
                    let draft = Draft::default().declared(Access::Read, matrix.slice());
                    let (draft, operand) = match norm {
                        Some(_) => (draft.plane("normed", matrix.cols(), Access::Write, x), Operand::Own),
                        None => (draft.declared(Access::Read, x), Operand::Plane),
                    };
                    let draft = draft.constant("COLS", matrix.cols());
                    let constants = cut.constants(matrix.encoding(), operand);
                    constants.iter().fold(draft, |draft, (name, value)| draft.constant(name, *value as usize))
                }
                _ => Draft::default(),
            };
            if matches!(does, Does::Router | Does::One) {
                draft = match norm.zip(router).filter(|_| does == Does::Router) {
                    Some((norm, (matrix, ..))) => {
                        let (d, group) = (matrix.cols(), norm.coded.map(|coded| coded.group));
                        NormCut::new(gpu, d, group, Some(THREADS)).draft(draft)
                    }
                    None => draft.constant("THREADS", THREADS).float(64, 4),
                };
                draft = draft.constant("TOKENS", 1).text(KEYS).text(ONE);
            } else {
                draft = draft.constant("TOKENS", few).float(64, 4).text(KEYS).text(ROUTE);
            }
            draft = draft
                .constant("EXPERTS", n_experts)
                .constant("TOP_K", top_k)
                .constant("GROUPS", groups)
                .constant("TOP_GROUPS", top_groups)
                .flag("SIGMOID", moe.router == RouterKind::Sigmoid)
                .flag("NORM", moe.norm_topk)
                .text(&format!("const NORM_MIN: f32 = {:?}f;\n", moe.norm_min as f32))
                .flag("BEST_TWO", score == GroupScore::BestTwo)
                .flag("LISTED", listed)
                .flag("HALTS", listed && halt.is_some())
                .constant("HALT", halt.map_or(0, |(halt, _)| halt.at))
                .constant("PER", n_experts.div_ceil(THREADS))
                .constant("SPREAD", spread)
                .constant("KEPT", kept)
                .constant("PADDED", n_experts.next_multiple_of(RUN * SPREAD));
            draft = match (does, &post) {
                (Does::Router, Some(post)) => draft.buffer("post", "atomic<u32>", Access::Write, post),
                _ => draft.buffer("logits", "f32", Access::Read, logits),
            };
            draft = draft.buffer("ids", "u32", Access::Write, ids).buffer(
                "weights",
                "f32",
                Access::Write,
                weights,
            );
            draft = match bias {
                Some(bias) => draft
                    .buffer("bias", "f32", Access::Read, bias)
                    .text("fn bias_of(expert: u32) -> f32 { return bias[expert]; }\n"),
                None => draft.text("fn bias_of(expert: u32) -> f32 { return 0.0; }\n"),
            };
            draft = match seen {
                Some((seen, _)) => draft
                    .buffer("seen", "f32", Access::Write, seen)
                    .text("fn see(i: u32, logit: f32) { seen[p.seen + i] = logit; }\n"),
                None => draft.text("fn see(i: u32, logit: f32) {}\n"),
            };
            draft = match correction {
                Some(correction) => draft
                    .buffer("correction", "f32", Access::Read, correction)
                    .text("fn correction_of(expert: u32) -> f32 { return correction[expert]; }\n"),
                None => draft.text("fn correction_of(expert: u32) -> f32 { return 0.0; }\n"),
            };
            if listed {
                draft = draft
                    .buffer("slots", "u32", Access::Read, slots)
                    .buffer("work", "u32", Access::Write, work)
                    .buffer("pairs", "u32", Access::Write, pairs);
            }
            match does {
                Does::Router => {
                    // The product has the bits of `FloatMatmul`, whose fma is the device's.
                    let (matrix, _, cut) = router.expect("made where there is a router");
                    let cols = matrix.cols();
                    let (_, words) = Memories::One.text();
                    let Some(norm) = norm else {
                        let core = cut.core(gpu, cols, 1, Operand::Plane)?;
                        return draft.loose_op(
                            gpu,
                            "router and route: one",
                            &[core.as_str(), words, PLAIN, ROUTER].concat(),
                        );
                    };
                    draft =
                        draft.flag("NORMED", true).flag("CODED", norm.coded.is_some()).flag("CHANGED", true);
                    draft = match norm.before {
                        Some(before) => draft
                            .plane("hidden", cols, Access::Read, before)
                            .plane("after", cols, Access::Write, norm.hidden)
                            .text("fn store_hidden(row: u32, chunk: u32, v: vec4<f32>) { ")
                            .text("store_after(row, chunk, v); }\n"),
                        None => draft.plane("hidden", cols, Access::Write, norm.hidden),
                    };
                    draft = draft.plane("weight", cols, Access::Read, norm.weight).text(NORM_ROW);
                    draft = add_delta(draft, Delta::Plane(norm.added, norm.bias), cols);
                    draft = match norm.coded {
                        Some(coded) => draft.coded(coded),
                        None => draft.text("fn store_codes(cell: u32, part: u32, coded: Codes) {}\n"),
                    };
                    let core = cut.core(gpu, cols, 1, Operand::Own)?;
                    draft.text(NORMED).loose_op(
                        gpu,
                        "norm, router and route: one",
                        &[core.as_str(), words, ROUTER].concat(),
                    )
                }
                Does::One => draft.text(ALONE).op(gpu, "route: one"),
                Does::Few => draft.text(LIST).op(gpu, "route: few"),
                Does::Choose => draft.text("fn list(n: u32, lane: u32, goes_on: bool) {}\n").op(gpu, "route"),
            }
        };
        let group = Draft::default()
            .constant("EXPERTS", n_experts)
            .constant("TOP_K", top_k)
            .text(GROUP)
            .buffer("ids", "u32", Access::Read, ids)
            .buffer("slots", "u32", Access::Read, slots)
            .buffer("work", "u32", Access::Write, work)
            .buffer("pairs", "u32", Access::Write, pairs)
            .op(gpu, "route: group")?;
        let (scale, number) = (moe.routed_scale as f32, halt.map_or(0.0, |(_, number)| number));
        let router = match router.filter(|_| bound <= gpu.most_bindings()) {
            Some((_, _, cut)) => Some((choose(Does::Router)?, cut.grid(n_experts))),
            None => None,
        };
        let norm = norm.filter(|_| router.is_some()).map(|norm| [norm.eps, norm.residual]);
        let (one, whole, choose) = (choose(Does::One)?, choose(Does::Few)?, choose(Does::Choose)?);
        let block = seen.map_or(0, |(_, block)| block);
        let list = list.clone();
        Ok(Self {
            router,
            norm,
            one,
            whole,
            choose,
            group,
            few,
            tokens,
            n_experts,
            list,
            scale,
            number,
            block,
        })
    }

    /// Tokens of one dispatch.
    #[must_use]
    pub const fn few(&self) -> usize {
        self.few
    }

    /// Whether it makes the logits of so many tokens itself.
    #[must_use]
    pub const fn makes_logits(&self, tokens: usize) -> bool {
        tokens == 1 && self.router.is_some()
    }

    /// Whether it makes the input of so many tokens itself, adding to the hidden states what is to be added.
    #[must_use]
    pub const fn norms(&self, tokens: usize) -> bool {
        self.makes_logits(tokens) && self.norm.is_some()
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there are more than it was made for.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let seen = self.block * tokens * self.n_experts;
        let words = [tokens as u32, self.scale.to_bits(), self.number.to_bits(), seen as u32];
        if let Some((op, parts)) = self.router.as_ref().filter(|_| tokens == 1) {
            let [eps, residual] = self.norm.unwrap_or_default().map(f32::to_bits);
            let words = [*parts, words[1], words[2], words[3], eps, residual];
            step.run(op, &words, [*parts, 1, 1]);
            return;
        }
        if tokens <= self.few {
            let op = if tokens == 1 { &self.one } else { &self.whole };
            step.run(op, &words, [tokens.min(1) as u32, 1, 1]);
            return;
        }
        step.run(&self.choose, &words, [tokens.div_ceil(self.few) as u32, 1, 1]);
        let most = self.list.entry_pairs(tokens) as u32;
        step.run(&self.group, &[words[0], most], [self.n_experts as u32, 1, 1]);
    }
}

/// Workgroups that share a token's logits.
const PARTS: usize = 64;

/// The id of each token's largest logit, the lowest of several; `0xffffffff` if one of them is not a number.
#[derive(Clone, Debug)]
pub struct Argmax {
    parts: Op,
    last: Op,
    tokens: usize,
    vocab: usize,
}

impl Argmax {
    /// Of `logits`, `[tokens, vocab]`, into `ids`, `[tokens]` u32.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If a buffer is too short, or there are no logits.
    pub fn new(
        gpu: &Gpu,
        tokens: usize,
        vocab: usize,
        logits: &Slice,
        ids: &Slice,
    ) -> Result<Self, GpuError> {
        assert!(vocab > 0, "no logits");
        demand(logits, tokens * vocab, "logits");
        demand(ids, tokens, "ids of tokens");
        let found = gpu.buffer("largest logits", (tokens * PARTS * 8) as u64)?;
        let parts = Draft::default()
            .constant("THREADS", 256)
            .text(ARGMAX)
            .buffer("logits", "f32", Access::Read, logits)
            .buffer("found", "vec2<u32>", Access::Write, &found)
            .text("fn candidate(token: u32, i: u32) -> vec2<u32> {\n")
            .text("return vec2(key_of(logits[token * p.count + i]), i);\n}\n")
            .text("fn emit(token: u32, part: u32, best: vec2<u32>) {\n")
            .text("found[token * p.parts + part] = best;\n}\n")
            .op(gpu, "argmax")?;
        let last = Draft::default()
            .constant("THREADS", PARTS)
            .text(ARGMAX)
            .buffer("found", "vec2<u32>", Access::Read, &found)
            .buffer("ids", "u32", Access::Write, ids)
            .text("fn candidate(token: u32, i: u32) -> vec2<u32> { return found[token * p.count + i]; }\n")
            .text("fn emit(token: u32, part: u32, best: vec2<u32>) {\n")
            .text("ids[token] = select(best.y, 0xffffffffu, best.x == 0xffffffffu);\n}\n")
            .op(gpu, "argmax: parts")?;
        Ok(Self { parts, last, tokens, vocab })
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there are more than it was made for.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let parts = PARTS as u32;
        step.run(&self.parts, &[self.vocab as u32, parts], [parts, tokens as u32, 1]);
        step.run(&self.last, &[parts, 1], [1, tokens as u32, 1]);
    }
}
