//! `smoe plan`: what a vault will hold in memory.

use serde_json::json;
use smoe_engine::memory::MemoryFacts;
use smoe_engine::plan::Bytes;
use smoe_engine::plan_vault;

use crate::args::PlanArgs;
use crate::failure::Failure;
use crate::model;

/// Runs the command.
pub fn plan(args: &PlanArgs) -> Result<(), Failure> {
    let vault = model::open_vault(&args.vault)?;
    let facts = MemoryFacts::detect();
    let mut request = args.machine.plan();
    request.reserved = model::text_bytes(&vault);
    model::warn_of_memory(&request);
    let plan = plan_vault(&vault, &request, &facts)?;
    if args.json {
        let json = json!({
            "physical_bytes": facts.physical,
            "cgroup_limit_bytes": facts.cgroup_limit,
            "available_bytes": facts.available,
            "budget_bytes": plan.budget_bytes,
            "backbone_bytes": plan.backbone_bytes,
            "kv_bytes": plan.kv_bytes,
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
    row("KV cache", plan.kv_bytes, format!("{} positions in {kv}", plan.context))?;
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
    if plan.holds_all() {
        say!("the ring holds every expert: after loading, nothing is read from disk");
    }
    Ok(())
}
