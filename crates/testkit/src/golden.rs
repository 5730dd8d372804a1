//! Goldens of the reference implementations, and the comparison that an engine must pass.

use std::fmt;
use std::path::Path;

use smoe_format::ModelSpec;

use crate::fixtures::fixture;
use crate::read;
use crate::reference::{Step, choose};
use crate::tolerance;
use crate::weights::Tensors;

/// What a reference implementation computed for the prompts of a fixture.
#[derive(Clone, Debug)]
pub struct Golden {
    /// The fixture's name.
    pub family: String,
    /// Of each MoE layer that has one: what is added to its scores for the choice.
    pub corrections: Vec<Vec<f64>>,
    /// Per prompt.
    pub prompts: Vec<Prompt>,
}

/// A prompt of `T` tokens and what came of it.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// `[T, vocab_size]`.
    pub logits: Vec<f32>,
    /// `[n_layers + 1, T, d_model]`, see [`crate::Forward::hidden`].
    pub hidden: Vec<f32>,
    /// `[MoE layers, T, n_experts]`.
    pub router: Vec<f32>,
    /// The greedy continuation.
    pub greedy: Vec<Step>,
}

impl Golden {
    /// Reads `golden.json` and `golden.safetensors` of a fixture's folder.
    ///
    /// # Panics
    /// If they cannot be read, or lack something.
    #[must_use]
    pub fn load(dir: &Path) -> Self {
        let path = dir.join("golden.json");
        let json: serde_json::Value =
            serde_json::from_slice(&read(&path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let tensors = Tensors::open(&[dir.join("golden.safetensors")]);
        let list = |value: &serde_json::Value| value.as_array().expect("a list").clone();
        let token = |value: &serde_json::Value| value.as_u64().expect("a token id") as u32;
        let prompts = list(&json["prompts"])
            .iter()
            .zip(list(&json["greedy"]))
            .enumerate()
            .map(|(i, (tokens, greedy))| Prompt {
                tokens: list(tokens).iter().map(token).collect(),
                logits: tensors.values(&format!("logits.{i}")),
                hidden: tensors.values(&format!("hidden.{i}")),
                router: tensors.values(&format!("router.{i}")),
                greedy: list(&greedy["tokens"])
                    .iter()
                    .zip(list(&greedy["margin"]))
                    .map(|(t, margin)| Step { token: token(t), margin: margin.as_f64().expect("a margin") })
                    .collect(),
            })
            .collect();
        let family = json["family"].as_str().expect("a family").to_owned();
        Self { family, corrections: corrections(dir), prompts }
    }

    /// The experts that an MoE layer's logits choose, and by how much.
    fn choose<F: Copy + Into<f64>>(&self, layer: usize, logits: &[F], spec: &ModelSpec) -> (Vec<u32>, f64) {
        let logits: Vec<f64> = logits.iter().map(|&l| l.into()).collect();
        choose(spec, &logits, self.corrections.get(layer).map(Vec::as_slice))
    }

    /// The golden of the fixture `family`; `None`, said aloud, where it is absent.
    #[must_use]
    pub fn of(family: &str) -> Option<Self> {
        fixture(family).map(|dir| Self::load(&dir))
    }
}

/// The correction biases of a checkpoint, by layer.
fn corrections(dir: &Path) -> Vec<Vec<f64>> {
    let weights = Tensors::open(&[dir.join("model.safetensors")]);
    let layer = |name: &str| {
        let module = name.strip_suffix(".e_score_correction_bias")?;
        module.strip_prefix("model.layers.")?.split('.').next()?.parse::<usize>().ok()
    };
    let mut found: Vec<(usize, &str)> =
        weights.names().filter_map(|name| layer(name).map(|layer| (layer, name))).collect();
    found.sort_unstable();
    found.iter().map(|(_, name)| weights.values(name).into_iter().map(f64::from).collect()).collect()
}

/// Other experts than the golden's, where the golden's choice was clear.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteMismatch {
    /// Index among the MoE layers.
    pub moe_layer: usize,
    /// Position in the prompt.
    pub pos: usize,
    /// The golden's experts, ascending.
    pub expected: Vec<u32>,
    /// The experts found, ascending.
    pub found: Vec<u32>,
    /// By how much the golden chose ([`choose`]).
    pub margin: f64,
}

/// How experts compare.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    /// Layers and positions compared.
    pub compared: usize,
    /// Left out: the golden's margin is at most [`tolerance::ROUTER_MARGIN`].
    pub narrow: usize,
    /// Where the experts are others.
    pub mismatches: Vec<RouteMismatch>,
}

/// How one prompt's outputs compare. A difference with a NaN in it is infinite.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Family and prompt.
    pub name: String,
    /// Positions whose logits were compared.
    pub positions: usize,
    /// The largest absolute difference of logits.
    pub logits: f64,
    /// The largest difference of hidden states, as a fraction of the larger of one and the golden's value.
    pub hidden: Option<f64>,
    /// The largest absolute difference of router logits.
    pub router: Option<f64>,
    /// Experts, if router logits were given.
    pub routes: Option<Routes>,
}

