//! The worker: writes mutants to disk, tries them, and says how each ended.

use std::fs;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use smoe_engine::plan::{PlanRequest, RingSize};
use smoe_engine::{Engine, EngineError, EngineOptions, Observer, Vault};
use smoe_format::file_name;
use smoe_sculpt::verify;
use smoe_testkit::random::Random;
use smoe_text::{ModelText, TemplateInput};

use super::corpus::{Base, Files, corpus};
use super::edit::{Mutant, mutate};
use super::{gguf, tell};
use crate::Result;

/// The memory plan of a case.
const MEMORY: u64 = 256 << 20;
/// The most resident memory that a case may reach: its plan, corpus and checks beside it.
const MAX_RESIDENT: u64 = 2 * MEMORY;
/// Slots of a small ring: one more than tokens visit.
const RING: usize = 4;
/// One case of so many is a GGUF file.
const GGUF_SHARE: usize = 3;
/// In the vocabulary of every base.
const TOKENS: [u32; 3] = [3, 141, 59];

/// What panics said, on whatever thread.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// A vault is being tried; other panics are this tool's own.
static TRYING: AtomicBool = AtomicBool::new(false);

/// Tries cases from `first` on, or `only` one, until the time is over.
pub fn work(seed: u64, first: u64, only: Option<u64>, time: Duration) -> Result<()> {
    let start = Instant::now();
    let root = tempfile::tempdir()?;
    let bases = corpus(root.path())?;
    let sources = gguf::sources(root.path())?;
    let room = root.path().join("gguf");
    fs::create_dir(&room)?;
    std::panic::set_hook(Box::new(|info| {
        let payload = info.payload_as_str().unwrap_or("no message");
        let place = info.location().map_or_else(String::new, ToString::to_string);
        if !TRYING.load(Ordering::Relaxed) {
            eprintln!("this tool is at fault: {payload:?} at {place}");
        }
        if let Ok(mut panics) = PANICS.lock() {
            panics.push(format!("{payload:?} at {place}"));
        }
    }));
    let mut case = first;
    while only.is_some() || start.elapsed() < time {
        let mut random = Random::named(seed, &format!("case {case}"));
        let verdict = if random.below(GGUF_SHARE) == 0 {
            let mutant = gguf::mutate(&sources, &room, &mut random)?;
            say(tell::CASE, &format!("{case} {}", mutant.what));
            watched(|| gguf::attempt(&mutant, &room))
        } else {
            let which = random.below(bases.len());
            let mutant = mutate(&bases, which, &mut random);
            say(tell::CASE, &format!("{case} {}", mutant.what));
            attempt(&bases, which, &mutant, case)?
        };
        match verdict {
            Ok(outcome) => say(tell::OUTCOME, &outcome),
            Err(finding) => say(tell::FINDING, &finding),
        }
        if only.is_some() {
            break;
        }
        case += 1;
    }
    say(tell::END, "");
    Ok(())
}

fn say(kind: &str, what: &str) {
    let mut out = std::io::stdout().lock();
    // A supervisor that is gone needs no answer.
    let _ = writeln!(out, "{kind}{}", what.replace('\n', " "));
    let _ = out.flush();
}

/// Puts the mutant in the base's place, tries it, puts the base back. The inner result is the verdict.
fn attempt(
    bases: &[Base],
    which: usize,
    mutant: &Mutant,
    case: u64,
) -> Result<std::result::Result<String, String>> {
    let base = &bases[which];
    if mutant.files == base.files {
        return Ok(Ok("no change".to_owned()));
    }
    replace(&base.directory, &base.files, &mutant.files)?;
    let verdict = watched(|| try_vault(bases, base, mutant, case));
    replace(&base.directory, &mutant.files, &base.files)?;
    Ok(verdict)
}

/// The verdict of a trial, or that it panicked or took too much memory.
fn watched(
    trial: impl FnOnce() -> std::result::Result<String, String>,
) -> std::result::Result<String, String> {
    // Where the kernel keeps it, the peak of resident memory starts anew with each case.
    let _ = fs::write("/proc/self/clear_refs", "5");
    TRYING.store(true, Ordering::Relaxed);
    let tried = catch_unwind(AssertUnwindSafe(trial));
    TRYING.store(false, Ordering::Relaxed);
    let panics = PANICS.lock().map(|mut panics| std::mem::take(&mut *panics)).unwrap_or_default();
    if tried.is_err() || !panics.is_empty() {
        return Err(format!("panic: {}", panics.join("; ")));
    }
    if let Some(resident) = peak_resident().filter(|&bytes| bytes > MAX_RESIDENT) {
        return Err(format!("{resident} bytes of memory in use, with a plan of {MEMORY}"));
    }
    tried.unwrap_or_else(|_| Err("panic".to_owned()))
}

