//! `smoe sculpt`: a checkpoint becomes a vault.

use std::path::Path;

use serde_json::json;
use smoe_engine::plan::Bytes;
use smoe_sculpt::{BackboneBits, BitsPerWeight, Checkpoint, DryRun, Outcome, SculptError, Settings};

use crate::args::{SculptArgs, SculptHow};
use crate::failure::Failure;
use crate::{interrupt, progress};

/// Hundredths of a bit of a weight that entropy-coded experts take: near the errors of 4-bit codes, EXP-QUANT-10.
const CODED_BPW: u16 = 325;

impl SculptHow {
    /// The settings that are meant for a checkpoint that has codes of its own, or for one that has not.
    pub fn settings(&self, is_coded: bool) -> Settings {
        let usual = if self.lossless { (16, BackboneBits::Bf16) } else { (4, BackboneBits::Q8) };
        let coded_bpw = self.bpw.map(BitsPerWeight::hundredths).or_else(|| {
            let decided = self.bits.is_some() || self.lossless;
            (!decided && !is_coded).then_some(CODED_BPW)
        });
        let coded_bpw = coded_bpw.filter(|_| self.entropy);
        Settings {
            bits: self.bits.unwrap_or(usual.0),
            group: self.group.unwrap_or(if coded_bpw.is_some() { 128 } else { 64 }),
            entropy: self.entropy,
            bpw: self.bpw.filter(|_| !self.entropy),
            coded_bpw,
            backbone: self.backbone.unwrap_or(usual.1),
            recipe: self.recipe,
            levels: self.levels,
            calibration: self.calibration.clone(),
            // Who names bits wants those, not the codes that a checkpoint has. Its own numbers are its codes.
            keep_experts: self.bpw.is_none()
                && coded_bpw.is_none()
                && self.bits.is_none_or(|bits| bits == 16),
            keep_backbone: self.backbone.is_none_or(|bits| bits == BackboneBits::Bf16),
            lossless: self.lossless,
            tokenizer: self.tokenizer.clone(),
            max_layers: self.max_layers,
            max_experts: self.max_experts,
            threads: self.threads,
            force: self.force,
        }
    }
}

/// Runs the command.
pub fn sculpt(args: &SculptArgs) -> Result<(), Failure> {
    let is_coded = is_coded(&args.checkpoint);
    let settings = args.how.settings(is_coded);
    let flag = interrupt::flag();
    if args.how.dry_run {
        let dry = smoe_sculpt::dry_run(&args.checkpoint, args.vault.as_deref(), &settings, flag)?;
        return print_dry_run(&dry, args.how.json);
    }
    let Some(vault) = &args.vault else {
        return Err(Failure::Usage("name the vault to make, or use --dry-run".to_owned()));
    };
    // An original file is not made, only measured and compared.
    let original = vault.extension().is_some_and(|ending| ending == "smoe") && vault.is_file();
    if original && !args.measure_error && !args.validate {
        let what = "is an original file: it can be measured (--measure-error) or compared (--validate)";
        return Err(Failure::Usage(format!("{} {what}", vault.display())));
    }
    let mut measure = args.measure_error;
    if !original {
        let bar = progress::Bar::default();
        let outcome = smoe_sculpt::sculpt(&args.checkpoint, vault, &settings, &bar, flag);
        bar.finish();
        match outcome.map_err(failure)? {
            Outcome::Created => {
                let speed = bar.speed().map_or_else(String::new, |speed| format!(": {speed}"));
                eprintln!("made {}{speed}", vault.display());
                // Whose codes these are, and what they lost, is not to be guessed.
                measure |= is_coded;
            }
            Outcome::AlreadyComplete => {
                eprintln!(
                    "{} is complete already, of this checkpoint (by samples; --validate compares all) and \
                     with these settings",
                    vault.display()
                );
            }
        }
    }
    if args.validate {
        validate(args, vault)?;
    }
    if measure {
        measure_error(args, vault)?;
    }
    Ok(())
}

/// True if the checkpoint has codes of its own; whatever is wrong with it is for the sculpt to say.
fn is_coded(checkpoint: &Path) -> bool {
    Checkpoint::open(checkpoint).is_ok_and(|checkpoint| checkpoint.is_coded())
}

/// A cancelled sculpt has said what is kept; it is no error of its own.
pub fn failure(error: SculptError) -> Failure {
    if matches!(error, SculptError::Cancelled { .. }) {
        eprintln!("{error}");
        return Failure::Interrupted;
    }
    error.into()
}

