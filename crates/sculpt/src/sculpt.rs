//! The sculpt as a whole: plan, resume, encode, finish, check, give the name.

mod dry_run;
mod place;
mod work;

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use smoe_format::{Encoding, ExpertFile, Projection, file_name};

use crate::checkpoint::Checkpoint;
use crate::error::{SculptError, Warning};
use crate::files::{OnDisk, WeightFiles};
use crate::journal;
use crate::partial::{Found, JOURNAL, Partial};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::settings::Settings;
use crate::source::Source;
use crate::vault::{self, Existing};
use crate::verify;
pub use dry_run::{DryRun, dry_run, dry_run_of};
use place::remove_old;
pub(crate) use place::{check_space, existing_ancestor, give_name, is_complete, place};
pub(crate) use work::Data;
use work::Work;

/// How a sculpt ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The vault was made, checked, and has its name.
    Created,
    /// There was a vault of the same checkpoint and settings already.
    AlreadyComplete,
}

/// Makes the vault directory `vault` from `checkpoint`.
///
/// Until it is complete and checked, the work is in `.NAME.partial/` beside it; after an error, a
/// cancellation or a kill the same call goes on from there, with the same bytes in the end.
///
/// Memory: a worker holds one run of rows at a time, as bytes, `f32` and codes: at most 12 MiB unless rows are
/// longer than 32,768 weights, and never a whole record or tensor. There are never more workers than 1 GiB of
/// such buffers allows. The rest is headers and tables, some tens of MiB for the largest published models.
/// (A checkpoint of 6.2 GB with rows of 2048 weights peaked at 19 MB with two workers.)
///
/// # Errors
/// [`SculptError::Cancelled`] if `cancel` became true; else what is wrong, and what to do about it.
pub fn sculpt(
    checkpoint: &Path,
    vault: &Path,
    settings: &Settings,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<Outcome, SculptError> {
    sculpt_of(checkpoint, &OnDisk, vault, settings, progress, cancel)
}

/// As [`sculpt`], of weight files that may not be on the disk yet; the vault is the same.
///
/// Of files that arrive, work is done in the order of the files, and a file is released once everything that is made
/// of it is on the disk and in the journal: a kill at any moment costs no file that was released.
///
/// # Errors
/// As [`sculpt`].
pub fn sculpt_of(
    checkpoint: &Path,
    files: &dyn WeightFiles,
    vault: &Path,
    settings: &Settings,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<Outcome, SculptError> {
    settings.validate()?;
    let vault = &place(vault)?;
    progress.phase("reading headers");
    let checkpoint = Checkpoint::open_of(checkpoint, settings.tokenizer.as_deref(), files)?;
    checkpoint.expect_samples(files)?;
    let settings = &settings.settled(checkpoint.is_coded());
    let mut plan = Plan::new((&checkpoint, files), settings, cancel)?;
    refuse_loss(&plan, settings)?;
    for warning in &plan.sources.warnings {
        progress.warn(&warning.to_string());
    }
    if settings.bpw.is_some() {
        plan.widths().iter().for_each(|line| progress.note(line));
    }
    if !settings.force && is_complete(vault, &plan.provenance)? {
        remove_old(vault, progress)?;
        return Ok(Outcome::AlreadyComplete);
    }
    if let Existing::Other = Existing::at(vault)? {
        return Err(SculptError::NotAVault { path: vault.to_owned() });
    }
    if !Partial::path(vault)?.exists() {
        // Before anything is written; what earlier work left is counted in `run`.
        check_space(existing_ancestor(vault), plan.total_bytes())?;
    }
    let partial = Partial::lock(vault)?;
    partial.refuse_strangers()?;
    // Another process may have finished it in the meantime.
    if !settings.force && is_complete(vault, &plan.provenance)? {
        let _ = fs::remove_dir(&partial.dir);
        return Ok(Outcome::AlreadyComplete);
    }
    let total = plan.total_bytes();
    let check = |allowed: &[&str]| read_back(&partial, (total, allowed), settings, progress, cancel);
    let not_begun = |e| {
        // Unless earlier.
        let _ = fs::remove_dir(&partial.dir);
        e
    };
    let decided = plan.decided((&checkpoint, files), settings, cancel).map_err(not_begun)?;
    let identity = checkpoint.identity()?;
    let mut pieces = match partial.inspect(&plan.provenance, &identity, decided, settings.force)? {
        Found::Whole => {
            if check(&[])?.is_empty() {
                give_name(&partial, vault, progress)?;
                return Ok(Outcome::Created);
            }
            progress.warn(&Warning::Redone { what: "all".to_owned() }.to_string());
            partial.clear()?;
            HashMap::new()
        }
        Found::Pieces(pieces) => pieces,
        Found::Nothing => {
            partial.clear()?;
            HashMap::new()
        }
    };
    let earlier = pieces.remove(journal::STEP).map(f32::from_bits);
    plan.find_step((&checkpoint, files), settings, earlier, progress, cancel).map_err(not_begun)?;
    let work = Work {
        checkpoint: &checkpoint,
        files,
        plan: &plan,
        decided,
        settings,
        partial: &partial,
        progress,
        cancel,
    };
    work.run(&pieces)?;
    let problems = check(&[JOURNAL])?;
    if !problems.is_empty() {
        return Err(SculptError::ReadBack { path: partial.dir.clone(), problems });
    }
    let journal = partial.file(JOURNAL);
    fs::remove_file(&journal).map_err(SculptError::io("remove", &journal))?;
    partial.sync()?;
    give_name(&partial, vault, progress)?;
    Ok(Outcome::Created)
}

/// Refuses a tensor of a kind whose scales no encoding of a vault holds, before any work is done. The others are
/// looked at when they are encoded, group by group.
fn refuse_loss(plan: &Plan, settings: &Settings) -> Result<(), SculptError> {
    if !settings.lossless {
        return Ok(());
    }
    let sources = &plan.sources;
    let what = "its scales are products, which have more bits than an f16";
    let refuse = |source: &Source, kept: Encoding, tensor: &dyn Fn() -> String| {
        if kept != Encoding::F32 && !source.form.may_be_exact() {
            return Err(SculptError::Lossy { tensor: tensor(), form: source.form.name(), what });
        }
        Ok(())
    };
    for t in &plan.backbone.tensors {
        refuse(&t.source, t.encoding, &|| sources.backbone_name(t.tensor))?;
    }
    for (key, tensors) in &sources.experts {
        let table = plan.experts.table(key.layer).expect("every record's layer has a table");
        for ((source, entry), projection) in tensors.iter().zip(&table.tensors).zip(Projection::ALL) {
            refuse(source, entry.encoding, &|| sources.family.expert(&sources.spec, *key, projection).name)?;
        }
    }
    Ok(())
}

/// Reads everything back, `total` bytes; the problems.
fn read_back(
    partial: &Partial,
    (total, allowed): (u64, &[&str]),
    settings: &Settings,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<Vec<verify::Problem>, SculptError> {
    match verify::check_directory(&partial.dir, allowed, settings.threads, progress, cancel) {
        Ok(report) => Ok(report.problems),
        Err(SculptError::Stopped) => {
            Err(SculptError::Cancelled { partial: partial.dir.clone(), done: total, total })
        }
        Err(e) => Err(e),
    }
}

/// Reads the head of a vault's expert file or of an original `.smoe`.
///
/// # Errors
/// If it cannot be read or is damaged.
pub fn read_head(path: &Path) -> Result<ExpertFile, SculptError> {
    let path = if path.is_dir() { path.join(file_name::EXPERTS) } else { path.to_owned() };
    Ok(vault::read_head(&path)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_sculpts_of_one_vault_exclude_each_other() {
        let dir = tempfile::tempdir().expect("dir");
        let vault = dir.path().join("v");
        let first = Partial::lock(&vault).expect("lock");
        assert!(matches!(Partial::lock(&vault), Err(SculptError::Busy { partial }) if partial == first.dir));
        drop(first);
        Partial::lock(&vault).expect("free again");
    }
}
