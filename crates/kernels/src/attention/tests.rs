//! Attention of many tokens against attention of each by itself, bit for bit.

use proptest::prelude::*;

use super::*;
use crate::{Pool, Shard};

pub(super) const TYPES: [KvType; 3] = [KvType::F32, KvType::F16, KvType::Q8];

pub(super) struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// In -scale..scale.
    pub fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| (self.next() as f32 / (1u64 << 30) as f32 - 1.0) * scale).collect()
    }
}

/// One bit pattern for all NaNs: which one comes out is not defined.
pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }).collect()
}

/// Keys and values of `heads` kv heads, in blocks that lie backwards with holes between them.
pub(super) struct Cache {
    ty: KvType,
    planes: [Vec<u8>; 2],
    dims: [usize; 2],
    pub table: Vec<u32>,
    block_positions: usize,
    heads: usize,
}

impl Cache {
    pub fn new(
        ty: KvType,
        [positions, block_positions, heads]: [usize; 3],
        dims: [usize; 2],
        row: &mut dyn FnMut(usize, usize) -> Vec<f32>,
    ) -> Self {
        let blocks = positions.div_ceil(block_positions);
        let table: Vec<u32> = (0..blocks as u32).rev().map(|b| 2 * b + 1).collect();
        let planes = dims.map(|dim| {
            let size = ty.row_bytes(dim);
            let mut bytes = vec![0xee; (2 * blocks + 1) * block_positions * heads * size];
            for position in 0..positions {
                for head in 0..heads {
                    let block = table[position / block_positions] as usize;
                    let at = ((block * heads + head) * block_positions + position % block_positions) * size;
                    Kernels::detect().store_kv_row(ty, &row(position, dim), &mut bytes[at..at + size]);
                }
            }
            bytes
        });
        Self { ty, planes, dims, table, block_positions, heads }
    }

    pub fn head(&self, head: usize) -> KvBlocks<'_> {
        let plane = |i: usize| {
            let row_bytes = self.ty.row_bytes(self.dims[i]);
            let head_bytes = self.block_positions * row_bytes;
            KvPlane {
                ty: self.ty,
                bytes: &self.planes[i],
                row_bytes,
                block_stride: self.heads * head_bytes,
                head_offset: head * head_bytes,
            }
        };
        let block_positions = self.block_positions;
        KvBlocks { keys: plane(0), values: plane(1), table: &self.table, block_positions }
    }
}

/// Each token by itself, with the scalar kernels: `[tokens, n_q * value_dim]`.
fn by_tokens(
    cache: &Cache,
    head: usize,
    queries: &[f32],
    stride: usize,
    n_q: usize,
    visible: Range<usize>,
    tokens: usize,
    sinks: Option<&[f32]>,
) -> Vec<f32> {
    let [head_dim, value_dim] = cache.dims;
    let mut out = vec![f32::NAN; tokens * n_q * value_dim];
    for (t, out) in out.chunks_mut(n_q * value_dim).enumerate() {
        let visible = visible.start..visible.end + t;
        let mut scores = vec![f32::NAN; n_q * visible.len()];
        let queries = &queries[t * stride..][..n_q * head_dim];
        let scalar = Kernels::available()[0];
        scalar.attention(queries, head_dim, cache.head(head), visible, 0.3, sinks, &mut scores, out);
    }
    out
}

