//! The reference against the goldens: what makes it an oracle.
#![allow(clippy::print_stdout, reason = "how near the reference comes is worth reading")]

use smoe_format::ModelSpec;
use smoe_testkit::{
    CheckpointWeights, Golden, compare, compare_greedy, compare_routes, fixtures, forward, greedy, tolerance,
};

fn meets(family: &str, spec: &ModelSpec) {
    let Some(dir) = fixtures::fixture(family) else { return };
    let golden = Golden::load(&dir);
    let weights = CheckpointWeights::open(&dir);
    assert_eq!(golden.prompts.len(), 4);
    for (i, prompt) in golden.prompts.iter().enumerate() {
        let found = forward(spec, &weights, &prompt.tokens);
        let report = compare(&golden, i, &found.logits, Some(&found.hidden), Some(&found.router), spec);
        println!("{report}");
        report.assert_passes();
        assert!(report.logits < tolerance::REFERENCE_LOGITS, "{report}");
        assert!(report.hidden.is_some_and(|h| h < tolerance::REFERENCE_HIDDEN), "{report}");
        assert!(report.router.is_some_and(|r| r < tolerance::REFERENCE_ROUTER), "{report}");
        let routes = compare_routes(&golden, i, &found.chosen, spec);
        assert_eq!(Some(routes), report.routes, "the experts visited are those that the logits name");

        let steps = greedy(spec, &weights, &prompt.tokens, prompt.greedy.len());
        let tokens: Vec<u32> = steps.iter().map(|s| s.token).collect();
        let report = compare_greedy(&tokens, &prompt.greedy);
        let margins = steps.iter().zip(&prompt.greedy).map(|(a, b)| (a.margin - b.margin).abs());
        println!("  {report}, margins within {:.2e}", margins.fold(0.0, f64::max));
        report.assert_passes();
    }
}

#[test]
fn qwen3_moe() {
    meets("qwen3_moe", &fixtures::qwen3_moe());
}

#[test]
fn qwen3_moe_tied() {
    meets("qwen3_moe_tied", &fixtures::qwen3_moe_tied());
}

#[test]
fn deepseek() {
    meets("deepseek", &fixtures::deepseek());
}

#[test]
fn mixtral() {
    meets("mixtral", &fixtures::mixtral());
}

#[test]
fn olmoe() {
    meets("olmoe", &fixtures::olmoe());
}

#[test]
fn qwen2_moe() {
    meets("qwen2_moe", &fixtures::qwen2_moe());
}

#[test]
fn glm4_moe() {
    meets("glm4_moe", &fixtures::glm4_moe());
}

#[test]
fn gpt_oss() {
    meets("gpt_oss", &fixtures::gpt_oss());
}

#[test]
fn deepseek_v2() {
    meets("deepseek_v2", &fixtures::deepseek_v2());
}

#[test]
fn deepseek_v3() {
    meets("deepseek_v3", &fixtures::deepseek_v3());
}

#[test]
fn granitemoe() {
    meets("granitemoe", &fixtures::granitemoe());
}

#[test]
fn ernie4_5_moe() {
    meets("ernie4_5_moe", &fixtures::ernie4_5_moe());
}

#[test]
fn minimax_m2() {
    meets("minimax_m2", &fixtures::minimax_m2());
}

#[test]
fn glm_moe_dsa() {
    meets("glm_moe_dsa", &fixtures::glm_moe_dsa());
}

#[test]
fn deepseek_v32() {
    meets("deepseek_v32", &fixtures::deepseek_v32());
}

#[test]
fn qwen3_next() {
    meets("qwen3_next", &fixtures::qwen3_next());
}

#[test]
fn qwen3_5_moe() {
    meets("qwen3_5_moe", &fixtures::qwen3_5_moe());
}

