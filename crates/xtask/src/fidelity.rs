//! `cargo xtask fidelity`: what each bit width does to a model's answers (EXP-FIDELITY-01), and with `--gguf` what it does
//! to a larger model with trained weights (EXP-FIDELITY-02).
//!
//! Every recipe is sculpted and computes the same texts as the 16-bit vault beside it, one text at a time, so that only
//! one text's reference is ever held. Of dialogues those positions are scored that predict a token of an answer; text
//! that every dialogue repeats would flatter the figures.

mod calibration;
mod dense;
mod report;
mod score;
mod texts;
mod validity;

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use smoe_engine::plan::PlanRequest;
use smoe_engine::{Engine, EngineOptions, KvType, Vault};
use smoe_sculpt::{BackboneBits, Levels, Settings, sculpt};
use smoe_testkit::shared_path;
use tempfile::TempDir;

use crate::{Result, workspace};
use report::Report;
use score::{Logits, Reference, Scores};
use texts::Texts;

/// `cargo xtask fidelity`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The checkpoint, with heldout.jsonl beside its weights [default: the shared demo-model]
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Instead, a dense model's GGUF file cut into experts that every token visits: the second table
    #[arg(long, value_name = "FILE", conflicts_with = "checkpoint")]
    gguf: Option<PathBuf>,
    /// With --gguf, plain text; its beginning calibrates, its end judges [default: the Rust book of the toolchain]
    #[arg(long, value_name = "FILE", requires = "gguf")]
    text: Option<PathBuf>,
    /// Only the first N dialogues, or with --gguf N windows that judge; the table is then printed and not written,
    /// unless --out is given
    #[arg(long, value_name = "N")]
    dialogues: Option<NonZero<usize>>,
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

