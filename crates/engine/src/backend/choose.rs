//! Which device computes.

use std::str::FromStr;

use smoe_format::expert_file::LayerTable;
#[cfg(feature = "gpu")]
use smoe_gpu::GpuError;
use smoe_kernels::Kernels;
#[cfg(feature = "gpu")]
use smoe_store::ArenaMemory;
use smoe_store::Store;

use crate::backend::Backend;
use crate::backend::cpu::CpuBackend;
#[cfg(feature = "cuda")]
use crate::backend::cuda;
#[cfg(feature = "gpu")]
use crate::backend::gpu;
#[cfg(feature = "gpu")]
use crate::device::ExpertPath;
#[cfg(feature = "gpu")]
use crate::forecast::{Touched, WeightsRate, forecast};
#[cfg(feature = "gpu")]
use crate::plan::{CHUNK_SHARE, MAX_CHUNK};
use crate::plan::{Plan, PlanRequest};
use crate::vault::Vault;
use crate::weights::Weights;
use crate::{EngineError, EngineOptions};

/// What the user asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The processor.
    #[default]
    Cpu,
    /// The best GPU if there is one that can run the model, else the processor.
    Auto,
    /// A GPU, or the one whose name contains this; a program that plays one will do.
    Gpu(Option<String>),
    /// An NVIDIA card, through CUDA.
    Cuda,
}

impl FromStr for DeviceChoice {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "cpu" => Self::Cpu,
            "auto" => Self::Auto,
            "gpu" => Self::Gpu(None),
            "cuda" => Self::Cuda,
            name => Self::Gpu(Some(name.to_owned())),
        })
    }
}

/// A device that was chosen, before the plan.
pub(crate) struct Chosen {
    #[cfg(feature = "gpu")]
    gpu: Option<std::sync::Arc<smoe_gpu::Gpu>>,
    #[cfg(feature = "cuda")]
    cuda: Option<std::sync::Arc<smoe_cuda::Cuda>>,
    /// Why it is not what one may have hoped for.
    pub(crate) note: Option<String>,
}

impl Chosen {
    const fn cpu(note: Option<String>) -> Self {
        Self {
            #[cfg(feature = "gpu")]
            gpu: None,
            #[cfg(feature = "cuda")]
            cuda: None,
            note,
        }
    }

