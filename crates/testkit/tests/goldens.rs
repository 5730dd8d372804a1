//! The reference against the goldens: what makes it an oracle.
#![allow(clippy::print_stdout, reason = "how near the reference comes is worth reading")]

use smoe_format::ModelSpec;
use smoe_testkit::{
    CheckpointWeights, Golden, compare, compare_greedy, compare_routes, fixtures, forward, greedy,
    shared_path, tolerance,
};

fn meets(family: &str, spec: &ModelSpec) {
    let Some(dir) = shared_path(&format!("fixtures/{family}")) else { return };
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

/// The goldens tell right from nearly right: each slip moves the reference off them, and all but the epsilon
/// (6e-4 on these weights) by more than the engine's tolerance.
#[test]
fn slips_of_the_spec_do_not_pass() {
    use smoe_format::spec::RopeScaling;
    type Slip = (&'static str, fn(&mut ModelSpec));
    let slips: [(&str, ModelSpec, &[Slip]); 3] = [
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
    ];
    for (family, right, slips) in slips {
        let Some(dir) = shared_path(&format!("fixtures/{family}")) else { return };
        let golden = Golden::load(&dir);
        let weights = CheckpointWeights::open(&dir);
        for (what, slip) in slips {
            let mut spec = right.clone();
            slip(&mut spec);
            let found = forward(&spec, &weights, &golden.prompts[2].tokens);
            let report = compare(&golden, 2, &found.logits, None, None, &spec);
            println!("{family}, {what}: logits off by {:.2e}", report.logits);
            assert!(report.logits > tolerance::REFERENCE_LOGITS, "{what}: {report}");
            assert!(!report.passes() || *what == "another epsilon", "{what}: {report}");
        }
    }
}
