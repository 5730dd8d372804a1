//! What a synthetic vault promises of routing and activations, seen by the engine that runs it.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::sync::atomic::AtomicBool;

use smoe_engine::plan::{PlanRequest, RingSize};
use smoe_engine::{Engine, EngineOptions, Observer, Vault};
use smoe_format::spec::FfnKind;
use smoe_sculpt::synth::RoutingStats;
use smoe_sculpt::{BackboneBits, Settings, Shape, SynthOptions, synth, token_stream};

/// How far measured statistics may be from those asked for: a stream of 4,000 tokens does not see all topics
/// alike, six layers are a small sample, and hidden states are not the embedding alone.
const TOLERANCE: f64 = 0.06;
/// A stream is observed in sessions of so many tokens.
const SESSION: usize = 250;
const TOKENS: usize = 4000;
const LAYERS: usize = 6;
const EXPERTS: usize = 64;
const TOP_K: usize = 4;

/// A small model of MoE layers with a shared expert.
fn shape() -> Shape {
    let mut shape = Shape::find("qwen3-30b-a3b").unwrap();
    let spec = &mut shape.spec;
    (spec.d_model, spec.vocab_size, spec.layers) = (256, 6400, vec![FfnKind::Moe; LAYERS]);
    (spec.attention.n_heads, spec.attention.n_kv_heads, spec.attention.head_dim) = (4, 2, 64);
    (spec.moe.n_experts, spec.moe.top_k, spec.moe.d_expert, spec.moe.d_shared) = (EXPERTS, TOP_K, 32, 64);
    shape
}

/// Counts what the router's logits mean, layer by layer.
struct Seen {
    uses: Vec<Vec<f64>>,
    before: Vec<Vec<usize>>,
    shared: usize,
    pairs: usize,
    embedding: Vec<f32>,
    /// Largest share of the embedding's length that a hidden state is away from it.
    strayed: f32,
    highest: f32,
}

fn length(values: impl Iterator<Item = f32>) -> f32 {
    values.map(|x| x * x).sum::<f32>().sqrt()
}

impl Observer for Seen {
    fn hidden(&mut self, index: usize, _first: usize, rows: &[f32]) {
        self.highest = rows.iter().fold(self.highest, |m, x| m.max(x.abs()));
        assert!(rows.iter().all(|x| x.is_finite()));
        match index {
            0 => self.embedding = rows.to_vec(),
            // What all layers but the last have added.
            _ if index == LAYERS - 1 => {
                for (x, e) in rows.chunks(256).zip(self.embedding.chunks(256)) {
                    let away = length(x.iter().zip(e).map(|(x, e)| x - e));
                    self.strayed = self.strayed.max(away / length(e.iter().copied()));
                }
            }
            _ => {}
        }
    }

    fn router(&mut self, index: usize, first: usize, rows: &[f32]) {
        for (t, logits) in rows.chunks(EXPERTS).enumerate() {
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            order.truncate(TOP_K);
            order.iter().for_each(|&e| self.uses[index][e] += 1.0);
            if first + t > 0 {
                self.pairs += TOP_K;
                self.shared += order.iter().filter(|e| self.before[index].contains(e)).count();
            }
            self.before[index] = order;
        }
    }

    fn logits(&mut self, _first: usize, rows: &[f32]) {
        assert!(rows.iter().all(|x| x.is_finite() && x.abs() < 100.0));
    }
}

fn measure(asked: RoutingStats, settings: Settings, unique_layers: Option<usize>) -> (RoutingStats, Seen) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vault");
    let options = SynthOptions { settings, unique_layers, routing: asked, seed: 3, text: None };
    synth(&shape(), &path, &options, &(), &AtomicBool::new(false)).unwrap();
    let plan = PlanRequest {
        memory: Some(1 << 30),
        ring: RingSize::Auto,
        context: Some(SESSION),
        chunk: Some(SESSION),
        threads: Some(2),
        ..PlanRequest::default()
    };
    let vault = Vault::open(&path).unwrap();
    let mut engine = Engine::open(&vault, &EngineOptions { plan, ..EngineOptions::default() }).unwrap();
    engine.preload(&mut |_, _| ()).unwrap();
    let mut seen = Seen {
        uses: vec![vec![0.0; EXPERTS]; LAYERS],
        before: vec![Vec::new(); LAYERS],
        shared: 0,
        pairs: 0,
        embedding: Vec::new(),
        strayed: 0.0,
        highest: 0.0,
    };
    let tokens: Vec<u32> = token_stream(6400, 11).take(TOKENS).collect();
    for session in tokens.chunks(SESSION) {
        engine.observe(session, &mut seen).unwrap();
    }
    let skew: f64 = seen
        .uses
        .iter()
        .map(|uses| {
            let mut uses = uses.clone();
            uses.sort_by(|a, b| b.total_cmp(a));
            // A tenth of 64 experts is 6.4.
            (uses[..6].iter().sum::<f64>() + 0.4 * uses[6]) / (TOKENS * TOP_K) as f64
        })
        .sum::<f64>()
        / LAYERS as f64;
    (RoutingStats { overlap: seen.shared as f64 / seen.pairs as f64, skew }, seen)
}

#[test]
fn routing_is_as_asked_and_activations_stay_tame() {
    let q = |bits, backbone| Settings { bits, backbone, ..Settings::default() };
    for (overlap, skew, settings, unique) in [
        (0.46, 0.3, q(4, BackboneBits::Q8), None),
        (0.46, 0.2, q(2, BackboneBits::Q4), Some(1)),
        (0.7, 0.3, q(16, BackboneBits::Bf16), Some(3)),
    ] {
        let asked = RoutingStats { overlap, skew };
        let (found, seen) = measure(asked, settings, unique);
        assert!((found.overlap - overlap).abs() < TOLERANCE, "{asked:?}: {found:?}");
        assert!((found.skew - skew).abs() < TOLERANCE, "{asked:?}: {found:?}");
        assert!((0.01..0.3).contains(&seen.strayed), "{}", seen.strayed);
        assert!(seen.highest < 8.0, "{}", seen.highest);
    }
}

#[test]
fn independent_routing_shares_what_chance_shares() {
    let (found, _) = measure(RoutingStats { overlap: 0.0, skew: 0.1 }, Settings::default(), None);
    assert!((found.overlap - 0.0625).abs() < 0.03, "{found:?}");
    assert!(found.skew < 0.16, "{found:?}");
}
