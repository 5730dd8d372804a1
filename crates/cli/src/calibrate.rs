//! `smoe calibrate`: what the experts see of a text, for a sculpt of few bits.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::json;
use smoe_engine::memory::MemoryFacts;
use smoe_engine::{Control, Engine, EngineError, ExpertObserver, ExpertSeen};
use smoe_sculpt::calibrate::{Collector, Document, Head, collect};
use smoe_sculpt::{BackboneBits, Recipe, SculptError, Settings};
use smoe_text::ModelText;

use crate::args::{CalibrateArgs, MachineArgs};
use crate::corpus::Corpus;
use crate::failure::Failure;
use crate::{interrupt, model, progress};

/// Tokens that are computed at once, and see each other.
const LONGEST: usize = 2048;

/// Runs the command.
pub fn calibrate(args: &CalibrateArgs) -> Result<(), Failure> {
    let named = model::resolve(&args.model)?;
    let out = args.out.clone().unwrap_or_else(|| beside(&named, "stats"));
    let is_vault = named.is_file() && named.extension().is_some_and(|e| e == "smoe")
        || named.join(smoe_format::file_name::EXPERTS).is_file();
    let scratch = (!is_vault).then(|| hidden(&out));
    if let Some(scratch) = &scratch {
        sculpt(args, &named, scratch)?;
    }
    let done = run(args, scratch.as_deref().unwrap_or(&named), &out);
    match (&done, &scratch) {
        (Ok(()), Some(scratch)) => {
            std::fs::remove_dir_all(scratch)?;
            eprintln!("removed {}", scratch.display());
        }
        (Err(_), Some(scratch)) => eprintln!("kept {} for the next run", scratch.display()),
        _ => {}
    }
    done
}

/// `NAME.SUFFIX` beside a model.
fn beside(model: &Path, suffix: &str) -> PathBuf {
    let mut name =
        model.canonicalize().ok().and_then(|p| Some(p.file_name()?.to_owned())).unwrap_or_default();
    name.push(".");
    name.push(suffix);
    PathBuf::from(name)
}

/// Where the vault of a checkpoint is while it is calibrated.
fn hidden(out: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(out.file_name().unwrap_or_default());
    name.push(".vault");
    out.with_file_name(name)
}

/// Makes a vault of the checkpoint whose error is far below that of the bits that anyone calibrates for.
fn sculpt(args: &CalibrateArgs, checkpoint: &Path, vault: &Path) -> Result<(), Failure> {
    eprintln!(
        "computing with {} at 8 bits in {}, which is removed at the end",
        checkpoint.display(),
        vault.display()
    );
    let settings = Settings {
        bits: 8,
        backbone: BackboneBits::Bf16,
        recipe: Recipe::Absmax,
        threads: args.threads,
        ..Settings::default()
    };
    let bar = progress::Bar::default();
    let made = smoe_sculpt::sculpt(checkpoint, vault, &settings, &bar, interrupt::flag());
    bar.finish();
    match made {
        Err(error @ SculptError::Cancelled { .. }) => {
            eprintln!("{error}");
            Err(Failure::Interrupted)
        }
        made => made.map(drop).map_err(Failure::from),
    }
}

