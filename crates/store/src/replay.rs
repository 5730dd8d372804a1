//! Scoring eviction policies on recorded routes, without a disk.
//!
//! A [`Trace`] is what the router chose: per step, layer and token, the experts. [`replay`] runs it against a cache
//! of some slots under any [`Policy`], the same ones that the store evicts by, and [`belady`] says what the best
//! choice of victims would have made of it. A layer's experts of one step are one batch, as the engine demands
//! them: all that are resident when it begins are hits, and it evicts its own only when nothing else is left.
//!
//! # The file
//!
//! Little-endian: `SMOETRAC`, u32 version (1), u32 layers, u32 experts of a layer, u32 top_k, u64 steps; per step
//! u32 tokens; then every step's u16 expert ids, layer by layer, in each token by token; then u32 crc32c of all
//! before it.

use crate::Policy;
use std::collections::BTreeSet;
use std::io::{self, Read, Write};

const MAGIC: [u8; 8] = *b"SMOETRAC";
const VERSION: u32 = 1;

/// Most ids in a trace: half a gigabyte, hours of decoding.
const MAX_IDS: u64 = 1 << 28;

/// Why a trace cannot be made or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace: {0}")]
    Read(#[from] io::Error),
    /// Another kind of file.
    #[error("not a trace of routes")]
    NotATrace,
    /// A version that this code does not know.
    #[error("version {0} of a trace; only version 1 is known")]
    Version(u32),
    /// Numbers that no model has.
    #[error("{layers} layers of {experts} experts, {top_k} of them a token: not a model's")]
    Shape {
        /// Layers.
        layers: u32,
        /// Experts of a layer.
        experts: u32,
        /// Experts of a token.
        top_k: u32,
    },
    /// More than 2^28 ids.
    #[error("the trace is too long: {ids} expert ids, at most {most}")]
    TooLong {
        /// Ids.
        ids: u64,
        /// The most there may be.
        most: u64,
    },
    /// A step whose ids are not tokens x layers x top_k, or none.
    #[error("step {step} has {found} expert ids, {expected} were expected")]
    Length {
        /// The step.
        step: usize,
        /// What its tokens need.
        expected: u64,
        /// What there are.
        found: u64,
    },
    /// An expert that a layer does not have.
    #[error("step {step} names expert {expert} of {experts}")]
    UnknownExpert {
        /// The step.
        step: usize,
        /// The id.
        expert: u16,
        /// Experts of a layer.
        experts: u32,
    },
    /// The file was damaged.
    #[error("the trace's checksum is wrong: expected {expected:08x}, found {found:08x}")]
    Checksum {
        /// What the file says.
        expected: u32,
        /// What its bytes have.
        found: u32,
    },
}

/// The experts that a router chose, step by step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    layers: u32,
    experts: u32,
    top_k: u32,
    /// Per step.
    tokens: Vec<u32>,
    /// Step by step, in each layer by layer, in each token by token, `top_k` of each.
    ids: Vec<u16>,
}

impl Trace {
    /// A trace without steps, of a model with `layers` MoE layers of `experts` experts, `top_k` of them a token.
    ///
    /// # Errors
    /// [`TraceError::Shape`] if one is 0, ids have no room in 16 bits, or a token would use more than there are.
    pub fn new(layers: u32, experts: u32, top_k: u32) -> Result<Self, TraceError> {
        // A million experts are some times what any model has, and tables of them are small.
        let plausible = (1..=1 << 16).contains(&layers)
            && (1..=1 << 16).contains(&experts)
            && u64::from(layers) * u64::from(experts) <= 1 << 20;
        if !plausible || !(1..=experts).contains(&top_k) {
            return Err(TraceError::Shape { layers, experts, top_k });
        }
        Ok(Self { layers, experts, top_k, tokens: Vec::new(), ids: Vec::new() })
    }

    /// Number of MoE layers.
    pub fn n_layers(&self) -> usize {
        self.layers as usize
    }

