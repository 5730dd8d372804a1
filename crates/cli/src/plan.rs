//! `smoe plan`: what a vault will hold in memory.

use std::time::Duration;

use serde_json::{Value, json};
use smoe_engine::ceiling::{self, EntropyCeiling};
use smoe_engine::forecast;
use smoe_engine::kv::BLOCK;
use smoe_engine::memory::MemoryFacts;
use smoe_engine::plan::{Bytes, Plan};
use smoe_engine::{DevicePlan, DirectIo, ExpertPath, OpenMode, Vault, plan_with_device};
use smoe_store::{Disk as _, FileDisk, decoded_at_once};

use crate::args::PlanArgs;
use crate::failure::Failure;
use crate::model;

/// The disk is read so long, with so many bytes and at least so many reads in flight, at most four times as many, to say
/// whether decoding keeps up with it.
const DISK_TIME: Duration = Duration::from_millis(200);
const DISK_BYTES: usize = 4 << 20;
const DEPTH: usize = 4;

/// What entropy-coded records save of a fixed width's bytes at equal fidelity, and so of the disk's time: EXP-QUANT-14.
const SAVED: f64 = 0.14;

/// Runs the command.
pub fn plan(args: &PlanArgs) -> Result<(), Failure> {
    let vault = model::open_vault(&args.vault)?;
    let facts = MemoryFacts::detect();
    let mut options = args.machine.options();
    options.plan.reserved = model::text_bytes(&vault);
    model::warn_of_memory(&options.plan);
    let (plan, device) = plan_with_device(&vault, &options, &facts)?;
    let decoding = Decoding::measure(&vault, &plan)?;
    if args.json {
        let json = json!({
            "entropy_decoding": decoding.as_ref().map(Decoding::json),
            "physical_bytes": facts.physical,
            "cgroup_limit_bytes": facts.cgroup_limit,
            "available_bytes": facts.available,
            "budget_bytes": plan.budget_bytes,
            "backbone_bytes": plan.backbone_bytes,
            "kv_bytes": plan.kv_bytes,
            "window_positions": plan.window_blocks * BLOCK,
            "state_bytes": plan.state_bytes,
            "snapshots": plan.snapshots,
            "activation_bytes": plan.activation_bytes,
            "fixed_bytes": plan.fixed_bytes,
            "text_bytes": plan.reserved_bytes,
            "slot_bytes": plan.slot_bytes,
            "ring_slots": plan.ring_slots,
            "ring_bytes": plan.ring_bytes(),
            "ring_floor_slots": plan.ring_floor,
            "experts": plan.n_experts,
            "plan_bytes": plan.total_bytes(),
            "floor_bytes": plan.floor_bytes(),
            "context": plan.context,
            "chunk": plan.chunk,
            "threads": plan.threads,
            "kv": format!("{:?}", plan.kv).to_lowercase(),
            "device": device.as_ref().map(of_device),
        });
        say!("{}", serde_json::to_string_pretty(&json)?);
        return Ok(());
    }
    let row = |name: &str, bytes: u64, note: String| -> Result<(), Failure> {
        say!("{name:<12} {:>10}  {note}", Bytes(bytes).to_string());
        Ok(())
    };
    let limit = match facts.cgroup_limit {
        Some(limit) => format!("cgroup limit {}", Bytes(limit)),
        None => format!("of {} installed", Bytes(facts.physical)),
    };
    row("may use", plan.budget_bytes, limit)?;
    row("backbone", plan.backbone_bytes, "resident".to_owned())?;
    let kv = format!("{:?}", plan.kv).to_lowercase();
    let windows = match plan.window_blocks * BLOCK {
        0 => String::new(),
        positions => format!(", {positions} of them where layers see a window"),
    };
    row("KV cache", plan.kv_bytes, format!("{} positions in {kv}{windows}", plan.context))?;
    if plan.state_bytes > 0 {
        let note = format!("linear attention: 2 a session, {} snapshots to go back to", plan.snapshots);
        row("states", plan.state_bytes, note)?;
    }
    row("activations", plan.activation_bytes, format!("steps of up to {} tokens", plan.chunk))?;
    row("fixed", plan.fixed_bytes, format!("{} compute threads", plan.threads))?;
    row("text", plan.reserved_bytes, "tokeniser".to_owned())?;
    let share = 100.0 * plan.ring_slots as f64 / plan.n_experts.max(1) as f64;
    let ring = format!(
        "{} of {} experts ({share:.0} %), {} each; the least is {}",
        plan.ring_slots,
        plan.n_experts,
        Bytes(plan.slot_bytes),
        plan.ring_floor
    );
    row("ring", plan.ring_bytes(), ring)?;
    row("in all", plan.total_bytes(), format!("the least is {}", Bytes(plan.floor_bytes())))?;
    if let Some(decoding) = &decoding {
        decoding.print(&plan)?;
    }
    if let Some(held) = &device {
        let experts = held.slots.iter().sum::<usize>();
        say!();
        row("may use", held.budget_bytes, format!("on {}", held.device))?;
        row("backbone", held.backbone_bytes, "resident".to_owned())?;
        row("KV cache", held.kv_bytes, "in place of the one above".to_owned())?;
        if held.state_bytes > 0 {
            let note = format!("2 a session, {} snapshots, in place of those above", held.snapshots);
            row("states", held.state_bytes, note)?;
        }
        row("planes", held.plane_bytes, format!("steps of up to {} tokens", plan.chunk))?;
        let share = 100.0 * experts as f64 / held.n_experts.max(1) as f64;
        let others = match held.path {
            _ if held.holds_all() => "",
            ExpertPath::ZeroCopy => "; the others are read over the bus, if that is fast enough",
            ExpertPath::InPlace => "; the others as the host names them",
            ExpertPath::Auto | ExpertPath::Staging | ExpertPath::Import => {
                "; of the others the processor computes what a few tokens need, prompts bring them"
            }
        };
        row("experts", held.expert_bytes, format!("{experts} of {} ({share:.0} %){others}", held.n_experts))?;
        row("in all", held.total_bytes(), String::new())?;
    }
    if plan.holds_all() {
        say!("the ring holds every expert: after loading, nothing is read from disk");
    }
    Ok(())
}