impl Report {
    /// Meets the engine's tolerances: logits within [`tolerance::LOGITS`], and the golden's experts.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.logits <= tolerance::LOGITS && self.routes.as_ref().is_none_or(|r| r.mismatches.is_empty())
    }

    /// # Panics
    /// With the report, if it does not pass.
    pub fn assert_passes(&self) {
        assert!(self.passes(), "{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {} positions: max difference of logits {:.2e}",
            self.name, self.positions, self.logits
        )?;
        if let Some(hidden) = self.hidden {
            write!(f, ", hidden {hidden:.2e}")?;
        }
        if let Some(router) = self.router {
            write!(f, ", router {router:.2e}")?;
        }
        if let Some(routes) = &self.routes {
            write!(f, "; {routes}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wrong = self.mismatches.len();
        write!(f, "{} of {} routes are the golden's", self.compared - wrong, self.compared)?;
        if self.narrow > 0 {
            write!(f, ", {} too narrow to ask", self.narrow)?;
        }
        for m in self.mismatches.iter().take(8) {
            write!(
                f,
                "\n  MoE layer {} position {}: experts {:?}, the golden has {:?} by {:.2e}",
                m.moe_layer, m.pos, m.found, m.expected, m.margin
            )?;
        }
        if wrong > 8 {
            write!(f, "\n  and {} more", wrong - 8)?;
        }
        Ok(())
    }
}

/// Compares outputs for prompt `i` with the golden.
///
/// `logits` is `[n, vocab_size]`, of the last `n` positions (1 or more); `hidden` is
/// `[n_layers + 1, T, d_model]` and `router` `[MoE layers, T, n_experts]`, each only compared if given.
///
/// # Panics
/// If a length does not fit `spec` and the prompt.
#[must_use]
pub fn compare<F: Copy + Into<f64>>(
    golden: &Golden,
    i: usize,
    logits: &[F],
    hidden: Option<&[F]>,
    router: Option<&[F]>,
    spec: &ModelSpec,
) -> Report {
    let prompt = &golden.prompts[i];
    let n = logits.len() / spec.vocab_size;
    assert!((1..=prompt.tokens.len()).contains(&n), "logits of {n} of {} positions", prompt.tokens.len());
    assert_eq!(logits.len(), n * spec.vocab_size, "length of the logits");
    let last = &prompt.logits[prompt.logits.len() - logits.len()..];
    Report {
        name: format!("{} prompt {i}", golden.family),
        positions: n,
        logits: largest(logits, last, |_| 1.0),
        hidden: hidden.map(|hidden| largest(hidden, &prompt.hidden, |g| g.abs().max(1.0))),
        router: router.map(|router| largest(router, &prompt.router, |_| 1.0)),
        routes: router.map(|router| {
            let rows = router.chunks(spec.moe.n_experts).enumerate();
            let layer = |row: usize| row / prompt.tokens.len();
            let chosen: Vec<u32> =
                rows.flat_map(|(row, logits)| golden.choose(layer(row), logits, spec).0).collect();
            compare_routes(golden, i, &chosen, spec)
        }),
    }
}

/// Compares experts for prompt `i`: `chosen` is `[MoE layers, T, top_k]`, in any order within a position.
///
/// # Panics
/// If the length does not fit `spec` and the prompt.
#[must_use]
pub fn compare_routes(golden: &Golden, i: usize, chosen: &[u32], spec: &ModelSpec) -> Routes {
    let prompt = &golden.prompts[i];
    let (n, k) = (prompt.tokens.len(), spec.moe.top_k);
    assert_eq!(chosen.len(), spec.moe_layers().count() * n * k, "length of the chosen experts");
    let mut routes = Routes::default();
    for (at, (found, logits)) in chosen.chunks(k).zip(prompt.router.chunks(spec.moe.n_experts)).enumerate() {
        let (expected, margin) = golden.choose(at / n, logits, spec);
        if margin <= tolerance::ROUTER_MARGIN {
            routes.narrow += 1;
            continue;
        }
        routes.compared += 1;
        let mut found = found.to_vec();
        found.sort_unstable();
        if found != expected {
            routes.mismatches.push(RouteMismatch { moe_layer: at / n, pos: at % n, expected, found, margin });
        }
    }
    routes
}

/// How a greedy continuation compares.
#[derive(Clone, Debug, PartialEq)]
pub struct GreedyReport {
    /// Tokens that are the golden's, from the first on.
    pub equal: usize,
    /// Tokens that the golden has.
    pub of: usize,
    /// The first other token: its index, the golden's step, the token found.
    pub differs: Option<(usize, Step, u32)>,
}

impl GreedyReport {
    /// No token differs, or the first that does had a margin below [`tolerance::GREEDY_MARGIN`].
    #[must_use]
    pub fn passes(&self) -> bool {
        match self.differs {
            Some((_, step, _)) => step.margin < tolerance::GREEDY_MARGIN,
            None => self.equal > 0,
        }
    }

    /// # Panics
    /// With the report, if it does not pass.
    pub fn assert_passes(&self) {
        assert!(self.passes(), "{self}");
    }
}

impl fmt::Display for GreedyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} greedy tokens equal", self.equal, self.of)?;
        if let Some((at, step, found)) = self.differs {
            let verdict = if self.passes() { "a near tie" } else { "wrong" };
            write!(f, "; token {at} is {found}, not {} by {:.2e}: {verdict}", step.token, step.margin)?;
        }
        Ok(())
    }
}