/// Turns the files `from` in a directory into `to`.
fn replace(directory: &Path, from: &Files, to: &Files) -> Result<()> {
    for name in from.keys().filter(|name| !to.contains_key(*name)) {
        fs::remove_file(directory.join(name))?;
    }
    for (name, bytes) in to {
        if from.get(name) != Some(bytes) {
            fs::write(directory.join(name), bytes)?;
        }
    }
    Ok(())
}

/// Everything that reads a vault, and whether the answer is allowed.
fn try_vault(bases: &[Base], base: &Base, mutant: &Mutant, case: u64) -> std::result::Result<String, String> {
    let strict = base.has_checksums() && !mutant.mended;
    let whole = match verify(&base.path, Some(1), &(), &AtomicBool::new(false)) {
        Ok(report) => {
            report.problems.iter().for_each(|problem| _ = problem.to_string());
            report.problems.is_empty()
        }
        Err(error) => {
            let _ = error.to_string();
            false
        }
    };
    if strict && whole {
        return Err("verify calls it whole".to_owned());
    }
    let verdict = if whole { "verify finds nothing" } else { "verify finds damage" };
    let refused = |by: &str, error: &EngineError| {
        let _ = error.to_string();
        Ok(format!("{verdict}, refused {by}"))
    };
    let vault = match Vault::open(&base.path) {
        Ok(vault) => vault,
        Err(error) => return refused("when opened", &error),
    };
    read_text(&vault, base, strict)?;
    let logits = match compute(&vault, case) {
        Ok(logits) => logits,
        Err(error) => return refused("when run", &error),
    };
    if logits == base.logits {
        return Ok(format!("{verdict}, logits are the same"));
    }
    if strict {
        // Expert file and backbone of another vault, both whole: its weights are its own affair.
        let weights =
            |base: &Base, files: &Files| [&base.experts, &base.backbone].map(|name| files.get(name).cloned());
        let found = weights(base, &mutant.files);
        let donor = bases.iter().find(|donor| weights(donor, &donor.files) == found);
        if donor.is_some_and(|donor| donor.logits == logits) {
            return Ok(format!("{verdict}, the weights of another whole vault"));
        }
        return Err("other logits, and no error".to_owned());
    }
    let why = if mutant.mended { "checksums were mended" } else { "an original has no checksums" };
    Ok(format!("{verdict}, other logits: {why}"))
}

/// Side files: as they were or an error; then what makes text of them.
fn read_text(vault: &Vault, base: &Base, strict: bool) -> std::result::Result<(), String> {
    for name in file_name::SIDE_FILES {
        let Ok(Some(bytes)) = vault.side_file(name) else { continue };
        if strict && base.files.get(name) != Some(&bytes) {
            return Err(format!("{name} is another, and no error"));
        }
    }
    let Ok(text) = ModelText::load(&|name| vault.side_file(name).ok().flatten()) else { return Ok(()) };
    if let Some(template) = &text.chat_template {
        let messages = json!([{ "role": "user", "content": "Hello, world" }]);
        let _ = template.render(&TemplateInput { messages, ..TemplateInput::default() });
    }
    if let Some(tokenizer) = &text.tokenizer
        && let Ok(ids) = tokenizer.encode("Hello, <|im_end|> world")
    {
        let _ = tokenizer.decode(&ids, true);
    }
    Ok(())
}

/// The bits of the logits after a few tokens. Even cases have a small ring and context, odd ones what the plan
/// gives.
pub fn compute(vault: &Vault, case: u64) -> std::result::Result<Vec<u32>, EngineError> {
    let small = case.is_multiple_of(2);
    let options = EngineOptions {
        plan: PlanRequest {
            memory: Some(MEMORY),
            ring: if small { RingSize::Slots(RING) } else { RingSize::Auto },
            context: small.then_some(64),
            chunk: small.then_some(2),
            threads: Some(1),
            ..PlanRequest::default()
        },
        ..EngineOptions::default()
    };
    let mut engine = Engine::open(vault, &options)?;
    let mut logits = Bits::default();
    engine.observe(&TOKENS, &mut logits)?;
    Ok(logits.0)
}

#[derive(Default)]
struct Bits(Vec<u32>);

impl Observer for Bits {
    fn hidden(&mut self, _: usize, _: usize, _: &[f32]) {}

    fn router(&mut self, _: usize, _: usize, _: &[f32]) {}

    fn logits(&mut self, _: usize, rows: &[f32]) {
        self.0.extend(rows.iter().map(|value| value.to_bits()));
    }
}

fn peak_resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