/// What lies in a device's memory.
fn of_device(held: &DevicePlan) -> Value {
    json!({
        "name": held.device,
        "budget_bytes": held.budget_bytes,
        "backbone_bytes": held.backbone_bytes,
        "kv_bytes": held.kv_bytes,
        "state_bytes": held.state_bytes,
        "snapshots": held.snapshots,
        "plane_bytes": held.plane_bytes,
        "expert_bytes": held.expert_bytes,
        "expert_path": held.path.name(),
        "experts": held.slots.iter().sum::<usize>(),
        "bytes": held.total_bytes(),
    })
}

/// Whether decoding entropy-coded records keeps up with the disk, both measured.
struct Decoding {
    ceiling: EntropyCeiling,
    /// Of all records: bytes on disk, and codes.
    record_bytes: u64,
    codes: u64,
    disk_bytes_per_s: f64,
    disk_is_direct: bool,
    /// Records that land last in a layer and are decoded while the disk idles.
    last: f64,
    /// Records that a layer of a token reads with this ring.
    misses: f64,
}

impl Decoding {
    /// None if records are used as they lie on disk.
    fn measure(vault: &Vault, plan: &Plan) -> Result<Option<Self>, Failure> {
        let experts = &vault.experts;
        if !experts.coded {
            return Ok(None);
        }
        let kernels = smoe_engine::kernels(std::env::var("SMOE_KERNELS").ok().as_deref())?;
        let disk = FileDisk::open(&vault.experts_path, OpenMode::Auto)?;
        let read_bytes = experts.longest_record() as usize;
        let depth = (DISK_BYTES / read_bytes.max(1)).clamp(DEPTH, 4 * DEPTH);
        let disk_bytes_per_s = ceiling::disk_at(&disk, read_bytes, depth, DISK_TIME, 7)?;
        let weights = |layer: u32| {
            let tensors = experts.table(layer).map_or(&[][..], |table| &table.tensors);
            tensors.iter().map(|t| (t.rows * t.cols) as u64).sum::<u64>()
        };
        let (layers, top_k) = (vault.spec.moe_layers().count(), vault.spec.moe.top_k);
        let hits = forecast::expected_hits(plan.ring_slots, plan.n_experts, layers, top_k);
        // A ring that does not hold what one token asks for has little of it for the next.
        let hits = hits * (plan.ring_slots as f64 / (layers * top_k).max(1) as f64).min(1.0);
        let misses = (top_k as f64 * (1.0 - hits)).max(1.0);
        Ok(Some(Self {
            last: decoded_at_once(experts.longest_record()) as f64,
            misses,
            ceiling: ceiling::entropy_decoding(kernels, plan.threads),
            record_bytes: experts.records.iter().map(|record| record.len).sum(),
            codes: experts.records.iter().map(|record| weights(record.key.layer)).sum(),
            disk_bytes_per_s,
            disk_is_direct: matches!(disk.direct(), DirectIo::Yes { .. }),
        }))
    }