    /// Experts of a layer.
    pub fn n_experts(&self) -> usize {
        self.experts as usize
    }

    /// Experts of a token in a layer.
    pub fn top_k(&self) -> usize {
        self.top_k as usize
    }

    /// Number of steps.
    pub fn n_steps(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens of all steps.
    pub fn n_tokens(&self) -> u64 {
        self.tokens.iter().map(|&tokens| u64::from(tokens)).sum()
    }

    fn ids_of(&self, tokens: u32) -> u64 {
        u64::from(tokens) * u64::from(self.layers) * u64::from(self.top_k)
    }

    /// Appends a step of `tokens` tokens: `ids` is `[layer][token][top_k]`.
    ///
    /// # Errors
    /// [`TraceError::Length`], [`TraceError::UnknownExpert`], [`TraceError::TooLong`]; nothing is appended then.
    pub fn push(&mut self, tokens: u32, ids: &[u16]) -> Result<(), TraceError> {
        let step = self.tokens.len();
        let (expected, found) = (self.ids_of(tokens), ids.len() as u64);
        if expected != found || found == 0 {
            return Err(TraceError::Length { step, expected, found });
        }
        if let Some(&expert) = ids.iter().find(|&&id| u32::from(id) >= self.experts) {
            return Err(TraceError::UnknownExpert { step, expert, experts: self.experts });
        }
        check_length(self.ids.len() as u64 + found)?;
        self.tokens.push(tokens);
        self.ids.extend_from_slice(ids);
        Ok(())
    }

    /// Every step: its tokens, and its ids as [`push`](Trace::push) took them.
    pub fn steps(&self) -> impl Iterator<Item = (u32, &[u16])> {
        let mut rest = self.ids.as_slice();
        self.tokens.iter().map(move |&tokens| {
            let (ids, after) = rest.split_at(self.ids_of(tokens) as usize);
            rest = after;
            (tokens, ids)
        })
    }

    /// Writes the file.
    ///
    /// # Errors
    /// The writer's.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut out = Summed { inner: out, sum: 0 };
        out.write_all(&MAGIC)?;
        for field in [VERSION, self.layers, self.experts, self.top_k] {
            out.write_all(&field.to_le_bytes())?;
        }
        out.write_all(&(self.tokens.len() as u64).to_le_bytes())?;
        for tokens in &self.tokens {
            out.write_all(&tokens.to_le_bytes())?;
        }
        let mut buffer = Vec::with_capacity(2 * CHUNK);
        for ids in self.ids.chunks(CHUNK) {
            buffer.clear();
            buffer.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
            out.write_all(&buffer)?;
        }
        let sum = out.sum.to_le_bytes();
        out.inner.write_all(&sum)
    }

    /// Reads a file, to its last byte; further ones are left. Memory grows with what is there, not with what a
    /// header claims.
    ///
    /// # Errors
    /// All kinds; a file that ends too soon is a [`TraceError::Read`].
    pub fn read(input: &mut dyn Read) -> Result<Self, TraceError> {
        let mut input = Summed { inner: input, sum: 0 };
        if input.array()? != MAGIC {
            return Err(TraceError::NotATrace);
        }
        let version = input.u32()?;
        if version != VERSION {
            return Err(TraceError::Version(version));
        }
        let mut trace = Self::new(input.u32()?, input.u32()?, input.u32()?)?;
        let n_steps = u64::from_le_bytes(input.array()?);
        // Every step has an id at least.
        check_length(n_steps)?;
        let mut total = 0;
        for step in 0..n_steps as usize {
            let tokens = input.u32()?;
            if tokens == 0 {
                return Err(TraceError::Length { step, expected: 0, found: 0 });
            }
            total += trace.ids_of(tokens);
            check_length(total)?;
            trace.tokens.push(tokens);
        }
        let mut buffer = [0; 2 * CHUNK];
        while (trace.ids.len() as u64) < total {
            let bytes = &mut buffer[..2 * CHUNK.min((total - trace.ids.len() as u64) as usize)];
            input.fill(bytes)?;
            trace.ids.extend(bytes.chunks_exact(2).map(|id| u16::from_le_bytes([id[0], id[1]])));
        }
        let found = input.sum;
        let expected = input.u32()?;
        if found != expected {
            return Err(TraceError::Checksum { expected, found });
        }
        let strange = |&id: &u16| u32::from(id) >= trace.experts;
        for (step, (_, ids)) in trace.steps().enumerate() {
            if let Some(&expert) = ids.iter().find(|id| strange(id)) {
                return Err(TraceError::UnknownExpert { step, expert, experts: trace.experts });
            }
        }
        Ok(trace)
    }

