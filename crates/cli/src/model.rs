//! From the name of a vault to an open engine and its text.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use smoe_engine::memory::MemoryFacts;
use smoe_engine::plan::{Bytes, PlanRequest};
use smoe_engine::{DirectIo, Engine, Vault};
use smoe_text::ModelText;

use crate::args::MachineArgs;
use crate::failure::Failure;
use crate::progress;

/// The vault called `demo`: `$SMOE_DEMO`, then beside the executable, then where it was built.
pub fn demo_path() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os("SMOE_DEMO") {
        return Ok(path.into());
    }
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("demo")));
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo");
    let built = built.canonicalize().unwrap_or(built);
    let found = beside.into_iter().chain([built]).find(|path| path.is_dir());
    found.ok_or_else(|| {
        Failure::new("the demo vault is not here: put it beside the executable, or name it in SMOE_DEMO")
    })
}

/// Where a vault named on the command line is.
pub fn resolve(vault: &Path) -> Result<PathBuf, Failure> {
    if vault.as_os_str() == "demo" { demo_path() } else { Ok(vault.to_owned()) }
}

/// Opens the vault named on the command line; no weights are read. A config.json beside an original file
/// says what its model is.
pub fn open_vault(name: &Path) -> Result<Vault, Failure> {
    let path = resolve(name)?;
    let config = path.with_file_name("config.json");
    let beside_original = path.is_file()
        && path.file_name().is_some_and(|name| name != smoe_format::file_name::EXPERTS)
        && config.is_file();
    let mut spec = None;
    if beside_original {
        let json = serde_json::from_slice(&std::fs::read(&config)?)
            .map_err(|e| Failure::new(format!("{}: {e}", config.display())))?;
        let (found, warnings) = smoe_sculpt::spec_from_config(&json)?;
        warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
        spec = Some(found);
    }
    let vault = Vault::open_with(&path, spec)?;
    vault.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    Ok(vault)
}

/// Memory that loading a tokeniser takes at its peak, per byte of its file: EXP-MEMORY-03.
const TOKENIZER_FACTOR: u64 = 15;

/// Memory that the text side of a vault takes besides the engine.
pub fn text_bytes(vault: &Vault) -> u64 {
    let beside = || std::fs::metadata(vault.side_path("tokenizer.json")).map_or(0, |m| m.len());
    let bytes = match vault.experts.manifest() {
        Some(_) => vault.listed("tokenizer.json").map_or(0, |entry| entry.bytes),
        None => beside(),
    };
    bytes * TOKENIZER_FACTOR
}

/// Tokeniser, template and defaults that travel with a vault.
pub fn open_text(vault: &Vault) -> Result<ModelText, Failure> {
    let failed = RefCell::new(None);
    let text = ModelText::load(&|name| {
        vault.side_file(name).unwrap_or_else(|e| {
            failed.borrow_mut().get_or_insert(e);
            None
        })
    });
    match failed.into_inner() {
        Some(error) => Err(error.into()),
        None => Ok(text?),
    }
}

/// Opens the engine, with a bar on stderr where loading takes long. `reserved` is what the caller holds
/// besides it.
pub fn open_engine(vault: &Vault, machine: &MachineArgs, reserved: u64) -> Result<Engine, Failure> {
    let mut options = machine.options();
    options.plan.reserved = reserved;
    warn_of_memory(&options.plan);
    let spinner = progress::spinner("loading the backbone");
    let engine = Engine::open(vault, &options);
    spinner.finish_and_clear();
    let mut engine = engine?;
    let info = engine.info();
    if let DirectIo::No { why } = info.direct_io {
        eprintln!("note: reads go through the page cache: {why}");
    }
    if let Some(note) = info.device_note {
        eprintln!("note: {note}");
    }
    preload(&mut engine)?;
    Ok(engine)
}

/// Loads all experts, if they fit, with a bar.
pub fn preload(engine: &mut Engine) -> Result<(), Failure> {
    let mut bar: Option<ProgressBar> = None;
    let loaded = engine.preload(&mut |done, total| {
        let bar = bar.get_or_insert_with(|| progress::bytes("loading experts", total));
        bar.set_position(done);
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    loaded?;
    while let Some(warning) = engine.take_warning() {
        eprintln!("warning: {warning}");
    }
    Ok(())
}

/// A size that the user named is taken, and what is free now is said if it is less.
pub fn warn_of_memory(request: &PlanRequest) {
    let budget = MemoryFacts::detect().budget();
    if let Some(memory) = request.memory.filter(|memory| *memory > budget) {
        eprintln!("warning: --memory {} is more than the {} free now", Bytes(memory), Bytes(budget));
    }
}