    /// Bytes of records that a thread decodes a second.
    fn bytes_per_s(&self) -> f64 {
        self.ceiling.codes_per_s * self.record_bytes as f64 / self.codes.max(1) as f64
    }

    /// Threads that keep up with the disk.
    fn threads_needed(&self) -> f64 {
        self.disk_bytes_per_s / self.bytes_per_s()
    }

    /// Time that decoding takes of all threads, as a share of the disk's.
    fn share(&self) -> f64 {
        self.threads_needed() / self.ceiling.threads as f64
    }

    fn keeps_up(&self) -> bool {
        self.share() <= 1.0
    }

    /// What of it is waited for, the rest being done while the disk reads on (EXP-STORE-17).
    fn waited(&self) -> f64 {
        self.share() * if self.keeps_up() { (self.last / self.misses).min(1.0) } else { 1.0 }
    }

    /// From how many records read in a layer on smaller ones save more time than decoding them is waited for; none if decoding
    /// does not keep up.
    fn pays_from(&self) -> Option<f64> {
        self.keeps_up().then(|| if self.share() <= SAVED { 1.0 } else { self.last * self.share() / SAVED })
    }

    /// Whether smaller records save more time than decoding them is waited for.
    fn pays(&self) -> bool {
        self.waited() <= SAVED
    }

    fn json(&self) -> Value {
        json!({
            "decoder": self.ceiling.decoder,
            "codes_per_s_a_thread": self.ceiling.codes_per_s,
            "record_bytes_per_s_a_thread": self.bytes_per_s(),
            "disk_bytes_per_s": self.disk_bytes_per_s,
            "disk_is_direct": self.disk_is_direct,
            "threads_needed": self.threads_needed(),
            "keeps_up": self.keeps_up(),
            "share_of_disk_time": self.share(),
            "waited_for": self.waited(),
            "misses_a_layer": self.misses,
            "pays_from_misses_a_layer": self.pays_from(),
            "pays": self.pays(),
        })
    }

    fn print(&self, plan: &Plan) -> Result<(), Failure> {
        let cached = if self.disk_is_direct { "" } else { ", its cache in between" };
        say!(
            "decoding     {:.1} G codes/s a thread ({}), {:.2} GB/s of records; the disk brings {:.2} GB/s{cached}: {:.2} \
             threads of {} keep up",
            self.ceiling.codes_per_s / 1e9,
            self.ceiling.decoder,
            self.bytes_per_s() / 1e9,
            self.disk_bytes_per_s / 1e9,
            self.threads_needed(),
            self.ceiling.threads
        );
        if plan.holds_all() {
            return Ok(());
        }
        let Some(from) = self.pays_from() else {
            say!(
                "decoding would not keep up with this disk: with these threads a vault of the same fidelity made without \
                 --entropy is faster"
            );
            return Ok(());
        };
        let verdict =
            if self.pays() { "so smaller records pay" } else { "so one made without --entropy is faster" };
        say!(
            "             faster than a vault of the same fidelity made without --entropy where a token misses {from:.1} or more of a \
             layer's experts; this ring leaves about {:.1}, {verdict}",
            self.misses
        );
        Ok(())
    }
}