fn run(args: &CalibrateArgs, vault: &Path, out: &Path) -> Result<(), Failure> {
    let vault = model::open_vault(vault)?;
    let manifest = vault.experts.manifest();
    let fingerprint = manifest.map(|manifest| manifest.source.fingerprint.clone()).ok_or_else(|| {
        Failure::new("an original file does not say of which checkpoint it is: name the checkpoint")
    })?;
    let budget = args.memory.unwrap_or_else(|| MemoryFacts::detect().budget());
    let machine = MachineArgs {
        memory: Some(budget / 2),
        threads: args.threads,
        exact: true,
        ..MachineArgs::default()
    };
    let text = model::open_text(&vault)?;
    let mut engine = model::open_engine(&vault, &machine, model::text_bytes(&vault))?;
    let plan = engine.info().plan;
    let longest = LONGEST.min(plan.context).min(plan.chunk);
    let documents = read_text(args, &text, longest)?;
    drop(text);
    let head = Head::new(&fingerprint, engine.spec(), &documents);
    let mut passes_made = 0;
    collect(out, &head, budget / 2, args.threads, |collector, pass, passes| {
        passes_made = passes;
        let of = if passes > 1 { format!(" {} of {passes}", pass + 1) } else { String::new() };
        let bar = progress::tokens(format!("calibrating{of}"), head.tokens);
        let read = read(&mut engine, collector, &documents, &|tokens| bar.inc(tokens));
        bar.finish_and_clear();
        read
    })?;
    let layers = head.layers.len();
    if args.json {
        let report = json!({
            "out": out, "tokens": head.tokens, "counted": head.counted, "layers": layers,
            "passes": passes_made, "bytes": layers as u64 * head.layer_bytes(),
        });
        say!("{report}");
    } else {
        eprintln!(
            "made {}: {} of {} tokens, {layers} layers; `smoe sculpt ... --calibration {}`",
            out.display(),
            head.counted,
            head.tokens,
            out.display()
        );
    }
    Ok(())
}

/// The text, in documents of at most `longest` tokens.
fn read_text(args: &CalibrateArgs, model: &ModelText, longest: usize) -> Result<Vec<Document>, Failure> {
    let corpus = Corpus::open(&args.text, args.answers_only)?;
    let mut left = args.max_tokens;
    let mut documents = Vec::new();
    for document in corpus.documents(model) {
        let crate::corpus::Document { tokens, scored, .. } = document?;
        let Document { tokens, counted } = Document::predicting(tokens, scored);
        for (tokens, counted) in tokens.chunks(longest).zip(counted.chunks(longest)) {
            let n = tokens.len().min(left);
            left -= n;
            if n > 0 {
                documents.push(Document { tokens: tokens[..n].to_vec(), counted: counted[..n].to_vec() });
            }
        }
        if left == 0 {
            break;
        }
    }
    if documents.iter().all(|document| !document.counted.contains(&true)) {
        return Err(corpus.nothing());
    }
    Ok(documents)
}

/// One pass over the text; layers after the last that is wanted are left out.
fn read(
    engine: &mut Engine,
    collector: &Arc<Mutex<Collector>>,
    documents: &[Document],
    advance: &dyn Fn(u64),
) -> Result<(), Failure> {
    let past = Arc::new(AtomicBool::new(false));
    let last = collector.lock().expect("no pass panics").last_layer();
    let watch = Watch { collector: collector.clone(), counted: Vec::new(), past: past.clone(), last };
    let watch = Arc::new(Mutex::new(watch));
    engine.watch_experts(Some(watch.clone()))?;
    let mut read_all = || {
        for document in documents {
            watch.lock().expect("no pass panics").counted.clone_from(&document.counted);
            past.store(false, Ordering::Relaxed);
            let mut session = engine.open_session()?;
            let mut control = Control::cancelled_by(interrupt::flag());
            let stop = || past.load(Ordering::Relaxed);
            control.stop = Some(&stop);
            match engine.sync(&mut session, &document.tokens, &mut control) {
                Err(EngineError::Cancelled) if past.load(Ordering::Relaxed) => {}
                Err(EngineError::Cancelled) => return Err(Failure::Interrupted),
                other => drop(other?),
            }
            advance(document.tokens.len() as u64);
        }
        Ok(())
    };
    let read = read_all();
    engine.watch_experts(None)?;
    read
}

/// Hands on what the engine shows.
#[derive(Debug)]
struct Watch {
    collector: Arc<Mutex<Collector>>,
    counted: Vec<bool>,
    /// Set once a layer comes that nobody wants, nor any after it.
    past: Arc<AtomicBool>,
    last: u32,
}

impl ExpertObserver for Watch {
    fn expert(&mut self, seen: &ExpertSeen<'_>) {
        if seen.layer > self.last {
            self.past.store(true, Ordering::Relaxed);
        } else if let Ok(mut collector) = self.collector.lock() {
            let place = (seen.layer, seen.expert);
            collector.add_tokens(place, seen.tokens, &self.counted, seen.inputs, seen.hidden);
        }
    }
}
