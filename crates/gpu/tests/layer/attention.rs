//! Attention over the cache.

use super::*;

/// A cache on both sides: sessions with their blocks, every row that was not stored not a number.
struct Cache {
    kv: KvLayout,
    ty: KvType,
    bytes: Vec<u8>,
    tables: Vec<u32>,
    /// Where each session's table begins.
    starts: Vec<usize>,
}

impl Cache {
    /// Sessions of `lengths` positions.
    fn new(kv: KvLayout, lengths: &[usize], random: &mut Random) -> Self {
        let ty = FORMATS.iter().find(|(f, _)| *f == kv.format).unwrap().1;
        let counts = lengths.iter().map(|n| n.div_ceil(KV_BLOCK));
        let total: usize = counts.clone().sum();
        // Blocks in an order of their own, with one that nobody has in front.
        let mut tables: Vec<u32> = (1..=total as u32).collect();
        (1..total).for_each(|i| tables.swap(i, random.below(i + 1)));
        let starts = counts.scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect();
        let bytes = vec![0xff; (total + 1) * kv.block_bytes()];
        let mut cache = Self { kv, ty, bytes, tables, starts };
        for (session, &length) in lengths.iter().enumerate() {
            for position in 0..length {
                for head in 0..kv.n_kv_heads {
                    let key = random.values(kv.head_dim);
                    let value = random.values(kv.value_dim);
                    cache.store(session, position, head, &key, &value);
                }
            }
        }
        cache
    }

    fn store(&mut self, session: usize, position: usize, head: usize, key: &[f32], value: &[f32]) {
        let block = self.tables[self.starts[session] + position / KV_BLOCK];
        for (plane, x) in [key, value].into_iter().enumerate() {
            let at = row_at(&self.kv, block, plane, head, position);
            cpu().store_kv_row(self.ty, x, &mut self.bytes[at..at + self.kv.row_bytes()]);
        }
    }

    /// What the CPU makes of a token's queries: (session, position, first position it sees).
    fn attend(
        &self,
        (session, position, visible): (usize, usize, usize),
        queries: &[f32],
        scale: f32,
        sinks: Option<&[f32]>,
    ) -> Vec<f32> {
        let kv = &self.kv;
        let per_kv = queries.len() / kv.head_dim / kv.n_kv_heads;
        let mut out = Vec::new();
        for head in 0..kv.n_kv_heads {
            let plane = |plane: usize| KvPlane {
                ty: self.ty,
                bytes: &self.bytes,
                row_bytes: kv.row_bytes(),
                block_stride: kv.block_bytes(),
                head_offset: (plane * kv.n_kv_heads + head) * KV_BLOCK * kv.row_bytes(),
            };
            let blocks = KvBlocks {
                keys: plane(0),
                values: plane(1),
                table: &self.tables[self.starts[session]..],
                block_positions: KV_BLOCK,
            };
            let mut mixed = vec![0.0; per_kv * kv.value_dim];
            let mut scores = vec![0.0; per_kv * (position + 1)];
            cpu().attention(
                &queries[head * per_kv * kv.head_dim..(head + 1) * per_kv * kv.head_dim],
                kv.head_dim,
                blocks,
                visible..position + 1,
                scale,
                sinks.map(|sinks| &sinks[head * per_kv..(head + 1) * per_kv]),
                &mut scores,
                &mut mixed,
            );
            out.extend(mixed);
        }
        out
    }
}

