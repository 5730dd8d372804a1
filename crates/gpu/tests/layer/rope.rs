//! Projections become queries and rows of the cache.

use super::*;

/// Numbers of every size, a head that is zero and one that is not all numbers among them.
fn projections(random: &mut Random, n: usize, dim: usize) -> Vec<f32> {
    let mut values = random.values(n);
    for (i, head) in values.chunks_mut(dim).enumerate() {
        let scale = [1.0, 1e-3, 300.0, 0.0, 1e5][i % 5];
        head.iter_mut().for_each(|v| *v *= scale);
    }
    values
}

fn check_rope(
    gpu: &Gpu,
    kv: KvLayout,
    per_kv: usize,
    dim: usize,
    pairs: RopePairs,
    norm: Option<bool>,
    bias: bool,
    bad: bool,
) {
    let what = format!("{kv:?}, {dim} rotated, {pairs:?}, norm {norm:?}, bias {bias}");
    let KvLayout { n_kv_heads, head_dim, value_dim, format } = kv;
    let ty = FORMATS.iter().find(|(f, _)| *f == format).unwrap().1;
    let mut random = Random(dim as u64 + 1000 * head_dim as u64);
    let kernels = cpu();
    let n_heads = per_kv * n_kv_heads;
    let (tokens, room, context, blocks, eps) = (3usize, 4usize, 70usize, 7usize, 1e-6);
    // Values first, then a gap, queries, keys.
    let v_at = 0;
    let q_at = n_kv_heads * value_dim + 5;
    let k_at = q_at + n_heads * head_dim;
    let stride = k_at + n_kv_heads * head_dim + 3;
    let mut plane = projections(&mut random, room * stride, head_dim);
    if bad {
        plane[stride + k_at + 1] = f32::NAN;
        plane[v_at + 2] = f32::INFINITY;
    }
    let biases = random.values(stride);
    let angles: Vec<f32> = random.values(context * dim);
    let heads = if norm == Some(true) { n_heads + n_kv_heads } else { 2 };
    let norms = random.values(heads * head_dim);
    // Two sessions: tables of three blocks each.
    let tables = [6u32, 1, 4, 2, 0, 5];
    let rows = [(33u32, 0usize), (0, 3), (69, 3), (1, 0)];
    let row_words: Vec<u32> =
        rows.iter().flat_map(|&(position, table)| [position, table as u32, 0, 0]).collect();

    let cache = upload(gpu, &vec![0xee; blocks * kv.block_bytes()]);
    let queries = stale(gpu, room * n_heads * head_dim);
    let (plane_slice, bias_slice) = (floats(gpu, &plane), floats(gpu, &biases));
    let (angle_slice, norm_slice) = (floats(gpu, &angles), floats(gpu, &norms));
    let rope = RopeAppend::new(
        gpu,
        room,
        n_heads,
        kv,
        RopeInput {
            projections: Projections {
                plane: &plane_slice,
                stride,
                at: [q_at, k_at, v_at],
                bias: bias.then_some(&bias_slice),
            },
            norm: norm.map(|whole| QkNorm { weights: &norm_slice, eps, whole }),
            angles: Angles { table: &angle_slice, positions: context, dim, pairs },
        },
        Rows { rows: &words(gpu, &row_words), tables: &words(gpu, &tables) },
        &queries,
        &cache,
    )
    .unwrap();
    run(gpu, |step| rope.record(step, tokens));

    let mut expected_queries = Vec::new();
    let mut expected = vec![0xee; blocks * kv.block_bytes()];
    for t in 0..tokens {
        let mut row = plane[t * stride..(t + 1) * stride].to_vec();
        if bias {
            kernels.add_in_place(&mut row, &biases);
        }
        let (position, table) = rows[t];
        let position = position as usize;
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles[position * dim..(position + 1) * dim]
            .as_chunks::<2>()
            .0
            .iter()
            .map(|a| (a[0], a[1]))
            .unzip();
        let style = if pairs == RopePairs::Halves { RopeStyle::Half } else { RopeStyle::Interleaved };
        let prepare = |at: usize, heads: usize, weights: &[f32]| {
            let mut x = row[at..at + heads * head_dim].to_vec();
            match norm {
                Some(true) => kernels.rms_norm_in_place(&mut x, &weights[..heads * head_dim], eps),
                Some(false) => kernels.rms_norm_in_place(&mut x, &weights[..head_dim], eps),
                None => {}
            }
            kernels.rope(&mut x, head_dim, &cos, &sin, style);
            x
        };
        let key_weights = if norm == Some(true) { n_heads * head_dim } else { head_dim };
        expected_queries.extend(prepare(q_at, n_heads, &norms));
        let keys = prepare(k_at, n_kv_heads, &norms[key_weights..]);
        let block = tables[table + position / KV_BLOCK];
        for h in 0..n_kv_heads {
            let at = row_at(&kv, block, 0, h, position);
            let key = &keys[h * head_dim..(h + 1) * head_dim];
            kernels.store_kv_row(ty, key, &mut expected[at..at + kv.row_bytes()]);
            let at = row_at(&kv, block, 1, h, position);
            let value = &row[v_at + h * value_dim..v_at + (h + 1) * value_dim];
            kernels.store_kv_row(ty, value, &mut expected[at..at + kv.row_bytes()]);
        }
    }
    let got = read(gpu, &queries);
    let (got, rest) = got.split_at(expected_queries.len());
    assert_close(got, &expected_queries, 0.0, true, &format!("queries of {what}"));
    assert_stale(rest);
    let got = gpu.download(&cache).unwrap();
    let rows = got.chunks_exact(kv.row_bytes()).zip(expected.chunks_exact(kv.row_bytes()));
    for (i, (got, expected)) in rows.enumerate() {
        assert_row(ty, got, expected, &format!("row {i} of {what}"));
    }
}

