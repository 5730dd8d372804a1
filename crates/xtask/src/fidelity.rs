//! `cargo xtask fidelity`: what each bit width does to a model's answers (EXP-FIDELITY-01).
//!
//! Every recipe is sculpted and computes the same dialogues as the 16-bit vault beside it, one dialogue at a
//! time, so that only one dialogue's reference is ever held. Scored are the positions that predict a token of an
//! answer; text that every dialogue repeats would flatter the figures.

mod calibration;
mod report;
mod score;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde_json::Value;
use smoe_engine::plan::PlanRequest;
use smoe_engine::{Engine, EngineOptions, KvType, Vault};
use smoe_sculpt::{BackboneBits, Levels, Settings, sculpt};
use smoe_testkit::shared_path;
use smoe_text::{Dialogue, ModelText, TemplateInput};
use tempfile::TempDir;

use crate::{Result, workspace};
use report::Report;
use score::{Logits, Reference, Scores};

/// `cargo xtask fidelity`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The checkpoint, with heldout.jsonl beside its weights [default: the shared demo-model]
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Only the first N dialogues; the table is then printed and not written, unless --out is given
    #[arg(long, value_name = "N")]
    dialogues: Option<usize>,
    /// Where the table goes [default: docs/experiments/fidelity.md]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// A vault and how to compute with it.
#[derive(Clone, Copy, Debug)]
struct Recipe {
    bits: u8,
    backbone: BackboneBits,
    exact: bool,
    kv: Option<KvType>,
    coding: Coding,
    /// Entropy-coded, so many hundredths of a bit a weight.
    coded_bpw: Option<u16>,
}

/// How codes are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coding {
    Absmax,
    Searched(Levels),
    Calibrated(Levels),
}

impl Coding {
    /// All of them, the plainest first.
    const ALL: [Self; 5] = [
        Self::Absmax,
        Self::Searched(Levels::Uniform),
        Self::Searched(Levels::Fitted),
        Self::Calibrated(Levels::Uniform),
        Self::Calibrated(Levels::Fitted),
    ];

    fn label(self) -> String {
        match self {
            Self::Absmax => "absmax".to_owned(),
            Self::Searched(levels) => format!("searched, {levels} levels"),
            Self::Calibrated(levels) => format!("calibrated, {levels} levels"),
        }
    }
}

/// Where the statistics are.
const STATS: &str = "stats";

/// Hundredths of a bit of the entropy-coded recipes: between the widths, and near them.
const CODED_BPW: [u16; 6] = [380, 360, 340, 325, 260, 230];

/// The widths, finest first; 16 is the reference.
const BITS: [u8; 6] = [8, 6, 5, 4, 3, 2];

impl Recipe {
    const REFERENCE: Self = Self {
        bits: 16,
        backbone: BackboneBits::Bf16,
        exact: false,
        kv: None,
        coding: Coding::Absmax,
        coded_bpw: None,
    };
    const SHIPPED: Self = Self {
        bits: 4,
        backbone: BackboneBits::Q8,
        coding: Coding::Searched(Levels::Fitted),
        ..Self::REFERENCE
    };

    /// All of them, the reference first.
    fn all() -> Vec<Self> {
        let plain = BITS.map(|bits| Self { bits, ..Self::REFERENCE });
        let exact = BITS.map(|bits| Self { bits, exact: true, ..Self::REFERENCE });
        let kv = Self { kv: Some(KvType::Q8), ..Self::SHIPPED };
        let coded = CODED_BPW.map(|bpw| Self { bits: 4, coded_bpw: Some(bpw), ..Self::REFERENCE });
        let low = [4, 3, 2].into_iter().flat_map(|bits| {
            Coding::ALL[1..].iter().map(move |&coding| Self { bits, coding, ..Self::REFERENCE })
        });
        [Self::REFERENCE]
            .into_iter()
            .chain(plain)
            .chain(exact)
            .chain(low)
            .chain([Self::SHIPPED, kv])
            .chain(coded)
            .collect()
    }

    /// Of its vault.
    fn name(self) -> String {
        format!(
            "{}-{}-{}-{}",
            self.bits,
            self.backbone,
            self.coding.label().replace(", ", "-").replace(' ', "-"),
            self.coded_bpw.unwrap_or(0)
        )
    }

    fn label(self) -> String {
        let bits = match (self.bits, self.coded_bpw) {
            (16, _) => "bf16".to_owned(),
            (bits, None) => format!("{bits} bits"),
            (_, Some(bpw)) => format!("entropy-coded, {:.2} bits", f64::from(bpw) / 100.0),
        };
        let mut label = format!("{bits}, backbone {}", self.backbone);
        if self.coding != Coding::Absmax {
            label += &format!(", {}", self.coding.label());
        }
        if self.exact {
            label += ", --exact";
        }
        match self.kv {
            Some(kv) => label + &format!(", --kv {}", format!("{kv:?}").to_lowercase()),
            None => label,
        }
    }
}

/// A recipe at work.
struct Subject {
    recipe: Recipe,
    engine: Engine,
    /// Codes and scales of the routed experts, per weight; padding is not counted.
    weight_bits: f64,
    scores: Scores,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    // Asked now: by the end others may have committed.
    let commit = workspace::commit();
    let (checkpoint, is_demo) = match &args.checkpoint {
        Some(path) => (path.clone(), false),
        None => (shared_path("demo-model").ok_or("name a checkpoint with --checkpoint")?, true),
    };
    let mut dialogues = Dialogues::open(&checkpoint)?;
    let all = dialogues.messages.len();
    dialogues.messages.truncate(args.dialogues.unwrap_or(all));
    let count = dialogues.messages.len();

