//! Choices against sums written out, and attention over them against a mask over all positions.

use super::*;
use crate::attention::tests::{Cache, Random, TYPES, bits};
use crate::attention::{AttentionHeads, AttentionScratch, KvBlocks, KvPlane, attend};
use crate::top_k;

/// A stored row as numbers, and what they are multiplied with.
fn read(plane: KvPlane<'_>, block: u32, at: usize, dim: usize) -> (Vec<f32>, f32) {
    let run = plane.run(block, at..at + 1);
    let element = |i: usize| match plane.ty {
        KvType::F32 => f32::from_le_bytes(run.bytes[4 * i..4 * i + 4].try_into().unwrap_or_default()),
        KvType::F16 => {
            smoe_format::half::f16_to_f32(u16::from_le_bytes([run.bytes[2 * i], run.bytes[2 * i + 1]]))
        }
        KvType::Q8 => f32::from(run.bytes[i] as i8),
    };
    ((0..dim).map(element).collect(), run.scale(0))
}

fn row(blocks: KvBlocks<'_>, plane: KvPlane<'_>, position: usize, dim: usize) -> (Vec<f32>, f32) {
    let size = blocks.block_positions;
    read(plane, blocks.table[position / size], position % size, dim)
}

#[test]
fn the_positions_of_the_largest_sums_are_chosen() {
    let (heads, dim, top_k_of) = (5, 24, 13);
    // Session and position: fewer than are chosen, as many, one more, past a span.
    let tokens = [(0, 3), (0, 12), (0, 13), (1, 40), (1, 41), (0, 700), (1, 1023), (0, 0)];
    for ty in TYPES {
        let mut rows = Random(21);
        // Every third key is all zeros: their scores are equal.
        let cache = Cache::new(ty, [1024, 32, 1], [dim, 1], &mut |position, dim| {
            if position % 3 == 0 { vec![0.0; dim] } else { rows.values(dim, 2.0) }
        });
        let tables = [0, 7].map(|by| {
            let mut table = cache.table.clone();
            table.rotate_left(by);
            table
        });
        let queries = Random(22).values(tokens.len() * heads * dim, 1.0);
        let weights = Random(23).values(tokens.len() * heads, 1.0);
        let blocks = |t: usize| KvBlocks { table: &tables[tokens[t].0], ..cache.head(0) };
        let expected: Vec<Option<Vec<u32>>> = (0..tokens.len())
            .map(|t| {
                let visible = tokens[t].1 + 1;
                let score = |position: usize| {
                    let (key, scale) = row(blocks(t), blocks(t).keys, position, dim);
                    (0..heads).fold(0.0f32, |score, h| {
                        let query = &queries[(t * heads + h) * dim..][..dim];
                        let product = Kernels::available()[0].dot(&key, query) * scale;
                        weights[t * heads + h].mul_add(product.max(0.0), score)
                    })
                };
                let scores: Vec<f32> = (0..visible).map(score).collect();
                (visible > top_k_of).then(|| {
                    let mut ids = vec![0; top_k_of];
                    top_k(&scores, &mut ids);
                    ids.sort_unstable();
                    ids
                })
            })
            .collect();
        assert!(expected.iter().flatten().any(|ids| ids.iter().any(|id| id % 3 == 0)), "some are equal");
        for kernels in Kernels::available() {
            for threads in [1, 3] {
                let pool = Pool::new(threads, false);
                let mut choices = Choices::new(tokens.len(), top_k_of, 1024);
                let sight = |t: usize| Sight { blocks: blocks(t), visible: 0..tokens[t].1 + 1, chosen: None };
                let shape = IndexHeads { n_heads: heads, head_dim: dim, top_k: top_k_of };
                choose(&pool, kernels, shape, &queries, &weights, &sight, &mut choices);
                for (t, expected) in expected.iter().enumerate() {
                    let found = choices.of(t, tokens[t].1 + 1);
                    assert_eq!(found, expected.as_deref(), "{kernels:?} {threads} {ty:?} token {t}");
                }
            }
        }
    }
}

