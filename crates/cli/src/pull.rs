//! `smoe pull`: a checkpoint on a hub becomes a vault while it is downloaded.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use smoe_hub::{HubError, Options, Pull};
use smoe_sculpt::{Checkpoint, Outcome, small_files};

use crate::args::PullArgs;
use crate::failure::Failure;
use crate::progress::PullBars;
use crate::sculpt::{failure, print_dry_run};
use crate::{interrupt, progress};

/// Names shown of a longer list.
const EXAMPLES: usize = 12;

/// Runs the command.
pub fn pull(args: &PullArgs) -> Result<(), Failure> {
    for (flag, given) in [("--validate", args.validate), ("--measure-error", args.measure_error)] {
        if given {
            let what =
                "needs the whole checkpoint, of which pull never has all: download it and use `smoe sculpt`";
            return Err(Failure::Usage(format!("{flag} {what}")));
        }
    }
    let name = args.repo.rsplit('/').next().unwrap_or_default();
    let vault = args.vault.clone().unwrap_or_else(|| PathBuf::from(name));
    let dir = arrivals(&vault)?;
    let begun = dir.exists();
    let env = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let usual = Options::default();
    let options = Options {
        endpoint: env("HF_ENDPOINT").unwrap_or(usual.endpoint),
        token: env("HF_TOKEN"),
        revision: args.revision.clone(),
        force: args.how.force,
        ..usual
    };
    let bars = Arc::new(PullBars::default());
    let spinner = progress::spinner("asking the hub");
    let pull = Pull::open(&dir, &args.repo, &options, bars.clone(), interrupt::flag());
    let found = pull.and_then(|pull| checkpoint(args, &dir, &pull).map(|checkpoint| (pull, checkpoint)));
    spinner.finish_and_clear();
    let (pull, checkpoint) = found?;

    // Whatever is wrong with it is for the sculpt to say.
    let is_coded = Checkpoint::open_of(&checkpoint, None, &pull).is_ok_and(|found| found.is_coded());
    let settings = args.how.settings(is_coded);
    let flag = interrupt::flag();
    if args.how.dry_run {
        let dry = smoe_sculpt::dry_run_of(&checkpoint, &pull, Some(&vault), &settings, flag);
        if !begun {
            pull.finish()?;
        }
        return print_dry_run(&dry?, args.how.json);
    }
    let outcome = smoe_sculpt::sculpt_of(&checkpoint, &pull, &vault, &settings, &*bars, flag);
    bars.finish();
    let outcome = outcome.map_err(failure)?;
    let commit = pull.commit().chars().take(12).collect::<String>();
    pull.finish()?;
    match outcome {
        Outcome::Created => eprintln!("made {} of {} at {commit}", vault.display(), args.repo),
        Outcome::AlreadyComplete => {
            eprintln!("{} is complete already, of this checkpoint and with these settings", vault.display());
        }
    }
    Ok(())
}

/// Where files arrive: `.NAME.download` beside the vault.
fn arrivals(vault: &Path) -> Result<PathBuf, Failure> {
    let name = vault.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Failure::Usage(format!("{} is no name for a vault", vault.display())))?;
    Ok(vault.with_file_name(format!(".{name}.download")))
}

/// What of the repository is to be sculpted.
fn checkpoint(args: &PullArgs, dir: &Path, pull: &Pull) -> Result<PathBuf, HubError> {
    let ggufs: Vec<&str> = pull.names().filter(|name| name.ends_with(".gguf")).collect();
    let list = || {
        let more = ggufs.len().saturating_sub(EXAMPLES);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}", ggufs.iter().take(EXAMPLES).copied().collect::<Vec<_>>().join(", "))
    };
    let none = |what| HubError::NoCheckpoint { repo: args.repo.clone(), what };
    if let Some(file) = &args.file {
        if ggufs.contains(&file.as_str()) {
            return Ok(dir.join(file));
        }
        let has = if ggufs.is_empty() { "no GGUF file".to_owned() } else { format!("only {}", list()) };
        return Err(none(format!("it has no GGUF file {file}, but {has}")));
    }
    if !pull.names().any(|name| name == "config.json")
        || !pull.names().any(|name| name.ends_with(".safetensors"))
    {
        return Err(none(if ggufs.is_empty() {
            "it has neither config.json and safetensors nor a GGUF file".to_owned()
        } else {
            format!("it has GGUF files; name one with --file: {}", list())
        }));
    }
    pull.small(&small_files().collect::<Vec<_>>())?;
    Ok(dir.to_owned())
}
