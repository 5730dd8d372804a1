//! What decoding will do, from what was measured: on the processor, and with a device.
//!
//! Experts are taken to be in memory: what a disk adds, it adds to both. A token on the processor takes the bytes that
//! it touches at the speed of its products ([`WeightsRate`]), and what is no product. On a device it takes what such a token was measured to
//! take there, experts of any content in its slots; where some are missing, layers halt:
//!
//! ```text
//! hits      1 - 0.53 x^-1.1 (1 - share^2), x = slots of a layer / top_k
//! halting   1 - hits^top_k, of a layer
//! layer     (wait + done + 0.8 in vain) / done, of as many at once as make it least
//! brought   half of slots / experts, of what is missing and the processor computes (EXP-GPU-20), else all
//! token     layers x layer + halting layers x (two dispatches + 100 us if the processor computes)
//!           + missed bytes / speed of products + brought bytes / speed of uploads
//! ```
//!
//! Where kernels read what is missing over the bus nothing halts (EXP-GPU-21):
//!
//! ```text
//! token     a token whose experts are all there + missed bytes / speed of the bus + brought bytes / speed of uploads
//! ```

use std::ops::Range;
use std::time::{Duration, Instant};

use smoe_format::backbone::LayerPart;
use smoe_format::{BackboneTensor, Encoding, FfnKind, LayerTable, ModelSpec};
use smoe_kernels::{
    Activations, ExpertCall, ExpertScratch, Input, Kernels, Matrix, Pool, Product, expert_ffn, matmul_all,
};
use smoe_store::AlignedBuf;

use crate::ceiling;
use crate::device::{DevicePlan, ExpertPath};
use crate::kv;
use crate::vault::Vault;

/// Bytes that a decoded token touches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Touched {
    /// Backbone without head and embedding.
    pub dense: u64,
    /// The head.
    pub head: u64,
    /// Routed experts.
    pub experts: u64,
    /// States of layers with linear attention, read and written.
    pub states: u64,
    /// MoE layers.
    pub layers: usize,
    /// One expert of an average layer.
    pub expert: f64,
}

impl Touched {
    /// Those of a vault.
    #[must_use]
    pub fn of(vault: &Vault) -> Self {
        let bytes = |tensor| {
            let name = vault.tensor_name(tensor);
            let found = vault.backbone.iter().find(|(n, _)| **n == *name);
            found.map_or(0, |(_, tensor)| tensor.bytes.end - tensor.bytes.start)
        };
        let all: u64 = vault.backbone.iter().map(|(_, t)| t.bytes.end - t.bytes.start).sum();
        let embed = bytes(BackboneTensor::Embed);
        let head = if vault.spec.tied_head { embed } else { bytes(BackboneTensor::Head) };
        let spec = &vault.spec;
        // Of the experts' biases, those of the chosen ones.
        let parts = [LayerPart::ExpertGateBias, LayerPart::ExpertUpBias, LayerPart::ExpertDownBias];
        let of_layer = |layer| parts.map(|part| bytes(BackboneTensor::Layer(layer as u32, part)));
        let biases: u64 = spec.moe_layers().flat_map(of_layer).sum();
        let unseen = biases - biases * spec.moe.top_k as u64 / spec.moe.n_experts.max(1) as u64;
        let routed: u64 = vault.experts.layers.iter().map(|table| table.used_bytes() as u64).sum();
        Self {
            expert: routed as f64 / vault.experts.layers.len().max(1) as f64,
            dense: all - embed - unseen - if spec.tied_head { 0 } else { head },
            head,
            experts: routed * spec.moe.top_k as u64,
            states: 2 * kv::state_bytes(spec),
            layers: spec.moe_layers().count(),
        }
    }

    /// Without the head.
    const fn layers_bytes(&self) -> u64 {
        self.dense + self.experts
    }

    /// All weights.
    #[must_use]
    pub const fn all(&self) -> u64 {
        self.dense + self.head + self.experts
    }
}

