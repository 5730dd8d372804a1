//! Attention of many tokens of a session: how its kernel is cut, and where a device and a shape have room for it.

use crate::attention::{AttentionHeads, AttentionScratch, SPLIT, THREADS};
use crate::draft::Draft;
use crate::quantise::Repeated;
use crate::rope::{KvLayout, Rows};
use crate::shader::{Access, Op};
use crate::{Gpu, GpuError, Slice};

/// Queries of a workgroup, the most that there is room for.
const QUERIES: [usize; 2] = [64, 32];
/// Words of a chain of keys and queries that are staged at once, at most.
const PIECE: usize = 4;
/// Vectors of values that are staged at once.
const VALUES: usize = 512;
/// Positions of a lane, for four queries: they and their sums take 64 registers.
const HELD: usize = 8;
/// Vectors of four queries that a lane sums values for: 64 registers too.
const VECTORS: usize = 2;

/// Lanes that must be of one subgroup.
const TEAM: usize = 8;

/// How attention_prompt.wgsl is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    queries: usize,
    threads: usize,
    /// Lanes side by side over a value.
    columns: usize,
    /// Words of a chain that are staged at once.
    piece: usize,
    /// Vectors of what is staged.
    stage: usize,
}

impl Cut {
    /// For so many queries a workgroup, on devices with subgroups of at least `narrowest` lanes; None if the shape cannot be
    /// cut so.
    fn new(kv: KvLayout, per_kv: usize, queries: usize, narrowest: usize) -> Option<Self> {
        let KvLayout { format, head_dim, value_dim, .. } = kv;
        // Words of four elements in 16 bytes.
        let (vectors, parts) = (queries / 4, format.words());
        let columns = (value_dim / 4).next_power_of_two();
        // Each lane of the quad has as much of a key as the others.
        let chain = head_dim / 16;
        if narrowest < TEAM
            || !head_dim.is_multiple_of(16)
            || !chain.is_multiple_of(parts)
            || queries < per_kv
        {
            return None;
        }
        let piece = (parts..=PIECE)
            .rev()
            .find(|piece| piece.is_multiple_of(parts) && chain.is_multiple_of(*piece))?;
        let threads = (vectors * columns / VECTORS).max(vectors * SPLIT / HELD);
        let staged = piece * (SPLIT + 2) + piece * (queries + 2);
        let stage = staged.max(VALUES).max(vectors * (SPLIT / HELD + SPLIT / narrowest));
        // Every lane sums something, stages whole values, and has positions of weights.
        let whole = vectors * columns >= threads && VALUES.is_multiple_of(threads);
        (whole && threads.is_multiple_of(SPLIT)).then_some(Self { queries, threads, columns, piece, stage })
    }

    /// The functions of all items of a lane.
    fn lists(&self, kv: KvLayout, repeated: Repeated) -> String {
        let (vectors, parts) = (self.queries / 4, kv.format.words());
        let (held, mine) = (vectors * SPLIT / self.threads, vectors * self.columns / self.threads);
        let [keys, queries, values] = [SPLIT * self.piece / parts, self.queries * self.piece, VALUES]
            .map(|items| items.div_ceil(self.threads));
        let calls =
            |head: &str, n: usize, call: &dyn Fn(&str) -> String| repeated.calls(head, n as u32, call);
        [
            calls("read_keys(ahead: ptr<function, KeysAhead>, run: Run, kv_head: u32, chain: u32, piece: u32, lane: u32)", keys, &|j| {
                format!("read_key(ahead, run, kv_head, chain, piece, lane, {j});")
            }),
            calls("stage_parts(wide: ptr<function, array<vec4<f32>, PARTS>>, item: u32)", parts, &|part| {
                format!("stage_part(wide, item, {part});")
            }),
            calls("stage_keys(ahead: ptr<function, KeysAhead>, lane: u32)", keys, &|j| {
                format!("stage_key(ahead, lane, {j});")
            }),
            calls(
                "read_queries(ahead: ptr<function, QueriesAhead>, run: Run, kv_head: u32, tile: u32, chain: u32, piece: u32, lane: u32)",
                queries,
                &|j| format!("read_query(ahead, run, kv_head, tile, chain, piece, lane, {j});"),
            ),
            calls("stage_queries(ahead: ptr<function, QueriesAhead>, lane: u32)", queries, &|j| {
                format!("stage_query(ahead, lane, {j});")
            }),
            calls("multiply_positions(acc: ptr<function, Held>, word: Word, at: u32)", held, &|j| {
                format!("multiply_position(acc, word, at, {j});")
            }),
            calls(
                "end_positions(acc: ptr<function, Held>, kept: ptr<function, Held>, seen: ptr<function, Seen>, chain: u32, vector: u32, across: u32)",
                held,
                &|j| format!("end_position(acc, kept, seen, chain, vector, across, {j});"),
            ),
            calls("read_values(ahead: ptr<function, ValuesAhead>, run: Run, kv_head: u32, first: u32, lane: u32)", values, &|j| {
                format!("read_value(ahead, run, kv_head, first, lane, {j});")
            }),
            calls("stage_values(ahead: ptr<function, ValuesAhead>, lane: u32)", values, &|j| {
                format!("stage_value(ahead, lane, {j});")
            }),
            calls("add_vectors(sums: ptr<function, Mine>, x: vec4<f32>, at: u32)", mine, &|v| {
                format!("add_vector(sums, x, at, {v});")
            }),
            calls("add_maskeds(sums: ptr<function, Mine>, x: vec4<f32>, at: u32)", mine, &|v| {
                format!("add_masked(sums, x, at, {v});")
            }),
            calls("end_slices(sums: ptr<function, Mine>, slice: ptr<function, Mine>)", 4 * mine, &|q| {
                format!("end_slice(sums, slice, {q});")
            }),
            calls(
                "leave_sums(sums: ptr<function, Mine>, run: Run, kv_head: u32, tile: u32, split: u32, mine: u32, column: u32)",
                4 * mine,
                &|q| format!("leave_sum(sums, run, kv_head, tile, split, mine, column, {q});"),
            ),
        ]
        .concat()
    }

