//! Latent attention: what goes into the latent, attention over it, and the products on either side.

use super::*;

/// Layouts as models have them, and others: (rank, turned).
const SHAPES: [(usize, usize); 4] = [(512, 64), (64, 12), (96, 8), (32, 32)];

/// A cache on both sides, every row that was not stored not a number.
struct Latents {
    kv: LatentLayout,
    ty: KvType,
    bytes: Vec<u8>,
    tables: Vec<u32>,
    starts: Vec<usize>,
}

impl Latents {
    /// Sessions of `lengths` positions, nothing in them.
    fn empty(kv: LatentLayout, lengths: &[usize], random: &mut Random) -> Self {
        let ty = FORMATS.iter().find(|(f, _)| *f == kv.format).unwrap().1;
        let counts = lengths.iter().map(|n| n.div_ceil(KV_BLOCK));
        let total: usize = counts.clone().sum();
        // Blocks in an order of their own, with one that nobody has in front.
        let mut tables: Vec<u32> = (1..=total as u32).collect();
        (1..total).for_each(|i| tables.swap(i, random.below(i + 1)));
        let starts = counts.scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect();
        Self { kv, ty, bytes: vec![0xff; (total + 1) * kv.block_bytes()], tables, starts }
    }

    /// The same, with rows in them.
    fn new(kv: LatentLayout, lengths: &[usize], random: &mut Random) -> Self {
        let mut cache = Self::empty(kv, lengths, random);
        for (session, &length) in lengths.iter().enumerate() {
            for position in 0..length {
                cache.store(session, position, &random.values(kv.key_dim()));
            }
        }
        cache
    }

    fn store(&mut self, session: usize, position: usize, row: &[f32]) {
        let block = self.tables[self.starts[session] + position / KV_BLOCK] as usize;
        let at = (block * KV_BLOCK + position % KV_BLOCK) * self.kv.row_bytes();
        cpu().store_kv_row(self.ty, row, &mut self.bytes[at..at + self.kv.row_bytes()]);
    }

    /// What the CPU makes of a token's queries: (session, position, first position it sees).
    fn attend(
        &self,
        (session, position, visible): (usize, usize, usize),
        queries: &[f32],
        scale: f32,
    ) -> Vec<f32> {
        let kv = &self.kv;
        let heads = queries.len() / kv.key_dim();
        let plane = KvPlane {
            ty: self.ty,
            bytes: &self.bytes,
            row_bytes: kv.row_bytes(),
            block_stride: kv.block_bytes(),
            head_offset: 0,
        };
        let table = &self.tables[self.starts[session]..];
        let blocks = KvBlocks { keys: plane, values: plane, table, block_positions: KV_BLOCK };
        let (mut mixed, mut scores) = (vec![0.0; heads * kv.kv_rank], vec![0.0; heads * (position + 1)]);
        cpu().attention(
            queries,
            kv.key_dim(),
            blocks,
            visible..position + 1,
            scale,
            None,
            &mut scores,
            &mut mixed,
        );
        mixed
    }

    /// The same on the device, over scratch for `room` splits (or as many as one token needs).
    fn attend_there(
        &self,
        gpu: &Gpu,
        tokens: &[(usize, usize, usize)],
        queries: &[f32],
        scale: f32,
        room: usize,
    ) -> Vec<f32> {
        self.attend_by(gpu, tokens, queries, scale, room, &[], None)
    }

    /// The same, cut in one of these ways if there are some, and into an int8 plane too.
    fn attend_by(
        &self,
        gpu: &Gpu,
        tokens: &[(usize, usize, usize)],
        queries: &[f32],
        scale: f32,
        room: usize,
        cuts: &[LatentCut],
        coded: Option<&CodedPlane>,
    ) -> Vec<f32> {
        let kv = self.kv;
        let heads = queries.len() / tokens.len() / kv.key_dim();
        let visible = tokens.iter().map(|&(_, position, first)| position + 1 - first).max().unwrap();
        let end = tokens.iter().map(|&(_, position, _)| position + 1).max().unwrap();
        let row = |&(session, position, first): &(usize, usize, usize)| {
            [position as u32, self.starts[session] as u32, first as u32, 0]
        };
        let rows = words(gpu, &tokens.iter().flat_map(row).collect::<Vec<_>>());
        let tables = words(gpu, &self.tables);
        let rows = Rows { rows: &rows, tables: &tables };
        let (queries, cache) = (floats(gpu, queries), upload(gpu, &self.bytes));
        let bytes = (room * heads * (kv.kv_rank + 2) * 4) as u64;
        let scratch = AttentionScratch::new(gpu, heads, kv.kv_rank, visible, bytes).unwrap();
        let n = tokens.len() * heads * kv.kv_rank;
        let out = stale(gpu, n + 4);
        let outputs = AttentionOutputs { plane: Some(&out), coded, gate: None };
        let t = tokens.len();
        let attention = if cuts.is_empty() {
            LatentAttention::new(gpu, t, kv, heads, scale, &queries, &cache, rows, &scratch, outputs)
        } else {
            LatentAttention::tuned(gpu, t, kv, heads, scale, &queries, &cache, rows, &scratch, outputs, cuts)
        };
        let attention = attention.unwrap();
        run(gpu, |step| attention.record(step, t, visible, end));
        let all = read(gpu, &out);
        assert_stale(&all[n..]);
        all[..n].to_vec()
    }
}