    /// Every batch in order: the experts of one layer that a step's tokens use, ascending, as record numbers with
    /// the position of the last token that uses each. Positions begin at 1.
    fn for_each_batch(&self, mut batch: impl FnMut(&[(u32, u64)])) {
        let mut last = vec![0_u64; self.n_experts()];
        let mut wants = Vec::new();
        let mut position = 1;
        for (tokens, ids) in self.steps() {
            for (layer, ids) in (0..).zip(ids.chunks(tokens as usize * self.top_k())) {
                for (token, ids) in (position..).zip(ids.chunks(self.top_k())) {
                    ids.iter().for_each(|&id| last[usize::from(id)] = token);
                }
                wants.clear();
                for (expert, last) in (0..).zip(&mut last) {
                    if *last > 0 {
                        wants.push((layer * self.experts + expert, std::mem::take(last)));
                    }
                }
                batch(&wants);
            }
            position += u64::from(tokens);
        }
    }

    /// Experts of all layers.
    pub fn n_records(&self) -> usize {
        self.n_layers() * self.n_experts()
    }
}

fn check_length(ids: u64) -> Result<(), TraceError> {
    if ids > MAX_IDS { Err(TraceError::TooLong { ids, most: MAX_IDS }) } else { Ok(()) }
}

/// Ids to convert at a time.
const CHUNK: usize = 4096;

/// A reader or writer that keeps the checksum of what went through.
struct Summed<T> {
    inner: T,
    sum: u32,
}

impl Summed<&mut dyn Write> {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum = smoe_format::crc::crc32c_append(self.sum, bytes);
        self.inner.write_all(bytes)
    }
}

impl Summed<&mut dyn Read> {
    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.inner.read_exact(bytes)?;
        self.sum = smoe_format::crc::crc32c_append(self.sum, bytes);
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut array = [0; N];
        self.fill(&mut array)?;
        Ok(array)
    }

    fn u32(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_le_bytes)
    }
}

/// How a cache fared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Score {
    /// Experts that were resident when their batch began.
    pub hits: u64,
    /// Experts that were not.
    pub misses: u64,
}

impl Score {
    /// The share of hits; none if nothing was demanded.
    pub fn hit_rate(&self) -> Option<f64> {
        let demanded = self.hits + self.misses;
        (demanded > 0).then(|| self.hits as f64 / demanded as f64)
    }
}

