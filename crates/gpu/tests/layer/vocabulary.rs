//! Embeddings and the largest logit.

use super::*;

#[test]
fn embeddings_are_the_rows_that_the_format_defines() {
    let Some(gpu) = gpu() else { return };
    let rows = 70;
    let mut encodings = vec![Encoding::F32, Encoding::F16, Encoding::Bf16];
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        for (j, zero) in [Zero::Symmetric, Zero::Affine].into_iter().enumerate() {
            let group = [16, 32, 64, 128][(i + 2 * j) % 4];
            encodings.push(Encoding::Uniform(Uniform::new(bits, group, zero).unwrap()));
        }
    }
    let ids = [69u32, 0, 16, 37, 69, 70, u32::MAX];
    for (i, encoding) in encodings.into_iter().enumerate() {
        let cols = [64, 37, 130][i % 3];
        let mut random = Random(i as u64);
        let mut w = random.values(rows * cols);
        // Scales from subnormal halves to large ones.
        w.iter_mut().enumerate().for_each(|(i, w)| *w *= [1.0, 3e-6, 1000.0, 0.0][i / cols % 4]);
        let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).unwrap()];
        encoding.encode(&w, cols, &mut bytes);
        let hidden = stale(gpu, (ids.len() + 1) * cols);
        let (table, ids_slice) = (upload(gpu, &bytes), words(gpu, &ids));
        let embed = Embed::new(gpu, ids.len(), &table, encoding, rows, cols, &ids_slice, &hidden).unwrap();
        run(gpu, |step| embed.record(step, ids.len()));
        let mut expected = vec![f32::NAN; ids.len() * cols];
        for (&id, row) in ids.iter().zip(expected.chunks_exact_mut(cols)).filter(|(id, _)| **id < 70) {
            encoding.decode_row(&bytes, cols, id as usize, row);
        }
        let got = read(gpu, &hidden);
        let (got, rest) = got.split_at(ids.len() * cols);
        assert_close(got, &expected, 1e-6, true, &format!("{encoding}"));
        assert_stale(rest);
    }
}

#[test]
fn the_largest_logit_is_found_and_what_is_not_a_number_is_told() {
    let Some(gpu) = gpu() else { return };
    for vocab in [1, 5, 300, 20_011] {
        let tokens = 8;
        let mut logits = Random(vocab as u64).values(tokens * vocab);
        let last = vocab - 1;
        // Ties, also of the two zeros; infinities; all equal; numbers that are none.
        let mut row = |t: usize, values: &dyn Fn(usize) -> f32| {
            (0..vocab).for_each(|i| logits[t * vocab + i] = values(i));
        };
        row(1, &|i| if i == last / 2 || i == last { 9.0 } else { -1.0 });
        row(2, &|i| if i % 2 == 0 { -0.0 } else { 0.0 });
        row(3, &|_| f32::NEG_INFINITY);
        row(4, &|i| if i == last { f32::INFINITY } else { f32::MAX });
        row(5, &|i| if i == last { f32::NAN } else { f32::INFINITY });
        row(6, &|i| if i == 0 { -f32::NAN } else { 1.0 });
        row(7, &|i| -1.0 - i as f32);
        let ids = stale(gpu, tokens + 1);
        let argmax = Argmax::new(gpu, tokens, vocab, &floats(gpu, &logits), &ids).unwrap();
        run(gpu, |step| argmax.record(step, tokens));
        let got = read_words(gpu, &ids);
        for (t, row) in logits.chunks_exact(vocab).enumerate() {
            let nan = row.iter().any(|v| v.is_nan());
            let expected = if nan { u32::MAX } else { cpu().argmax(row) };
            assert_eq!(got[t], expected, "token {t} of {vocab} logits");
        }
        assert_eq!(got[tokens], STALE);
    }
}
