//! What decoding will do, from what was measured: on the processor, and with a device.
//!
//! Experts are taken to be in memory: what a disk adds, it adds to both. A token on the processor takes the bytes that
//! it touches, at a share of the speed at which memory streams. On a device it takes what such a token was measured to
//! take there, experts of any content in its slots; where some are missing, layers halt:
//!
//! ```text
//! hits      1 - 0.53 x^-1.1 (1 - share^2), x = slots of a layer / top_k
//! halting   1 - hits^top_k, of a layer
//! layer     (wait + done + 0.8 in vain) / done, of as many at once as make it least
//! token     layers x layer + halting layers x two dispatches + missed bytes / speed of uploads
//! ```

use smoe_format::{BackboneTensor, ModelSpec};

use crate::device::DevicePlan;
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
        let routed: u64 = vault.experts.layers.iter().map(|table| table.used_bytes() as u64).sum();
        Self {
            expert: routed as f64 / vault.experts.layers.len().max(1) as f64,
            dense: all - embed - if spec.tied_head { 0 } else { head },
            head,
            experts: routed * spec.moe.top_k as u64,
            layers: spec.moe_layers().count(),
        }
    }

    /// All of them.
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
    /// Kernels of it.
    pub dispatches: u32,
    /// What a layer takes more that is handed over by itself and waited for, seconds.
    pub wait_s: f64,
    /// Experts brought there, bytes per second.
    pub upload_bytes_per_s: f64,
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

/// Of the speed at which memory streams, what decoding on the processor gets: 0.93 on two cores, 0.65 to 0.9 on sixteen
/// (EXP-PEER-02, EXP-GPU-04). Open: no one share fits both.
const CPU_SHARE: f64 = 0.75;
/// The most layers that are handed over at once where they may halt, and the cost of one that runs in vain behind a
/// halt, in layers.
pub(crate) const MOST_LAYERS: usize = 8;
pub(crate) const IN_VAIN: f64 = 0.8;

/// What is expected.
#[must_use]
pub fn forecast(
    spec: &ModelSpec,
    touched: &Touched,
    memory_bytes_per_s: f64,
    device: Option<(&DevicePlan, DeviceRates)>,
) -> Forecast {
    let cpu_tok_s = CPU_SHARE * memory_bytes_per_s / touched.all() as f64;
    let device = device.map(|(plan, rates)| {
        let hit_rate = hit_rate(plan, touched.layers, spec.moe.top_k);
        DeviceForecast { rates, hit_rate, tok_s: 1.0 / token_s(spec, touched, &rates, hit_rate) }
    });
    Forecast { cpu_tok_s, device }
}

/// The share of the experts asked for that a device holds: fitted to EXP-GPU-02, half of whose tokens' experts are the
/// last token's.
fn hit_rate(plan: &DevicePlan, layers: usize, top_k: usize) -> f64 {
    if plan.holds_all() {
        return 1.0;
    }
    let slots: usize = plan.slots.iter().sum();
    let share = slots as f64 / plan.n_experts.max(1) as f64;
    let sets = slots as f64 / (layers * top_k).max(1) as f64;
    1.0 - 0.53 * sets.max(1.0).powf(-1.1) * share.mul_add(-share, 1.0)
}

/// Seconds of a token at a rate of hits.
fn token_s(spec: &ModelSpec, touched: &Touched, rates: &DeviceRates, hit_rate: f64) -> f64 {
    if hit_rate >= 1.0 {
        return rates.token_s;
    }
    let (layers, top_k) = (touched.layers as f64, spec.moe.top_k as f64);
    let pass = hit_rate.powf(top_k);
    let layer_s = rates.token_s / layers;
    let (_, per_layer) = at_once(pass, rates.wait_s / layer_s);
    let halts = layers * (1.0 - pass);
    let missed = layers * top_k * (1.0 - hit_rate) * touched.expert;
    let dispatch_s = rates.token_s / f64::from(rates.dispatches.max(1));
    layers.mul_add(per_layer * layer_s, halts * 2.0 * dispatch_s) + missed / rates.upload_bytes_per_s
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

    /// Qwen3-30B-A3B as EXP-GPU-02 had it.
    fn subject(slots: usize) -> (ModelSpec, Touched, DevicePlan, DeviceRates) {
        let moe = MoeSpec { n_experts: 128, top_k: 8, ..MoeSpec::default() };
        let spec = ModelSpec { moe, ..ModelSpec::default() };
        let expert = 2_506_752.0;
        let touched =
            Touched { dense: 960_000_000, head: 330_000_000, experts: 962_592_768, layers: 48, expert };
        let plan = DevicePlan {
            device: "a card".to_owned(),
            budget_bytes: 0,
            backbone_bytes: 0,
            kv_bytes: 0,
            plane_bytes: 0,
            slots: vec![slots; 48],
            expert_bytes: 0,
            n_experts: 48 * 128,
        };
        let rates =
            DeviceRates { token_s: 7.4e-3, dispatches: 531, wait_s: 220e-6, upload_bytes_per_s: 20e9 };
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
        let (spec, touched, ..) = subject(32);
        let cpu = forecast(&spec, &touched, 100e9, None);
        assert!(cpu.device.is_none() && (30.0..40.0).contains(&cpu.cpu_tok_s), "{cpu:?}");
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