    /// Opens the device.
    ///
    /// # Errors
    /// If a GPU was asked for by name and there is none, or it cannot run this model.
    #[cfg(feature = "gpu")]
    pub(crate) fn open(choice: &DeviceChoice, vault: &Vault, exact: bool) -> Result<Self, EngineError> {
        use smoe_gpu::{Gpu, Software};

        let (name, software) = match choice {
            DeviceChoice::Cpu => return Ok(Self::cpu(None)),
            DeviceChoice::Auto => (None, Software::Refuse),
            DeviceChoice::Gpu(name) => (name.as_deref(), Software::Accept),
            DeviceChoice::Cuda => return Self::open_cuda(vault, exact),
        };
        if let Some(what) = gpu::unsupported(&vault.spec, exact, &vault.experts.layers) {
            if *choice == DeviceChoice::Auto {
                return Ok(Self::cpu(Some(format!("on the processor: no GPU kernels for {what}"))));
            }
            return Err(EngineError::Unsupported { what: format!("{what} on a GPU (--device cpu can)") });
        }
        match Gpu::shared(name, software) {
            Ok(gpu) => Ok(Self { gpu: Some(gpu), ..Self::cpu(None) }),
            Err(error) if *choice == DeviceChoice::Auto => {
                Ok(Self::cpu(Some(format!("on the processor: {error}"))))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a card through CUDA.
    #[cfg(feature = "cuda")]
    fn open_cuda(vault: &Vault, exact: bool) -> Result<Self, EngineError> {
        if let Some(what) = cuda::unsupported(&vault.spec, exact, &vault.experts.layers) {
            let what = format!("{what} through CUDA (--device gpu or cpu can)");
            return Err(EngineError::Unsupported { what });
        }
        Ok(Self { cuda: Some(std::sync::Arc::new(smoe_cuda::Cuda::open()?)), ..Self::cpu(None) })
    }

    /// There is no CUDA in this build.
    #[cfg(all(feature = "gpu", not(feature = "cuda")))]
    fn open_cuda(_vault: &Vault, _exact: bool) -> Result<Self, EngineError> {
        Err(EngineError::Unsupported { what: "CUDA: this build has none".to_owned() })
    }

    /// Without GPUs in this build: the processor, or an error.
    ///
    /// # Errors
    /// If a GPU was asked for.
    #[cfg(not(feature = "gpu"))]
    pub(crate) fn open(choice: &DeviceChoice, _vault: &Vault, _exact: bool) -> Result<Self, EngineError> {
        match choice {
            DeviceChoice::Gpu(_) | DeviceChoice::Cuda => {
                Err(EngineError::Unsupported { what: "a GPU: this build has none".to_owned() })
            }
            DeviceChoice::Cpu | DeviceChoice::Auto => Ok(Self::cpu(None)),
        }
    }

    /// The plan, with steps as long as suits the device; `plan` makes one of a request.
    ///
    /// A card fills with few tokens, so steps are short where it holds every expert. What it lacks is brought to it for each
    /// step anew, nearly all of a layer's experts for a prompt: then steps are as long as the planes' share of its memory
    /// allows, as they are on the processor (EXP-GPU-18).
    ///
    /// # Errors
    /// Those of `plan`.
    pub(crate) fn plan(
        &self,
        vault: &Vault,
        options: &EngineOptions,
        plan: &dyn Fn(&PlanRequest) -> Result<Plan, EngineError>,
    ) -> Result<Plan, EngineError> {
        let request = &options.plan;
        #[cfg(feature = "gpu")]
        {
            let up_to = |longest: usize, most: usize| {
                let chunk = request.chunk.map(|chunk| chunk.min(most));
                plan(&PlanRequest { chunk, longest_chunk: Some(longest.min(most)), ..request.clone() })
            };
            if let Some(device) = &self.gpu {
                let most = gpu::max_chunk(device.facts(), &vault.spec);
                let held = |plan: &Plan| self.held(vault, plan, options).ok().flatten();
                let short = up_to(DEVICE_CHUNK, most)?;
                // What has no room at all is refused where it is claimed.
                if request.chunk.is_some() || held(&short).is_none_or(|held| held.holds_all()) {
                    return Ok(short);
                }
                let mut longest = MAX_CHUNK;
                while longest > DEVICE_CHUNK {
                    let long = up_to(longest, most)?;
                    // Not at the price of positions.
                    let fits = held(&long).is_some_and(|h| h.plane_bytes <= h.budget_bytes / CHUNK_SHARE);
                    if fits && long.context == short.context {
                        return Ok(long);
                    }
                    longest /= 2;
                }
                return Ok(short);
            }
            #[cfg(feature = "cuda")]
            if self.cuda.is_some() {
                return up_to(DEVICE_CHUNK, MAX_CHUNK);
            }
        }
        let _ = vault;
        plan(request)
    }

    /// What will lie in its memory; none of the processor.
    ///
    /// # Errors
    /// If the device is too small.
    pub(crate) fn held(
        &self,
        vault: &Vault,
        plan: &Plan,
        options: &EngineOptions,
    ) -> Result<Option<crate::DevicePlan>, EngineError> {
        let (spec, tables): (_, &[LayerTable]) = (&vault.spec, &vault.experts.layers);
        let (vram, slots) = (options.vram, options.device_slots);
        #[cfg(feature = "cuda")]
        if let Some(card) = &self.cuda {
            let (facts, path) = (cuda::facts(card), ExpertPath::Staging);
            return crate::DevicePlan::new(&facts, spec, tables, plan, vram, slots, path).map(Some);
        }
        #[cfg(feature = "gpu")]
        if let Some(device) = &self.gpu {
            let path = path(device, options).0;
            return crate::DevicePlan::new(device.facts(), spec, tables, plan, vram, slots, path).map(Some);
        }
        let _ = (spec, tables, plan, vram, slots);
        Ok(None)
    }

    /// The backend. A GPU that is too small is an error if it was asked for, and the processor's case otherwise; one that
    /// is lost, or whose memory others hold, is the processor's in any case.
    ///
    /// # Errors
    /// If the device is too small, or refuses something.
    pub(crate) fn backend(
        &mut self,
        vault: &Vault,
        options: &EngineOptions,
        weights: Weights,
        plan: &Plan,
        kernels: Kernels,
        store: &mut Store,
    ) -> Result<Box<dyn Backend>, EngineError> {
        let (spec, tables): (_, &[LayerTable]) = (&vault.spec, &vault.experts.layers);
        let exact = options.exact;
        #[cfg(feature = "cuda")]
        if self.cuda.is_some()
            && let Some(held) = self.held(vault, plan, options)?
            && let Some(card) = self.cuda.take()
        {
            let backend = cuda::CudaBackend::new(card, spec, &weights, tables, plan, held)?;
            return Ok(Box::new(backend));
        }
        #[cfg(feature = "gpu")]
        if let Some(device) = self.gpu.take() {
            let choice = &options.device;
            // The ring, which is not touched yet, has the room for it.
            let rate = (*choice == DeviceChoice::Auto).then(|| {
                let mut weights = WeightsRate::new(vault, kernels, plan.threads, plan.ring_bytes());
                (0..2).for_each(|_| weights.iter_mut().for_each(WeightsRate::time));
                weights.map_or(f64::NAN, |weights| weights.median())
            });
            let made = on_device(&device, vault, options, &weights, plan, kernels, store);
            let worth = |(mut backend, note): (gpu::GpuBackend, _)| match rate {
                Some(rate) => gains(&mut backend, vault, rate).map(|why| (backend, note, why)),
                None => Ok((backend, note, None)),
            };
            match made.and_then(worth) {
                Ok((backend, note, None)) => {
                    self.note = note;
                    return Ok(Box::new(backend));
                }
                Ok((_, _, Some(why))) => self.note = Some(format!("on the processor: {why}")),
                // Nobody asked for a device that fails, or whose memory is taken.
                Err(error) if *choice == DeviceChoice::Auto || has_failed(&device, &error) => {
                    self.note = Some(format!("on the processor: {error}"));
                }
                Err(error) => return Err(error),
            }
        }
        let _ = (options, store);
        Ok(Box::new(CpuBackend::new(spec.clone(), weights, tables, plan, kernels, exact)))
    }
}

/// Whether a device can do no more: it was lost, or others have its memory.
#[cfg(feature = "gpu")]
fn has_failed(device: &smoe_gpu::Gpu, error: &EngineError) -> bool {
    matches!(error, EngineError::Gpu(GpuError::OutOfMemory { .. })) || device.check().is_err()
}

/// Puts the model on a device. Where less memory is free than the card has, with fewer experts, which is noted.
#[cfg(feature = "gpu")]
fn on_device(
    device: &std::sync::Arc<smoe_gpu::Gpu>,
    vault: &Vault,
    options: &EngineOptions,
    weights: &Weights,
    plan: &Plan,
    kernels: Kernels,
    store: &mut Store,
) -> Result<(gpu::GpuBackend, Option<String>), EngineError> {
    let (spec, tables) = (&vault.spec, &vault.experts.layers);
    let (mut limit, slots, mut refused) = (options.vram, options.device_slots, None);
    let (mut path, mut path_note) = path(device, options);
    let mut ring: Option<gpu::Ring> = None;
    loop {
        let held = match crate::DevicePlan::new(device.facts(), spec, tables, plan, limit, slots, path) {
            Ok(held) => held,
            // What was refused tells more than that less would not do.
            Err(error) => return Err(refused.map_or(error, EngineError::Gpu)),
        };
        if options.device_path == ExpertPath::ZeroCopy && held.path == ExpertPath::Import {
            let why = "zero-copy takes a ring that holds every expert, a layer's in one binding".to_owned();
            path_note = Some(why);
        }
        // Each expert comes once where all have room.
        let lends = held.path == ExpertPath::InPlace
            || matches!(held.path, ExpertPath::Import | ExpertPath::ZeroCopy)
                && (options.device_path == path || !held.holds_all());
        if lends && ring.is_none() {
            // Its pages become memory now: many threads are quicker than the driver at that.
            store.with_memory(|memory| match memory {
                ArenaMemory::Empty(bytes) => crate::ceiling::touch(bytes, plan.threads),
                ArenaMemory::Full(_) => {}
            });
            match gpu::Ring::new(device, store.lend(), tables) {
                Ok(lent) if held.path == ExpertPath::ZeroCopy && options.device_path == ExpertPath::Auto => {
                    // A device that fails says so where it is asked for more.
                    if !matches!(gpu::is_bus_worth_it(device, &lent, plan.slot_bytes), Ok(true)) {
                        path = ExpertPath::Import;
                    }
                    ring = Some(lent);
                    continue;
                }
                Ok(lent) => ring = Some(lent),
                Err(error) => {
                    (path, path_note) = (ExpertPath::Staging, Some(error.to_string()));
                    continue;
                }
            }
        }
        let held = if lends { held } else { crate::DevicePlan { path: ExpertPath::Staging, ..held } };
        let can_shrink = held.expert_bytes > 0 || refused.is_none();
        // By at least one of each layer's experts less than was planned, until a token's are left.
        limit = Some(held.total_bytes() - held.expert_bytes.div_ceil(LESS));
        let (n, of) = (held.slots.iter().sum::<usize>(), held.n_experts);
        let lent = ring.clone().filter(|_| lends);
        let exact = options.exact;
        match gpu::GpuBackend::new(device.clone(), spec, weights, tables, plan, held, kernels, lent, exact) {
            Err(EngineError::Gpu(error @ GpuError::OutOfMemory { .. })) if can_shrink => {
                refused = Some(error)
            }
            made => {
                let note = refused.map(|why| format!("{why}: {n} of {of} experts are kept there"));
                let mut backend = made?;
                backend.path_note = path_note;
                return Ok((backend, note));
            }
        }
    }
}

/// How experts come to a device, and why not better if so.
#[cfg(feature = "gpu")]
fn path(device: &smoe_gpu::Gpu, options: &EngineOptions) -> (ExpertPath, Option<String>) {
    use smoe_gpu::DeviceKind;

    if options.device_path == ExpertPath::Staging {
        return (ExpertPath::Staging, None);
    }
    if let Err(why) = device.can_import() {
        return (ExpertPath::Staging, Some(why));
    }
    let shares = matches!(device.facts().kind, DeviceKind::Integrated | DeviceKind::Software);
    let path = match options.device_path {
        // Who says how many experts a device is to hold wants it to hold them.
        ExpertPath::Auto if shares && options.device_slots.is_none() => ExpertPath::InPlace,
        ExpertPath::Auto => ExpertPath::ZeroCopy,
        path => path,
    };
    (path, None)
}

/// By this part of them fewer experts are asked for where a device had no room.
#[cfg(feature = "gpu")]
const LESS: u64 = 8;

/// Why a device is not worth while, the processor going through weights at this `rate`; none if it is, or cannot be measured.
#[cfg(feature = "gpu")]
fn gains(backend: &mut gpu::GpuBackend, vault: &Vault, rate: f64) -> Result<Option<String>, EngineError> {
    let (Some(rates), Some(tier)) = (backend.measure()?, backend.tier()) else { return Ok(None) };
    let touched = Touched::of(vault);
    let forecast = forecast(&vault.spec, &touched, rate, Some((&tier.plan, rates)));
    Ok(forecast.device.filter(|device| device.tok_s <= forecast.cpu_tok_s).map(|device| {
        format!(
            "{} would decode {:.1} tokens per second with {:.0} % of the experts in its memory, the processor {:.1} \
             (--device gpu takes it all the same)",
            tier.plan.device,
            device.tok_s,
            100.0 * tier.plan.slots.iter().sum::<usize>() as f64 / tier.plan.n_experts.max(1) as f64,
            forecast.cpu_tok_s
        )
    }))
}

/// Tokens of a prefill step on a device that holds every expert, unless the user says otherwise: they fill it, and planes and
/// routes of longer steps take its memory. EXP-GPU-18.
#[cfg(feature = "gpu")]
const DEVICE_CHUNK: usize = 512;