/// Runs `trace` against a cache of `slots` slots under `policy`, which holds none yet and has room for them and for
/// [`Trace::n_records`] records.
///
/// As the store does when leases are kept until a batch ends and its reads arrive in order. Where a batch is larger
/// than the cache, the store's figures depend on when leases come back; here its own are evicted as the policy
/// has it.
///
/// # Panics
/// If `slots` is 0, or the policy does not keep its contract.
pub fn replay(trace: &Trace, slots: usize, policy: &mut dyn Policy) -> Score {
    assert!(slots > 0, "a cache without slots");
    let mut free: Vec<u32> = (0..slots as u32).rev().collect();
    // Per slot what it holds and the batch that used it last; per record its slot.
    let mut held = vec![(0_u32, 0_u64); slots];
    let mut place: Vec<Option<u32>> = vec![None; trace.n_records()];
    let (mut misses, mut claimed) = (Vec::new(), Vec::new());
    let arrive = |policy: &mut dyn Policy, claimed: &mut Vec<(u32, u32, u64)>| {
        claimed.drain(..).for_each(|(slot, record, stamp)| policy.insert(slot, record, stamp));
    };
    let (mut score, mut batch) = (Score::default(), 0);
    trace.for_each_batch(|wants| {
        batch += 1;
        misses.clear();
        for &(record, stamp) in wants {
            match place[record as usize] {
                Some(slot) => {
                    policy.touch(slot, stamp);
                    held[slot as usize].1 = batch;
                    score.hits += 1;
                }
                None => misses.push((record, stamp)),
            }
        }
        score.misses += misses.len() as u64;
        // All claim their slots before the first arrives.
        for &(record, stamp) in &misses {
            let slot = free.pop().or_else(|| policy.evict(&mut |slot| held[slot as usize].1 != batch));
            let slot = slot.unwrap_or_else(|| {
                arrive(policy, &mut claimed);
                policy.evict(&mut |_| true).expect("a policy that holds every slot parts with one")
            });
            let before = std::mem::replace(&mut held[slot as usize], (record, batch)).0;
            if place[before as usize] == Some(slot) {
                place[before as usize] = None;
            }
            place[record as usize] = Some(slot);
            claimed.push((slot, record, stamp));
        }
        arrive(policy, &mut claimed);
    });
    score
}

/// The most hits that any choice of victims could have on `trace` with `slots` slots (Belady, 1966): at the end of
/// each batch the cache keeps what is used again soonest.
///
/// A bound for every policy. It may keep nothing of a batch, where a real cache keeps at least what it loaded last.
pub fn belady(trace: &Trace, slots: usize) -> Score {
    const NEVER: u32 = u32::MAX;
    // Per use, in the order of the batches, the batch that uses the record next.
    let mut uses: Vec<(u32, u32)> = Vec::new();
    let mut n_batches = 0;
    trace.for_each_batch(|wants| {
        uses.extend(wants.iter().map(|&(record, _)| (record, n_batches)));
        n_batches += 1;
    });
    let mut next = vec![NEVER; trace.n_records()];
    for (record, batch) in uses.iter_mut().rev() {
        let this = std::mem::replace(&mut next[*record as usize], *batch);
        *batch = this;
    }
    // What is kept: by next use.
    let mut kept: BTreeSet<(u32, u32)> = BTreeSet::new();
    let (mut score, mut at, mut batch) = (Score::default(), 0, 0);
    trace.for_each_batch(|wants| {
        let wanted = &uses[at..at + wants.len()];
        at += wants.len();
        for &(record, _) in wanted {
            if kept.remove(&(batch, record)) {
                score.hits += 1;
            } else {
                score.misses += 1;
            }
        }
        kept.extend(wanted.iter().filter(|used| used.1 != NEVER).map(|&(record, next)| (next, record)));
        while kept.len() > slots {
            kept.pop_last();
        }
        batch += 1;
    });
    score
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]
mod tests {
    use super::*;
    use crate::PolicyKind;
    use proptest::prelude::*;

    /// Traces of small models whose tokens prefer some experts, of steps of 1 to 5 tokens.
    fn traces() -> impl Strategy<Value = Trace> {
        (1..4_u32, 2..9_u32, 1..3_u32).prop_flat_map(|(layers, experts, top_k)| {
            let id = prop_oneof![(0..experts as u16), (0..experts.div_ceil(2) as u16)];
            let token = prop::collection::vec(id, (layers * top_k) as usize);
            let step = prop::collection::vec(token, 1..6);
            prop::collection::vec(step, 0..40).prop_map(move |steps| {
                let mut trace = Trace::new(layers, experts, top_k.min(experts)).unwrap();
                for tokens in steps {
                    let k = top_k as usize;
                    let of_layer =
                        |layer: usize| tokens.iter().flat_map(move |t| &t[layer * k..(layer + 1) * k]);
                    let ids: Vec<u16> = (0..layers as usize).flat_map(of_layer).copied().collect();
                    trace.push(tokens.len() as u32, &ids).unwrap();
                }
                trace
            })
        })
    }

