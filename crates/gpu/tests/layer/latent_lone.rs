//! What a lone token's latent attention has in fewer dispatches: the bits of those that it replaces.

use super::*;

/// Encodings of a head's matrix, and the group of its inputs.
fn encodings() -> [(Encoding, usize); 3] {
    let q = |bits, group, zero| Encoding::Uniform(Uniform::new(bits, group, zero).unwrap());
    [(q(8, 64, Zero::Symmetric), 64), (q(4, 32, Zero::Affine), 32), (q(4, 64, Zero::Symmetric), 64)]
}

fn weights(gpu: &Gpu, encoding: Encoding, rows: usize, cols: usize, random: &mut Random) -> Weights {
    let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).unwrap()];
    encoding.encode(&random.values(rows * cols), cols, &mut bytes);
    Weights::new(upload(gpu, &bytes), rows, cols, encoding)
}

#[test]
fn what_enters_is_what_three_kernels_make() {
    let Some(gpu) = gpu() else { return };
    let shapes = [(512, 64, 128, 5), (64, 12, 28, 3), (96, 8, 256, 2)];
    for (i, (kv_rank, rope_dim, cols, heads)) in shapes.into_iter().enumerate() {
        for (j, (encoding, group)) in encodings().into_iter().enumerate() {
            let mut random = Random((3 * i + j) as u64);
            let kv = LatentLayout { format: FORMATS[(i + j) % 3].0, kv_rank, rope_dim };
            let (key_dim, head_stride, position) = (kv.key_dim(), cols + rope_dim + 3, 37);
            // Heads, something else, the row.
            let kv_at = 2 + heads * head_stride;
            let stride = kv_at + key_dim + 1;
            let plane = floats(gpu, &random.values(stride));
            let table = floats(gpu, &random.values(40 * rope_dim));
            let norms = floats(gpu, &random.values(kv_rank));
            let pairs = [RopePairs::Halves, RopePairs::Neighbours][(i + j) % 2];
            let angles = Angles { table: &table, positions: 40, dim: rope_dim, pairs };
            let (row_words, tables) = (words(gpu, &[position, 1, 0, 0]), words(gpu, &[0, 0, 1]));
            let rows = Rows { rows: &row_words, tables: &tables };
            let matrix = weights(gpu, encoding, heads * kv_rank, cols, &mut random);
            let from = HeadColumns { plane: &plane, stride, at: 2, head_stride };
            let norm = LatentNorm { weights: &norms, eps: 1e-5 };
            let input = LatentInput { plane: &plane, stride, kv_at, queries: None, norm, angles };
            let cache = || stale(gpu, 2 * kv.block_bytes() / 4);
            let queries = || stale(gpu, heads * key_dim + 4);

            let (expected, expected_cache) = (queries(), cache());
            let turn = HeadTurn { angles, rows, queries: &expected, key_dim };
            let part = HeadPlane::new(gpu, 1, heads, cols, Some(group)).unwrap();
            let append = LatentAppend::new(gpu, 1, kv, input, rows, &expected_cache).unwrap();
            let first = HeadInput::new(gpu, 1, heads, cols, from, Some(turn), &part).unwrap();
            let product = HeadMatmul::new(gpu, &matrix, heads, &part, 1, &expected, key_dim).unwrap();
            run(gpu, |step| {
                append.record(step, 1);
                first.record(step, 1);
                product.record(step, 1);
            });
            for appends in [true, false] {
                let (got, got_cache) = (queries(), cache());
                let turn = HeadTurn { queries: &got, ..turn };
                let row = appends.then_some(LatentRow { kv, input, cache: &got_cache });
                let entry = LatentEntry::new(gpu, &matrix, heads, from, turn, row).unwrap().unwrap();
                run(gpu, |step| entry.record(step));
                let name = format!("{encoding} {kv:?} {heads} heads of {cols}, {appends}");
                assert_eq!(read_words(gpu, &got), read_words(gpu, &expected), "{name}");
                let rows_there = if appends { &expected_cache } else { &cache() };
                assert_eq!(read_words(gpu, &got_cache), read_words(gpu, rows_there), "{name}");
            }
        }
    }
}