/// What a device was measured to do with a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceRates {
    /// Seconds of a decoded token whose experts are all there.
    pub token_s: f64,
    /// Seconds of the first that it decoded.
    pub first_s: f64,
    /// Kernels of it.
    pub dispatches: u32,
    /// What a layer takes more that is handed over by itself and waited for, seconds.
    pub wait_s: f64,
    /// Experts brought there, bytes per second, in the way that is used; infinite if they need not be.
    pub upload_bytes_per_s: f64,
    /// What becomes of experts that are missing.
    pub missing: Missing,
    /// Experts brought there, by every way.
    pub uploads: UploadRates,
}

/// What becomes of experts that a device lacks, in a step of few tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Missing {
    /// They are brought there.
    Brought,
    /// The processor computes them.
    Computed,
    /// Kernels read them where the ring has them, so many bytes per second.
    OverBus(f64),
}

/// Experts brought to a device, a token's misses of a layer at a time, bytes per second; none if it was not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UploadRates {
    /// Copied by the processor to where the driver fetches them.
    pub staging: Option<f64>,
    /// Copied by the device from memory that is lent to it.
    pub import: Option<f64>,
    /// The same by a kernel that reads there and writes into the device's memory.
    pub kernel: Option<f64>,
    /// As `import`, of as many experts at once as a prompt lacks of a layer.
    pub import_many: Option<f64>,
    /// As `staging`, of as many.
    pub staging_many: Option<f64>,
}

/// What decoding will do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// On the processor, tokens per second.
    pub cpu_tok_s: f64,
    /// With the device.
    pub device: Option<DeviceForecast>,
}

/// What decoding will do with a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceForecast {
    /// What was measured.
    pub rates: DeviceRates,
    /// Share of the experts asked for that the device will hold.
    pub hit_rate: f64,
    /// Tokens per second.
    pub tok_s: f64,
}

/// Seconds a layer and value of the model's width that decoding on the processor takes besides products, for attention over some
/// hundred positions, norms, routing and sums: few of them are forked, so that more threads take as long. 49 and 63 us a layer of 2,048 on
/// 16 threads, 39 and 73 on two (EXP-GPU-11).
const REST_S: f64 = 50e-6 / 2048.0;
/// Bytes of memory that products are timed over at most. Over 512 MiB they ran at 141 GB/s on a server that streamed the whole ring
/// at 94 to 117, and decoded at 93 (EXP-GPU-05).
const COLD_BYTES: u64 = 4 << 30;
const PAGE: usize = 16 << 10;
/// For how long they are timed at once, and how often. One half second gave between 0.6 and 1.0 of what decoding did on a
/// server that others use too (EXP-GPU-05): a median of several, with other work between them, is not one moment's.
const TIMED: Duration = Duration::from_millis(100);
const ROUNDS: usize = 5;
/// The most layers that are handed over at once where they may halt, and the cost of one that runs in vain behind a
/// halt, in layers.
pub(crate) const MOST_LAYERS: usize = 8;
pub(crate) const IN_VAIN: f64 = 0.8;
/// Seconds that a layer which halts takes besides, where the processor computes what is missing: its threads sleep when it
/// does. Fitted to eight runs with 16 threads, seven of which are forecast within 12 % (EXP-GPU-20).
const HALT_S: f64 = 100e-6;

/// Memory that weights are taken of: the backbone's one after the other, experts anywhere.
struct Cold {
    bytes: AlignedBuf,
    at: usize,
    random: u64,
}

impl Cold {
    /// Where the next `len` bytes lie, again from the beginning if the rest is too short.
    fn next(&mut self, len: usize) -> Range<usize> {
        if self.at + len > self.bytes.len() {
            self.at = 0;
        }
        let start = self.at;
        self.at = (start + len).next_multiple_of(64);
        start..start + len
    }

    /// Where `len` bytes of some page on lie.
    fn anywhere(&mut self, len: usize) -> Range<usize> {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let places = self.bytes.len().saturating_sub(len) / PAGE + 1;
        let start = (self.random >> 33) as usize % places * PAGE;
        start..start + len
    }
}

/// How fast the processor goes through the weights of decoded tokens, everything being in memory: a layer's projections,
/// router and experts in the model's shapes and encodings, and the head, forked as they are in a token, over memory that no
/// cache holds.
pub struct WeightsRate<'a> {
    vault: &'a Vault,
    kernels: Kernels,
    pool: Pool,
    cold: Cold,
    /// Bytes per second, by round.
    rates: Vec<f64>,
}

