//! Collecting: layers in groups that fit in memory, one pass over the text for each.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use smoe_kernels::{Kernels, Loops};

use super::part::{self, Part, Sum};
use super::{HEAD, Head, refuse, triangle};
use crate::error::SculptError;
use crate::workers;

/// Inputs that wait until they are summed: a sum costs less the more tokens it has.
const WAITING: usize = 64 << 20;
/// Elements of a register.
const LANES: usize = 16;

/// Collects the statistics of `head` in the directory `dir`; layers that are there already are kept.
///
/// `pass` runs the model over the whole text and tells the collector what the experts of its layers see; it is called
/// once for each group of layers whose statistics fit in `memory` bytes (at least one layer at a time), with the number
/// of the pass and of all passes.
///
/// # Errors
/// If `dir` has statistics of another model or text, a file cannot be written, or `pass` fails: the layers of finished
/// passes stay.
pub fn collect<E: From<SculptError>>(
    dir: &Path,
    head: &Head,
    memory: u64,
    threads: Option<usize>,
    mut pass: impl FnMut(&Arc<Mutex<Collector>>, usize, usize) -> Result<(), E>,
) -> Result<(), E> {
    fs::create_dir_all(dir).map_err(SculptError::io("create", dir))?;
    match Head::read(dir)? {
        Some(found) if found == *head => {}
        Some(_) => {
            let what = "has statistics of another model or text: name another output, or remove it";
            return Err(refuse(dir, what).into());
        }
        None => {
            let (path, new) = (dir.join(HEAD), dir.join("head.new"));
            let json = serde_json::to_vec_pretty(head).map_err(SculptError::json(&path))?;
            fs::write(&new, json)
                .and_then(|()| fs::rename(&new, &path))
                .map_err(SculptError::io("write", &path))?;
        }
    }
    let lacking: Vec<u32> =
        head.layers.iter().copied().filter(|&layer| Part::open(dir, head, layer).is_err()).collect();
    let at_once = (memory / head.layer_bytes().max(1)).max(1) as usize;
    let passes = lacking.len().div_ceil(at_once);
    for (i, layers) in lacking.chunks(at_once).enumerate() {
        let collector = Arc::new(Mutex::new(Collector::new(head, layers, threads)));
        pass(&collector, i, passes)?;
        let mut collector = collector.lock().expect("no pass panics");
        collector.flush();
        for (layer, experts) in layers.iter().zip(collector.sums.chunks(head.n_experts)) {
            part::write(dir, head, *layer, experts)?;
        }
    }
    Ok(())
}

/// Sums what experts of some layers see.
#[derive(Debug)]
pub struct Collector {
    layers: Vec<u32>,
    n_experts: usize,
    widths: [usize; 2],
    /// By layer and then expert.
    sums: Vec<Sum>,
    /// Inputs and hidden values of each that were not summed yet, row by row, padded to whole registers.
    waiting: Vec<[Vec<f32>; 2]>,
    waiting_bytes: usize,
    threads: Option<usize>,
    kernels: Kernels,
}

impl Collector {
    fn new(head: &Head, layers: &[u32], threads: Option<usize>) -> Self {
        let n = layers.len() * head.n_experts;
        Self {
            layers: layers.to_vec(),
            n_experts: head.n_experts,
            widths: [head.d_model, head.d_expert],
            sums: vec![Sum::zeros(head.d_model, head.d_expert); n],
            waiting: vec![[Vec::new(), Vec::new()]; n],
            waiting_bytes: 0,
            threads,
            kernels: Kernels::detect(),
        }
    }

    /// The last layer whose experts are wanted in this pass: nothing after it need be computed.
    #[must_use]
    pub fn last_layer(&self) -> u32 {
        self.layers.last().copied().unwrap_or(0)
    }

    /// True if this layer's experts are wanted in this pass.
    #[must_use]
    pub fn wants(&self, layer: u32) -> bool {
        self.layers.contains(&layer)
    }

    /// Adds those tokens of an expert that are `counted`: `tokens` are rows of `inputs`, `[T, d_model]`, and `hidden`,
    /// `[tokens, d_expert]`, is before down. Experts of other layers are passed over.
    ///
    /// # Panics
    /// As [`Self::add`], or if a token has no row.
    pub fn add_tokens(
        &mut self,
        (layer, expert): (u32, u32),
        tokens: &[u32],
        counted: &[bool],
        inputs: &[f32],
        hidden: &[f32],
    ) {
        if !self.wants(layer) {
            return;
        }
        let [d_model, d_expert] = self.widths;
        for (&token, hidden) in tokens.iter().zip(hidden.chunks_exact(d_expert)) {
            if counted[token as usize] {
                let input = &inputs[token as usize * d_model..][..d_model];
                self.add(layer, expert, input, hidden);
            }
        }
    }