    /// Bytes that a workgroup shares.
    const fn shared(&self, tile: usize) -> usize {
        16 * (self.stage + self.queries / 4 * SPLIT) + 4 * SPLIT + 24 * tile + 16
    }
}

/// The kernel over a split of positions for several tokens, and how many they are; None where it does not fit.
pub(crate) fn op(
    gpu: &Gpu,
    kv: KvLayout,
    heads: AttentionHeads<'_>,
    queries: &Slice,
    cache: &Slice,
    rows: Rows<'_>,
    scratch: &AttentionScratch,
) -> Result<Option<(Op, usize)>, GpuError> {
    let per_kv = heads.n_heads / kv.n_kv_heads;
    let narrowest = gpu.facts().subgroup.0 as usize;
    let cuts = QUERIES.iter().filter_map(|&queries| Cut::new(kv, per_kv, queries, narrowest));
    let fits = |cut: &Cut| {
        cut.threads <= gpu.most_threads()
            && cut.shared(cut.queries / per_kv) <= gpu.wide_shared_bytes() as usize
    };
    let Some(cut) = cuts.into_iter().find(fits) else { return Ok(None) };
    let tile = cut.queries / per_kv;
    let draft = Draft::default()
        .constant("HEADS", heads.n_heads)
        .constant("KV_HEADS", kv.n_kv_heads)
        .constant("PER_KV", per_kv)
        .constant("QUERIES", cut.queries)
        .constant("TILE", tile)
        .constant("HEAD_DIM", kv.head_dim)
        .constant("VALUE_DIM", kv.value_dim)
        .constant("COLUMNS", cut.columns)
        .constant("ROW", kv.row_bytes() / 16)
        .constant("NARROW", kv.format.words())
        .constant("THREADS", cut.threads)
        .constant("SLICES", THREADS / cut.columns)
        .constant("PIECE", cut.piece)
        .constant("STAGED", VALUES / cut.columns)
        .constant("STAGE", cut.stage)
        .buffer("keys", "vec4<u32>", Access::Read, cache)
        .buffer("values", kv.format.narrow(), Access::Read, cache)
        .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
        .buffer("tables", "u32", Access::Read, rows.tables)
        .buffer("queries", "vec4<f32>", Access::Read, queries)
        .buffer("sums", "vec4<f32>", Access::Write, &scratch.sums)
        .buffer("stats", "vec2<f32>", Access::Write, &scratch.stats)
        .text("alias Narrow = ")
        .text(kv.format.narrow())
        .text(";\n")
        // Of it, only the exponential: nothing is quantised here.
        .float(64, gpu.team(64))
        .text(kv.format.widen())
        .text(include_str!("wgsl/attention_split.wgsl"));
    let source = [include_str!("wgsl/attention_prompt.wgsl"), &cut.lists(kv, Repeated::on(gpu)?)].concat();
    let op = draft.loose_op(gpu, "attention, prompt", &source)?;
    Ok(Some((op, tile)))
}

#[cfg(test)]
mod tests {
    use super::{Cut, VALUES};
    use crate::rope::{KvFormat, KvLayout};

    #[test]
    fn a_cut_gives_every_lane_whole_work() {
        for format in [KvFormat::F32, KvFormat::F16, KvFormat::Q8] {
            for (head_dim, value_dim) in [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)] {
                let kv = KvLayout { format, n_kv_heads: 1, head_dim, value_dim };
                for queries in [64, 32] {
                    let Some(cut) = Cut::new(kv, 8, queries, 8) else {
                        assert!((format, head_dim) == (KvFormat::Q8, 96), "{kv:?}");
                        continue;
                    };
                    let vectors = queries / 4;
                    assert_eq!(vectors * cut.columns % cut.threads, 0, "sums of {kv:?}: {cut:?}");
                    assert_eq!(vectors * 128 % cut.threads, 0, "scores of {kv:?}: {cut:?}");
                    assert!(
                        cut.threads.is_multiple_of(cut.columns) && VALUES.is_multiple_of(cut.threads),
                        "{kv:?}: {cut:?}"
                    );
                    assert_eq!(head_dim / 16 % cut.piece, 0, "chains of {kv:?}: {cut:?}");
                    let most = if queries == 64 { 48 << 10 } else { 32 << 10 };
                    assert!(cut.shared(queries / 8) <= most, "{kv:?}: {cut:?}");
                }
            }
        }
        // So many lanes that some would have no values to stage, and subgroups that are too narrow.
        let wide = KvLayout { format: KvFormat::F16, n_kv_heads: 1, head_dim: 256, value_dim: 256 };
        assert_eq!(Cut::new(wide, 8, 128, 8), None);
        assert_eq!(Cut::new(wide, 8, 64, 4), None);
        let odd = KvLayout { format: KvFormat::F16, n_kv_heads: 1, head_dim: 36, value_dim: 36 };
        assert_eq!(Cut::new(odd, 1, 64, 8), None);
    }
}