/// Compares greedy tokens with the golden's, up to the first that differs: after it the contexts are others.
/// Fewer tokens than the golden has are compared as far as they go.
#[must_use]
pub fn compare_greedy(tokens: &[u32], golden: &[Step]) -> GreedyReport {
    let differs = tokens
        .iter()
        .zip(golden)
        .enumerate()
        .find(|(_, (found, step))| **found != step.token)
        .map(|(at, (found, step))| (at, *step, *found));
    let equal = differs.map_or(tokens.len().min(golden.len()), |(at, ..)| at);
    GreedyReport { equal, of: golden.len(), differs }
}

fn largest<F: Copy + Into<f64>>(found: &[F], golden: &[f32], unit: impl Fn(f64) -> f64) -> f64 {
    assert_eq!(found.len(), golden.len(), "length of what is compared");
    let mut largest = 0.0f64;
    for (&found, &golden) in found.iter().zip(golden) {
        let golden = f64::from(golden);
        let difference = (found.into() - golden).abs() / unit(golden);
        largest = if difference.is_nan() { f64::INFINITY } else { largest.max(difference) };
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::qwen3_moe;

    /// One MoE layer, two positions of four experts, two of them chosen.
    fn small() -> (Golden, ModelSpec) {
        let mut spec = qwen3_moe();
        spec.layers.truncate(1);
        (spec.d_model, spec.vocab_size, spec.moe.n_experts) = (2, 3, 4);
        let prompt = Prompt {
            tokens: vec![0, 2],
            logits: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            hidden: vec![100.0; 8],
            router: vec![0.5, 0.1, 0.4, 0.2, 0.3, 0.3, 0.300_001, 0.1],
            greedy: vec![
                Step { token: 2, margin: 1.0 },
                Step { token: 1, margin: 1e-3 },
                Step { token: 0, margin: 0.5 },
            ],
        };
        (Golden { family: "small".to_owned(), corrections: Vec::new(), prompts: vec![prompt] }, spec)
    }

    #[test]
    fn equal_outputs_pass_and_near_ties_are_not_asked() {
        let (golden, spec) = small();
        let p = &golden.prompts[0];
        let report = compare(&golden, 0, &p.logits, Some(&p.hidden), Some(&p.router), &spec);
        assert!(report.passes());
        assert_eq!((report.logits, report.hidden, report.router), (0.0, Some(0.0), Some(0.0)));
        let routes = report.routes.expect("given");
        assert_eq!((routes.compared, routes.narrow), (1, 1));
        assert!(compare::<f32>(&golden, 0, &p.logits[3..], None, None, &spec).passes());
        assert!(compare_routes(&golden, 0, &[2, 0, 3, 3], &spec).mismatches.is_empty());
    }

    #[test]
    fn every_fault_is_seen() {
        let (golden, spec) = small();
        let p = &golden.prompts[0];
        for wrong in [6.01, f32::NAN, f32::INFINITY] {
            let mut logits = p.logits.clone();
            logits[5] = wrong;
            assert!(!compare(&golden, 0, &logits, None, None, &spec).passes(), "{wrong}");
        }
        // A NaN first, a small difference after it.
        let nan_first = [f32::NAN, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(compare(&golden, 0, &nan_first, None, None, &spec).logits, f64::INFINITY);
        let mut router = p.router.clone();
        router.swap(1, 2);
        let report = compare(&golden, 0, &p.logits, None, Some(&router), &spec);
        assert!(!report.passes());
        let mismatch = &report.routes.as_ref().expect("given").mismatches[0];
        assert_eq!((&mismatch.expected[..], &mismatch.found[..]), (&[0, 2][..], &[0, 1][..]));
        assert!(report.to_string().contains("MoE layer 0 position 0"), "{report}");
    }

    #[test]
    fn greedy_tokens_may_part_at_a_near_tie_only() {
        let (golden, _) = small();
        let steps = &golden.prompts[0].greedy;
        assert!(compare_greedy(&[2, 1, 0], steps).passes());
        assert!(compare_greedy(&[2], steps).passes());
        assert!(compare_greedy(&[2, 0, 2], steps).passes(), "parts where the margin is 1e-3");
        assert!(!compare_greedy(&[2, 1, 1], steps).passes());
        assert!(!compare_greedy(&[0, 1, 0], steps).passes());
        assert!(!compare_greedy(&[], steps).passes());
        assert!(compare_greedy(&[2, 1, 1], steps).to_string().contains("wrong"));
    }
}