/// A block of tokens with every set, in the middle of a wider plane of queries and one of outputs.
fn check(
    cache: &Cache,
    random: &mut Random,
    n_q: usize,
    visible: Range<usize>,
    tokens: usize,
    with_sinks: bool,
    scratch_positions: usize,
) {
    let [head_dim, value_dim] = cache.dims;
    let (stride, width) = (n_q * head_dim + 5, n_q * value_dim + 3);
    let queries = random.values(tokens * stride, 3.0);
    let sinks = random.values(n_q, 4.0);
    let sinks = with_sinks.then_some(&sinks[..]);
    let expected = by_tokens(cache, 0, &queries, stride, n_q, visible.clone(), tokens, sinks);
    for kernels in Kernels::available() {
        let mut out = vec![7.0; tokens * width];
        let mut scratch = vec![f32::NAN; AttentionScratch::floats(head_dim, value_dim, scratch_positions)];
        let mut shard = Shard::new(&mut out, tokens, width);
        let mut part = shard.part(2..width - 1);
        kernels.attention_block(
            &queries,
            stride,
            n_q,
            head_dim,
            cache.head(0),
            visible.clone(),
            0.3,
            sinks,
            &mut scratch,
            &mut part,
        );
        for (t, out) in out.chunks(width).enumerate() {
            let (expected, inner) = (&expected[t * n_q * value_dim..][..n_q * value_dim], &out[2..width - 1]);
            assert_eq!(bits(inner), bits(expected), "{kernels:?} token {t} {visible:?} {:?}", cache.ty);
            assert_eq!([out[0], out[1], out[width - 1]], [7.0; 3], "{kernels:?} token {t}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn a_block_of_tokens_has_the_bits_of_each_alone(
        ty in 0usize..3,
        dims in [1usize..140, 1usize..140],
        n_q in 1usize..12,
        tokens in 1usize..40,
        before in 1usize..70,
        start in 0usize..70,
        block in 1usize..40,
        with_sinks in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut random = Random(seed);
        let positions = before + tokens - 1;
        let size = [positions, block, 1];
        let mut rows = Random(seed ^ 1);
        let cache = Cache::new(TYPES[ty], size, dims, &mut |_, dim| rows.values(dim, 2.0));
        let visible = start % before..before;
        check(&cache, &mut random, n_q, visible, tokens, with_sinks, positions);
    }
}

#[test]
fn whole_registers_and_more_heads_than_a_tile_has_lanes() {
    let mut random = Random(1);
    for ty in TYPES {
        for (dims, n_q, tokens, before) in
            [([128, 128], 8, 9, 100), ([64, 64], 1, 70, 1), ([96, 64], 40, 3, 33), ([16, 256], 33, 2, 64)]
        {
            let mut rows = Random(2);
            let size = [before + tokens - 1, 32, 1];
            let cache = Cache::new(ty, size, dims, &mut |_, dim| rows.values(dim, 2.0));
            check(&cache, &mut random, n_q, 0..before, tokens, n_q == 40, size[0]);
        }
    }
}

#[test]
fn tiles_are_narrower_where_the_scratch_holds_no_wide_ones() {
    let mut rows = Random(3);
    let (tokens, before) = (5, 17_000);
    let size = [before + tokens - 1, 4096, 1];
    let cache = Cache::new(KvType::Q8, size, [8, 8], &mut |_, dim| rows.values(dim, 2.0));
    let wide = 32 * size[0];
    assert!(AttentionScratch::floats(8, 8, size[0]) < wide, "scores of 32 queries do not fit");
    check(&cache, &mut Random(4), 8, 0..before, tokens, false, size[0]);
}

#[test]
fn what_a_token_does_not_see_cannot_reach_it() {
    // Later positions hold what would spoil every sum, were it multiplied by 0; weights are as small as can
    // be, so that a sum keeps the sign of a zero.
    for ty in [KvType::F32, KvType::F16] {
        for bad in [f32::NAN, f32::INFINITY, -0.0] {
            let (tokens, before) = (12, 20);
            let mut rows = Random(5);
            let size = [before + tokens - 1, 8, 1];
            let cache = Cache::new(ty, size, [32, 32], &mut |position, dim| {
                let sign = if position < before { -1e-30 } else { 1.0 };
                let rows = rows.values(dim, 60.0);
                rows.iter().map(|x| if position > before + 3 { bad } else { x * sign }).collect()
            });
            check(&cache, &mut Random(6), 4, 0..before, tokens, false, size[0]);
        }
    }
}

#[test]
fn scores_of_any_kind_come_out_alike() {
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e30, 0.0] {
        let mut rows = Random(7);
        let size = [40, 16, 1];
        let cache = Cache::new(KvType::F32, size, [20, 20], &mut |position, dim| {
            if position % 11 == 3 { vec![value; dim] } else { rows.values(dim, 50.0) }
        });
        for with_sinks in [false, true] {
            check(&cache, &mut Random(8), 3, 0..30, 11, with_sinks, 40);
        }
    }
}

#[test]
fn a_step_of_several_sessions_is_each_token_alone() {
    let (heads, n_q, dims) = (3, 2, [48, 40]);
    // Session, first position, tokens: two prompts, one of which comes in two pieces, and single tokens.
    let runs = [(0, 4, 21), (1, 0, 1), (2, 30, 40), (0, 25, 3), (1, 1, 1), (1, 2, 2)];
    let tokens: Vec<(usize, usize)> = runs
        .into_iter()
        .flat_map(|(session, first, n)| (first..first + n).map(move |p| (session, p)))
        .collect();
    let mut rows = Random(9);
    let cache = Cache::new(KvType::F16, [256, 16, heads], dims, &mut |_, dim| rows.values(dim, 2.0));
    let tables = [0, 1, 2].map(|session| {
        let mut table = cache.table.clone();
        table.rotate_left(5 * session);
        table
    });
    let (width, out_width) = (heads * n_q * dims[0], heads * n_q * dims[1]);
    let queries = Random(10).values(tokens.len() * width, 3.0);
    let sinks = Random(11).values(heads * n_q, 3.0);
    let sight = |t: usize, head: usize| {
        let (session, position) = tokens[t];
        let blocks = KvBlocks { table: &tables[session], ..cache.head(head) };
        Sight { blocks, visible: 0..position + 1, chosen: None }
    };
    let mut expected = vec![0.0; tokens.len() * out_width];
    let mut scores = vec![0.0; n_q * 256];
    for (i, out) in expected.chunks_mut(n_q * dims[1]).enumerate() {
        let (t, head) = (i / heads, i % heads);
        let Sight { blocks, visible, .. } = sight(t, head);
        let queries = &queries[t * width + head * n_q * dims[0]..][..n_q * dims[0]];
        let sinks = Some(&sinks[head * n_q..(head + 1) * n_q]);
        let scalar = Kernels::available()[0];
        scalar.attention(queries, dims[0], blocks, visible, 0.2, sinks, &mut scores, out);
    }
    let shape = AttentionHeads {
        n_kv_heads: heads,
        per_kv: n_q,
        head_dim: dims[0],
        value_dim: dims[1],
        scale: 0.2,
        sinks: Some(&sinks),
    };
    for kernels in Kernels::available() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads, false);
            let mut scratch = AttentionScratch::new(threads, dims[0], dims[1], 256);
            let mut out = vec![f32::NAN; expected.len()];
            attend(&pool, kernels, &shape, &queries, &sight, &mut scratch, &mut out);
            assert_eq!(bits(&out), bits(&expected), "{kernels:?} {threads}");
        }
    }
}