    fn bytes(trace: &Trace) -> Vec<u8> {
        let mut bytes = Vec::new();
        trace.write(&mut bytes).unwrap();
        bytes
    }

    /// LRU as one would say it: of all that is not in the batch, else of all, the one whose last use is oldest.
    fn naive_lru(trace: &Trace, slots: usize) -> Score {
        let mut held: Vec<(u64, usize, u32)> = Vec::new();
        let (mut score, mut time) = (Score::default(), 0);
        trace.for_each_batch(|wants| {
            let began = held.clone();
            let was_held = |record: u32| began.iter().any(|&(_, _, r)| r == record);
            for &(record, stamp) in wants.iter().filter(|want| was_held(want.0)) {
                time += 1;
                held.retain(|&(_, _, r)| r != record);
                held.push((stamp, time, record));
                score.hits += 1;
            }
            for &(record, stamp) in wants.iter().filter(|want| !was_held(want.0)) {
                time += 1;
                score.misses += 1;
                if held.len() == slots {
                    let foreign = |&&(_, _, r): &&(u64, usize, u32)| wants.iter().all(|want| want.0 != r);
                    let victim = held.iter().filter(foreign).min().or(held.iter().min()).copied();
                    held.retain(|h| Some(*h) != victim);
                }
                held.push((stamp, time, record));
            }
        });
        score
    }