    let scratch = tempfile::tempdir()?;
    // The reference first: it calibrates the others.
    let mut subjects = Vec::new();
    for recipe in Recipe::all() {
        subjects.push(open(recipe, &checkpoint, &scratch)?);
        if subjects.len() == 1 {
            let vault = scratch.path().join(recipe.name());
            calibration::calibrate(&vault, &mut subjects[0].engine, &dialogues, &scratch.path().join(STATS))?;
        }
    }
    let vocab_size = subjects[0].engine.spec().vocab_size;
    let mut logits = Logits::new(vocab_size);
    let (mut tokens_seen, mut answers_seen) = (0, 0);
    for index in 0..count {
        let dialogue = dialogues.render(index)?;
        tokens_seen += dialogue.tokens.len();
        answers_seen += dialogue.answer.iter().filter(|answer| **answer).count();
        let mut reference: Option<Reference> = None;
        for subject in &mut subjects {
            logits.compute(&mut subject.engine, &dialogue.tokens)?;
            let reference =
                reference.get_or_insert_with(|| Reference::new(&logits, &dialogue.tokens, &dialogue.answer));
            subject.scores.add(index, reference, &logits);
        }
        if (index + 1) % 20 == 0 || index + 1 == count {
            let seconds = start.elapsed().as_secs();
            eprintln!("{} of {count} dialogues, {seconds} s", index + 1);
        }
    }

    let info = subjects[0].engine.info();
    let mut command = "cargo xtask fidelity".to_owned();
    if let Some(n) = args.dialogues {
        command += &format!(" --dialogues {n}");
    }
    let report = Report {
        command,
        commit,
        machine: format!("{}, {} kernels, {} threads", workspace::cpu(), info.kernels, info.plan.threads),
        model: if is_demo { "demo-model".to_owned() } else { checkpoint.display().to_string() },
        dialogues: count,
        tokens: tokens_seen,
        answers: answers_seen,
        subjects: &subjects,
    };
    let text = report.text();
    println!("{text}");
    if is_demo && count == all {
        report.check_card()?;
    }
    eprintln!("{} s in all", start.elapsed().as_secs());
    match (&args.out, args.dialogues) {
        (Some(path), _) => report::write(path, &text),
        (None, None) => report::write(&workspace::root().join("docs/experiments/fidelity.md"), &text),
        (None, Some(_)) => Ok(()),
    }
}

/// Sculpts a recipe's vault, if it is not there, and opens it.
fn open(recipe: Recipe, checkpoint: &Path, scratch: &TempDir) -> Result<Subject> {
    let path = scratch.path().join(recipe.name());
    let (recipe_of, levels, calibrated) = match recipe.coding {
        Coding::Absmax => (smoe_sculpt::Recipe::Absmax, Levels::Uniform, false),
        Coding::Searched(levels) => (smoe_sculpt::Recipe::Searched, levels, false),
        Coding::Calibrated(levels) => (smoe_sculpt::Recipe::Searched, levels, true),
    };
    let settings = Settings {
        bits: recipe.bits,
        backbone: recipe.backbone,
        entropy: recipe.coded_bpw.is_some(),
        coded_bpw: recipe.coded_bpw,
        group: if recipe.coded_bpw.is_some() { 128 } else { 64 },
        recipe: recipe_of,
        levels,
        calibration: calibrated.then(|| scratch.path().join(STATS)),
        ..Settings::default()
    };
    sculpt(checkpoint, &path, &settings, &(), &AtomicBool::new(false))?;
    let vault = Vault::open(&path)?;
    let options = EngineOptions {
        // Room for all experts of the demo model; what a vault does not need is not claimed.
        plan: PlanRequest { memory: Some(512 << 20), kv: recipe.kv, ..PlanRequest::default() },
        exact: recipe.exact,
        kernels: std::env::var("SMOE_KERNELS").ok().filter(|name| !name.is_empty()),
        ..EngineOptions::default()
    };
    let tensors = || vault.experts.layers.iter().flat_map(|layer| &layer.tensors);
    let experts = vault.spec.moe.n_experts;
    let weights: usize = tensors().map(|tensor| tensor.rows * tensor.cols * experts).sum();
    let bytes: u64 = match vault.experts.coded {
        true => vault.experts.records.iter().map(|record| record.used).sum(),
        false => tensors().map(|tensor| (tensor.len * experts) as u64).sum(),
    };
    Ok(Subject {
        recipe,
        engine: Engine::open(&vault, &options)?,
        weight_bits: 8.0 * bytes as f64 / weights as f64,
        scores: Scores::default(),
    })
}

/// The held-out dialogues and the model's own way to render them.
struct Dialogues {
    messages: Vec<Value>,
    text: ModelText,
}

impl Dialogues {
    fn open(checkpoint: &Path) -> Result<Self> {
        let text = ModelText::load(&|name| std::fs::read(checkpoint.join(name)).ok())?;
        let lines = std::fs::read_to_string(checkpoint.join("heldout.jsonl"))?;
        let messages = lines
            .lines()
            .map(|line| Ok(serde_json::from_str::<Value>(line)?["messages"].take()))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { messages, text })
    }

    fn render(&self, index: usize) -> Result<Dialogue> {
        let input = TemplateInput { messages: self.messages[index].clone(), ..Default::default() };
        self.text.dialogue(&input).map_err(|e| format!("dialogue {index}: {e}").into())
    }
}