#[test]
fn latent_attention_is_the_cpus_within_the_tolerance() {
    let Some(gpu) = gpu() else { return };
    for (i, ((kv_rank, rope_dim), heads)) in SHAPES.into_iter().zip([20, 3, 16, 9]).enumerate() {
        for (j, (format, _)) in FORMATS.into_iter().enumerate() {
            if i > 1 && (i + j) % 3 != 0 {
                continue;
            }
            let kv = LatentLayout { format, kv_rank, rope_dim };
            let mut random = Random((7 * i + j) as u64);
            let cache = Latents::new(kv, &[290, 40], &mut random);
            let tokens = [(0, 289, 0), (1, 0, 0), (0, 127, 0), (0, 128, 0), (1, 39, 0), (0, 260, 131)];
            let queries = random.values(tokens.len() * heads * kv.key_dim());
            let got = cache.attend_there(gpu, &tokens, &queries, 0.07, 1 << 12);
            for (t, &token) in tokens.iter().enumerate() {
                let own = &queries[t * heads * kv.key_dim()..(t + 1) * heads * kv.key_dim()];
                let expected = cache.attend(token, own, 0.07);
                let got = &got[t * heads * kv_rank..(t + 1) * heads * kv_rank];
                assert_close(got, &expected, 2e-5, false, &format!("{kv:?} {heads} {token:?}"));
            }
        }
    }
}

#[test]
fn a_token_gets_the_same_latents_alone_among_others_and_in_rounds() {
    let Some(gpu) = gpu() else { return };
    let heads = 18;
    for (kv_rank, rope_dim) in [(512, 64), (64, 12)] {
        let kv = LatentLayout { format: KvFormat::F16, kv_rank, rope_dim };
        let mut random = Random(kv_rank as u64);
        let cache = Latents::new(kv, &[400, 140], &mut random);
        let tokens: Vec<_> = (0..36).map(|i| (i % 2, (37 * i) % 140, 0)).chain([(0, 399, 0)]).collect();
        let queries = random.values(tokens.len() * heads * kv.key_dim());
        // So many have workgroups enough for many heads each; few tokens take narrower ones.
        let all = cache.attend_there(gpu, &tokens, &queries, 0.1, 1 << 12);
        assert_eq!(all, cache.attend_there(gpu, &tokens, &queries, 0.1, 9), "rounds");
        for t in [0, 7, 20, 35, 36] {
            let (q, v) = (heads * kv.key_dim(), heads * kv_rank);
            let one = cache.attend_there(gpu, &tokens[t..=t], &queries[t * q..(t + 1) * q], 0.1, 0);
            assert_eq!(one, all[t * v..(t + 1) * v], "token {t}");
        }
    }
}

/// Whatever a workgroup has, and whether it ends with outputs (where all positions are of the first split) or leaves them to be joined.
#[test]
fn cuts_change_no_bits_of_latents() {
    let Some(gpu) = gpu() else { return };
    let cut = |threads, heads, ahead, values_ahead| LatentCut { threads, heads, ahead, values_ahead };
    for (i, ((kv_rank, rope_dim), heads)) in SHAPES.into_iter().zip([5, 3, 128, 9]).enumerate() {
        for (j, (format, _)) in FORMATS.into_iter().enumerate() {
            if (i + j) % 3 != 1 {
                continue;
            }
            let kv = LatentLayout { format, kv_rank, rope_dim };
            let mut random = Random((5 * i + j) as u64);
            let cache = Latents::new(kv, &[258, 129], &mut random);
            for tokens in [
                vec![(0, 127, 0)],
                vec![(1, 128, 0)],
                vec![(0, 5, 0), (1, 126, 97)],
                vec![(0, 257, 0), (1, 0, 0), (0, 256, 130), (0, 140, 127)],
            ] {
                let queries = random.values(tokens.len() * heads * kv.key_dim());
                let expected = cache.attend_there(gpu, &tokens, &queries, 0.2, 1 << 10);
                let cuts = [
                    cut(128, 1, 3, 4),
                    cut(512, 4, 1, 8),
                    cut(128, 8, 2, 32),
                    cut(256, 2, 4, 16),
                    cut(256, 16, 1, 8),
                    cut(512, 1, 9, 32),
                ];
                for cut in cuts.into_iter().skip(i % 2).step_by(2) {
                    let got = cache.attend_by(gpu, &tokens, &queries, 0.2, 0, &[cut], None);
                    assert_eq!(got, expected, "{kv:?}, {heads} heads, {tokens:?}, {cut:?}");
                }
            }
        }
    }
}