    /// Adds one token of an expert: its input, `[d_model]`, and its hidden values before down, `[d_expert]`.
    ///
    /// # Panics
    /// If a length differs from the head's, or the expert is none of the wanted ones.
    pub fn add(&mut self, layer: u32, expert: u32, input: &[f32], hidden: &[f32]) {
        assert_eq!([input.len(), hidden.len()], self.widths, "an expert's inputs");
        let place = self.layers.iter().position(|&l| l == layer).expect("a wanted layer");
        let place = place * self.n_experts + expert as usize;
        self.sums[place].tokens += 1;
        for (rows, row) in self.waiting[place].iter_mut().zip([input, hidden]) {
            rows.extend_from_slice(row);
            let padded = row.len().next_multiple_of(LANES);
            rows.resize(rows.len() + padded - row.len(), 0.0);
            self.waiting_bytes += 4 * padded;
        }
        if self.waiting_bytes >= WAITING {
            self.flush();
        }
    }

    /// Sums everything that waits, on all threads.
    fn flush(&mut self) {
        let (kernels, widths) = (self.kernels, self.widths);
        let jobs: Vec<_> = self.sums.iter_mut().zip(&mut self.waiting).map(Mutex::new).collect();
        let never = AtomicBool::new(false);
        let all = workers::for_each(workers::count(self.threads, 1), jobs.len(), &never, |i, (): &mut ()| {
            let mut job = jobs[i].lock().expect("no worker panics");
            let (sum, waiting) = &mut *job;
            for (n, (sum, rows)) in
                widths.into_iter().zip([&mut sum.input, &mut sum.hidden].into_iter().zip(&mut **waiting))
            {
                kernels.compiled(Products { n, rows, sum });
                rows.clear();
            }
            Ok(())
        });
        debug_assert!(matches!(all, Ok(true)));
        self.waiting_bytes = 0;
    }
}

/// Adds `X^T X` of padded rows to an upper triangle.
struct Products<'a> {
    n: usize,
    rows: &'a [f32],
    sum: &'a mut [f32],
}

impl Loops for Products<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Self { n, rows, sum } = self;
        let stride = n.next_multiple_of(LANES);
        let rows = rows.as_chunks::<LANES>().0;
        let (chunks, mut start) = (stride / LANES, 0);
        // Four rows of the triangle at once, sixteen columns at a time.
        for i in (0..n).step_by(4) {
            for chunk in i / LANES..chunks {
                let mut tile = [[0.0f32; LANES]; 4];
                for row in rows.chunks_exact(chunks) {
                    let (x, own) = (row[chunk], &row[i / LANES]);
                    for r in 0..4 {
                        let factor = own[i % LANES + r];
                        for lane in 0..LANES {
                            tile[r][lane] += factor * x[lane];
                        }
                    }
                }
                let mut at = start;
                for (r, tile) in tile.iter().enumerate().take(n - i) {
                    let row = i + r;
                    let (from, to) = (row.max(chunk * LANES), n.min((chunk + 1) * LANES));
                    for j in from..to {
                        sum[at + j - row] += tile[j - chunk * LANES];
                    }
                    at += n - row;
                }
            }
            start += (i..n.min(i + 4)).map(|row| n - row).sum::<usize>();
        }
        debug_assert_eq!(start, triangle(n));
    }
}

#[cfg(test)]
mod tests {
    use smoe_testkit::random::Random;

    use super::super::Statistics;
    use super::*;

    fn head() -> Head {
        Head {
            version: Head::VERSION,
            model: "m".to_owned(),
            model_type: "tiny".to_owned(),
            text: "t".to_owned(),
            tokens: 100,
            counted: 100,
            layers: vec![1, 2, 4],
            n_experts: 3,
            d_model: 37,
            d_expert: 18,
        }
    }

    /// Rows of each (layer, expert), in the order in which they come.
    fn rows(head: &Head) -> Vec<(u32, u32, Vec<f32>, Vec<f32>)> {
        let mut random = Random::new(3);
        let mut bell = |n: usize| (0..n).map(|_| random.bell() as f32).collect::<Vec<_>>();
        let all = (0..130).flat_map(|t| head.layers.iter().map(move |&layer| (t, layer)));
        // The third expert gets few tokens, and in layer 4 none.
        all.filter_map(|(t, layer)| {
            let expert = if t % 40 == 39 { 2 } else { t % 2 };
            let row = (layer, expert, bell(head.d_model), bell(head.d_expert));
            (layer != 4 || expert != 2).then_some(row)
        })
        .collect()
    }

