//! Opening: the plan, the kernels, and the store with what decodes its records.

use std::sync::Arc;

use smoe_format::{ExpertFile, ExpertKey, LayerTable, entropy, original};
use smoe_kernels::{EntropyDecoder, Kernels, KernelsError};
use smoe_meter::StoreMeter;
use smoe_store::{Disk, PolicyKind, Record, RecordDecoder, Store, StoreConfig, staging_bytes};

use super::EngineOptions;
use crate::EngineError;
use crate::backend::{Chosen, cpu};
use crate::device::DevicePlan;
use crate::memory::MemoryFacts;
use crate::plan::{Plan, PlanRequest, Subject, all_float};
use crate::vault::Vault;

/// Whom the ring evicts: EXP-STORE-09.
pub const POLICY: PolicyKind = PolicyKind::Lrfu;
/// Threads that read the backbone, and experts of some MB.
pub(super) const READERS: usize = 4;
/// The most that may be asked for.
const MAX_READERS: usize = 64;

/// Reads in flight that saturate a drive, by the size of a record: EXP-STORE-05.
const fn readers(record_bytes: u64) -> usize {
    match record_bytes {
        0x20_0000.. => READERS,
        0x8_0000.. => 2 * READERS,
        _ => 4 * READERS,
    }
}

/// Readers that decode what they read, each with a buffer of its own; none if records are used as they lie on disk.
fn decoding_readers(experts: &ExpertFile) -> Option<usize> {
    if experts.coded {
        Some(readers(experts.longest_record()))
    } else {
        (!experts.original.is_empty()).then_some(READERS)
    }
}

/// The plan for a vault, before anything is claimed.
///
/// # Errors
/// As [`Plan::new`].
pub fn plan(vault: &Vault, request: &PlanRequest, facts: &MemoryFacts) -> Result<Plan, EngineError> {
    let experts = &vault.experts;
    let staging = experts.longest_record() + entropy::SLACK as u64;
    let decode_bytes = decoding_readers(experts).map_or(0, |readers| staging_bytes(readers, staging));
    let resident = || vault.backbone.iter().map(|(_, tensor)| tensor.encoding);
    let subject = Subject {
        spec: &vault.spec,
        layers: &experts.layers,
        backbone_bytes: vault.backbone.file_len,
        all_float: all_float(resident(), &experts.layers),
        groups: cpu::groups(resident(), &experts.layers).len(),
        decode_bytes,
    };
    Plan::new(subject, request, facts)
}

/// The same with a device if the options choose one, and what will lie in its memory.
///
/// # Errors
/// As [`Plan::new`], and if the device is too small or cannot run the model.
pub fn plan_with_device(
    vault: &Vault,
    options: &EngineOptions,
    facts: &MemoryFacts,
) -> Result<(Plan, Option<DevicePlan>), EngineError> {
    let chosen = Chosen::open(&options.device, vault, options.exact)?;
    let plan = chosen.plan(vault, options, &|request| plan(vault, request, facts))?;
    let held = chosen.held(vault, &plan, options)?;
    Ok((plan, held))
}

/// The kernels called `name`, or the fastest.
///
/// # Errors
/// If this machine has no kernels of that name.
pub fn kernels(name: Option<&str>) -> Result<Kernels, EngineError> {
    Kernels::by_name(name).map_err(|e: KernelsError| EngineError::Setting {
        name: "SMOE_KERNELS",
        value: name.unwrap_or_default().to_owned(),
        rule: e.to_string(),
    })
}

pub(super) fn open_store(
    vault: &Vault,
    disk: Arc<dyn Disk>,
    plan: &Plan,
    kernels: Kernels,
    options: &EngineOptions,
    meter: Arc<StoreMeter>,
) -> Result<Store, EngineError> {
    let experts = &vault.experts;
    let records = experts
        .records
        .iter()
        .map(|record| {
            let slot_len = experts.table(record.key.layer).map_or(0, |table| table.record_len);
            Record {
                key: record.key,
                offset: record.offset,
                len: record.len as u32,
                slot_len: slot_len as u32,
                crc32c: record.crc32c,
            }
        })
        .collect();
    let decoder: Option<Arc<dyn RecordDecoder>> = if experts.coded {
        Some(Arc::new(Uncode { decoder: EntropyDecoder::new(kernels), layers: experts.layers.clone() }))
    } else if experts.original.is_empty() {
        None
    } else {
        Some(Arc::new(Retile::new(vault)))
    };
    let config = StoreConfig {
        // Each reader that decodes has a buffer, which the plan counts: more there cannot be.
        readers: match (options.readers, decoding_readers(experts)) {
            (Some(n), most) => n.clamp(1, most.unwrap_or(MAX_READERS)),
            (None, Some(most)) => most,
            (None, None) => readers(plan.slot_bytes),
        },
        floor: plan.ring_floor,
        policy: POLICY,
        verify: options.verify,
        ..StoreConfig::new(plan.ring_slots, plan.slot_bytes as usize)
    };
    Ok(Store::open(disk, records, config, decoder, meter)?)
}

/// Turns entropy-coded records into tiles, on the reader threads.
struct Uncode {
    decoder: EntropyDecoder,
    layers: Vec<LayerTable>,
}

impl Uncode {
    fn table(&self, key: ExpertKey) -> Option<&LayerTable> {
        let found = self.layers.binary_search_by_key(&key.layer, |table| table.layer);
        found.ok().map(|i| &self.layers[i])
    }
}

impl RecordDecoder for Uncode {
    fn slack(&self) -> usize {
        entropy::SLACK
    }

    fn parts(&self, key: ExpertKey) -> usize {
        self.table(key).map_or(1, shares)
    }

    fn start(&self, key: ExpertKey, part: usize) -> usize {
        self.table(key).map_or(0, |table| entropy::part(table, part).slot.start)
    }

    fn decode(&self, key: ExpertKey, raw: &[u8], part: usize, out: &mut [u8]) -> Result<(), String> {
        let table = self.table(key).ok_or("is not in the layer table")?;
        let len = raw.len() - self.slack();
        let decoded = if shares(table) == 1 {
            self.decoder.decode(raw, len, table, out)
        } else {
            let start = if part == 0 { 0 } else { self.start(key, part) };
            let part = entropy::part(table, part);
            let own = part.slot.start - start..part.slot.end - start;
            self.decoder.decode_part(raw, len, table, &part, &mut out[own])
        };
        decoded.map_err(|error| error.to_string())
    }
}

/// Parts in which readers share the decoding of a record: of few blocks it is decoded by one, for handing over and
/// waking would take more than is gained (EXP-STORE-17).
fn shares(table: &LayerTable) -> usize {
    match entropy::n_parts(table) {
        ..=3 => 1,
        n => n,
    }
}

/// Turns the original's row-major records into tiles, on the reader threads.
struct Retile {
    experts: ExpertFile,
}

impl Retile {
    fn new(vault: &Vault) -> Self {
        Self { experts: vault.experts.clone() }
    }
}

impl RecordDecoder for Retile {
    fn decode(&self, key: ExpertKey, raw: &[u8], _: usize, slot: &mut [u8]) -> Result<(), String> {
        let found = self.experts.records.binary_search_by_key(&key, |record| record.key);
        let (Ok(i), Some(table)) = (found, self.experts.table(key.layer)) else {
            return Err("is not in the expert table".to_owned());
        };
        original::retile(raw, &self.experts.original[i], table, slot);
        Ok(())
    }
}
