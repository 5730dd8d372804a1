//! What a synthetic vault promises of routing and activations, seen by the engine that runs it.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::process::Command;
use std::sync::atomic::AtomicBool;

use smoe_engine::plan::{PlanRequest, RingSize};
use smoe_engine::{Engine, EngineOptions, Observer, Vault};
use smoe_format::spec::{FfnKind, GroupScore, GroupSpec, LatentSpec, RouterKind};
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

/// The same with what DeepSeek's models have: latent attention, and a router with corrections and groups.
fn grouped(router: RouterKind, groups: GroupSpec) -> Shape {
    let mut shape = shape();
    let spec = &mut shape.spec;
    (spec.attention.n_kv_heads, spec.attention.qk_norm) = (1, false);
    spec.attention.latent =
        Some(LatentSpec { q_rank: 96, kv_rank: 64, rope_dim: 16, value_dim: 32, norm_eps: 1e-6 });
    spec.rope.interleaved = true;
    (spec.moe.router, spec.moe.groups, spec.moe.routed_scale) = (router, Some(groups), 2.5);
    spec.moe.correction_bias = router == RouterKind::Sigmoid;
    spec.moe.norm_topk = router == RouterKind::Sigmoid;
    shape
}

/// Counts what the router's logits mean, layer by layer.
struct Seen {
    /// How groups of experts are chosen.
    router: RouterKind,
    groups: Option<GroupSpec>,
    uses: Vec<Vec<f64>>,
    before: Vec<Vec<usize>>,
    shared: usize,
    pairs: usize,
    embedding: Vec<f32>,
    /// Largest share of the embedding's length that a hidden state is away from it.
    strayed: f32,
    highest: f32,
}

impl Seen {
    /// The experts of the groups that rank highest: each expert's score is the sum of its group's best, counted anew.
    fn candidates(&self, logits: &[f32]) -> Vec<usize> {
        let Some(GroupSpec { n, top, score }) = self.groups else { return (0..EXPERTS).collect() };
        let value = |e: usize| match self.router {
            RouterKind::Softmax => f64::from(logits[e]).exp(),
            RouterKind::Sigmoid => 1.0 / (1.0 + f64::from(-logits[e]).exp()),
        };
        let rank = |group: usize| {
            let mut values: Vec<f64> = (group * EXPERTS / n..(group + 1) * EXPERTS / n).map(value).collect();
            values.sort_by(|a, b| b.total_cmp(a));
            values[..if score == GroupScore::Best { 1 } else { 2 }].iter().sum::<f64>()
        };
        let mut groups: Vec<usize> = (0..n).collect();
        groups.sort_by(|&a, &b| rank(b).total_cmp(&rank(a)));
        (0..EXPERTS).filter(|e| groups[..top].contains(&(e * n / EXPERTS))).collect()
    }
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
            let mut order = self.candidates(logits);
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

fn measure(
    shape: &Shape,
    asked: RoutingStats,
    settings: Settings,
    unique_layers: Option<usize>,
) -> (RoutingStats, Seen) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vault");
    let options =
        SynthOptions { settings, unique_layers, routing: asked, seed: 3, ..SynthOptions::default() };
    synth(shape, &path, &options, &(), &AtomicBool::new(false)).unwrap();
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
        router: shape.spec.moe.router,
        groups: shape.spec.moe.groups,
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
        let (found, seen) = measure(&shape(), asked, settings, unique);
        assert!((found.overlap - overlap).abs() < TOLERANCE, "{asked:?}: {found:?}");
        assert!((found.skew - skew).abs() < TOLERANCE, "{asked:?}: {found:?}");
        assert!((0.01..0.3).contains(&seen.strayed), "{}", seen.strayed);
        assert!(seen.highest < 8.0, "{}", seen.highest);
    }
}

#[test]
fn independent_routing_shares_what_chance_shares() {
    let (found, _) = measure(&shape(), RoutingStats { overlap: 0.0, skew: 0.1 }, Settings::default(), None);
    assert!((found.overlap - 0.0625).abs() < 0.03, "{found:?}");
    assert!(found.skew < 0.16, "{found:?}");
}

#[test]
fn groups_of_experts_are_chosen_as_asked_too() {
    for (router, score, overlap, skew) in [
        (RouterKind::Sigmoid, GroupScore::BestTwo, 0.46, 0.3),
        (RouterKind::Softmax, GroupScore::Best, 0.6, 0.35),
    ] {
        let asked = RoutingStats { overlap, skew };
        let shape = grouped(router, GroupSpec { n: 8, top: 3, score });
        let (found, seen) = measure(&shape, asked, Settings::default(), None);
        assert!((found.overlap - overlap).abs() < TOLERANCE, "{asked:?}: {found:?}");
        assert!((found.skew - skew).abs() < TOLERANCE, "{asked:?}: {found:?}");
        assert!((0.01..0.3).contains(&seen.strayed), "{}", seen.strayed);
        assert!(seen.highest < 8.0, "{}", seen.highest);
    }
}

fn smoe(args: &[&str]) -> Result<serde_json::Value, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_smoe")).args(args).output().unwrap();
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout).unwrap()),
        false => Err(String::from_utf8(output.stderr).unwrap()),
    }
}

#[test]
fn a_model_published_in_mxfp4_is_made_so_unless_told_and_inspected_as_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (config, vault) = (path("config.json"), path("vault"));
    let published = serde_json::json!({
        "model_type": "gpt_oss", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 150_000, "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
        "num_experts_per_tok": 2, "intermediate_size": 64,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    });
    std::fs::write(&config, published.to_string()).unwrap();
    let synth =
        |more: &[&str]| smoe(&[&["synth", "--like", &config, &vault, "--force", "--json"], more].concat());

    let made = synth(&["--unique-layers", "1", "--overlap", "0.5"]).unwrap();
    assert_eq!(made["expert_encoding"], "mxfp4/32");
    let facts = smoe(&["inspect", &vault, "--json"]).unwrap();
    assert_eq!(facts["layers"][0]["encodings"]["up"], "mxfp4/32");
    let synthetic = &facts["synthetic"];
    assert_eq!(synthetic["like"], "config.json");
    assert_eq!(
        (synthetic["unique_layers"].as_u64(), synthetic["asked"]["overlap"].as_f64()),
        (Some(1), Some(0.5))
    );
    let away = synthetic["predicted"]["overlap"].as_f64().unwrap() - 0.5;
    assert!(away.abs() < RoutingStats::TOLERANCE, "{synthetic}");

    assert_eq!(synth(&["--bits", "4"]).unwrap()["expert_encoding"], "q4/64");
    assert_eq!(synth(&["--bits", "4", "--group", "32"]).unwrap()["expert_encoding"], "q4/32");
    assert!(synth(&["--group", "64"]).unwrap_err().contains("mxfp4 has groups of 32"));
    assert!(synth(&["--bits", "7"]).unwrap_err().contains("or mxfp4"));
    let least = synth(&["--overlap", "0.01"]).unwrap_err();
    assert!(least.contains("--overlap 0.01: out of reach"), "{least}");
}