#[test]
fn outputs_over_a_latent_are_quantised_as_the_cpu_would() {
    let Some(gpu) = gpu() else { return };
    let heads = 3;
    for (kv_rank, group) in [(512, 64), (64, 32), (96, 64)] {
        let kv = LatentLayout { format: KvFormat::F16, kv_rank, rope_dim: 8 };
        let mut random = Random(kv_rank as u64 + 1);
        let cache = Latents::new(kv, &[150], &mut random);
        for tokens in [vec![(0, 100, 0), (0, 127, 0)], vec![(0, 149, 0)]] {
            let queries = random.values(tokens.len() * heads * kv.key_dim());
            let coded = stale_coded(gpu, tokens.len(), heads * kv_rank, group);
            let got = cache.attend_by(gpu, &tokens, &queries, 0.2, 0, &[], Some(&coded));
            assert_eq!(got, cache.attend_there(gpu, &tokens, &queries, 0.2, 0), "{kv_rank} {tokens:?}");
            assert_coded(gpu, &coded, &got, tokens.len());
        }
    }
}

#[test]
fn a_latent_that_is_not_a_number_reaches_those_who_see_it_and_no_others() {
    let Some(gpu) = gpu() else { return };
    let kv = LatentLayout { format: KvFormat::F16, kv_rank: 64, rope_dim: 16 };
    let mut random = Random(3);
    let mut cache = Latents::new(kv, &[300], &mut random);
    cache.store(0, 255, &[f32::NAN; 80]);
    let tokens: Vec<_> = (250..262).map(|position| (0, position, 0)).chain([(0, 299, 256)]).collect();
    let queries = random.values(tokens.len() * 2 * 80);
    let got = cache.attend_there(gpu, &tokens, &queries, 0.3, 1 << 10);
    for (&(_, position, first), row) in tokens.iter().zip(got.chunks_exact(2 * 64)) {
        let sees = (first..=position).contains(&255);
        assert!(row.iter().all(|v| v.is_nan() == sees), "{first}..={position}");
    }
}

