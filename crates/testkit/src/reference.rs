//! The reference forward: what a model computes, written to be read and to share no shape with an engine.
//!
//! `f64` throughout; one position after the other, one dot product after the other, last term first; the
//! whole context each time and no KV cache; experts in descending order; weights fetched anew from
//! [`Weights`] and forgotten. Follows the published definitions of the Llama lineage: pre-norm residual
//! blocks, RMSNorm (Zhang, Sennrich 2019), RoPE (Su et al. 2021), SwiGLU (Shazeer 2020).

use std::f64::consts::PI;

use smoe_format::backbone::LayerPart;
use smoe_format::spec::{FfnKind, RopeScaling, RopeSpec};
use smoe_format::{BackboneTensor, ExpertKey, ModelSpec, Projection};

use crate::weights::Weights;

/// What a forward over `T` tokens found.
#[derive(Clone, Debug)]
pub struct Forward {
    /// `[T, vocab_size]`.
    pub logits: Vec<f64>,
    /// `[n_layers + 1, T, d_model]`: the embedding, then each layer's output, the last one after the final
    /// norm.
    pub hidden: Vec<f64>,
    /// `[MoE layers, T, n_experts]`, before the softmax.
    pub router: Vec<f64>,
    /// `[MoE layers, T, top_k]`: the experts visited, ascending.
    pub chosen: Vec<u32>,
}

/// Runs `tokens` through the model.
///
/// # Panics
/// If a token is not in the vocabulary, or a tensor is missing or of another size than `spec` says.
#[must_use]
pub fn forward(spec: &ModelSpec, weights: &impl Weights, tokens: &[u32]) -> Forward {
    let backbone = |tensor: BackboneTensor| {
        let values = weights.backbone(tensor);
        let (rows, cols) = tensor.shape(spec);
        assert_eq!(values.len(), rows * cols, "size of `{tensor}`");
        values
    };
    let d = spec.d_model;
    let embedding = backbone(BackboneTensor::Embed);
    let mut stream: Vec<Vec<f64>> = Vec::new();
    for &token in tokens {
        let token = token as usize;
        assert!(token < spec.vocab_size, "token {token} of {}", spec.vocab_size);
        stream.push(embedding[token * d..(token + 1) * d].to_vec());
    }

    let mut out =
        Forward { logits: Vec::new(), hidden: stream.concat(), router: Vec::new(), chosen: Vec::new() };
    let eps = f64::from(spec.rms_norm_eps);
    for (layer, kind) in spec.layers.iter().enumerate() {
        let layer = layer as u32;
        let part = |part| backbone(BackboneTensor::Layer(layer, part));

        let norm = part(LayerPart::AttnNorm);
        let normed: Vec<_> = stream.iter().map(|x| rms_norm(x, &norm, eps)).collect();
        let attended = attention(spec, &part, &normed);
        add(&mut stream, &attended);

        let norm = part(LayerPart::FfnNorm);
        let normed: Vec<_> = stream.iter().map(|x| rms_norm(x, &norm, eps)).collect();
        let fed = match kind {
            FfnKind::Dense(_) => {
                let matrices = [part(LayerPart::Gate), part(LayerPart::Up), part(LayerPart::Down)];
                normed.iter().map(|x| swiglu(x, &matrices)).collect()
            }
            FfnKind::Moe => mixture(spec, weights, layer, &part, &normed, &mut out),
        };
        add(&mut stream, &fed);
        if layer as usize + 1 < spec.n_layers() {
            out.hidden.extend(stream.iter().flatten());
        }
    }

    let norm = backbone(BackboneTensor::FinalNorm);
    let head = if spec.tied_head { embedding } else { backbone(BackboneTensor::Head) };
    for x in &stream {
        let x = rms_norm(x, &norm, eps);
        out.logits.extend(product(&head, &x));
        out.hidden.extend(x);
    }
    out
}

/// A greedily chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The token of the largest logit, the lowest id at a tie.
    pub token: u32,
    /// Its logit's lead over the next.
    pub margin: f64,
}

/// Continues `prompt` greedily by `n` tokens, each from a forward over everything before it.
///
/// # Panics
/// As [`forward`]; and if the prompt is empty.
#[must_use]
pub fn greedy(spec: &ModelSpec, weights: &impl Weights, prompt: &[u32], n: usize) -> Vec<Step> {
    assert!(!prompt.is_empty(), "an empty prompt has no next token");
    let mut tokens = prompt.to_vec();
    let mut steps = Vec::new();
    for _ in 0..n {
        let logits = forward(spec, weights, &tokens).logits;
        let last = &logits[logits.len() - spec.vocab_size..];
        let order = descending(last);
        let margin = order.get(1).map_or(f64::INFINITY, |&second| last[order[0]] - last[second]);
        steps.push(Step { token: order[0] as u32, margin });
        tokens.push(order[0] as u32);
    }
    steps
}