impl std::fmt::Debug for WeightsRate<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WeightsRate").field("rates", &self.rates).finish_non_exhaustive()
    }
}

impl<'a> WeightsRate<'a> {
    /// Over at most `room` bytes of memory, which this holds; none if there is no such memory.
    #[must_use]
    pub fn new(vault: &'a Vault, kernels: Kernels, threads: usize, room: u64) -> Option<Self> {
        let mut bytes = AlignedBuf::zeroed(COLD_BYTES.min(room) as usize).ok()?;
        ceiling::touch(&mut bytes, threads);
        let cold = Cold { bytes, at: 0, random: 1 };
        let rates = Vec::with_capacity(2 * ROUNDS);
        Some(Self { vault, kernels, pool: Pool::new(threads, false), cold, rates })
    }

    /// Times a few rounds: to be called before and after other work, as memory that is shared changes from one moment to
    /// the next.
    pub fn time(&mut self) {
        let mut mock = Mock::new(self.vault, &self.pool, self.kernels);
        let (layers, touched) = (self.vault.spec.n_layers(), Touched::of(self.vault));
        for _ in 0..ROUNDS {
            // The first layer finds everything asleep.
            if mock.layer(self.vault, 0, &mut self.cold).is_none() {
                return;
            }
            let (start, mut done) = (Instant::now(), 0);
            for layer in (0..layers).cycle() {
                done += mock.layer(self.vault, layer, &mut self.cold).unwrap_or(0);
                if start.elapsed() >= TIMED {
                    break;
                }
            }
            // Layers and head as a token has them: where threads are many the head runs a half faster (EXP-GPU-05, EXP-GPU-11).
            let layers_s = touched.layers_bytes() as f64 / done as f64 * start.elapsed().as_secs_f64();
            let start = Instant::now();
            let head = mock.head(self.vault, &mut self.cold).unwrap_or(0);
            let (bytes, head_s) = (touched.layers_bytes() + head as u64, start.elapsed().as_secs_f64());
            self.rates.push(bytes as f64 / (layers_s + head_s));
        }
    }

    /// Bytes per second, by round.
    #[must_use]
    pub fn rates(&self) -> &[f64] {
        &self.rates
    }

    /// Their median; NaN if nothing was timed, or a layer has more weights than there was room for. A head for which there was
    /// none is left out.
    #[must_use]
    pub fn median(&self) -> f64 {
        let mut rates = self.rates.clone();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// Layers of a token, as far as their weights go.
struct Mock<'a> {
    pool: &'a Pool,
    kernels: Kernels,
    x: Vec<f32>,
    activations: Activations,
    outs: [Vec<f32>; 3],
    scratch: ExpertScratch,
    y: Vec<f32>,
}

impl<'a> Mock<'a> {
    fn new(vault: &Vault, pool: &'a Pool, kernels: Kernels) -> Self {
        let (spec, a) = (&vault.spec, &vault.spec.attention);
        let widest = spec.d_model.max(a.n_heads * a.head_dim.max(a.value_dim()));
        let top_k = spec.moe.top_k.max(1);
        Self {
            pool,
            kernels,
            x: (0..widest).map(|i| (i % 251) as f32 / 125.0 - 1.0).collect(),
            activations: Activations::with_capacity(1, widest),
            outs: Default::default(),
            scratch: ExpertScratch::with_capacity(top_k, spec.d_model, spec.moe.d_expert.max(1), true),
            y: vec![0.0; top_k * spec.d_model],
        }
    }