/// The goldens tell right from nearly right: each slip moves the reference off them, and all but the epsilon
/// (6e-4 on these weights) by more than the engine's tolerance.
#[test]
fn slips_of_the_spec_do_not_pass() {
    use smoe_format::spec::{Activation, GroupScore, GroupSpec, RopeScaling, RouterKind};
    type Slip = (&'static str, fn(&mut ModelSpec));
    let slips: [(&str, ModelSpec, &[Slip]); 15] = [
        (
            "qwen3_moe",
            fixtures::qwen3_moe(),
            &[
                ("top-k not normalised", |s| s.moe.norm_topk = false),
                ("one expert fewer", |s| s.moe.top_k = 1),
                ("no QK-norm", |s| s.attention.qk_norm = false),
                ("another RoPE base", |s| s.rope.theta = 1e4),
                ("another epsilon", |s| s.rms_norm_eps = 1e-4),
            ],
        ),
        (
            "qwen3_moe_tied",
            fixtures::qwen3_moe_tied(),
            &[
                ("no YaRN", |s| s.rope.scaling = RopeScaling::None),
                ("linear for YaRN", |s| s.rope.scaling = RopeScaling::Linear { factor: 4.0 }),
                ("another YaRN", |s| s.rope.scaling = fixtures::yarn(4.0, 2048)),
                ("cosines not scaled", |s| {
                    if let RopeScaling::Yarn { attention_factor, .. } = &mut s.rope.scaling {
                        *attention_factor = 1.0;
                    }
                }),
                ("ramp not truncated", |s| {
                    if let RopeScaling::Yarn { truncate, .. } = &mut s.rope.scaling {
                        *truncate = false;
                    }
                }),
            ],
        ),
        (
            "deepseek",
            fixtures::deepseek(),
            &[("top-k normalised", |s| s.moe.norm_topk = true), ("no shared expert", |s| s.moe.d_shared = 0)],
        ),
        ("olmoe", fixtures::olmoe(), &[("no QK-norm", |s| s.attention.qk_norm = false)]),
        (
            "qwen2_moe",
            fixtures::qwen2_moe(),
            &[
                ("no biases", |s| s.attention.qkv_bias = false),
                ("an open gate", |s| s.moe.shared_gate = false),
            ],
        ),
        (
            "glm4_moe",
            fixtures::glm4_moe(),
            &[
                ("a softmax router", |s| s.moe.router = RouterKind::Softmax),
                ("no corrections", |s| s.moe.correction_bias = false),
                ("all of a head rotated", |s| s.rope.dim = None),
                ("neighbours rotated", |s| s.rope.interleaved = true),
                ("another scale", |s| s.moe.routed_scale = 1.1),
            ],
        ),
        (
            "gpt_oss",
            fixtures::gpt_oss(),
            &[
                ("no sinks", |s| s.attention.sinks = false),
                ("no windows", |s| s.windows.clear()),
                ("a longer window", |s| s.windows[0] = 17),
                ("no bias of the output", |s| s.attention.o_bias = false),
                ("no bias of the router", |s| s.moe.router_bias = false),
                ("no biases of experts", |s| s.moe.expert_bias = false),
                ("a plain SwiGLU", |s| s.moe.activation = Activation::SwiGlu),
                ("another steepness", |s| {
                    s.moe.activation = Activation::ClampedSwiglu { alpha: 1.6, limit: 7.0 };
                }),
            ],
        ),
        (
            "deepseek_v2",
            fixtures::deepseek_v2(),
            &[
                ("halves rotated", |s| s.rope.interleaved = false),
                ("another scale of scores", |s| s.attention.score_scale = 1.1),
            ],
        ),
        (
            "deepseek_v3",
            fixtures::deepseek_v3(),
            &[
                ("no groups", |s| s.moe.groups = None),
                ("groups by their best", |s| {
                    s.moe.groups = s.moe.groups.map(|g| GroupSpec { score: GroupScore::Best, ..g });
                }),
                ("no corrections", |s| s.moe.correction_bias = false),
                ("no scale", |s| s.moe.routed_scale = 1.0),
            ],
        ),
        (
            "granitemoe",
            fixtures::granitemoe(),
            &[
                ("embeddings as they are", |s| s.multipliers.embedding = 1.0),
                ("residuals as they are", |s| s.multipliers.residual = 1.0),
                ("logits as they are", |s| s.multipliers.logits = 1.0),
                ("scores by the root of a head's width", |s| s.attention.score_scale = 1.0),
                ("top-k not normalised", |s| s.moe.norm_topk = false),
            ],
        ),
        (
            "ernie4_5_moe",
            fixtures::ernie4_5_moe(),
            &[
                ("no corrections", |s| s.moe.correction_bias = false),
                ("top-k not normalised", |s| s.moe.norm_topk = false),
                ("a larger least divisor", |s| s.moe.norm_min = 1.0),
                ("halves rotated", |s| s.rope.interleaved = false),
                ("no shared expert", |s| s.moe.d_shared = 0),
            ],
        ),
        (
            "minimax_m2",
            fixtures::minimax_m2(),
            &[
                ("no corrections", |s| s.moe.correction_bias = false),
                ("no QK-norm", |s| s.attention.qk_norm = false),
                ("all of a head rotated", |s| s.rope.dim = None),
                ("neighbours rotated", |s| s.rope.interleaved = true),
                ("top-k not normalised", |s| s.moe.norm_topk = false),
            ],
        ),
        (
            "glm_moe_dsa",
            fixtures::glm_moe_dsa(),
            &[
                ("all positions seen", |s| s.attention.indexer = None),
                ("one position fewer", |s| change_indexer(s, |i| i.top_k -= 1)),
                ("halves rotated in the indexer", |s| change_indexer(s, |i| i.interleaved = false)),
                ("halves rotated in attention", |s| s.rope.interleaved = false),
                ("no scale", |s| s.moe.routed_scale = 1.0),
            ],
        ),
        (
            "deepseek_v32",
            fixtures::deepseek_v32(),
            &[
                ("all positions seen", |s| s.attention.indexer = None),
                ("neighbours rotated in the indexer", |s| change_indexer(s, |i| i.interleaved = true)),
                ("scores not scaled", |s| s.attention.score_scale = 1.0),
                ("no groups", |s| s.moe.groups = None),
            ],
        ),
        (
            "qwen3_next",
            fixtures::qwen3_next(),
            &[
                ("no gate of attention", |s| s.attention.gate = false),
                ("all of a head rotated", |s| s.rope.dim = None),
                ("an open gate", |s| s.moe.shared_gate = false),
                ("no QK-norm", |s| s.attention.qk_norm = false),
            ],
        ),
    ];
    for (family, right, slips) in slips {
        let Some(dir) = fixtures::fixture(family) else { continue };
        let golden = Golden::load(&dir);
        let weights = CheckpointWeights::open(&dir);
        for (what, slip) in slips {
            let mut spec = right.clone();
            slip(&mut spec);
            if *what == "a softmax router" {
                spec.moe.correction_bias = false;
            }
            let found = forward(&spec, &weights, &golden.prompts[2].tokens);
            let report = compare(&golden, 2, &found.logits, None, None, &spec);
            println!("{family}, {what}: logits off by {:.2e}", report.logits);
            assert!(report.logits > tolerance::REFERENCE_LOGITS, "{what}: {report}");
            assert!(!report.passes() || *what == "another epsilon", "{what}: {report}");
        }
    }
}

fn change_indexer(spec: &mut ModelSpec, change: fn(&mut smoe_format::spec::IndexerSpec)) {
    change(spec.attention.indexer.as_mut().expect("an indexer"));
}