#[test]
fn what_is_appended_is_the_cpus_row_and_queries_have_its_bits() {
    let Some(gpu) = gpu() else { return };
    let neighbours = [RopePairs::Neighbours, RopePairs::Halves];
    for (i, ((kv_rank, rope_dim), q_rank)) in SHAPES.into_iter().zip([1536, 48, 0, 200]).enumerate() {
        for (j, (format, _)) in FORMATS.into_iter().enumerate() {
            let kv = LatentLayout { format, kv_rank, rope_dim };
            let mut random = Random((11 * i + j) as u64);
            let mut cache = Latents::empty(kv, &[70, 33], &mut random);
            let tokens: [(usize, usize); 4] = [(0, 0), (0, 69), (1, 32), (1, 3)];
            let (pairs, context, eps) = (neighbours[(i + j) % 2], 70, 1e-5);
            // Queries in front, something else between, and behind.
            let (kv_at, stride) = (q_rank + 4, q_rank + 4 + kv.key_dim() + 3);
            let x = random.values(tokens.len() * stride);
            let weights = random.values(kv_rank + q_rank);
            let table = random.values(context * rope_dim);
            let (plane, norms, angles) = (floats(gpu, &x), floats(gpu, &weights), floats(gpu, &table));
            let row =
                |&(session, position): &(usize, usize)| [position as u32, cache.starts[session] as u32, 0, 0];
            let rows = words(gpu, &tokens.iter().flat_map(row).collect::<Vec<_>>());
            let tables = words(gpu, &cache.tables);
            let there = upload(gpu, &cache.bytes);
            let low = stale(gpu, tokens.len() * q_rank + 4);
            let group = [32, 64, 128][j];
            let coded = stale_coded(gpu, tokens.len(), q_rank.max(1), group);
            let input = |plane_out, coded| LatentInput {
                plane: &plane,
                stride,
                kv_at,
                queries: (q_rank > 0).then_some(LatentQueries {
                    rank: q_rank,
                    at: 0,
                    plane: plane_out,
                    coded,
                }),
                norm: LatentNorm { weights: &norms, eps },
                angles: Angles { table: &angles, positions: context, dim: rope_dim, pairs },
            };
            for input in [input(Some(&low), None), input(None, Some(&coded))] {
                let rows = Rows { rows: &rows, tables: &tables };
                let append = LatentAppend::new(gpu, tokens.len(), kv, input, rows, &there).unwrap();
                run(gpu, |step| append.record(step, tokens.len()));
            }
            let style = match pairs {
                RopePairs::Halves => RopeStyle::Half,
                RopePairs::Neighbours => RopeStyle::Interleaved,
            };
            let mut expected_low = Vec::new();
            for (t, &(session, position)) in tokens.iter().enumerate() {
                let of_token = &x[t * stride..(t + 1) * stride];
                let mut row = of_token[kv_at..kv_at + kv.key_dim()].to_vec();
                cpu().rms_norm_in_place(&mut row[..kv_rank], &weights[..kv_rank], eps);
                let own = &table[position * rope_dim..(position + 1) * rope_dim];
                let cos: Vec<f32> = own.iter().step_by(2).copied().collect();
                let sin: Vec<f32> = own.iter().skip(1).step_by(2).copied().collect();
                cpu().rope(&mut row[kv_rank..], rope_dim, &cos, &sin, style);
                cache.store(session, position, &row);
                if q_rank > 0 {
                    let mut q = of_token[..q_rank].to_vec();
                    cpu().rms_norm_in_place(&mut q, &weights[kv_rank..], eps);
                    expected_low.extend(q);
                }
            }
            let name = format!("{kv:?} {q_rank} {pairs:?}");
            let got = gpu.download(&there).unwrap();
            // What a row is padded with is nobody's.
            let is_padding = |at: usize| {
                let (at, bytes) = (at % kv.row_bytes(), kv.row_bytes());
                match format {
                    KvFormat::F32 => at >= 4 * kv.key_dim(),
                    KvFormat::F16 => at >= 2 * kv.key_dim(),
                    KvFormat::Q8 => (kv.key_dim()..bytes - 4).contains(&at),
                }
            };
            let differ = |(at, (a, b)): &(usize, (&u8, &u8))| a != b && !is_padding(*at);
            let wrong = got.iter().zip(&cache.bytes).enumerate().filter(differ).count();
            assert_eq!(wrong, 0, "bytes of the cache, {name}");
            if q_rank > 0 {
                let got = read(gpu, &low);
                assert_close(&got[..expected_low.len()], &expected_low, 0.0, true, &name);
                assert_stale(&got[expected_low.len()..]);
                assert_coded(gpu, &coded, &expected_low, tokens.len());
            }
        }
    }
}

/// Encodings of a head's matrix, and the group of its inputs if they are int8.
fn forms() -> Vec<(Encoding, Option<usize>)> {
    let q = |bits, group, zero| Encoding::Uniform(Uniform::new(bits, group, zero).unwrap());
    vec![
        (q(8, 64, Zero::Symmetric), Some(64)),
        (q(4, 32, Zero::Affine), Some(32)),
        (q(4, 64, Zero::Symmetric), Some(64)),
        (q(8, 64, Zero::Symmetric), None),
        (Encoding::Bf16, None),
        (Encoding::F32, None),
    ]
}