    /// Multiplies those of some matrices with one input that the vault has; gives the bytes, none if they have no room.
    fn products(&mut self, vault: &Vault, of: &[BackboneTensor], cold: &mut Cold) -> Option<usize> {
        let part = |tensor: &BackboneTensor| {
            let found = vault.backbone.get(&vault.tensor_name(*tensor)).filter(|t| t.cols <= self.x.len())?;
            Some((found.encoding, found.rows, found.cols, (found.bytes.end - found.bytes.start) as usize))
        };
        let found: Vec<_> = of.iter().filter_map(part).collect();
        let Some(&(first, _, cols, _)) = found.first() else { return Some(0) };
        let found = found.iter().filter(|of| of.2 == cols && of.0 == first);
        let ranges: Vec<_> = found.clone().map(|of| cold.next(of.3)).collect();
        let mut products: Vec<Product<'_>> = Vec::with_capacity(ranges.len());
        let mut done = 0;
        for ((of, range), out) in found.zip(ranges).zip(&mut self.outs) {
            let &(encoding, rows, cols, len) = of;
            let bytes = cold.bytes.get(range)?;
            out.resize(rows, 0.0);
            products.push(Product::new(Matrix::new(bytes, rows, cols, encoding), 1, out));
            done += len;
        }
        let (x, pool, kernels) = (&self.x[..cols], self.pool, self.kernels);
        with_input(x, &mut self.activations, kernels, first, &mut |input| {
            matmul_all(pool, kernels, &mut products, input);
        });
        Some(done)
    }

    /// Goes through the head; gives its bytes, none if they have no room.
    fn head(&mut self, vault: &Vault, cold: &mut Cold) -> Option<usize> {
        let tensor = if vault.spec.tied_head { BackboneTensor::Embed } else { BackboneTensor::Head };
        self.products(vault, &[tensor], cold)
    }