/// Attention of every position over itself and all before it.
fn attention(spec: &ModelSpec, part: &impl Fn(LayerPart) -> Vec<f64>, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let a = &spec.attention;
    let eps = f64::from(spec.rms_norm_eps);
    let [wq, wk, wv, wo] = [LayerPart::Q, LayerPart::K, LayerPart::V, LayerPart::O].map(part);
    let norms = a.qk_norm.then(|| (part(LayerPart::QNorm), part(LayerPart::KNorm)));
    let (frequencies, factor) = rope_frequencies(&spec.rope, a.head_dim);

    // `[position][head]` vectors of `head_dim`.
    let heads = |w: &[f64], norm: Option<&Vec<f64>>, rotate: bool| -> Vec<Vec<Vec<f64>>> {
        let mut all = Vec::new();
        for (pos, x) in inputs.iter().enumerate() {
            let mut of_position = Vec::new();
            for head in product(w, x).chunks(a.head_dim) {
                let mut head = norm.map_or_else(|| head.to_vec(), |norm| rms_norm(head, norm, eps));
                if rotate {
                    rotate_halves(&mut head, pos, &frequencies, factor);
                }
                of_position.push(head);
            }
            all.push(of_position);
        }
        all
    };
    let queries = heads(&wq, norms.as_ref().map(|n| &n.0), true);
    let keys = heads(&wk, norms.as_ref().map(|n| &n.1), true);
    let values = heads(&wv, None, false);

    let mut outputs = Vec::new();
    for (pos, of_position) in queries.iter().enumerate() {
        let mut joined = Vec::new();
        for (head, query) in of_position.iter().enumerate() {
            let kv_head = head / (a.n_heads / a.n_kv_heads);
            let scores: Vec<f64> =
                keys[..=pos].iter().map(|k| dot(query, &k[kv_head]) / (a.head_dim as f64).sqrt()).collect();
            let shares = softmax(&scores);
            for i in 0..a.head_dim {
                let mut sum = 0.0;
                for (share, value) in shares.iter().zip(&values[..=pos]).rev() {
                    sum += share * value[kv_head][i];
                }
                joined.push(sum);
            }
        }
        outputs.push(product(&wo, &joined));
    }
    outputs
}

/// Routed experts, from the last to the first, and then the shared expert; notes logits and choice in `out`.
fn mixture(
    spec: &ModelSpec,
    weights: &impl Weights,
    layer: u32,
    part: &impl Fn(LayerPart) -> Vec<f64>,
    inputs: &[Vec<f64>],
    out: &mut Forward,
) -> Vec<Vec<f64>> {
    let router = part(LayerPart::Router);
    // A weight for every expert of every position, most of them zero.
    let mut shares = Vec::new();
    for x in inputs {
        let logits = product(&router, x);
        let (chosen, dense) = route(spec, &logits);
        out.router.extend(logits);
        out.chosen.extend(chosen);
        shares.push(dense);
    }

    let mut outputs = vec![vec![0.0; spec.d_model]; inputs.len()];
    for expert in (0..spec.moe.n_experts).rev() {
        if shares.iter().all(|dense| dense[expert] == 0.0) {
            continue;
        }
        let key = ExpertKey { layer, expert: expert as u32 };
        let matrices = Projection::ALL.map(|projection| {
            let values = weights.expert(key, projection);
            let (rows, cols) = projection.shape(spec);
            assert_eq!(values.len(), rows * cols, "size of {key} {}", projection.name());
            values
        });
        for (pos, x) in inputs.iter().enumerate() {
            let share = shares[pos][expert];
            if share != 0.0 {
                for (sum, y) in outputs[pos].iter_mut().zip(swiglu(x, &matrices)) {
                    *sum += share * y;
                }
            }
        }
    }
    if spec.moe.d_shared > 0 {
        let matrices = [part(LayerPart::SharedGate), part(LayerPart::SharedUp), part(LayerPart::SharedDown)];
        let shared: Vec<_> = inputs.iter().map(|x| swiglu(x, &matrices)).collect();
        add(&mut outputs, &shared);
    }
    outputs
}

/// The experts that a token visits, ascending, and the weight of every expert, zero where not visited.
/// At equal probability the lower id comes first.
#[must_use]
pub fn route(spec: &ModelSpec, logits: &[f64]) -> (Vec<u32>, Vec<f64>) {
    // The one kind there is; a new one must be thought of here.
    let smoe_format::spec::RouterKind::Softmax = spec.moe.router;
    let probabilities = softmax(logits);
    let mut chosen = descending(logits);
    chosen.truncate(spec.moe.top_k);
    chosen.sort_unstable();
    let total: f64 = if spec.moe.norm_topk { chosen.iter().map(|&e| probabilities[e]).sum() } else { 1.0 };
    let mut dense = vec![0.0; logits.len()];
    for &expert in &chosen {
        dense[expert] = probabilities[expert] / total;
    }
    (chosen.into_iter().map(|e| e as u32).collect(), dense)
}

/// Indices from the largest value to the smallest, the lower index first at a tie.
pub(crate) fn descending(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order
}

