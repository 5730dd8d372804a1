//! `smoe sculpt`: a checkpoint becomes a vault.

use serde_json::json;
use smoe_engine::plan::Bytes;
use smoe_sculpt::{DryRun, Outcome, SculptError, Settings};

use crate::args::SculptArgs;
use crate::failure::Failure;
use crate::{interrupt, progress};

/// Runs the command.
pub fn sculpt(args: &SculptArgs) -> Result<(), Failure> {
    let settings = Settings {
        bits: args.bits,
        group: args.group,
        backbone: args.backbone,
        max_layers: args.max_layers,
        max_experts: args.max_experts,
        threads: args.threads,
        force: args.force,
    };
    let flag = interrupt::flag();
    if args.dry_run {
        let dry = smoe_sculpt::dry_run(&args.checkpoint, args.vault.as_deref(), &settings, flag)?;
        return print_dry_run(&dry, args.json);
    }
    let Some(vault) = &args.vault else {
        return Err(Failure::Usage("name the vault to make, or use --dry-run".to_owned()));
    };
    let bar = progress::Bar::default();
    let outcome = smoe_sculpt::sculpt(&args.checkpoint, vault, &settings, &bar, flag);
    bar.finish();
    match outcome {
        Ok(Outcome::Created) => eprintln!("made {}", vault.display()),
        Ok(Outcome::AlreadyComplete) => {
            eprintln!("{} is complete already, with these settings", vault.display());
        }
        Err(error @ SculptError::Cancelled { .. }) => {
            eprintln!("{error}");
            return Err(Failure::Interrupted);
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

fn print_dry_run(dry: &DryRun, as_json: bool) -> Result<(), Failure> {
    if as_json {
        let warnings: Vec<String> = dry.warnings.iter().map(ToString::to_string).collect();
        let json = json!({
            "spec": serde_json::to_value(&dry.spec)?,
            "warnings": warnings,
            "checkpoint_bytes": dry.checkpoint_bytes,
            "weights": dry.weights,
            "active_weights": dry.active_weights,
            "expert_encodings": dry.expert_encodings,
            "experts": dry.experts,
            "record_bytes": dry.record_bytes,
            "experts_bytes": dry.experts_bytes,
            "backbone_bytes": dry.backbone_bytes,
            "side_bytes": dry.side_bytes,
            "token_expert_bytes": dry.token_expert_bytes,
            "token_backbone_bytes": dry.token_backbone_bytes,
            "padding_bytes": dry.padding_bytes,
            "needed_bytes": dry.needed_bytes,
            "available_bytes": dry.available_bytes,
        });
        println!("{}", serde_json::to_string_pretty(&json)?);
        return Ok(());
    }
    for warning in &dry.warnings {
        eprintln!("warning: {warning}");
    }
    let spec = &dry.spec;
    let millions = |n: u64| format!("{:.1} M", n as f64 / 1e6);
    println!(
        "model       {}: {} layers, width {}, {} experts of width {}, {} per token",
        spec.model_type,
        spec.n_layers(),
        spec.d_model,
        spec.moe.n_experts,
        spec.moe.d_expert,
        spec.moe.top_k
    );
    println!("weights     {} ({} per token)", millions(dry.weights), millions(dry.active_weights));
    println!("checkpoint  {}", Bytes(dry.checkpoint_bytes));
    println!(
        "experts     {} in {} records of {}, gate {}, up {}, down {}, {} padding",
        Bytes(dry.experts_bytes),
        dry.experts,
        Bytes(dry.record_bytes),
        dry.expert_encodings[0],
        dry.expert_encodings[1],
        dry.expert_encodings[2],
        Bytes(dry.padding_bytes)
    );
    println!("backbone    {}, resident in memory", Bytes(dry.backbone_bytes));
    println!(
        "per token   {} of expert records, {} of backbone",
        Bytes(dry.token_expert_bytes),
        Bytes(dry.token_backbone_bytes)
    );
    let available = dry.available_bytes.map_or(String::new(), |bytes| format!(", {} are free", Bytes(bytes)));
    println!("disk        needs {}{available}", Bytes(dry.needed_bytes));
    Ok(())
}