/// A row of the cache, byte by byte; only which NaN it is may differ, and the sign of a zero.
#[track_caller]
fn assert_row(ty: KvType, got: &[u8], expected: &[u8], what: &str) {
    let value = |row: &[u8], at: usize| match ty {
        KvType::F32 => f32::from_le_bytes(row[at / 4 * 4..][..4].try_into().unwrap()),
        KvType::F16 => f16_to_f32(u16::from_le_bytes(row[at / 2 * 2..][..2].try_into().unwrap())),
        KvType::Q8 => 1.0,
    };
    for (at, (a, b)) in got.iter().zip(expected).enumerate() {
        let values = [value(got, at), value(expected, at)];
        let alike = values.iter().all(|v| v.is_nan()) || values.iter().all(|v| *v == 0.0);
        assert!(a == b || alike, "{what}: byte {at} is {a}, not {b}");
    }
}

#[test]
fn projections_become_queries_and_rows_of_the_cache() {
    let Some(gpu) = gpu() else { return };
    let layout =
        |format, n_kv_heads, head_dim, value_dim| KvLayout { format, n_kv_heads, head_dim, value_dim };
    use RopePairs::{Halves, Neighbours};
    for (format, _) in FORMATS {
        check_rope(gpu, layout(format, 2, 64, 64), 2, 64, Halves, Some(false), false, false);
        check_rope(gpu, layout(format, 1, 36, 52), 3, 20, Neighbours, None, true, false);
        check_rope(gpu, layout(format, 1, 256, 128), 1, 128, Halves, None, false, true);
    }
    check_rope(gpu, layout(KvFormat::F16, 2, 48, 48), 2, 48, Halves, Some(true), false, false);
    check_rope(gpu, layout(KvFormat::F32, 3, 4, 4), 1, 2, Neighbours, Some(true), true, false);
}

#[test]
fn rows_of_every_size_are_stored_as_the_cpu_stores_them() {
    let Some(gpu) = gpu() else { return };
    let (dim, n) = (16, 64);
    let plane: Vec<f32> = (0..n * 3 * dim)
        .map(|i| {
            let exponent = (i / (3 * dim)) as i32 - 36;
            let mantissa = Random(i as u64 * 77).value();
            mantissa * 10f32.powi(exponent)
        })
        .collect();
    for (format, ty) in FORMATS {
        let kv = KvLayout { format, n_kv_heads: 1, head_dim: dim, value_dim: dim };
        let cache = upload(gpu, &vec![0; 2 * kv.block_bytes()]);
        let rows: Vec<u32> = (0..n as u32).flat_map(|t| [t, 0, 0, 0]).collect();
        // No rotation: the rows are stored as they come.
        let angles: Vec<f32> = (0..n).flat_map(|_| [1.0, 0.0]).collect();
        let rope = RopeAppend::new(
            gpu,
            n,
            1,
            kv,
            RopeInput {
                projections: Projections {
                    plane: &floats(gpu, &plane),
                    stride: 3 * dim,
                    at: [0, dim, 2 * dim],
                    bias: None,
                },
                norm: None,
                angles: Angles {
                    table: &floats(gpu, &angles),
                    positions: n,
                    dim: 2,
                    pairs: RopePairs::Halves,
                },
            },
            Rows { rows: &words(gpu, &rows), tables: &words(gpu, &[1, 0]) },
            &stale(gpu, n * dim),
            &cache,
        )
        .unwrap();
        run(gpu, |step| rope.record(step, n));
        let got = gpu.download(&cache).unwrap();
        for t in 0..n {
            let block = 1 - (t / KV_BLOCK) as u32;
            let value = &plane[(3 * t + 2) * dim..(3 * t + 3) * dim];
            let mut expected = vec![0; kv.row_bytes()];
            cpu().store_kv_row(ty, value, &mut expected);
            let at = row_at(&kv, block, 1, 0, t);
            let got = &got[at..at + kv.row_bytes()];
            // A device may take subnormal numbers, and scales, for zero.
            let least = value.iter().fold(f32::MAX, |m, v| m.min(v.abs()));
            let most = value.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            if least > 1.2e-38 && (format != KvFormat::Q8 || most > 1.6e-36) {
                assert_row(ty, got, &expected, &format!("{format:?} row of {value:?}"));
            }
        }
    }
}