#[test]
fn heads_that_share_a_row_are_the_same_on_any_number_of_threads() {
    let (n_q, dims) = (40, [48, 32]);
    let mut rows = Random(12);
    let cache = Cache::new(KvType::F16, [200, 16, 1], dims, &mut |_, dim| rows.values(dim, 2.0));
    for tokens in [1, 2, 5] {
        let queries = Random(13).values(tokens * n_q * dims[0], 3.0);
        let sinks = Random(14).values(n_q, 3.0);
        let first = 200 - tokens;
        let expected = {
            let visible = 0..first + 1;
            by_tokens(&cache, 0, &queries, n_q * dims[0], n_q, visible, tokens, Some(&sinks))
        };
        let sight = |t: usize, head: usize| Sight {
            blocks: cache.head(head),
            visible: 0..first + t + 1,
            chosen: None,
        };
        let shape = AttentionHeads {
            n_kv_heads: 1,
            per_kv: n_q,
            head_dim: dims[0],
            value_dim: dims[1],
            scale: 0.3,
            sinks: Some(&sinks),
        };
        for kernels in Kernels::available() {
            for threads in [1, 2, 3, 9] {
                let pool = Pool::new(threads, false);
                let mut scratch = AttentionScratch::new(threads, dims[0], dims[1], 200);
                let mut out = vec![f32::NAN; expected.len()];
                attend(&pool, kernels, &shape, &queries, &sight, &mut scratch, &mut out);
                assert_eq!(bits(&out), bits(&expected), "{kernels:?}, {tokens} tokens, {threads} threads");
            }
        }
    }
}

#[test]
fn wrong_shapes_of_a_block_panic() {
    let cache = Cache::new(KvType::F16, [40, 8, 1], [16, 16], &mut |_, dim| vec![0.5; dim]);
    // Lengths of queries, scratch and a token's outputs, and what the first of four tokens sees.
    let call = |queries: usize, scratch: usize, width: usize, visible: Range<usize>| {
        std::panic::catch_unwind(|| {
            let (queries, mut scratch) = (vec![0.0; queries], vec![0.0; scratch]);
            let mut out = vec![0.0; 4 * width];
            let mut out = Shard::new(&mut out, 4, width);
            let (n_q, head_dim) = (4, 16);
            Kernels::detect().attention_block(
                &queries,
                64,
                n_q,
                head_dim,
                cache.head(0),
                visible,
                1.0,
                None,
                &mut scratch,
                &mut out,
            );
        })
        .is_err()
    };
    let scratch = AttentionScratch::floats(16, 16, 40);
    assert!(!call(256, scratch, 64, 0..30));
    assert!(call(255, scratch, 64, 0..30), "queries");
    assert!(call(256, 100, 64, 0..30), "scratch");
    assert!(call(256, scratch, 63, 0..30), "outputs of one width");
    assert!(call(256, scratch, 128, 0..30), "values longer than rows");
    assert!(call(256, scratch, 64, 0..38), "past the table");
    assert!(call(256, scratch, 64, 3..3), "nothing visible");
}