/// Angle per position of each of the `head_dim / 2` pairs, and the factor on cosines and sines.
#[must_use]
pub fn rope_frequencies(rope: &RopeSpec, head_dim: usize) -> (Vec<f64>, f64) {
    let pairs = head_dim / 2;
    let plain = |pair: usize| rope.theta.powf(-2.0 * pair as f64 / head_dim as f64);
    match rope.scaling {
        RopeScaling::None => ((0..pairs).map(plain).collect(), 1.0),
        RopeScaling::Linear { factor } => ((0..pairs).map(|pair| plain(pair) / factor).collect(), 1.0),
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor, truncate } => {
            // The (fractional) pair that turns `rotations` times within the original context.
            let pair_of = |rotations: f64| {
                let wavelength = original_context as f64 / rotations;
                head_dim as f64 / 2.0 * (wavelength / (2.0 * PI)).ln() / rope.theta.ln()
            };
            let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            let frequency = |pair: usize| {
                let stretched = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain(pair) * (stretched / factor + (1.0 - stretched))
            };
            ((0..pairs).map(frequency).collect(), attention_factor)
        }
    }
}

/// Turns each pair (element i, element i + half) of a head as a complex number.
fn rotate_halves(head: &mut [f64], pos: usize, frequencies: &[f64], factor: f64) {
    let half = head.len() / 2;
    for (pair, frequency) in frequencies.iter().enumerate() {
        let (sin, cos) = (pos as f64 * frequency).sin_cos();
        let (re, im) = (head[pair], head[pair + half]);
        head[pair] = factor * (re * cos - im * sin);
        head[pair + half] = factor * (re * sin + im * cos);
    }
}

fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean_square = dot(x, x) / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean_square + eps).sqrt() * w).collect()
}

/// `down (silu(gate x) * (up x))`.
fn swiglu(x: &[f64], [gate, up, down]: &[Vec<f64>; 3]) -> Vec<f64> {
    let inner: Vec<f64> = product(gate, x)
        .into_iter()
        .zip(product(up, x))
        .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
        .collect();
    product(down, &inner)
}

/// Matrix `[rows, x.len()]` times `x`.
fn product(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    matrix.chunks(x.len()).map(|row| dot(row, x)).collect()
}

/// The last terms first.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sum = 0.0;
    for (a, b) in a.iter().zip(b).rev() {
        sum += a * b;
    }
    sum
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let raised: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
    let total: f64 = raised.iter().rev().sum();
    raised.into_iter().map(|r| r / total).collect()
}

fn add(to: &mut [Vec<f64>], what: &[Vec<f64>]) {
    for (to, what) in to.iter_mut().flatten().zip(what.iter().flatten()) {
        *to += what;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{qwen3_moe, yarn};
    use crate::tiny::TinyModel;

    #[test]
    fn a_token_does_not_see_what_follows_it() {
        for model in TinyModel::all(3) {
            let tokens = model.prompt(11, 9);
            let whole = forward(&model.spec, &model, &tokens);
            let start = forward(&model.spec, &model, &tokens[..5]);
            assert_eq!(whole.logits[..5 * model.spec.vocab_size], start.logits[..]);
        }
    }

    #[test]
    fn scalings_meet_at_their_limits() {
        let rope = |scaling| rope_frequencies(&RopeSpec { theta: 1e4, scaling }, 64);
        let (plain, one) = rope(RopeScaling::None);
        assert_eq!((plain.len(), plain[0], one), (32, 1.0, 1.0));
        assert_eq!(rope(RopeScaling::Linear { factor: 1.0 }).0, plain);
        let (linear, _) = rope(RopeScaling::Linear { factor: 8.0 });
        let (stretched, factor) = rope(yarn(8.0, 4096));
        assert!((factor - 1.207_944).abs() < 1e-6);
        // Fast pairs are kept, slow ones stretched whole, those between lie between.
        assert_eq!(stretched[0], plain[0]);
        assert!((stretched[31] / linear[31] - 1.0).abs() < 1e-12);
        for pair in 0..32 {
            assert!(stretched[pair] <= plain[pair] * (1.0 + 1e-12));
            assert!(stretched[pair] >= linear[pair] * (1.0 - 1e-12));
        }
    }

    #[test]
    fn routing_weights_are_a_share_or_a_probability() {
        let mut spec = qwen3_moe();
        let logits = [0.0, 2.0, -1.0, 2.0, 1.0, 0.0, 0.0, 2.0];
        let (chosen, dense) = route(&spec, &logits);
        assert_eq!(chosen, [1, 3]);
        assert_eq!((dense[1], dense[3], dense[7]), (0.5, 0.5, 0.0));
        spec.moe.norm_topk = false;
        let (_, dense) = route(&spec, &logits);
        assert!((dense[1] - 2f64.exp() / logits.iter().map(|l: &f64| l.exp()).sum::<f64>()).abs() < 1e-15);
    }
}