#[test]
fn products_head_by_head_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    let (heads, tokens) = (5, 9);
    for (rows, cols) in [(64, 128), (32, 28), (128, 512)] {
        for (encoding, group) in forms() {
            let name = format!("{encoding} {group:?} {rows} x {cols}");
            let mut random = Random(rows as u64);
            let mut bytes = vec![0; encoding.tensor_bytes(heads * rows, cols).unwrap()];
            encoding.encode(&random.values(heads * rows * cols), cols, &mut bytes);
            let matrix = Matrix::new(&bytes, heads * rows, cols, encoding);
            // Of a wider plane, and into one.
            let (head_stride, out_stride) = (cols + 4, rows + 8);
            let x = random.values(tokens * heads * head_stride);
            let mut expected = vec![f32::from_bits(STALE); tokens * heads * out_stride];
            let input = CpuHeadInput { x: &x, stride: head_stride, coded: group.is_some() };
            let mut scratch = HeadScratch::with_capacity(tokens, heads, cols);
            head_matmul(
                &Pool::new(1, false),
                cpu(),
                &matrix,
                heads,
                input,
                &mut scratch,
                &mut expected,
                out_stride,
            );
            let plane = floats(gpu, &x);
            let part = HeadPlane::new(gpu, tokens, heads, cols, group).unwrap();
            let from = HeadColumns { plane: &plane, stride: heads * head_stride, at: 0, head_stride };
            let input = HeadInput::new(gpu, tokens, heads, cols, from, None, &part).unwrap();
            let weights = Weights::new(upload(gpu, &bytes), heads * rows, cols, encoding);
            let mut first: Option<Vec<u32>> = None;
            for n in [9, 1, 2, 4] {
                let out = stale(gpu, expected.len());
                let product = HeadMatmul::new(gpu, &weights, heads, &part, tokens, &out, out_stride).unwrap();
                run(gpu, |step| {
                    input.record(step, n);
                    product.record(step, n);
                });
                let (got, len) = (read_words(gpu, &out), n * heads * out_stride);
                assert!(got[len..].iter().all(|w| *w == STALE), "{name}: written past the end");
                let all = first.get_or_insert_with(|| got.clone());
                assert_eq!(got[..len], all[..len], "{name}: {n} tokens");
                let got: Vec<f32> = got.into_iter().map(f32::from_bits).collect();
                for (got, expected) in
                    got[..len].chunks_exact(out_stride).zip(expected.chunks_exact(out_stride))
                {
                    assert_stale(&got[rows..]);
                    let tolerance = 2e-5 * (cols as f32).sqrt();
                    assert_close(&got[..rows], &expected[..rows], tolerance, group.is_some(), &name);
                }
            }
        }
    }
}

#[test]
fn what_follows_a_heads_first_columns_is_turned_into_the_queries() {
    let Some(gpu) = gpu() else { return };
    let (heads, tokens, context) = (6, 3, 50);
    for (cols, dim, pairs, group) in [
        (128, 64, RopePairs::Neighbours, Some(64)),
        (28, 12, RopePairs::Halves, Some(16)),
        (28, 12, RopePairs::Neighbours, None),
    ] {
        let mut random = Random(cols as u64);
        let (head_stride, at, kv_rank) = (cols + dim, 8, 64);
        let (stride, key_dim) = (at + heads * head_stride, kv_rank + dim);
        let x = random.values(tokens * stride);
        let table = random.values(context * dim);
        let (plane, angles) = (floats(gpu, &x), floats(gpu, &table));
        let positions = [49usize, 0, 17];
        let rows = words(gpu, &positions.map(|p| [p as u32, 0, 0, 0]).concat());
        let tables = words(gpu, &[0]);
        let rows = Rows { rows: &rows, tables: &tables };
        let queries = stale(gpu, tokens * heads * key_dim);
        let part = match group {
            Some(group) => HeadPlane::Coded(stale_coded(gpu, tokens * heads, cols, group)),
            None => HeadPlane::Float(stale(gpu, tokens * heads * cols)),
        };
        let from = HeadColumns { plane: &plane, stride, at, head_stride };
        let angles = Angles { table: &angles, positions: context, dim, pairs };
        let turn = HeadTurn { angles, rows, queries: &queries, key_dim };
        let input = HeadInput::new(gpu, tokens, heads, cols, from, Some(turn), &part).unwrap();
        run(gpu, |step| input.record(step, tokens));
        let got = read(gpu, &queries);
        let mut firsts = Vec::new();
        for t in 0..tokens {
            let own = &table[positions[t] * dim..(positions[t] + 1) * dim];
            let cos: Vec<f32> = own.iter().step_by(2).copied().collect();
            let sin: Vec<f32> = own.iter().skip(1).step_by(2).copied().collect();
            let style = match pairs {
                RopePairs::Halves => RopeStyle::Half,
                RopePairs::Neighbours => RopeStyle::Interleaved,
            };
            for head in 0..heads {
                let from = &x[t * stride + at + head * head_stride..][..head_stride];
                firsts.extend_from_slice(&from[..cols]);
                let mut rest = from[cols..].to_vec();
                cpu().rope(&mut rest, dim, &cos, &sin, style);
                let got = &got[(t * heads + head) * key_dim..][..key_dim];
                assert_stale(&got[..kv_rank]);
                assert_close(&got[kv_rank..], &rest, 0.0, true, &format!("{cols} {dim} {pairs:?}"));
            }
        }
        match &part {
            HeadPlane::Float(plane) => assert_close(&read(gpu, plane), &firsts, 0.0, true, "first columns"),
            HeadPlane::Coded(plane) => assert_coded(gpu, plane, &firsts, tokens * heads),
        }
    }
}
