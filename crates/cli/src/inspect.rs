//! `smoe inspect`: what is in a vault.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use smoe_engine::Vault;
use smoe_engine::plan::Bytes;
use smoe_format::spec::{GroupScore, GroupSpec, MoeSpec, RopeScaling, RouterKind};
use smoe_format::{Encoding, FfnKind, Projection, Table};
use smoe_sculpt::Synthetic;

use crate::args::InspectArgs;
use crate::failure::Failure;
use crate::model;

/// Runs the command.
pub fn inspect(args: &InspectArgs) -> Result<(), Failure> {
    let vault = model::open_vault(&args.vault)?;
    let facts = facts(&vault)?;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&facts)?);
    } else {
        print_facts(&vault, &facts)?;
    }
    Ok(())
}

fn facts(vault: &Vault) -> Result<Value, Failure> {
    let experts = &vault.experts;
    let expert_bytes: u64 = experts.records.iter().map(|r| r.len).sum();
    let used: u64 = experts.records.iter().map(|r| r.used).sum();
    let slots = experts.records.iter().filter_map(|r| experts.table(r.key.layer));
    let slot_bytes: u64 = slots.map(|table| table.record_len as u64).sum();
    let weights: u64 = experts
        .layers
        .iter()
        .flat_map(|l| l.tensors.iter().map(|t| (t.rows * t.cols) as u64 * u64::from(l.n_experts)))
        .sum();
    let layers: Vec<Value> = experts
        .layers
        .iter()
        .map(|l| {
            let kinds = Projection::ALL.iter().zip(&l.tensors);
            let encodings: BTreeMap<_, _> = kinds.map(|(p, t)| (p.name(), t.encoding.to_string())).collect();
            json!({
                "layer": l.layer,
                "experts": l.n_experts,
                "record_bytes": l.record_len,
                "used_bytes": l.used_bytes(),
                "encodings": encodings,
            })
        })
        .collect();
    let tables: Vec<Value> = level_tables(vault)
        .iter()
        .map(|table| json!({ "encoding": table.to_string(), "levels": table.levels() }))
        .collect();
    let mut backbone: BTreeMap<String, u64> = BTreeMap::new();
    for (_, tensor) in vault.backbone.iter() {
        *backbone.entry(tensor.encoding.to_string()).or_default() += tensor.bytes.end - tensor.bytes.start;
    }
    let manifest = experts.manifest();
    Ok(json!({
        "version": experts.version,
        "experts_file": vault.experts_path,
        "backbone_file": vault.backbone_path,
        "spec": serde_json::to_value(&vault.spec)?,
        "expert_file_bytes": experts.file_len,
        "record_bytes": expert_bytes,
        "padding_bytes": expert_bytes.saturating_sub(used),
        "expert_weights": weights,
        "entropy_coded": experts.coded,
        "bits_per_expert_weight_unpadded": used as f64 * 8.0 / weights.max(1) as f64,
        "slot_bytes_of_all_experts": slot_bytes,
        "bits_per_expert_weight": expert_bytes as f64 * 8.0 / weights.max(1) as f64,
        "backbone_bytes": vault.backbone.file_len,
        "backbone_bytes_by_encoding": backbone,
        "layers": layers,
        "level_tables": tables,
        "synthetic": synthetic(vault).map(|s| {
            let predicted = s.predict(&vault.spec, Synthetic::TOKENS);
            json!({
                "like": s.like,
                "seed": s.seed,
                "unique_layers": s.unique_layers,
                "asked": { "overlap": s.routing.overlap, "skew": s.routing.skew },
                "predicted": { "overlap": predicted.overlap, "skew": predicted.skew },
            })
        }),
        "source": manifest.map(|m| serde_json::to_value(&m.source)).transpose()?,
        "files": manifest.map(|m| serde_json::to_value(&m.files)).transpose()?,
    }))
}

/// How a vault of random weights was made.
fn synthetic(vault: &Vault) -> Option<Synthetic> {
    Synthetic::of(&vault.experts.manifest()?.source)
}

/// How a router makes weights of logits.
fn router(moe: &MoeSpec) -> String {
    let kind = match moe.router {
        RouterKind::Softmax => "softmax",
        RouterKind::Sigmoid => "sigmoid",
    };
    let groups = moe.groups.map(|GroupSpec { n, top, score }| {
        let by = match score {
            GroupScore::Best => "best",
            GroupScore::BestTwo => "two best",
        };
        format!("{top} of {n} groups by their {by}")
    });
    let parts = [
        moe.router_bias.then(|| "biases".to_owned()),
        moe.correction_bias.then(|| "corrections".to_owned()),
        groups,
        moe.norm_topk.then(|| "weights of sum 1".to_owned()),
        (moe.routed_scale != 1.0).then(|| format!("times {}", moe.routed_scale)),
    ];
    parts.into_iter().flatten().fold(kind.to_owned(), |line, part| line + ", " + &part)
}

/// The level tables of the experts, each once, as layers first use them: a label alone does not tell two apart.
fn level_tables(vault: &Vault) -> Vec<Table> {
    let mut tables = Vec::new();
    for tensor in vault.experts.layers.iter().flat_map(|layer| &layer.tensors) {
        if let Encoding::Table(table) = tensor.encoding
            && !tables.contains(&table)
        {
            tables.push(table);
        }
    }
    tables
}