    /// Goes through a layer; gives the bytes, none if they have no room.
    fn layer(&mut self, vault: &Vault, layer: usize, cold: &mut Cold) -> Option<usize> {
        let mut done = 0;
        for parts in [&[LayerPart::Q, LayerPart::K, LayerPart::V][..], &[LayerPart::O], &[LayerPart::Router]]
        {
            let tensors: Vec<_> =
                parts.iter().map(|part| BackboneTensor::Layer(layer as u32, *part)).collect();
            done += self.products(vault, &tensors, cold)?;
        }
        // Attention over few positions costs its fork.
        self.pool.run(self.pool.threads(), &|_| {});
        if vault.spec.layers[layer] != FfnKind::Moe {
            return Some(done);
        }
        let index = vault.spec.moe_layers().position(|moe| moe == layer)?;
        let table: &LayerTable = &vault.experts.layers[index];
        let (d, top_k) = (vault.spec.d_model, vault.spec.moe.top_k);
        let ranges: Vec<_> = (0..top_k).map(|_| cold.anywhere(table.used_bytes())).collect();
        let mut calls = Vec::with_capacity(top_k);
        for range in ranges {
            let bytes = cold.bytes.get(range)?;
            let [gate, up, down] = table
                .tensors
                .map(|t| Matrix::new(&bytes[t.offset..t.offset + t.len], t.rows, t.cols, t.encoding));
            calls.push(ExpertCall { gate, up, down, bias: None, tokens: &[0] });
            done += table.used_bytes();
        }
        let (x, pool, kernels) = (&self.x[..d], self.pool, self.kernels);
        let (scratch, y) = (&mut self.scratch, &mut self.y[..top_k * d]);
        with_input(x, &mut self.activations, kernels, table.tensors[0].encoding, &mut |input| {
            expert_ffn(pool, kernels, &calls, vault.spec.moe.activation, input, scratch, y);
        });
        Some(done)
    }
}

/// Calls `f` with one token in the form that weights of this encoding take.
fn with_input(
    x: &[f32],
    activations: &mut Activations,
    kernels: Kernels,
    encoding: Encoding,
    f: &mut dyn FnMut(&Input<'_>),
) {
    match encoding.tiles() {
        None => f(&Input::new(x, 1, &[])),
        Some(tiles) => {
            activations.quantise(kernels, x, 1, x.len(), tiles.group());
            f(&Input::new(x, 1, &[activations.view()]));
        }
    }
}

/// What is expected, the processor going through weights at `weights_bytes_per_s` ([`WeightsRate`]).
#[must_use]
pub fn forecast(
    spec: &ModelSpec,
    touched: &Touched,
    weights_bytes_per_s: f64,
    device: Option<(&DevicePlan, DeviceRates)>,
) -> Forecast {
    let rest_s = REST_S * (spec.n_layers() * spec.d_model) as f64;
    let cpu_tok_s = 1.0 / (touched.all() as f64 / weights_bytes_per_s + rest_s);
    let device = device.map(|(plan, rates)| {
        let hit_rate = hit_rate(plan, touched.layers, spec.moe.top_k);
        let share = plan.slots.iter().sum::<usize>() as f64 / plan.n_experts.max(1) as f64;
        let here = match rates.missing {
            Missing::Brought => None,
            Missing::Computed => Some(weights_bytes_per_s),
            Missing::OverBus(rate) => Some(rate),
        };
        let upload_s = rates.upload_bytes_per_s.recip();
        let missed_s = here.map_or(upload_s, |rate| (share / 2.0).mul_add(upload_s, rate.recip()));
        DeviceForecast { rates, hit_rate, tok_s: 1.0 / token_s(spec, touched, &rates, hit_rate, missed_s) }
    });
    Forecast { cpu_tok_s, device }
}

/// The share of the experts asked for that a device holds.
fn hit_rate(plan: &DevicePlan, layers: usize, top_k: usize) -> f64 {
    // Those that the ring has are found layer by layer.
    if plan.path == ExpertPath::InPlace && !plan.holds_all() {
        return 0.0;
    }
    expected_hits(plan.slots.iter().sum(), plan.n_experts, layers, top_k)
}

/// The share of the experts asked for that are in one of `slots`: fitted to EXP-GPU-02, half of whose tokens' experts are
/// the last token's.
#[must_use]
pub fn expected_hits(slots: usize, n_experts: usize, layers: usize, top_k: usize) -> f64 {
    if slots >= n_experts {
        return 1.0;
    }
    let share = slots as f64 / n_experts.max(1) as f64;
    let sets = slots as f64 / (layers * top_k).max(1) as f64;
    1.0 - 0.53 * sets.max(1.0).powf(-1.1) * share.mul_add(-share, 1.0)
}

/// Seconds of a token at a rate of hits, `missed_s` being those of a byte that is missing.
fn token_s(spec: &ModelSpec, touched: &Touched, rates: &DeviceRates, hit_rate: f64, missed_s: f64) -> f64 {
    if hit_rate >= 1.0 {
        return rates.token_s;
    }
    let (layers, top_k) = (touched.layers as f64, spec.moe.top_k as f64);
    let missed = layers * top_k * (1.0 - hit_rate) * touched.expert;
    if matches!(rates.missing, Missing::OverBus(_)) {
        return missed.mul_add(missed_s, rates.token_s);
    }
    let pass = hit_rate.powf(top_k);
    let layer_s = rates.token_s / layers;
    let (_, per_layer) = at_once(pass, rates.wait_s / layer_s);
    let halts = layers * (1.0 - pass);
    let dispatch_s = rates.token_s / f64::from(rates.dispatches.max(1));
    let halt_s = 2.0 * dispatch_s + if rates.missing == Missing::Computed { HALT_S } else { 0.0 };
    layers.mul_add(per_layer * layer_s, halts * halt_s) + missed * missed_s
}

/// How many layers to hand over at once if each passes with this probability, independently, and handing over costs
/// `wait` layers; and what a layer costs then.
pub(crate) fn at_once(pass: f64, wait: f64) -> (usize, f64) {
    let (mut best, mut least) = (1, f64::INFINITY);
    let (mut done, mut passed) = (0.0, 1.0);
    for n in 1..=MOST_LAYERS {
        done += passed;
        passed *= pass;
        let cost = (wait + done + (n as f64 - done) * IN_VAIN) / done;
        if cost < least {
            (best, least) = (n, cost);
        }
    }
    (best, least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use smoe_format::spec::MoeSpec;
    use smoe_testkit::TinyModel;

    /// Qwen3-30B-A3B as EXP-GPU-02 had it.
    fn subject(slots: usize) -> (ModelSpec, Touched, DevicePlan, DeviceRates) {
        let moe = MoeSpec { n_experts: 128, top_k: 8, ..MoeSpec::default() };
        let spec = ModelSpec { moe, ..ModelSpec::default() };
        let expert = 2_506_752.0;
        let touched = Touched {
            dense: 960_000_000,
            head: 330_000_000,
            experts: 962_592_768,
            states: 0,
            layers: 48,
            expert,
        };
        let plan = DevicePlan {
            device: "a card".to_owned(),
            budget_bytes: 0,
            backbone_bytes: 0,
            kv_bytes: 0,
            state_bytes: 0,
            snapshots: 0,
            plane_bytes: 0,
            path: ExpertPath::Staging,
            slots: vec![slots; 48],
            expert_bytes: 0,
            n_experts: 48 * 128,
        };
        let rates = DeviceRates {
            token_s: 7.4e-3,
            first_s: 0.1,
            dispatches: 531,
            wait_s: 220e-6,
            upload_bytes_per_s: 20e9,
            missing: Missing::Computed,
            uploads: UploadRates::default(),
        };
        (spec, touched, plan, rates)
    }

    #[test]
    fn hits_are_those_that_were_measured() {
        for (slots, measured) in [(32, 0.90), (64, 0.961), (128, 1.0)] {
            let (spec, touched, plan, _) = subject(slots);
            let expected = hit_rate(&plan, touched.layers, spec.moe.top_k);
            assert!((expected - measured).abs() < 0.015, "{slots}: {expected}");
        }
    }

    #[test]
    fn more_slots_and_faster_rates_are_never_slower() {
        let of = |slots: usize, change: &dyn Fn(&mut DeviceRates)| {
            let (spec, touched, plan, mut rates) = subject(slots);
            change(&mut rates);
            forecast(&spec, &touched, 100e9, Some((&plan, rates))).device.expect("there is one").tok_s
        };
        let all: Vec<f64> = (8..=128).map(|slots| of(slots, &|_| ())).collect();
        assert!(all.is_sorted(), "{all:?}");
        assert!((all[120] - 1.0 / 7.4e-3).abs() < 1e-6);
        let base = of(32, &|_| ());
        assert!(base > of(32, &|r| r.wait_s *= 2.0));
        assert!(base > of(32, &|r| r.upload_bytes_per_s /= 2.0));
        assert!(base > of(32, &|r| r.token_s *= 1.5));
        assert!(base > of(32, &|r| r.missing = Missing::Brought));
        let over_bus = |rate: f64| of(32, &|r| r.missing = Missing::OverBus(rate));
        assert!(over_bus(40e9) > base && over_bus(40e9) > over_bus(20e9));
        let (spec, touched, ..) = subject(32);
        let cpu = forecast(&spec, &touched, 100e9, None);
        assert!(cpu.device.is_none() && (40.0..45.0).contains(&cpu.cpu_tok_s), "{cpu:?}");
    }

    #[test]
    #[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
    fn products_of_every_kind_of_layer_are_timed_or_told_to_have_no_room() {
        let coded = TinyModel::every(1).into_iter().map(|model| (model, "q4/64", "q8/64"));
        let floats = [(TinyModel::qwen3(1), "q4/64", "bf16"), (TinyModel::qwen2(2), "bf16", "q8/64")];
        for (model, experts, backbone) in coded.chain(floats) {
            let dir = tempfile::tempdir().unwrap();
            let encoding = |text: &str| text.parse::<Encoding>().unwrap();
            model.write_vault(dir.path(), [encoding(experts); 3], encoding(backbone));
            let vault = Vault::open(dir.path()).unwrap();
            let mut rate = WeightsRate::new(&vault, Kernels::detect(), 2, 4 << 20).unwrap();
            assert!(rate.median().is_nan());
            rate.time();
            let (low, high) =
                rate.rates().iter().fold((f64::INFINITY, 0f64), |(l, h), &r| (l.min(r), h.max(r)));
            assert!(low > 0.0 && high.is_finite() && (low..=high).contains(&rate.median()), "{rate:?}");
            let mut none = WeightsRate::new(&vault, Kernels::detect(), 2, 4096).unwrap();
            none.time();
            assert!(none.median().is_nan());
        }
    }

    #[test]
    fn the_fewer_layers_halt_the_more_are_handed_over() {
        assert_eq!(at_once(0.0, 0.5).0, 1);
        assert_eq!(at_once(1.0, 0.5).0, MOST_LAYERS);
        let all: Vec<usize> = (0..=100).map(|i| at_once(f64::from(i) / 100.0, 0.5).0).collect();
        assert!(all.is_sorted(), "{all:?}");
        // The cheaper a wait, the fewer.
        assert!(at_once(0.9, 0.01).0 < at_once(0.9, 1.0).0);
    }
}
