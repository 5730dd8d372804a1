//! The reference forward: what a model computes, written to be read and to share no shape with an engine.
//!
//! `f64` throughout; one position after the other, one dot product after the other, last term first; the
//! whole context each time and no KV cache; experts in descending order; weights fetched anew from
//! [`Weights`] and forgotten. Follows the published definitions of the Llama lineage: pre-norm residual
//! blocks, RMSNorm (Zhang, Sennrich 2019), RoPE (Su et al. 2021), SwiGLU (Shazeer 2020), latent attention
//! (DeepSeek-V2, 2024) without absorption, sparse attention (DeepSeek-V3.2, 2025) as a mask, gated delta nets (Yang,
//! Kautz, Hatamizadeh 2024) without a state.

use std::f64::consts::PI;

use smoe_format::backbone::LayerPart;
use smoe_format::spec::{
    Activation, DeltaSpec, FfnKind, GroupScore, IndexerSpec, LatentSpec, RopeScaling, RopeSpec, RouterKind,
};
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
        let row = &embedding[token * d..(token + 1) * d];
        stream.push(row.iter().map(|x| x * spec.multipliers.embedding).collect());
    }

    let mut out =
        Forward { logits: Vec::new(), hidden: stream.concat(), router: Vec::new(), chosen: Vec::new() };
    let eps = f64::from(spec.rms_norm_eps);
    for (layer, kind) in spec.layers.iter().enumerate() {
        let layer = layer as u32;
        let part = |part| backbone(BackboneTensor::Layer(layer, part));

        let norm = part(LayerPart::AttnNorm);
        let normed: Vec<_> = stream.iter().map(|x| rms_norm(x, &norm, eps)).collect();
        let attended = match spec.delta_of(layer as usize) {
            Some(delta) => gated_delta(spec, &delta, &part, &normed),
            None => attention(spec, layer as usize, &part, &normed),
        };
        add(&mut stream, &attended, spec.multipliers.residual);

        let norm = part(LayerPart::FfnNorm);
        let normed: Vec<_> = stream.iter().map(|x| rms_norm(x, &norm, eps)).collect();
        let fed = match kind {
            FfnKind::Dense(_) => {
                let matrices = [part(LayerPart::Gate), part(LayerPart::Up), part(LayerPart::Down)];
                normed.iter().map(|x| feed_forward(x, &matrices, None, Activation::SwiGlu)).collect()
            }
            FfnKind::Moe => mixture(spec, weights, layer, &part, &normed, &mut out),
        };
        add(&mut stream, &fed, spec.multipliers.residual);
        if layer as usize + 1 < spec.n_layers() {
            out.hidden.extend(stream.iter().flatten());
        }
    }

    let norm = backbone(BackboneTensor::FinalNorm);
    let head = if spec.tied_head { embedding } else { backbone(BackboneTensor::Head) };
    for x in &stream {
        let x = rms_norm(x, &norm, eps);
        out.logits.extend(product(&head, &x).into_iter().map(|logit| logit * spec.multipliers.logits));
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

/// Vectors by position and head.
type Heads = Vec<Vec<Vec<f64>>>;

/// Attention of every position over itself and those before it that it sees.
fn attention(
    spec: &ModelSpec,
    layer: usize,
    part: &impl Fn(LayerPart) -> Vec<f64>,
    inputs: &[Vec<f64>],
) -> Vec<Vec<f64>> {
    let a = &spec.attention;
    let [queries, keys, values] = match a.latent {
        Some(latent) => latent_heads(spec, &latent, part, inputs),
        None => heads(spec, part, inputs),
    };
    let chosen =
        a.indexer.zip(a.latent).map(|(indexer, latent)| chosen(spec, &indexer, &latent, part, inputs));
    let sinks = a.sinks.then(|| part(LayerPart::Sinks));
    let (wo, bias) = (part(LayerPart::O), a.o_bias.then(|| part(LayerPart::OBias)));
    let gate = a.gate.then(|| part(LayerPart::OGate));
    let per_kv = a.n_heads / keys[0].len();

    let mut outputs = Vec::new();
    for (pos, of_position) in queries.iter().enumerate() {
        let first = spec.window(layer).map_or(0, |window| (pos + 1).saturating_sub(window));
        let mut joined = Vec::new();
        for (head, query) in of_position.iter().enumerate() {
            let kv_head = head / per_kv;
            let mut scores: Vec<f64> = keys[first..=pos]
                .iter()
                .map(|k| dot(query, &k[kv_head]) / (a.head_dim as f64).sqrt() * a.score_scale)
                .collect();
            if let Some(chosen) = &chosen {
                let hide = |(position, score): (usize, &mut f64)| {
                    if !chosen[pos].contains(&position) {
                        *score = f64::NEG_INFINITY;
                    }
                };
                scores.iter_mut().enumerate().for_each(hide);
            }
            // A sink is one more position, whose value is nothing.
            scores.extend(sinks.as_ref().map(|sinks| sinks[head]));
            let shares = softmax(&scores);
            for i in 0..a.value_dim() {
                let mut sum = 0.0;
                for (share, value) in shares.iter().zip(&values[first..=pos]).rev() {
                    sum += share * value[kv_head][i];
                }
                joined.push(sum);
            }
        }
        if let Some(gate) = &gate {
            for (x, gate) in joined.iter_mut().zip(product(gate, &inputs[pos])) {
                *x *= sigmoid(gate);
            }
        }
        let mut output = product(&wo, &joined);
        plus(&mut output, bias.as_deref());
        outputs.push(output);
    }
    outputs
}

/// A gated delta net. No state is kept: what a key finds of an earlier token's difference is written out, as the sum over
/// all tokens between.
fn gated_delta(
    spec: &ModelSpec,
    delta: &DeltaSpec,
    part: &impl Fn(LayerPart) -> Vec<f64>,
    inputs: &[Vec<f64>],
) -> Vec<Vec<f64>> {
    use LayerPart as P;
    let (keys, width) = (delta.keys(), delta.conv_width);
    let projected: Vec<Vec<f64>> = {
        let all = [part(P::Q), part(P::K), part(P::V)];
        inputs.iter().map(|x| all.iter().flat_map(|w| product(w, x)).collect()).collect()
    };
    let conv = part(P::Conv);
    let mixed = |pos: usize, channel: usize| {
        let taps = (0..width.min(pos + 1)).rev();
        let sum: f64 =
            taps.map(|back| conv[channel * width + width - 1 - back] * projected[pos - back][channel]).sum();
        sum * sigmoid(sum)
    };
    let unit = |pos: usize, first: usize| {
        let x: Vec<f64> = (first..first + delta.key_dim).map(|channel| mixed(pos, channel)).collect();
        let norm = (dot(&x, &x) + 1e-6).sqrt();
        x.into_iter().map(|x| x / norm).collect::<Vec<_>>()
    };
    let [w_beta, w_decay, rates, biases, w_gate, norm, wo] =
        [P::Beta, P::Decay, P::DecayLog, P::DecayBias, P::OGate, P::DeltaNorm, P::O].map(part);
    let mut joined = vec![Vec::new(); inputs.len()];
    for head in 0..delta.n_value_heads {
        let key_head = head / (delta.n_value_heads / delta.n_key_heads);
        let value = 2 * keys + head * delta.value_dim;
        let row = |w: &[f64]| w[head * spec.d_model..(head + 1) * spec.d_model].to_vec();
        let (w_beta, w_decay) = (row(&w_beta), row(&w_decay));
        // Of each token: its key, the difference that it adds, and the logarithm of all decay up to it.
        let mut written: Vec<(Vec<f64>, Vec<f64>, f64)> = Vec::new();
        let mut logarithm = 0.0;
        for (pos, x) in inputs.iter().enumerate() {
            let [query, key] = [0, keys].map(|first| unit(pos, first + key_head * delta.key_dim));
            logarithm -= rates[head].exp() * (dot(&w_decay, x) + biases[head]).exp().ln_1p();
            let read = |what: &[f64], written: &[(Vec<f64>, Vec<f64>, f64)]| {
                let mut sum = vec![0.0; delta.value_dim];
                for (key, difference, then) in written.iter().rev() {
                    let share = dot(what, key) * (logarithm - then).exp();
                    sum.iter_mut().zip(difference).for_each(|(sum, d)| *sum += share * d);
                }
                sum
            };
            let beta = sigmoid(dot(&w_beta, x));
            let known = read(&key, &written);
            let difference =
                (0..delta.value_dim).map(|i| beta * (mixed(pos, value + i) - known[i])).collect();
            written.push((key, difference, logarithm));
            let found = read(&query, &written);
            let found: Vec<f64> = found.into_iter().map(|y| y / (delta.key_dim as f64).sqrt()).collect();
            let gate = &w_gate[head * delta.value_dim * spec.d_model..];
            let gate = product(&gate[..delta.value_dim * spec.d_model], x);
            let normed = rms_norm(&found, &norm, f64::from(spec.rms_norm_eps));
            joined[pos].extend(normed.iter().zip(gate).map(|(y, gate)| y * gate * sigmoid(gate)));
        }
    }
    joined.iter().map(|joined| product(&wo, joined)).collect()
}

/// Queries, keys and values that are projections.
fn heads(spec: &ModelSpec, part: &impl Fn(LayerPart) -> Vec<f64>, inputs: &[Vec<f64>]) -> [Heads; 3] {
    use LayerPart::{K, KBias, KNorm, Q, QBias, QNorm, V, VBias};
    let a = &spec.attention;
    let eps = f64::from(spec.rms_norm_eps);
    let rope = Rope::new(spec);
    [(Q, QBias, Some(QNorm)), (K, KBias, Some(KNorm)), (V, VBias, None)].map(|(w, bias, norm)| {
        let (w, bias) = (part(w), a.qkv_bias.then(|| part(bias)));
        let is_value = norm.is_none();
        let norm = norm.filter(|_| a.qk_norm).map(part);
        let of_position = |(pos, x): (usize, &Vec<f64>)| {
            let mut all = product(&w, x);
            plus(&mut all, bias.as_deref());
            if let Some(norm) = &norm {
                // As long as a head, or as all of them.
                all = all.chunks(norm.len()).flat_map(|x| rms_norm(x, norm, eps)).collect();
            }
            let mut heads: Vec<Vec<f64>> = all.chunks(a.head_dim).map(<[f64]>::to_vec).collect();
            if !is_value {
                heads.iter_mut().for_each(|head| rope.turn(&mut head[..spec.rope_dim()], pos));
            }
            heads
        };
        inputs.iter().enumerate().map(of_position).collect()
    })
}

/// Queries, keys and values of latent attention as the publication has them: every head's made anew of the latent.
fn latent_heads(
    spec: &ModelSpec,
    latent: &LatentSpec,
    part: &impl Fn(LayerPart) -> Vec<f64>,
    inputs: &[Vec<f64>],
) -> [Heads; 3] {
    let a = &spec.attention;
    let eps = f64::from(latent.norm_eps);
    let (rank, plain) = (latent.kv_rank, a.head_dim - latent.rope_dim);
    let rope = Rope::new(spec);
    let [wq, down, norm, k_up, v_up] = {
        use LayerPart::{KUp, KvDown, KvDownNorm, Q, VUp};
        [Q, KvDown, KvDownNorm, KUp, VUp].map(part)
    };
    let q_low = (latent.q_rank > 0).then(|| (part(LayerPart::QDown), part(LayerPart::QDownNorm)));
    let (mut queries, mut keys, mut values) = (Heads::new(), Heads::new(), Heads::new());
    for (pos, x) in inputs.iter().enumerate() {
        let q = match &q_low {
            Some((down, norm)) => product(&wq, &rms_norm(&product(down, x), norm, eps)),
            None => product(&wq, x),
        };
        let turned = |head: &[f64]| {
            let mut head = head.to_vec();
            rope.turn(&mut head[plain..], pos);
            head
        };
        queries.push(q.chunks(a.head_dim).map(turned).collect());
        let low = product(&down, x);
        let (content, mut position) = (rms_norm(&low[..rank], &norm, eps), low[rank..].to_vec());
        rope.turn(&mut position, pos);
        let key = |head: usize| {
            let w = &k_up[head * rank * plain..(head + 1) * rank * plain];
            let own = (0..plain).map(|i| (0..rank).rev().map(|r| w[r * plain + i] * content[r]).sum::<f64>());
            own.chain(position.iter().copied()).collect()
        };
        keys.push((0..a.n_heads).map(key).collect());
        values.push(product(&v_up, &content).chunks(latent.value_dim).map(<[f64]>::to_vec).collect());
    }
    [queries, keys, values]
}

/// The positions that an indexer chooses for each position, the best first; all, where there are no more than it
/// chooses.
fn chosen(
    spec: &ModelSpec,
    indexer: &IndexerSpec,
    latent: &LatentSpec,
    part: &impl Fn(LayerPart) -> Vec<f64>,
    inputs: &[Vec<f64>],
) -> Vec<Vec<usize>> {
    let [wq, wk, norm, norm_bias, weights, down, down_norm] = {
        use LayerPart::{IndexK, IndexKNorm, IndexKNormBias, IndexQ, IndexWeights, QDown, QDownNorm};
        [IndexQ, IndexK, IndexKNorm, IndexKNormBias, IndexWeights, QDown, QDownNorm].map(part)
    };
    let rope = Rope { interleaved: indexer.interleaved, ..Rope::new(spec) };
    let width = indexer.head_dim as f64;
    let key = |(pos, x): (usize, &Vec<f64>)| {
        let x = product(&wk, x);
        let mean = x.iter().rev().sum::<f64>() / width;
        let centred: Vec<f64> = x.iter().map(|x| x - mean).collect();
        // RMSNorm of what is centred.
        let mut key = rms_norm(&centred, &norm, f64::from(indexer.norm_eps));
        plus(&mut key, Some(&norm_bias));
        rope.turn(&mut key[..latent.rope_dim], pos);
        key
    };
    let keys: Vec<Vec<f64>> = inputs.iter().enumerate().map(key).collect();
    let choose = |(pos, x): (usize, &Vec<f64>)| {
        let low = rms_norm(&product(&down, x), &down_norm, f64::from(latent.norm_eps));
        let mut queries: Vec<Vec<f64>> =
            product(&wq, &low).chunks(indexer.head_dim).map(<[f64]>::to_vec).collect();
        queries.iter_mut().for_each(|query| rope.turn(&mut query[..latent.rope_dim], pos));
        let shares = product(&weights, x);
        let score = |key: &Vec<f64>| -> f64 {
            let of_head = |(query, share): (&Vec<f64>, &f64)| {
                share / (indexer.n_heads as f64).sqrt() * (dot(query, key) / width.sqrt()).max(0.0)
            };
            queries.iter().zip(&shares).rev().map(of_head).sum()
        };
        let mut order = descending(&keys[..=pos].iter().map(score).collect::<Vec<_>>());
        order.truncate(indexer.top_k);
        order
    };
    inputs.iter().enumerate().map(choose).collect()
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
    let moe = &spec.moe;
    let router = part(LayerPart::Router);
    let router_bias = moe.router_bias.then(|| part(LayerPart::RouterBias));
    let correction = moe.correction_bias.then(|| part(LayerPart::Correction));
    let biases = moe
        .expert_bias
        .then(|| [LayerPart::ExpertGateBias, LayerPart::ExpertUpBias, LayerPart::ExpertDownBias].map(part));
    // A weight for every expert of every position, most of them zero.
    let mut shares = Vec::new();
    for x in inputs {
        let mut logits = product(&router, x);
        plus(&mut logits, router_bias.as_deref());
        let (chosen, dense) = route(spec, &logits, correction.as_deref());
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
        let bias = biases.as_ref().map(|all| {
            all.each_ref().map(|all| {
                let width = all.len() / moe.n_experts;
                &all[expert * width..(expert + 1) * width]
            })
        });
        for (pos, x) in inputs.iter().enumerate() {
            let share = shares[pos][expert];
            if share != 0.0 {
                let output = feed_forward(x, &matrices, bias, moe.activation);
                for (sum, y) in outputs[pos].iter_mut().zip(output) {
                    *sum += share * y;
                }
            }
        }
    }
    if spec.moe.d_shared > 0 {
        let matrices = [part(LayerPart::SharedGate), part(LayerPart::SharedUp), part(LayerPart::SharedDown)];
        let gate = moe.shared_gate.then(|| part(LayerPart::SharedScale));
        let shared = |x: &Vec<f64>| {
            let weight = gate.as_ref().map_or(1.0, |gate| sigmoid(dot(gate, x)));
            let output = feed_forward(x, &matrices, None, Activation::SwiGlu);
            output.into_iter().map(|y| weight * y).collect()
        };
        add(&mut outputs, &inputs.iter().map(shared).collect::<Vec<_>>(), 1.0);
    }
    outputs
}

/// The experts that a token visits, ascending, and the weight of every expert, zero where not visited.
/// At equal scores the lower id comes first.
#[must_use]
pub fn route(spec: &ModelSpec, logits: &[f64], correction: Option<&[f64]>) -> (Vec<u32>, Vec<f64>) {
    let scores = match spec.moe.router {
        RouterKind::Softmax => softmax(logits),
        RouterKind::Sigmoid => logits.iter().map(|&l| sigmoid(l)).collect(),
    };
    let (chosen, _) = choose(spec, logits, correction);
    let total: f64 = if spec.moe.norm_topk {
        chosen.iter().map(|&e| scores[e as usize]).sum::<f64>().max(spec.moe.norm_min)
    } else {
        1.0
    };
    let mut dense = vec![0.0; logits.len()];
    for &expert in &chosen {
        dense[expert as usize] = scores[expert as usize] / total * spec.moe.routed_scale;
    }
    (chosen, dense)
}

/// The experts that are chosen, ascending, and by how much: the least lead, of a chosen expert over the others or of a
/// chosen group over the others. By scores; by logits, which are in the same order, if shares have
/// no corrections.
#[must_use]
pub fn choose(spec: &ModelSpec, logits: &[f64], correction: Option<&[f64]>) -> (Vec<u32>, f64) {
    let lead = |values: &[f64], order: &[usize], k: usize| {
        order.get(k).map_or(f64::INFINITY, |&next| values[order[k - 1]] - values[next])
    };
    let mut ranked = match spec.moe.router {
        RouterKind::Softmax if correction.is_none() => logits.to_vec(),
        RouterKind::Softmax => softmax(logits),
        RouterKind::Sigmoid => logits.iter().map(|&l| sigmoid(l)).collect(),
    };
    plus(&mut ranked, correction);
    let mut margin = f64::INFINITY;
    if let Some(groups) = spec.moe.groups {
        let size = ranked.len() / groups.n;
        let score = |group: &[f64]| {
            let order = descending(group);
            match groups.score {
                GroupScore::Best => group[order[0]],
                GroupScore::BestTwo => order.iter().take(2).map(|&e| group[e]).sum(),
            }
        };
        let scores: Vec<f64> = ranked.chunks(size).map(score).collect();
        let order = descending(&scores);
        margin = lead(&scores, &order, groups.top);
        for &group in &order[groups.top..] {
            ranked[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
        }
    }
    let mut order = descending(&ranked);
    margin = margin.min(lead(&ranked, &order, spec.moe.top_k));
    order.truncate(spec.moe.top_k);
    order.sort_unstable();
    (order.into_iter().map(|e| e as u32).collect(), margin)
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

/// Rotary position embedding of a model.
struct Rope {
    frequencies: Vec<f64>,
    factor: f64,
    interleaved: bool,
}

impl Rope {
    fn new(spec: &ModelSpec) -> Self {
        let (frequencies, factor) = rope_frequencies(&spec.rope, spec.rope_dim());
        Self { frequencies, factor, interleaved: spec.rope.interleaved }
    }

    /// Turns each pair of elements (i and i + half, or neighbours) as a complex number.
    fn turn(&self, x: &mut [f64], pos: usize) {
        let half = x.len() / 2;
        for (pair, frequency) in self.frequencies.iter().enumerate() {
            let (a, b) = if self.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let (sin, cos) = (pos as f64 * frequency).sin_cos();
            let (re, im) = (x[a], x[b]);
            x[a] = self.factor * (re * cos - im * sin);
            x[b] = self.factor * (re * sin + im * cos);
        }
    }
}

fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean_square = dot(x, x) / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean_square + eps).sqrt() * w).collect()
}