/// A step's attention on the device, over scratch for `room` splits (or as many as one token needs).
fn attend(
    gpu: &Gpu,
    cache: &Cache,
    tokens: &[(usize, usize, usize)],
    queries: &[f32],
    scale: f32,
    sinks: Option<&[f32]>,
    room: usize,
    group: Option<usize>,
) -> Vec<f32> {
    let kv = cache.kv;
    let n_heads = queries.len() / tokens.len() / kv.head_dim;
    let width = n_heads * kv.value_dim;
    let visible = tokens.iter().map(|&(_, position, first)| position + 1 - first).max().unwrap();
    let bytes = (room * n_heads * (kv.value_dim + 2) * 4) as u64;
    let scratch = AttentionScratch::new(gpu, n_heads, kv.value_dim, visible, bytes).unwrap();
    let rows: Vec<u32> = tokens
        .iter()
        .flat_map(|&(session, position, first)| {
            [position as u32, cache.starts[session] as u32, first as u32, 0]
        })
        .collect();
    let plane = stale(gpu, (tokens.len() + 1) * width);
    let coded = group.map(|group| stale_coded(gpu, tokens.len() + 1, width, group));
    let sinks = sinks.map(|sinks| floats(gpu, sinks));
    let attention = Attention::new(
        gpu,
        tokens.len(),
        kv,
        AttentionHeads { n_heads, scale, sinks: sinks.as_ref() },
        &floats(gpu, queries),
        &upload(gpu, &cache.bytes),
        Rows { rows: &words(gpu, &rows), tables: &words(gpu, &cache.tables) },
        &scratch,
        AttentionOutputs { plane: Some(&plane), coded: coded.as_ref(), gate: None },
        None,
    )
    .unwrap();
    // If all are in the first split that is known, and then it is not; as tokens of one session, whatever they are, and as
    // tokens of as many.
    let end = tokens.iter().map(|&(_, position, _)| position + 1).max().unwrap();
    let [got, again, apart] =
        [(end, 1), (usize::MAX, 1), (usize::MAX, tokens.len())].map(|(end, sessions)| {
            gpu.write(&plane, 0, &STALE.to_le_bytes().repeat((tokens.len() + 1) * width));
            run(gpu, |step| attention.record(step, tokens.len(), sessions, visible, end));
            let mut got = read(gpu, &plane);
            let rest = got.split_off(tokens.len() * width);
            assert_stale(&rest);
            if let Some(coded) = &coded {
                assert_coded(gpu, coded, &got, tokens.len());
            }
            got.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
    assert_eq!(got, again, "one kernel or two");
    assert_eq!(again, apart, "a tile of tokens, or one token a workgroup");
    got.into_iter().map(f32::from_bits).collect()
}

fn check_attention(
    gpu: &Gpu,
    kv: KvLayout,
    per_kv: usize,
    lengths: &[usize],
    tokens: &[(usize, usize, usize)],
    sinks: bool,
    group: Option<usize>,
) {
    let mut random = Random(per_kv as u64 * 1000 + kv.head_dim as u64);
    let cache = Cache::new(kv, lengths, &mut random);
    let n_heads = per_kv * kv.n_kv_heads;
    let queries: Vec<f32> = random.values(tokens.len() * n_heads * kv.head_dim);
    let sinks: Option<Vec<f32>> = sinks.then(|| random.values(n_heads));
    let scale = 1.7;
    let got = attend(gpu, &cache, tokens, &queries, scale, sinks.as_deref(), 1 << 12, group);
    let width = n_heads * kv.head_dim;
    let expected: Vec<f32> = tokens
        .iter()
        .zip(queries.chunks_exact(width))
        .flat_map(|(&token, queries)| cache.attend(token, queries, scale, sinks.as_deref()))
        .collect();
    assert_close(&got, &expected, 2e-5, false, &format!("{kv:?}, {per_kv} queries a head"));
}

#[test]
fn attention_is_the_cpus_for_every_shape_of_heads() {
    let Some(gpu) = gpu() else { return };
    let layout =
        |format, n_kv_heads, head_dim, value_dim| KvLayout { format, n_kv_heads, head_dim, value_dim };
    let tokens = [(0, 0, 0), (0, 299, 0), (1, 39, 0), (0, 299, 130), (0, 255, 255), (0, 256, 127)];
    let lengths = [300, 40];
    let first = [(0, 0, 0), (0, 127, 0), (1, 39, 0), (0, 100, 30)];
    for (format, _) in FORMATS {
        check_attention(gpu, layout(format, 2, 64, 64), 4, &lengths, &first, false, Some(64));
        check_attention(gpu, layout(format, 1, 36, 36), 3, &lengths, &first, true, None);
        check_attention(gpu, layout(format, 2, 64, 64), 4, &lengths, &tokens, false, Some(64));
        check_attention(gpu, layout(format, 1, 36, 52), 3, &lengths, &tokens, true, Some(32));
    }
    check_attention(gpu, layout(KvFormat::F16, 1, 128, 128), 16, &lengths, &tokens, false, Some(128));
    check_attention(gpu, layout(KvFormat::F16, 2, 128, 128), 8, &lengths, &first, false, Some(64));
    check_attention(gpu, layout(KvFormat::F16, 1, 128, 128), 9, &lengths, &first, false, Some(32));
    check_attention(gpu, layout(KvFormat::Q8, 1, 256, 256), 9, &lengths, &tokens[..3], false, None);
    check_attention(gpu, layout(KvFormat::F32, 3, 4, 4), 1, &lengths, &tokens, true, Some(16));
    // So many that the queries of a kv head share a workgroup.
    let many: Vec<_> = (285..300).map(|position| (0, position, 0)).collect();
    check_attention(gpu, layout(KvFormat::F16, 4, 64, 64), 4, &lengths, &many, false, Some(64));
}

/// How many decode together decides whether a kv head's queries share a workgroup: not what they get.
#[test]
fn a_token_gets_the_same_among_many_and_alone() {
    let Some(gpu) = gpu() else { return };
    for (format, per_kv) in [(KvFormat::F16, 4), (KvFormat::Q8, 8), (KvFormat::F32, 5)] {
        let kv = KvLayout { format, n_kv_heads: 4, head_dim: 32, value_dim: 32 };
        let mut random = Random(per_kv as u64 + 50);
        let cache = Cache::new(kv, &[300], &mut random);
        let tokens: Vec<_> = (288..300).map(|position| (0, position, 0)).collect();
        let width = per_kv * 4 * 32;
        let queries = random.values(tokens.len() * width);
        let all = attend(gpu, &cache, &tokens, &queries, 0.5, None, 1 << 12, Some(64));
        for (t, all) in all.chunks_exact(width).enumerate() {
            let query = &queries[t * width..(t + 1) * width];
            let one = attend(gpu, &cache, &tokens[t..=t], query, 0.5, None, 1 << 12, Some(64));
            assert_eq!(one, all, "{format:?}, token {t}");
        }
    }
}

/// Tokens of several sessions, some of them a prompt's.
fn mixed_tokens() -> Vec<(usize, usize, usize)> {
    let mut tokens: Vec<_> = (250..270).map(|position| (0, position, 0)).collect();
    tokens.extend([(1, 17, 0), (2, 5, 0), (0, 290, 200)]);
    tokens.extend((125..134).map(|position: usize| (1, position, position.saturating_sub(100))));
    tokens
}

#[test]
fn what_a_token_attends_to_does_not_depend_on_the_others_or_on_the_scratch() {
    let Some(gpu) = gpu() else { return };
    let tokens = mixed_tokens();
    for (format, per_kv) in [(KvFormat::F16, 2), (KvFormat::Q8, 1), (KvFormat::F32, 8)] {
        let kv = KvLayout { format, n_kv_heads: 2, head_dim: 32, value_dim: 32 };
        let mut random = Random(per_kv as u64);
        let cache = Cache::new(kv, &[300, 140, 8], &mut random);
        let width = per_kv * 2 * 32;
        let queries = random.values(tokens.len() * width);
        let all = attend(gpu, &cache, &tokens, &queries, 0.5, None, 1 << 12, None);
        // Room for a few tokens at once only.
        assert_eq!(all, attend(gpu, &cache, &tokens, &queries, 0.5, None, 13, None), "rounds");
        for t in [0, 7, 19, 21, 22, 25, tokens.len() - 1] {
            let row = t * width..(t + 1) * width;
            let one = attend(gpu, &cache, &tokens[t..=t], &queries[row.clone()], 0.5, None, 0, None);
            assert_eq!(one, all[row.clone()], "token {t}");
            let expected = cache.attend(tokens[t], &queries[row], 0.5, None);
            assert_close(&one, &expected, 2e-5, false, "token alone");
        }
    }
}

/// Tokens that fill tiles of the kernel for prompts, and begin and end within them: alone, they never meet it.
#[test]
fn a_prompt_has_the_bits_of_its_tokens_one_by_one() {
    let Some(gpu) = gpu() else { return };
    let [f32s, f16s, q8s] = [KvFormat::F32, KvFormat::F16, KvFormat::Q8];
    let shapes = [
        (f16s, 8, 128, 128),
        (f16s, 16, 64, 64),
        (f16s, 5, 96, 96),
        (f16s, 4, 192, 128),
        (q8s, 2, 64, 64),
        (q8s, 8, 128, 64),
        (f32s, 3, 64, 128),
        (f32s, 1, 80, 80),
        (f16s, 8, 256, 256),
    ];
    for (i, (format, per_kv, head_dim, value_dim)) in shapes.into_iter().enumerate() {
        let kv = KvLayout { format, n_kv_heads: 3 + i % 2, head_dim, value_dim };
        let mut random = Random(i as u64 + 70);
        let cache = Cache::new(kv, &[300, 150], &mut random);
        // Over the end of a split, a few of another session in between, some with a window that begins in a split of its own.
        let n = [17, 33, 64, 31][i % 4];
        let mut tokens: Vec<_> = (0..n).map(|t| (0, 100 + t, 0)).collect();
        tokens.extend((140..150).map(|position| (1, position, 0)));
        tokens.extend((270..290).map(|position| (0, position, position - 145)));
        let (n_heads, queries_of) = (per_kv * kv.n_kv_heads, per_kv * kv.n_kv_heads * head_dim);
        let queries: Vec<f32> = random.values(tokens.len() * queries_of);
        let sinks: Option<Vec<f32>> = (i % 3 == 0).then(|| random.values(n_heads));
        let all = attend(gpu, &cache, &tokens, &queries, 0.7, sinks.as_deref(), 1 << 12, None);
        let width = n_heads * value_dim;
        for t in [0, n - 1, n, n + 9, n + 10, tokens.len() - 1] {
            let query = &queries[t * queries_of..(t + 1) * queries_of];
            let one = attend(gpu, &cache, &tokens[t..=t], query, 0.7, sinks.as_deref(), 0, None);
            assert_eq!(one, all[t * width..(t + 1) * width], "{kv:?}, {per_kv} queries a head, token {t}");
            let expected = cache.attend(tokens[t], query, 0.7, sinks.as_deref());
            assert_close(&one, &expected, 2e-5, false, &format!("{kv:?}, token {t}"));
        }
    }
}

#[test]
fn a_row_that_is_not_a_number_reaches_those_who_see_it_and_no_others() {
    let Some(gpu) = gpu() else { return };
    for (format, _) in FORMATS {
        let kv = KvLayout { format, n_kv_heads: 2, head_dim: 64, value_dim: 64 };
        let mut random = Random(5);
        let mut cache = Cache::new(kv, &[300], &mut random);
        // A key of head 0 and a value of head 1.
        let good = random.values(64);
        cache.store(0, 255, 0, &[f32::NAN; 64], &good);
        cache.store(0, 258, 1, &good, &[f32::NAN; 64]);
        // Those who see neither, one, both; a window behind them.
        let tokens: Vec<_> =
            (240..285).map(|position| (0, position, 0)).chain([(0, 299, 259), (0, 299, 256)]).collect();
        let queries = random.values(tokens.len() * 128);
        let got = attend(gpu, &cache, &tokens, &queries, 0.5, None, 1 << 12, None);
        for (&(_, position, first), row) in tokens.iter().zip(got.chunks_exact(128)) {
            let sees = |bad: usize| (first..=position).contains(&bad);
            for (head, bad) in [(0, 255), (1, 258)] {
                let row = &row[head * 64..(head + 1) * 64];
                assert!(
                    row.iter().all(|v| v.is_nan() == sees(bad)),
                    "{format:?}: {first}..={position}, head {head}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]
    #[test]
    fn attention_over_any_rows_is_the_cpus(seed in any::<u64>()) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let mut random = Random(seed);
        let kv = KvLayout { format: KvFormat::F16, n_kv_heads: 4, head_dim: 64, value_dim: 64 };
        let lengths: Vec<_> = (0..3).map(|_| 1 + random.below(400)).collect();
        let cache = Cache::new(kv, &lengths, &mut random);
        let tokens: Vec<_> = (0..1 + random.below(40)).map(|_| {
            let session = random.below(3);
            let position = random.below(lengths[session]);
            (session, position, if random.below(2) == 0 { 0 } else { random.below(position + 1) })
        }).collect();
        let queries = random.values(tokens.len() * 512);
        let room = 5 + random.below(60);
        let got = attend(gpu, &cache, &tokens, &queries, 1.0, None, room, None);
        for (t, &token) in tokens.iter().enumerate() {
            let row = t * 512..(t + 1) * 512;
            let expected = cache.attend(token, &queries[row.clone()], 1.0, None);
            assert_close(&got[row], &expected, 2e-5, false, &format!("{token:?}"));
        }
    }
}

/// One token whose query, key and value attention makes itself: the bits of both apart, in its outputs and in the cache.
fn check_turning(
    gpu: &Gpu,
    kv: KvLayout,
    per_kv: usize,
    (dim, pairs): (usize, RopePairs),
    norm: Option<bool>,
    (bias, sinks): (bool, bool),
    (position, first): (usize, usize),
    group: usize,
) -> bool {
    let what = format!("{kv:?}, {per_kv}, {dim}, {pairs:?}, {norm:?}, {bias}, {sinks}, {position}, {first}");
    let KvLayout { n_kv_heads, head_dim, value_dim, .. } = kv;
    let n_heads = per_kv * n_kv_heads;
    let mut random = Random(position as u64 + 1000 * head_dim as u64);
    let context = position + 1;
    let mut cache = Cache::new(kv, &[context], &mut random);
    // Whatever is at its own position is to be written, and not to be read.
    for head in 0..n_kv_heads {
        let block = cache.tables[position / KV_BLOCK];
        for plane in 0..2 {
            let at = row_at(&kv, block, plane, head, position);
            cache.bytes[at..at + kv.row_bytes()].fill(0xff);
        }
    }
    let at = [0, n_heads * head_dim, (n_heads + n_kv_heads) * head_dim];
    let stride = at[2] + n_kv_heads * value_dim;
    let (plane, biases) = (floats(gpu, &random.values(stride)), floats(gpu, &random.values(stride)));
    let table = floats(gpu, &random.values(context * dim));
    let norms = floats(gpu, &random.values((n_heads + n_kv_heads) * head_dim));
    let input = RopeInput {
        projections: Projections { plane: &plane, stride, at, bias: bias.then_some(&biases) },
        norm: norm.map(|whole| QkNorm { weights: &norms, eps: 1e-6, whole }),
        angles: Angles { table: &table, positions: context, dim, pairs },
    };
    let rows = words(gpu, &[position as u32, 0, first as u32, 0]);
    let tables = words(gpu, &cache.tables);
    let rows = Rows { rows: &rows, tables: &tables };
    let sink_values = floats(gpu, &random.values(n_heads));
    let heads = AttentionHeads { n_heads, scale: 0.2, sinks: sinks.then_some(&sink_values) };
    let visible = context - first;
    let scratch = AttentionScratch::new(gpu, n_heads, value_dim, visible, 1 << 20).unwrap();
    let width = n_heads * value_dim;
    // Whether it is known that all are in the first split.
    let run_one = |turns: bool, end: usize| {
        let bytes = upload(gpu, &cache.bytes);
        let queries = stale(gpu, n_heads * head_dim);
        let coded = stale_coded(gpu, 1, width, group);
        // Any columns of the plane will do for a gate.
        let gate = AttentionGate { plane: &plane, stride, at: 0 };
        let outputs =
            AttentionOutputs { plane: None, coded: Some(&coded), gate: (group == 64).then_some(gate) };
        let attention =
            Attention::new(gpu, 1, kv, heads, &queries, &bytes, rows, &scratch, outputs, Some(input))
                .unwrap();
        if turns && !attention.turns(visible) {
            return None;
        }
        let rope = RopeAppend::new(gpu, 1, n_heads, kv, input, rows, &queries, &bytes).unwrap();
        run(gpu, |step| {
            if turns {
                attention.record_turning(step, visible, end);
            } else {
                rope.record(step, 1);
                attention.record(step, 1, 1, visible, end);
            }
        });
        Some([&coded.codes, &coded.cells, &bytes].map(|slice| read_words(gpu, slice)))
    };
    let apart = run_one(false, context);
    for end in [context, usize::MAX] {
        let Some([codes, cells, bytes]) = run_one(true, end) else { return false };
        let [apart_codes, apart_cells, apart_bytes] = apart.as_ref().unwrap();
        assert!(bytes == *apart_bytes, "the cache of {what}");
        assert!(codes == *apart_codes && cells == *apart_cells, "outputs of {what}");
    }
    true
}

#[test]
fn attention_that_turns_a_lone_token_does_what_rope_and_attention_do() {
    let Some(gpu) = gpu() else { return };
    let kv = |format, n_kv_heads, head_dim, value_dim| KvLayout { format, n_kv_heads, head_dim, value_dim };
    let (halves, neighbours) = (RopePairs::Halves, RopePairs::Neighbours);
    let [f32s, f16s, q8s] = [KvFormat::F32, KvFormat::F16, KvFormat::Q8];
    let made = [
        check_turning(gpu, kv(f16s, 2, 128, 128), 4, (128, halves), Some(false), (false, false), (37, 0), 64),
        check_turning(gpu, kv(f16s, 2, 128, 128), 4, (128, halves), Some(false), (false, false), (0, 0), 64),
        check_turning(
            gpu,
            kv(f16s, 2, 128, 128),
            4,
            (128, halves),
            Some(false),
            (false, false),
            (128, 0),
            64,
        ),
        check_turning(gpu, kv(f32s, 1, 64, 64), 1, (32, neighbours), Some(true), (true, true), (95, 3), 32),
        check_turning(gpu, kv(q8s, 3, 20, 12), 2, (20, halves), None, (true, false), (127, 100), 32),
        check_turning(gpu, kv(q8s, 1, 96, 128), 3, (64, halves), Some(false), (false, true), (300, 170), 64),
    ];
    assert!(made.iter().all(|one| *one == made[0]), "{made:?}");
    eprintln!("made there: {}", made[0]);
}

/// Outputs of all tokens, recorded as one kernel if all are in the first split, or as several.
fn gated(
    gpu: &Gpu,
    cache: &Cache,
    n_heads: usize,
    tokens: &[(usize, usize, usize)],
    queries: &[f32],
    gate: Option<&[f32]>,
    coded: bool,
) -> Vec<u32> {
    let kv = cache.kv;
    let width = n_heads * kv.value_dim;
    let row = |&(session, position, first): &(usize, usize, usize)| {
        [position as u32, cache.starts[session] as u32, first as u32, 0]
    };
    let rows: Vec<u32> = tokens.iter().flat_map(row).collect();
    let scratch = AttentionScratch::new(gpu, n_heads, kv.value_dim, 300, 1 << 20).unwrap();
    let plane = stale(gpu, tokens.len() * width);
    let int8 = stale_coded(gpu, tokens.len(), width, 64);
    // Behind five other columns.
    let stride = width + 5;
    let columns: Vec<f32> =
        gate.unwrap_or(&[]).chunks(width).flat_map(|row| [&[f32::NAN; 5], row].concat()).collect();
    let columns = floats(gpu, &columns);
    let gate = gate.map(|_| AttentionGate { plane: &columns, stride, at: 5 });
    let outputs = if coded {
        AttentionOutputs { plane: None, coded: Some(&int8), gate }
    } else {
        AttentionOutputs { plane: Some(&plane), coded: None, gate }
    };
    let attention = Attention::new(
        gpu,
        tokens.len(),
        kv,
        AttentionHeads { n_heads, scale: 0.4, sinks: None },
        &floats(gpu, queries),
        &upload(gpu, &cache.bytes),
        Rows { rows: &words(gpu, &rows), tables: &words(gpu, &cache.tables) },
        &scratch,
        outputs,
        None,
    )
    .unwrap();
    let end = tokens.iter().map(|&(_, position, _)| position + 1).max().unwrap();
    run(gpu, |step| attention.record(step, tokens.len(), 1, end, end));
    if coded {
        [&int8.codes, &int8.cells].iter().flat_map(|slice| read_words(gpu, slice)).collect()
    } else {
        read_words(gpu, &plane)
    }
}

#[test]
fn a_gate_multiplies_outputs_with_its_sigmoid_and_changes_nothing_else() {
    let Some(gpu) = gpu() else { return };
    let kv = KvLayout { format: KvFormat::F16, n_kv_heads: 2, head_dim: 64, value_dim: 64 };
    let mut random = Random(91);
    let cache = Cache::new(kv, &[300], &mut random);
    let (n_heads, width) = (8, 512);
    // One split of a token, several, and a prompt.
    for range in [40..41, 299..300, 100..140] {
        let tokens: Vec<_> = range.map(|position| (0, position, 0)).collect();
        let queries = random.values(tokens.len() * width);
        let mut gate: Vec<f32> = random.values(tokens.len() * width).iter().map(|g| 4.0 * g).collect();
        gate[..3].copy_from_slice(&[f32::NEG_INFINITY, 100.0, 0.0]);
        let plain = gated(gpu, &cache, n_heads, &tokens, &queries, None, false);
        let opened = gated(gpu, &cache, n_heads, &tokens, &queries, Some(&gate), false);
        for (i, ((x, g), got)) in plain.iter().zip(&gate).zip(&opened).enumerate() {
            let expected = f32::from_bits(*x) * sigmoid(*g);
            assert_eq!(f32::from_bits(*got), expected, "{}: output {i}, {g}", tokens.len());
        }
        // The same, quantised.
        let int8 = gated(gpu, &cache, n_heads, &tokens, &queries, Some(&gate), true);
        let plane = floats(gpu, &opened.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>());
        let expected = stale_coded(gpu, tokens.len(), width, 64);
        let quantise = Quantise::new(gpu, &plane, &expected).unwrap();
        run(gpu, |step| quantise.record(step, tokens.len()));
        let expected: Vec<u32> =
            [&expected.codes, &expected.cells].iter().flat_map(|slice| read_words(gpu, slice)).collect();
        assert_eq!(int8, expected, "int8 of {}", tokens.len());
    }
}