/// Softmax over all positions, those that are not chosen at minus infinity, as reference implementations do it.
fn masked(blocks: KvBlocks<'_>, query: &[f32], visible: usize, chosen: &[u32], dims: [usize; 2]) -> Vec<f64> {
    let product = |position: usize| {
        let (key, scale) = row(blocks, blocks.keys, position, dims[0]);
        let sum: f64 = key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum();
        let is_chosen = chosen.contains(&(position as u32));
        if is_chosen { sum * f64::from(scale) * 0.2 } else { f64::NEG_INFINITY }
    };
    let scores: Vec<f64> = (0..visible).map(product).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = scores.iter().map(|s| (s - most).exp()).sum();
    let mut out = vec![0.0; dims[1]];
    for (position, score) in scores.iter().enumerate() {
        let (value, scale) = row(blocks, blocks.values, position, dims[1]);
        let weight = (score - most).exp() / total;
        out.iter_mut().zip(value).for_each(|(o, v)| *o += weight * f64::from(v) * f64::from(scale));
    }
    out
}

#[test]
fn attention_over_chosen_positions_is_attention_with_a_mask() {
    // Few heads, of which tokens make a tile together, and so many that one token's are cut among threads.
    for n_q in [3, 44] {
        attends_with_a_mask(n_q);
    }
}

fn attends_with_a_mask(n_q: usize) {
    let dims = [40, 32];
    let chosen: [&[u32]; 3] = [&[0, 5, 31, 32, 33, 70], &[2, 64, 99], &[1]];
    let visible = [71, 100, 30];
    for ty in TYPES {
        // Values that are the beginnings of keys, as a latent's, and values of their own.
        for is_latent in [true, false] {
            let mut rows = Random(31);
            let cache = Cache::new(ty, [128, 32, 1], dims, &mut |_, dim| rows.values(dim, 2.0));
            let own = cache.head(0);
            let blocks = if is_latent { KvBlocks { values: own.keys, ..own } } else { own };
            let queries = Random(32).values(3 * n_q * dims[0], 1.0);
            let shape = AttentionHeads {
                n_kv_heads: 1,
                per_kv: n_q,
                head_dim: dims[0],
                value_dim: dims[1],
                scale: 0.2,
                sinks: None,
            };
            let run = |kernels, threads, chosen: [Option<&'static [u32]>; 3]| {
                let sight = |t: usize, _: usize| Sight { blocks, visible: 0..visible[t], chosen: chosen[t] };
                let bytes = 128 * dims.map(|dim| ty.row_bytes(dim)).iter().sum::<usize>();
                let mut scratch = AttentionScratch::new(threads, dims[0], dims[1], 128).with_rows(bytes);
                let mut out = vec![f32::NAN; 3 * n_q * dims[1]];
                let pool = Pool::new(threads, false);
                attend(&pool, kernels, &shape, &queries, &sight, &mut scratch, &mut out);
                out
            };
            let scalar = run(Kernels::available()[0], 1, chosen.map(Some));
            for (i, found) in scalar.chunks(dims[1]).enumerate() {
                let (t, query) = (i / n_q, &queries[i * dims[0]..(i + 1) * dims[0]]);
                for (found, expected) in found.iter().zip(masked(blocks, query, visible[t], chosen[t], dims))
                {
                    assert!((f64::from(*found) - expected).abs() < 1e-4, "{ty:?}: {found} for {expected}");
                }
            }
            static ALL: [u32; 128] = {
                let mut all = [0; 128];
                let mut i = 0;
                while i < all.len() {
                    all[i] = i as u32;
                    i += 1;
                }
                all
            };
            let plain = run(Kernels::available()[0], 1, [None; 3]);
            for kernels in Kernels::available() {
                for threads in [1, 3, 5] {
                    assert_eq!(bits(&run(kernels, threads, chosen.map(Some))), bits(&scalar), "{kernels:?}");
                    let some = [Some(chosen[0]), None, Some(chosen[2])];
                    let expected: Vec<_> = [&scalar, &plain, &scalar]
                        .iter()
                        .enumerate()
                        .flat_map(|(t, of)| &of[t * n_q * dims[1]..(t + 1) * n_q * dims[1]])
                        .copied()
                        .collect();
                    assert_eq!(
                        bits(&run(kernels, threads, some)),
                        bits(&expected),
                        "one sees all, {kernels:?}"
                    );
                    let all = visible.map(|n| Some(&ALL[..n]));
                    assert_eq!(
                        bits(&run(kernels, threads, all)),
                        bits(&plain),
                        "all are chosen, {kernels:?}"
                    );
                }
            }
        }
    }
}