/// Encodes the checkpoint anew and compares every code and scale with what the vault holds.
fn validate(args: &SculptArgs, vault: &Path) -> Result<(), Failure> {
    let bar = progress::Bar::default();
    let counts = smoe_sculpt::compare_codes(
        &args.checkpoint,
        vault,
        args.how.calibration.as_deref(),
        args.how.threads,
        &bar,
        interrupt::flag(),
    );
    bar.finish();
    let counts = counts.map_err(failure)?;
    let mut different = 0;
    for kind in &counts {
        different += kind.different_codes + kind.different_scales;
        eprintln!(
            "{:<14} {} codes and {} scales equal, {} and {} different",
            kind.kind, kind.equal_codes, kind.equal_scales, kind.different_codes, kind.different_scales
        );
    }
    if different > 0 {
        return Err(Failure::new(format!("{} does not hold this checkpoint's codes", vault.display())));
    }
    eprintln!("valid: every code and scale is that of the checkpoint");
    Ok(())
}

fn measure_error(args: &SculptArgs, vault: &Path) -> Result<(), Failure> {
    let bar = progress::Bar::default();
    let errors =
        smoe_sculpt::measure_error(&args.checkpoint, vault, args.how.threads, &bar, interrupt::flag());
    bar.finish();
    let errors = errors.map_err(failure)?;
    if args.how.json {
        let kinds: Vec<_> = errors
            .iter()
            .map(|e| {
                json!({
                    "kind": e.kind,
                    "encoding": e.encoding,
                    "weights": e.weights,
                    "rmse": e.rmse,
                    // JSON has no infinity: no error at all is null.
                    "snr_db": e.snr_db.is_finite().then_some(e.snr_db),
                    "max_error": e.max_error,
                    "codes_digest": format!("{:016x}", e.digest),
                })
            })
            .collect();
        say!("{}", serde_json::to_string_pretty(&kinds)?);
        return Ok(());
    }
    say!("kind            encoding      weights        RMSE    SNR dB   max error  codes");
    for e in &errors {
        say!(
            "{:<15} {:<9} {:>11} {:>11.3e} {:>9.2} {:>11.3e}  {:016x}",
            e.kind,
            e.encoding,
            e.weights,
            e.rmse,
            e.snr_db,
            e.max_error,
            e.digest
        );
    }
    Ok(())
}

/// Shows what a sculpt would do.
pub fn print_dry_run(dry: &DryRun, as_json: bool) -> Result<(), Failure> {
    if as_json {
        let warnings: Vec<String> = dry.warnings.iter().map(ToString::to_string).collect();
        let json = json!({
            "spec": serde_json::to_value(&dry.spec)?,
            "warnings": warnings,
            "checkpoint_bytes": dry.checkpoint_bytes,
            "weights": dry.weights,
            "active_weights": dry.active_weights,
            "expert_encodings": dry.expert_encodings,
            "expert_widths": dry.widths,
            "experts": dry.experts,
            "record_bytes": dry.record_bytes,
            "experts_bytes": dry.experts_bytes,
            "backbone_bytes": dry.backbone_bytes,
            "side_bytes": dry.side_bytes,
            "token_expert_bytes": dry.token_expert_bytes,
            "token_backbone_bytes": dry.token_backbone_bytes,
            "padding_bytes": dry.padding_bytes,
            "arriving_bytes": dry.arriving_bytes,
            "sampled_bytes": dry.sampled_bytes,
            "needed_bytes": dry.needed_bytes,
            "available_bytes": dry.available_bytes,
        });
        say!("{}", serde_json::to_string_pretty(&json)?);
        return Ok(());
    }
    for warning in &dry.warnings {
        eprintln!("warning: {warning}");
    }
    let spec = &dry.spec;
    let millions = |n: u64| format!("{:.1} M", n as f64 / 1e6);
    say!(
        "model       {}: {} layers, width {}, {} experts of width {}, {} per token",
        spec.model_type,
        spec.n_layers(),
        spec.d_model,
        spec.moe.n_experts,
        spec.moe.d_expert,
        spec.moe.top_k
    );
    say!("weights     {} ({} per token)", millions(dry.weights), millions(dry.active_weights));
    say!("checkpoint  {}", Bytes(dry.checkpoint_bytes));
    say!(
        "experts     {} in {} records of {}, gate {}, up {}, down {}, {} padding",
        Bytes(dry.experts_bytes),
        dry.experts,
        Bytes(dry.record_bytes),
        dry.expert_encodings[0],
        dry.expert_encodings[1],
        dry.expert_encodings[2],
        Bytes(dry.padding_bytes)
    );
    if dry.widths.len() > 1 {
        for line in &dry.widths {
            say!("            {line}");
        }
    }
    say!("backbone    {}, resident in memory", Bytes(dry.backbone_bytes));
    say!(
        "per token   {} of expert records, {} of backbone",
        Bytes(dry.token_expert_bytes),
        Bytes(dry.token_backbone_bytes)
    );
    let available = dry.available_bytes.map_or(String::new(), |bytes| format!(", {} are free", Bytes(bytes)));
    let arriving = match dry.arriving_bytes {
        0 => String::new(),
        bytes => format!(
            ", {} of it for files of the checkpoint, which come and go, {} for what is read before they come",
            Bytes(bytes),
            Bytes(dry.sampled_bytes)
        ),
    };
    say!("disk        needs {}{arriving}{available}", Bytes(dry.needed_bytes));
    Ok(())
}