    fn give(collector: &Mutex<Collector>, rows: &[(u32, u32, Vec<f32>, Vec<f32>)]) {
        let mut collector = collector.lock().expect("free");
        for (layer, expert, input, hidden) in rows {
            if collector.wants(*layer) {
                collector.add(*layer, *expert, input, hidden);
            }
        }
    }

    #[test]
    fn hessians_are_the_means_of_products_blended_with_the_layers() {
        let dir = tempfile::tempdir().expect("dir");
        let head = head();
        let rows = rows(&head);
        collect(dir.path(), &head, u64::MAX, Some(2), |collector, _, passes| {
            assert_eq!(passes, 1);
            give(collector, &rows);
            Ok::<_, SculptError>(())
        })
        .expect("collected");
        let statistics = Statistics::open(dir.path()).expect("complete");
        for (layer, expert, pooled) in [(1, 0, 0.3), (2, 1, 0.3), (2, 2, 1.0), (4, 2, 1.0)] {
            let found = statistics.hessians(layer, expert).expect("read");
            let mean = |kind: usize, i: usize, j: usize, of: &dyn Fn(u32) -> bool| {
                let mine: Vec<_> = rows.iter().filter(|row| row.0 == layer && of(row.1)).collect();
                let value = |row: &&&(u32, u32, Vec<f32>, Vec<f32>)| {
                    let x = if kind == 0 { &row.2 } else { &row.3 };
                    f64::from(x[i]) * f64::from(x[j])
                };
                if mine.is_empty() {
                    0.0
                } else {
                    mine.iter().map(|r| value(&r)).sum::<f64>() / mine.len() as f64
                }
            };
            for (kind, square) in found.iter().enumerate() {
                assert_eq!(square.n, [37, 18][kind]);
                for i in 0..square.n {
                    for j in 0..square.n {
                        let all = mean(kind, i, j, &|_| true);
                        let own = mean(kind, i, j, &|e| e == expert);
                        let expected = pooled * all + (1.0 - pooled) * own;
                        let value = f64::from(square.row(i)[j]);
                        assert!((value - expected).abs() < 1e-4, "{layer} {expert} {kind} {i} {j}");
                    }
                }
            }
        }
    }

    #[test]
    fn passes_fit_in_memory_and_an_interrupted_run_goes_on() {
        let dir = tempfile::tempdir().expect("dir");
        let head = head();
        let rows = rows(&head);
        let whole = tempfile::tempdir().expect("dir");
        collect(whole.path(), &head, u64::MAX, None, |collector, _, _| {
            give(collector, &rows);
            Ok::<_, SculptError>(())
        })
        .expect("collected");
        let mut seen = Vec::new();
        let stopped = collect(dir.path(), &head, head.layer_bytes(), None, |collector, i, passes| {
            seen.push((i, passes, collector.lock().expect("free").last_layer()));
            if i == 1 {
                return Err(SculptError::Stopped);
            }
            give(collector, &rows);
            Ok(())
        });
        assert!(matches!(stopped, Err(SculptError::Stopped)));
        assert_eq!(seen, [(0, 3, 1), (1, 3, 2)]);
        assert!(matches!(Statistics::open(dir.path()), Err(SculptError::Statistics { .. })));
        // A torn part is done again, as if it were not there.
        let torn = part::path(dir.path(), 1);
        let bytes = fs::read(&torn).expect("part");
        fs::write(&torn, &bytes[..bytes.len() - 9]).expect("torn");
        seen.clear();
        collect(dir.path(), &head, 2 * head.layer_bytes(), None, |collector, i, passes| {
            seen.push((i, passes, collector.lock().expect("free").last_layer()));
            give(collector, &rows);
            Ok::<_, SculptError>(())
        })
        .expect("collected");
        assert_eq!(seen, [(0, 2, 2), (1, 2, 4)]);
        for layer in head.layers.clone() {
            let read = |dir: &Path| fs::read(part::path(dir, layer)).expect("part");
            assert!(read(dir.path()) == read(whole.path()), "layer {layer}");
        }
        let other = Head { text: "u".to_owned(), ..head };
        let refused = collect(dir.path(), &other, 1, None, |_, _, _| Ok::<_, SculptError>(()));
        assert!(matches!(refused, Err(SculptError::Statistics { .. })));
    }
}