    /// Tries every choice of what to keep.
    fn best_of_all(trace: &Trace, slots: usize) -> u64 {
        let mut best: std::collections::HashMap<Vec<u32>, u64> = [(Vec::new(), 0)].into();
        trace.for_each_batch(|wants| {
            let wants: Vec<u32> = wants.iter().map(|want| want.0).collect();
            let mut after = std::collections::HashMap::new();
            for (held, hits) in best.drain() {
                let mut all = held.clone();
                all.extend(wants.iter().filter(|record| !held.contains(record)));
                all.sort_unstable();
                let hits = hits + (held.len() + wants.len() - all.len()) as u64;
                for choice in 0..1_u32 << all.len() {
                    if choice.count_ones() as usize <= slots {
                        let kept = |i: &usize| choice & (1 << i) != 0;
                        let kept: Vec<u32> = (0..all.len()).filter(kept).map(|i| all[i]).collect();
                        let most: &mut u64 = after.entry(kept).or_default();
                        *most = hits.max(*most);
                    }
                }
            }
            best = after;
        });
        best.into_values().max().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn belady_is_never_beaten(trace in traces(), slots in 1..20_usize) {
            let best = belady(&trace, slots);
            for kind in PolicyKind::ALL {
                let score = replay(&trace, slots, &mut *kind.build(slots, trace.n_records()));
                prop_assert!(score.hits <= best.hits, "{} beats it", kind.name());
                prop_assert_eq!(score.hits + score.misses, best.hits + best.misses);
            }
        }

        #[test]
        fn lru_agrees_with_a_naive_one(trace in traces(), slots in 1..20_usize) {
            let score = replay(&trace, slots, &mut *PolicyKind::Lru.build(slots, trace.n_records()));
            prop_assert_eq!(score, naive_lru(&trace, slots));
        }

        #[test]
        fn a_cache_for_everything_misses_each_once(trace in traces()) {
            let all = trace.n_records();
            let mut used = std::collections::HashSet::new();
            trace.for_each_batch(|wants| used.extend(wants.iter().map(|want| want.0)));
            for kind in PolicyKind::ALL {
                let score = replay(&trace, all, &mut *kind.build(all, all));
                prop_assert_eq!(score.misses, used.len() as u64);
                prop_assert_eq!(score, belady(&trace, all));
            }
        }

        #[test]
        fn traces_survive_the_file(trace in traces()) {
            let bytes = bytes(&trace);
            let mut rest = bytes.as_slice();
            prop_assert_eq!(Trace::read(&mut rest).unwrap(), trace);
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn damage_is_an_error(trace in traces(), at in any::<prop::sample::Index>(), bit in 0..8_u32) {
            let mut bytes = bytes(&trace);
            let at = at.index(bytes.len());
            prop_assert!(Trace::read(&mut &bytes[..at]).is_err(), "cut at {}", at);
            bytes[at] ^= 1_u8 << bit;
            prop_assert!(Trace::read(&mut &bytes[..]).is_err(), "flipped at {}", at);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn belady_is_the_best_there_is(
            slots in 1..4_usize,
            steps in prop::collection::vec(prop::collection::vec(0..5_u16, 1..4), 1..9),
        ) {
            let mut trace = Trace::new(1, 5, 1).unwrap();
            steps.iter().for_each(|ids| trace.push(ids.len() as u32, ids).unwrap());
            prop_assert_eq!(belady(&trace, slots).hits, best_of_all(&trace, slots));
        }
    }

    #[test]
    fn a_prefill_leaves_the_cache_as_its_tokens_one_by_one_would() {
        // Eleven tokens use expert 0 only at first, then 1 and 2; then all three are asked for with room for two.
        let tokens = [0, 0, 1, 2, 1, 2, 1, 2, 1, 2, 1];
        let mut at_once = Trace::new(1, 3, 1).unwrap();
        at_once.push(tokens.len() as u32, &tokens).unwrap();
        let mut one_by_one = Trace::new(1, 3, 1).unwrap();
        tokens.iter().for_each(|&id| one_by_one.push(1, &[id]).unwrap());
        for trace in [&mut at_once, &mut one_by_one] {
            let before = replay(trace, 2, &mut *PolicyKind::Lru.build(2, 3));
            trace.push(1, &[1]).unwrap();
            trace.push(1, &[2]).unwrap();
            let after = replay(trace, 2, &mut *PolicyKind::Lru.build(2, 3));
            assert_eq!(after.hits - before.hits, 2);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for (layers, experts, top_k) in
            [(0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 2, 3), (1, 1 << 17, 1), (1 << 17, 1, 1)]
        {
            assert!(matches!(Trace::new(layers, experts, top_k), Err(TraceError::Shape { .. })));
        }
        let mut trace = Trace::new(2, 4, 1).unwrap();
        assert!(matches!(trace.push(1, &[0]), Err(TraceError::Length { expected: 2, found: 1, .. })));
        assert!(matches!(trace.push(0, &[]), Err(TraceError::Length { .. })));
        assert!(matches!(trace.push(1, &[0, 4]), Err(TraceError::UnknownExpert { expert: 4, .. })));
        assert_eq!(trace.n_steps(), 0);
        assert_eq!(belady(&trace, 1).hit_rate(), None);

        let mut claims = bytes(&trace);
        claims[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(Trace::read(&mut &claims[..]), Err(TraceError::TooLong { .. })));
        claims[24..32].copy_from_slice(&1_u64.to_le_bytes());
        claims[32..36].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(Trace::read(&mut &claims[..]), Err(TraceError::TooLong { .. })));
        claims[8] = 2;
        assert!(matches!(Trace::read(&mut &claims[..]), Err(TraceError::Version(2))));
        assert!(matches!(Trace::read(&mut &b"SMOETRAP"[..]), Err(TraceError::NotATrace)));
        assert!(matches!(Trace::read(&mut &b"SMO"[..]), Err(TraceError::Read(_))));
    }
}