#[test]
fn what_leaves_is_what_two_kernels_make() {
    let Some(gpu) = gpu() else { return };
    for (i, (kv_rank, rope_dim, rows_of_head, heads)) in
        [(512, 64, 128, 3), (64, 12, 32, 5)].into_iter().enumerate()
    {
        for (encoding, group) in encodings() {
            let mut random = Random(i as u64 + 40);
            let kv = LatentLayout { format: KvFormat::F16, kv_rank, rope_dim };
            let matrix = weights(gpu, encoding, heads * rows_of_head, kv_rank, &mut random);
            // More splits than are read at once, a window, one split.
            for (position, first) in [(17 * 128 + 5, 0), (300, 129), (100, 0)] {
                let visible = position + 1 - first;
                let blocks = (position + 1usize).div_ceil(KV_BLOCK);
                let halves: Vec<u8> = (0..blocks * kv.block_bytes() / 2)
                    .flat_map(|_| (0x3400 + (random.next() as u16 & 0x87ff)).to_le_bytes())
                    .collect();
                let cache = upload(gpu, &halves);
                let tables = words(gpu, &(0..blocks as u32).collect::<Vec<_>>());
                let row_words = words(gpu, &[position as u32, 0, first as u32, 0]);
                let rows = Rows { rows: &row_words, tables: &tables };
                let queries = floats(gpu, &random.values(heads * kv.key_dim()));
                let scratch = AttentionScratch::new(gpu, heads, kv_rank, visible, 0).unwrap();
                let plane = CodedPlane::new(gpu, heads, kv_rank, group).unwrap();
                let whole = CodedPlane { tokens: 1, cols: heads * kv_rank, ..plane.clone() };
                let outputs = AttentionOutputs { coded: Some(&whole), ..Default::default() };
                let attention =
                    LatentAttention::new(gpu, 1, kv, heads, 0.1, &queries, &cache, rows, &scratch, outputs)
                        .unwrap();
                let stride = rows_of_head + 8;
                let (expected, got) = (stale(gpu, heads * stride), stale(gpu, heads * stride));
                let x = HeadPlane::Coded(plane);
                let product = HeadMatmul::new(gpu, &matrix, heads, &x, 1, &expected, stride).unwrap();
                run(gpu, |step| {
                    attention.record(step, 1, visible, position + 1);
                    product.record(step, 1);
                });
                let exit =
                    LatentExit::new(gpu, &matrix, heads, &scratch, rows, &got, stride).unwrap().unwrap();
                run(gpu, |step| {
                    attention.record_splits(step, visible, position + 1);
                    exit.record(step);
                });
                let name = format!("{encoding} {kv_rank} {heads} heads, {first}..={position}");
                assert_eq!(read_words(gpu, &got), read_words(gpu, &expected), "{name}");
            }
        }
    }
}

#[test]
fn a_row_that_workgroups_quantise_has_the_same_product() {
    let Some(gpu) = gpu() else { return };
    for (encoding, group) in encodings() {
        for (rows, cols) in [(96, 512), (70, 60)] {
            let mut random = Random(cols as u64);
            let matrix = weights(gpu, encoding, rows, cols, &mut random);
            let x = floats(gpu, &random.values(cols));
            let coded = CodedPlane::new(gpu, 1, cols, group).unwrap();
            let columns = || Columns { plane: stale(gpu, rows + 7), stride: rows + 7, offset: 3 };
            let (expected, got) = (columns(), columns());
            let quantise = Quantise::new(gpu, &x, &coded).unwrap();
            let product = CodedMatmul::new(gpu, &matrix, &coded, &expected).unwrap();
            let own = OwnMatmul::new(gpu, &matrix, &x, &got).unwrap().unwrap();
            run(gpu, |step| {
                quantise.record(step, 1);
                product.record(step, 1);
                own.record(step);
            });
            let name = format!("{encoding} {rows} x {cols}");
            assert_eq!(read_words(gpu, &got.plane), read_words(gpu, &expected.plane), "{name}");
        }
    }
}