/// Hundredths of a bit of the entropy-coded recipes: near the widths, and between them.
const CODED_BPW: [u16; 8] = [380, 340, 325, 290, 260, 230, 200, 175];

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

    /// All of the first table, the reference first.
    fn all() -> Vec<Self> {
        let exact = BITS.map(|bits| Self { bits, exact: true, ..Self::REFERENCE });
        let kv = Self { kv: Some(KvType::Q8), ..Self::SHIPPED };
        let plain = BITS.map(|bits| Self { bits, ..Self::REFERENCE });
        [Self::REFERENCE]
            .into_iter()
            .chain(plain)
            .chain(exact)
            .chain(Self::low().filter(|recipe| recipe.coding != Coding::Absmax))
            .chain([Self::SHIPPED, kv])
            .chain(Self::coded())
            .collect()
    }

    /// Few bits, every way to choose codes.
    fn low() -> impl Iterator<Item = Self> {
        let all = |bits| Coding::ALL.map(|coding| Self { bits, coding, ..Self::REFERENCE });
        [4, 3, 2].into_iter().flat_map(all)
    }

    /// Entropy-coded, by themselves and with error feedback.
    fn coded() -> impl Iterator<Item = Self> {
        let codings = [Coding::Searched(Levels::Uniform), Coding::Calibrated(Levels::Uniform)];
        codings.into_iter().flat_map(|coding| {
            CODED_BPW.map(|bpw| Self { bits: 4, coding, coded_bpw: Some(bpw), ..Self::REFERENCE })
        })
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
        match (self.coding, self.coded_bpw) {
            (Coding::Absmax | Coding::Searched(_), Some(_)) | (Coding::Absmax, None) => {}
            (Coding::Calibrated(_), Some(_)) => label += ", calibrated",
            (coding, None) => label += &format!(", {}", coding.label()),
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
    if let Some(gguf) = &args.gguf {
        return dense::run(args, gguf);
    }
    ready(args, report::MARKS)?;
    let start = Instant::now();
    // Asked now: by the end HEAD may have moved.
    let commit = workspace::commit();
    let (checkpoint, is_demo) = match &args.checkpoint {
        Some(path) => (path.clone(), false),
        None => (shared_path("demo-model").ok_or("name a checkpoint with --checkpoint")?, true),
    };
    let texts = Texts::dialogues(&checkpoint, args.dialogues.map(NonZero::get))?;
    let scratch = tempfile::tempdir()?;
    // Room for all experts of the demo model; what a vault does not need is not claimed.
    let mut subjects = open_all(&Recipe::all(), &checkpoint, &texts, &scratch, 512 << 20)?;
    judge(&mut subjects, &texts, start)?;

    let report = Report {
        command: command(args),
        commit,
        machine: machine(&subjects),
        model: if is_demo { "demo-model".to_owned() } else { checkpoint.display().to_string() },
        texts: &texts,
        subjects: &subjects,
    };
    let text = report.text();
    println!("{text}");
    if is_demo && args.dialogues.is_none() {
        report.check_card()?;
    }
    eprintln!("{} s in all", start.elapsed().as_secs());
    write(args, report::MARKS, &text)
}

/// What was run, files by what they are.
fn command(args: &Args) -> String {
    let mut command = "cargo xtask fidelity".to_owned();
    for (flag, given) in [
        (" --checkpoint DIR", args.checkpoint.is_some()),
        (" --gguf FILE", args.gguf.is_some()),
        (" --text FILE", args.text.is_some()),
        (" --out FILE", args.out.is_some()),
    ] {
        command += if given { flag } else { "" };
    }
    args.dialogues.map_or(command.clone(), |n| format!("{command} --dialogues {n}"))
}

/// Where the table goes; a part of it is printed only.
fn destination(args: &Args) -> Option<PathBuf> {
    let usual = || workspace::root().join("docs/experiments/fidelity.md");
    args.out.clone().or_else(|| args.dialogues.is_none().then(usual))
}

/// Refuses, before hours of work, a place where the table cannot go.
fn ready(args: &Args, marks: report::Marks) -> Result<()> {
    destination(args).map_or(Ok(()), |path| report::around(&path, marks).map(|_| ()))
}

/// Puts a table where the arguments say.
fn write(args: &Args, marks: report::Marks, text: &str) -> Result<()> {
    destination(args).map_or(Ok(()), |path| report::write(&path, marks, text))
}

fn machine(subjects: &[Subject]) -> String {
    let info = subjects[0].engine.info();
    format!("{}, {} kernels, {} threads", workspace::cpu(), info.kernels, info.plan.threads)
}

/// Sculpts and opens the vaults of all recipes, of which the first is the reference: it calibrates the others.
fn open_all(
    recipes: &[Recipe],
    checkpoint: &Path,
    texts: &Texts,
    scratch: &TempDir,
    memory: u64,
) -> Result<Vec<Subject>> {
    let mut subjects = Vec::new();
    for &recipe in recipes {
        eprintln!("sculpting: {}", recipe.label());
        subjects.push(open(recipe, checkpoint, scratch, memory)?);
        if subjects.len() == 1 {
            let vault = scratch.path().join(recipe.name());
            calibration::calibrate(&vault, &mut subjects[0].engine, texts, &scratch.path().join(STATS))?;
        }
    }
    Ok(subjects)
}

/// Has every vault read every text that judges, and scores it against the first.
fn judge(subjects: &mut [Subject], texts: &Texts, start: Instant) -> Result<()> {
    let vocab_size = subjects[0].engine.spec().vocab_size;
    let mut logits = Logits::new(vocab_size);
    let judges: Vec<_> = texts.list.iter().filter(|text| text.judges).collect();
    for (n, text) in judges.iter().enumerate() {
        let mut reference: Option<Reference> = None;
        for subject in &mut *subjects {
            logits.compute(&mut subject.engine, &text.tokens)?;
            let reference =
                reference.get_or_insert_with(|| Reference::new(&logits, &text.tokens, &text.answer));
            subject.scores.add(!text.calibrates, reference, &logits);
        }
        if (n + 1) % 20 == 0 || n + 1 == judges.len() || text.tokens.len() > 400 {
            eprintln!("{} of {} texts, {} s", n + 1, judges.len(), start.elapsed().as_secs());
        }
    }
    Ok(())
}

/// Sculpts a recipe's vault, if it is not there, and opens it.
fn open(recipe: Recipe, checkpoint: &Path, scratch: &TempDir, memory: u64) -> Result<Subject> {
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
        plan: PlanRequest { memory: Some(memory), kv: recipe.kv, ..PlanRequest::default() },
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

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> std::result::Result<Args, clap::Error> {
        Cli::try_parse_from(line.split(' ')).map(|cli| cli.args)
    }

    #[test]
    fn the_report_names_the_command_that_was_run() {
        for (line, expected) in [
            ("x", "cargo xtask fidelity"),
            ("x --dialogues 9", "cargo xtask fidelity --dialogues 9"),
            ("x --gguf a.gguf", "cargo xtask fidelity --gguf FILE"),
            (
                "x --gguf a --text b --dialogues 2 --out c",
                "cargo xtask fidelity --gguf FILE --text FILE --out FILE --dialogues 2",
            ),
        ] {
            assert_eq!(command(&parse(line).unwrap()), expected);
        }
        assert!(parse("x --dialogues 0").is_err());
    }

    #[test]
    fn a_place_where_no_table_can_go_is_refused_before_any_work() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        std::fs::write(at("prose.md"), "no marks").unwrap();
        let refused = |line: &str| run(&parse(line).unwrap()).unwrap_err().to_string();
        let model = at("model.gguf");
        std::fs::write(&model, "no model").unwrap();
        for how in [String::new(), format!(" --gguf {model}")] {
            assert!(refused(&format!("x{how} --out {}", at("prose.md"))).contains("missing"), "{how}");
            let nowhere = refused(&format!("x{how} --out {}", at("none/table.md")));
            assert!(nowhere.contains("no directory"), "{nowhere}");
        }
    }
}