fn print_facts(vault: &Vault, facts: &Value) -> Result<(), Failure> {
    let spec = &vault.spec;
    let number = |name: &str| facts[name].as_u64().unwrap_or(0);
    say!("vault      version {}, {}", vault.experts.version, vault.experts_path.display());
    say!("model      {}", spec.model_type);
    let dense = spec.layers.iter().filter(|kind| matches!(kind, FfnKind::Dense(_))).count();
    say!(
        "shape      {} layers ({dense} dense), width {}, vocabulary {}, context {}",
        spec.n_layers(),
        spec.d_model,
        spec.vocab_size,
        spec.max_context
    );
    let a = spec.attention;
    let heads = match a.latent {
        None => format!("{} heads over {} KV heads of {}", a.n_heads, a.n_kv_heads, a.head_dim),
        Some(latent) => {
            let queries = match latent.q_rank {
                0 => String::new(),
                rank => format!(", queries of {rank}"),
            };
            let (rank, rope) = (latent.kv_rank, latent.rope_dim);
            format!("{} heads of {} over a latent of {rank} and {rope}{queries}", a.n_heads, a.head_dim)
        }
    };
    say!(
        "attention  {heads}{}{}, RoPE base {}{}",
        if a.qk_norm { ", QK-norm" } else { "" },
        a.indexer.map_or_else(String::new, |i| format!(", an indexer chooses {} positions", i.top_k)),
        spec.rope.theta,
        match spec.rope.scaling {
            RopeScaling::None => String::new(),
            RopeScaling::Linear { factor } => format!(", positions divided by {factor}"),
            RopeScaling::Yarn { factor, original_context, .. } => {
                format!(", YaRN {factor} x over {original_context}")
            }
        }
    );
    let shared = match spec.moe.d_shared {
        0 => String::new(),
        width => format!(", shared expert of width {width}"),
    };
    say!(
        "experts    {} per layer, {} per token, width {}{shared}",
        spec.moe.n_experts,
        spec.moe.top_k,
        spec.moe.d_expert
    );
    say!("router     {}", router(&spec.moe));
    if let Some(synthetic) = synthetic(vault) {
        let Synthetic { like, seed, unique_layers, routing, .. } = &synthetic;
        let n_moe = spec.moe_layers().count();
        say!(
            "synthetic  {like}'s shape, random weights (seed {seed}), records of {unique_layers} of {n_moe} layers"
        );
        let predicted = synthetic.predict(spec, Synthetic::TOKENS);
        say!(
            "           routing: overlap {:.2}, skew {:.2}, predicted for {} tokens of its stream (asked for {} and {}){}",
            predicted.overlap,
            predicted.skew,
            Synthetic::TOKENS,
            routing.overlap,
            routing.skew,
            if spec.moe.router_bias || spec.moe.correction_bias {
                "; biases and corrections are zero"
            } else {
                ""
            }
        );
    }
    say!(
        "records    {} in {}, {} padding ({:.1} %), {:.2} bits a weight",
        vault.experts.records.len(),
        Bytes(number("record_bytes")),
        Bytes(number("padding_bytes")),
        100.0 * number("padding_bytes") as f64 / number("record_bytes").max(1) as f64,
        facts["bits_per_expert_weight"].as_f64().unwrap_or(0.0)
    );
    if vault.experts.coded {
        let coded = 1.0 - number("record_bytes") as f64 / number("slot_bytes_of_all_experts").max(1) as f64;
        say!(
            "           entropy-coded: {:.2} bits a weight without padding, {} in slots ({:.0} % less to read)",
            facts["bits_per_expert_weight_unpadded"].as_f64().unwrap_or(0.0),
            Bytes(number("slot_bytes_of_all_experts")),
            100.0 * coded
        );
    }
    let mut last = String::new();
    for table in &vault.experts.layers {
        let kinds = Projection::ALL.iter().zip(&table.tensors);
        let kinds: Vec<String> = kinds.map(|(p, t)| format!("{} {}", p.name(), t.encoding)).collect();
        let line = format!(
            "{}, {} a {}",
            kinds.join(", "),
            Bytes(table.record_len as u64),
            if vault.experts.coded { "slot" } else { "record" }
        );
        if line != last {
            say!("  from layer {}: {line}", table.layer);
        }
        last = line;
    }
    for table in level_tables(vault) {
        let levels: Vec<String> = table.levels().iter().map(i8::to_string).collect();
        say!("  levels of {table}: {}", levels.join(" "));
    }
    say!("backbone   {}", Bytes(vault.backbone.file_len));
    if let Some(encodings) = facts["backbone_bytes_by_encoding"].as_object() {
        for (encoding, bytes) in encodings {
            say!("  {encoding}: {}", Bytes(bytes.as_u64().unwrap_or(0)));
        }
    }
    match vault.experts.manifest() {
        Some(manifest) => {
            say!("source     {}: {}", manifest.source.fingerprint, manifest.source.settings);
            if let Some(what) = smoe_sculpt::earlier_codes(&manifest.source.settings) {
                say!("           {what}");
            }
            for file in &manifest.files {
                say!("file       {} ({}, crc32c {})", file.name, Bytes(file.bytes), file.crc32c);
            }
        }
        None => say!("checksums  none: an original file of version {}", vault.experts.version),
    }
    Ok(())
}