/// `down (activation(gate x, up x))`, with a bias on each product if there is one.
fn feed_forward(
    x: &[f64],
    [gate, up, down]: &[Vec<f64>; 3],
    bias: Option<[&[f64]; 3]>,
    activation: Activation,
) -> Vec<f64> {
    let [gate_bias, up_bias, down_bias] = bias.map_or([None; 3], |bias| bias.map(Some));
    let (mut gate, mut up) = (product(gate, x), product(up, x));
    plus(&mut gate, gate_bias);
    plus(&mut up, up_bias);
    let activate = |(gate, up): (f64, f64)| match activation {
        Activation::SwiGlu => gate * sigmoid(gate) * up,
        Activation::ClampedSwiglu { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate * sigmoid(alpha * gate) * (up + 1.0)
        }
    };
    let inner: Vec<f64> = gate.into_iter().zip(up).map(activate).collect();
    let mut out = product(down, &inner);
    plus(&mut out, down_bias);
    out
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Adds a bias, if there is one.
fn plus(to: &mut [f64], bias: Option<&[f64]>) {
    to.iter_mut().zip(bias.unwrap_or_default()).for_each(|(to, bias)| *to += bias);
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

fn add(to: &mut [Vec<f64>], what: &[Vec<f64>], weight: f64) {
    for (to, what) in to.iter_mut().flatten().zip(what.iter().flatten()) {
        *to += weight * what;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{qwen3_moe, yarn};
    use crate::tiny::TinyModel;

    #[test]
    fn a_token_does_not_see_what_follows_it() {
        for model in TinyModel::every(3) {
            let tokens = model.prompt(11, 9);
            let whole = forward(&model.spec, &model, &tokens);
            let start = forward(&model.spec, &model, &tokens[..5]);
            assert_eq!(whole.logits[..5 * model.spec.vocab_size], start.logits[..]);
        }
    }

    #[test]
    fn scalings_meet_at_their_limits() {
        let rope = |scaling| rope_frequencies(&RopeSpec { theta: 1e4, scaling, ..Default::default() }, 64);
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
        let (chosen, dense) = route(&spec, &logits, None);
        assert_eq!(chosen, [1, 3]);
        assert_eq!((dense[1], dense[3], dense[7]), (0.5, 0.5, 0.0));
        spec.moe.norm_topk = false;
        let (_, dense) = route(&spec, &logits, None);
        assert!((dense[1] - 2f64.exp() / logits.iter().map(|l: &f64| l.exp()).sum::<f64>()).abs() < 1e-15);
    }
}
