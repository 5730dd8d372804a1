//! `smoe synth`: a vault of a real model's shape with random weights, to measure a machine with.

use serde_json::json;
use smoe_engine::plan::Bytes;
use smoe_format::Table;
use smoe_sculpt::synth::{Required, RoutingStats};
use smoe_sculpt::{Outcome, Recipe, Settings, Shape, SynthOptions, Synthesis};

use crate::args::{ExpertBits, SynthArgs};
use crate::failure::Failure;
use crate::{interrupt, model, progress};

/// Runs the command.
pub fn synth(args: &SynthArgs) -> Result<(), Failure> {
    let mut shape = Shape::find(&args.like)?;
    if let Some(layers) = args.layers {
        shape.cut(layers)?;
    }
    for warning in &shape.warnings {
        eprintln!("warning: {warning}");
    }
    let published = if shape.mxfp4 { ExpertBits::Mxfp4 } else { ExpertBits::Uniform(4) };
    let bits = args.bits.unwrap_or(published);
    if let (ExpertBits::Mxfp4, Some(group)) = (bits, args.group)
        && group != Table::MXFP4.group()
    {
        let said = if args.bits.is_some() { "" } else { ", as this model is published; --bits 4 has others" };
        return Err(Failure::Usage(format!("--group {group}: mxfp4 has groups of 32{said}")));
    }
    let usual = SynthOptions::default().routing;
    let settings = Settings::default();
    let options = SynthOptions {
        settings: Settings {
            bits: if let ExpertBits::Uniform(bits) = bits { bits } else { settings.bits },
            group: args.group.unwrap_or(settings.group),
            backbone: args.backbone,
            // Random weights have nothing to lose.
            recipe: Recipe::Absmax,
            force: args.force,
            ..settings
        },
        mxfp4: bits == ExpertBits::Mxfp4,
        unique_layers: args.unique_layers,
        seed: args.seed,
        routing: RoutingStats {
            overlap: args.overlap.unwrap_or(usual.overlap),
            skew: args.skew.unwrap_or(usual.skew),
        },
        required: Required { overlap: args.overlap.is_some(), skew: args.skew.is_some() },
        text: args.text.as_deref().map(model::resolve).transpose()?,
    };
    let bar = progress::Bar::default();
    let made = smoe_sculpt::synth(&shape, &args.vault, &options, &bar, interrupt::flag());
    bar.finish();
    let made = made?;
    let vault = args.vault.display();
    match made.outcome {
        Outcome::Created => eprintln!("made {vault}"),
        Outcome::AlreadyComplete => eprintln!("{vault} is complete already, made with these arguments"),
    }
    if args.json {
        return print_json(&shape, &made, &options.routing);
    }
    print(&made, &options.routing)?;
    if let Some(text) = &args.text {
        say!("text        of {}: {} tokens", text.display(), made.spec.vocab_size);
    }
    Ok(())
}

fn print(made: &Synthesis, asked: &RoutingStats) -> Result<(), Failure> {
    let spec = &made.spec;
    let n_moe = spec.moe_layers().count();
    let shared = match spec.moe.d_shared {
        0 => String::new(),
        width => format!(", shared expert of width {width}"),
    };
    say!(
        "shape       {} layers ({} dense), width {}, {} experts of width {}, {} per token{shared}",
        spec.n_layers(),
        spec.n_layers() - n_moe,
        spec.d_model,
        spec.moe.n_experts,
        spec.moe.d_expert,
        spec.moe.top_k
    );
    let records = match made.unique_layers {
        n if n < n_moe => format!(", the records of {n} of {n_moe} layers"),
        _ => String::new(),
    };
    say!(
        "vault       {} on disk, experts {}{records}, {} of backbone",
        Bytes(made.bytes),
        made.expert_encoding,
        Bytes(made.backbone_bytes)
    );
    say!(
        "per token   {} of expert records, {} of backbone",
        Bytes(made.token_expert_bytes),
        Bytes(made.token_backbone_bytes)
    );
    let p = made.predicted;
    say!(
        "routing     overlap {:.2}, skew {:.2}, predicted for 4,096 tokens of its stream",
        p.overlap,
        p.skew
    );
    for (name, asked, predicted) in [("overlap", asked.overlap, p.overlap), ("skew", asked.skew, p.skew)] {
        if (asked - predicted).abs() > RoutingStats::TOLERANCE {
            say!("            the usual {name} of {asked} is out of reach of this shape's router");
        }
    }
    Ok(())
}

fn print_json(shape: &Shape, made: &Synthesis, asked: &RoutingStats) -> Result<(), Failure> {
    let json = json!({
        "like": shape.name,
        "created": made.outcome == Outcome::Created,
        "spec": serde_json::to_value(&made.spec)?,
        "unique_layers": made.unique_layers,
        "expert_encoding": made.expert_encoding,
        "bytes": made.bytes,
        "backbone_bytes": made.backbone_bytes,
        "token_expert_bytes": made.token_expert_bytes,
        "token_backbone_bytes": made.token_backbone_bytes,
        "asked": { "overlap": asked.overlap, "skew": asked.skew },
        "predicted": { "overlap": made.predicted.overlap, "skew": made.predicted.skew },
    });
    say!("{}", serde_json::to_string_pretty(&json)?);
    Ok(())
}
