//! The sculpt as a whole: plan, resume, encode, finish, check, give the name.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use smoe_format::expert_file::{Architecture, FileEntry, Provenance};
use smoe_format::spec::{FfnKind, ModelSpec};
use smoe_format::{BackboneTensor, Encoding, ExpertFile, Projection, RECORD_ALIGN, entropy, file_name};

use crate::checkpoint::{Checkpoint, SideFile};
use crate::coded::{self, Claim, Placing};
use crate::encode::{Scratch, crc_at, crc_start, encode_record, write_item, write_record};
use crate::error::{SculptError, Warning};
use crate::files::{Expected, OnDisk, WeightFiles};
use crate::journal::{self, Journal};
use crate::partial::{Found, JOURNAL, Ledger, Partial, differs, hidden, remove_vault_files};
use crate::plan::{Item, Plan, parent_of, worker_bytes};
use crate::progress::Progress;
use crate::schedule::{self, Stage};
use crate::settings::Settings;
use crate::source::Source;
use crate::vault::{self, Existing};
use crate::{verify, workers};

/// Left free on the disk beyond what the vault needs.
const RESERVE: u64 = 64 << 20;

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

/// Where the vault really goes: links are followed, so that the work lies on its disk and a replaced vault
/// is the one that is meant.
pub(crate) fn place(vault: &Path) -> Result<PathBuf, SculptError> {
    let Ok(entry) = fs::symlink_metadata(vault) else { return Ok(vault.to_owned()) };
    let refuse = |what: &str| SculptError::Place { vault: vault.to_owned(), what: what.to_owned() };
    let real = match fs::canonicalize(vault) {
        Ok(real) => real,
        Err(_) if entry.is_symlink() => return Err(refuse("is a link that leads nowhere; remove it")),
        Err(e) => return Err(SculptError::io("read", vault)(e)),
    };
    let device = |path: &Path| fs::metadata(path).map(|m| m.dev()).map_err(SculptError::io("read", path));
    // A finished vault takes its name by a rename, which cannot replace a mount point.
    if real.is_dir() && device(&real)? != device(parent_of(&real))? {
        return Err(refuse("is a mount point; name a directory below it"));
    }
    Ok(real)
}

/// True if `vault` is complete and of this provenance; an error if it is another's.
pub(crate) fn is_complete(vault: &Path, provenance: &Provenance) -> Result<bool, SculptError> {
    match Existing::at(vault)? {
        Existing::Nothing => Ok(false),
        Existing::Other => Err(SculptError::NotAVault { path: vault.to_owned() }),
        Existing::Damaged(what) => Err(SculptError::DamagedVault { vault: vault.to_owned(), what }),
        Existing::Vault(file) => {
            let Some(manifest) = file.manifest() else {
                let what = format!("it is a version {} file", file.version);
                return Err(SculptError::DamagedVault { vault: vault.to_owned(), what });
            };
            match differs(&manifest.source, provenance) {
                None => Ok(true),
                Some((what, found, expected)) => {
                    Err(SculptError::OtherVault { vault: vault.to_owned(), what, found, expected })
                }
            }
        }
    }
}

struct Work<'a> {
    checkpoint: &'a Checkpoint,
    files: &'a dyn WeightFiles,
    plan: &'a Plan,
    /// [`Plan::decided`].
    decided: u32,
    settings: &'a Settings,
    partial: &'a Partial,
    progress: &'a dyn Progress,
    cancel: &'a AtomicBool,
}

/// The two data files.
pub(crate) struct Data {
    pub experts: (File, PathBuf),
    pub backbone: (File, PathBuf),
}

impl Data {
    /// Opens both in `partial` and gives them their lengths.
    pub fn open(partial: &Partial, experts_len: u64, backbone_len: u64) -> Result<Self, SculptError> {
        let open = |name, len| Ok::<_, SculptError>((partial.data_file(name, len)?, partial.file(name)));
        Ok(Self {
            experts: open(file_name::EXPERTS, experts_len)?,
            backbone: open(file_name::BACKBONE, backbone_len)?,
        })
    }

    /// Writes what comes before the data of both, and waits until all is on the disk.
    pub fn write_heads(&self, backbone_header: &[u8], experts: &ExpertFile) -> Result<(), SculptError> {
        let head = experts.head_bytes();
        assert_eq!(head.len() as u64, experts.data_offset, "the head's length does not depend on checksums");
        for ((file, path), bytes) in [(&self.backbone, backbone_header), (&self.experts, &head)] {
            file.write_all_at(bytes, 0).map_err(SculptError::io("write", path))?;
            file.sync_all().map_err(SculptError::io("write", path))?;
            forget(file);
        }
        Ok(())
    }

    fn of(&self, item: Item) -> (&File, &Path) {
        let (file, path) = match item {
            Item::Expert(_) => &self.experts,
            Item::Run { .. } => &self.backbone,
        };
        (file, path)
    }
}

/// An item that the journal says is done: where, and with which checksum.
struct Claimed {
    item: usize,
    /// The number of the record, if it is one that is entropy-coded.
    record: usize,
    offset: u64,
    len: u64,
    /// Of `len`, what is not padding.
    used: u64,
    crc: u32,
}

impl Work<'_> {
    /// Encodes what is not among `pieces` and writes heads and side files.
    fn run(&self, pieces: &HashMap<String, u32>) -> Result<(), SculptError> {
        let plan = self.plan;
        let items = plan.items();
        let mut crcs: Vec<OnceLock<u32>> = items.iter().map(|_| OnceLock::new()).collect();
        let bytes = |i: usize| plan.bytes(items[i]);
        let total: u64 = (0..items.len()).map(bytes).sum();
        let done = AtomicU64::new(0);
        let cancelled = || SculptError::Cancelled {
            partial: self.partial.dir.clone(),
            done: done.load(Ordering::Relaxed),
            total,
        };
        let workers = workers::count(self.settings.threads, worker_bytes(plan));

        // The journal is the first file and says for whom the others are.
        let journal_path = self.partial.file(JOURNAL);
        let mut lines = String::new();
        journal::push_piece(&mut lines, journal::DECIDED, self.decided);
        if let Some(step) = plan.step {
            journal::push_piece(&mut lines, journal::STEP, step.to_bits());
        }
        if pieces.is_empty() {
            Journal::create(&journal_path, &plan.provenance, &self.checkpoint.identity()?, &lines)?;
        }
        let most: u64 = match plan.experts.coded {
            true => plan.experts.data_offset + self.most_bytes(),
            false => plan.experts.file_len,
        };
        let data = Data::open(self.partial, most, plan.backbone.file_len)?;
        // Bytes of the entropy-coded records that are there, in their order.
        let mut used = Vec::new();
        if !pieces.is_empty() {
            self.progress.phase("checking unfinished work");
            let claimed = self.claimed(&items, pieces);
            self.progress.start(claimed.iter().map(|claim| bytes(claim.item)).sum());
            let finished = workers::for_each(workers, claimed.len(), self.cancel, |n, buffer| {
                let Claimed { item: i, offset, len, crc, .. } = claimed[n];
                let (item, file) = (items[i], data.of(items[i]).0);
                if crc_at(file, offset, len, crc_start(plan, item), buffer).is_ok_and(|found| found == crc) {
                    _ = crcs[i].set(crc);
                    done.fetch_add(bytes(i), Ordering::Relaxed);
                } else {
                    self.progress.warn(&Warning::Redone { what: plan.item_name(item) }.to_string());
                }
                self.progress.advance(bytes(i));
                Ok(())
            })?;
            if plan.experts.coded {
                // Where a record lies is known only if all those before it are there.
                let experts = claimed.iter().filter(|claim| matches!(items[claim.item], Item::Expert(_)));
                for claim in experts {
                    let intact = crcs[claim.item].get().is_some();
                    if intact && claim.record == used.len() {
                        used.push(claim.used);
                    } else if intact {
                        crcs[claim.item].take();
                        done.fetch_sub(bytes(claim.item), Ordering::Relaxed);
                    }
                }
            }
            if !finished {
                // The journal still has them all.
                return Err(cancelled());
            }
        }
        let todo: Vec<usize> = (0..items.len()).filter(|&i| crcs[i].get().is_none()).collect();
        let stages = self.stages(&items, &todo);
        self.check_space(total - done.load(Ordering::Relaxed), &stages)?;

        for (i, crc) in crcs.iter().enumerate() {
            if let Some(&crc) = crc.get() {
                let name = plan.item_name(items[i]);
                let name = match items[i] {
                    Item::Expert(record) if plan.experts.coded => coded::claim_name(&name, used[record]),
                    _ => name,
                };
                journal::push_piece(&mut lines, &name, crc);
            }
        }
        let journal = Journal::create(&journal_path, &plan.provenance, &self.checkpoint.identity()?, &lines)?;
        self.partial.sync()?;
        let ledger = Ledger::new(journal_path, journal, [&data.experts.0, &data.backbone.0], total);

        let read_before = self.checkpoint.bytes_read();
        self.progress.phase("encoding");
        self.progress.start(total);
        self.progress.advance(done.load(Ordering::Relaxed));
        let placing = Placing::new(plan.experts.data_offset, used);
        let encode = |i: usize, scratch: &mut Scratch| -> Result<(), SculptError> {
            let item = items[i];
            let mut name = plan.item_name(item);
            let crc = match item {
                Item::Expert(record) if plan.experts.coded => {
                    // Workers take records in their order, so those before this one are there or under way.
                    let turn = placing.turn(record);
                    encode_record(self.checkpoint, plan, record, self.settings, scratch)?;
                    let used = scratch.record.coded.len() as u64;
                    // Otherwise the worker of one before it has an error to tell.
                    let Some(offset) = turn.place(used) else { return Ok(()) };
                    name = coded::claim_name(&name, used);
                    write_record(plan, record, data.of(item), offset, &scratch.record)?
                }
                _ => write_item(self.checkpoint, plan, item, data.of(item), self.settings, scratch)?,
            };
            ledger.finished(&name, crc, bytes(i))?;
            _ = crcs[i].set(crc);
            done.fetch_add(bytes(i), Ordering::Relaxed);
            self.progress.advance(bytes(i));
            Ok(())
        };
        let all = |work: &[usize]| -> Result<bool, SculptError> {
            let encoded =
                workers::for_each(workers, work.len(), self.cancel, |n, scratch| encode(work[n], scratch));
            // Also after an error: what is done is done.
            let flushed = ledger.flush();
            let encoded = encoded?;
            flushed.map(|()| encoded)
        };
        let encoded = if self.files.arrives() { self.arriving(&stages, &all) } else { all(&todo) };
        match encoded {
            Ok(true) => {}
            // A file that did not come because nobody waits any more is no error of its own.
            Err(SculptError::Io { .. }) if workers::stopped(self.cancel) => return Err(cancelled()),
            Err(e) => return Err(e),
            Ok(false) => return Err(cancelled()),
        }
        self.progress.encoded(self.checkpoint.bytes_read() - read_before);
        let crcs: Vec<u32> = crcs.iter().map(|crc| *crc.get().expect("all items are done")).collect();
        let mut experts = plan.experts.clone();
        if experts.coded {
            experts.set_coded(&placing.into_used());
            let (file, path) = &data.experts;
            file.set_len(experts.file_len).map_err(SculptError::io("write", path))?;
        }
        self.write_heads(&data, experts, &items, &crcs)
    }

    /// Bytes of all entropy-coded records if they were as long as they can be.
    fn most_bytes(&self) -> u64 {
        let layers = &self.plan.experts.layers;
        layers.iter().map(|t| u64::from(t.n_experts) * entropy::max_record_len(t) as u64).sum()
    }

    /// The items that the journal says are there, and where.
    fn claimed(&self, items: &[Item], pieces: &HashMap<String, u32>) -> Vec<Claimed> {
        let plan = self.plan;
        let records = coded::claims(pieces);
        let mut end = plan.experts.data_offset;
        let claimed = items.iter().enumerate().map_while(|(i, &item)| {
            let name = plan.item_name(item);
            Some(match item {
                Item::Expert(record) if plan.experts.coded => {
                    // The first that is missing ends the list: where the next one lies is not known.
                    let &Claim { used, crc } = records.get(name.as_str())?;
                    let len = used.next_multiple_of(RECORD_ALIGN as u64);
                    let offset = end;
                    end = end.saturating_add(len);
                    Some(Claimed { item: i, record, offset, len, used, crc })
                }
                _ => pieces.get(&name).map(|&crc| {
                    let (offset, len) = plan.place(item);
                    Claimed { item: i, record: 0, offset, len, used: len, crc }
                }),
            })
        });
        claimed.flatten().collect()
    }

    /// Does all work of files that arrive; false if the caller wants to stop.
    fn arriving(
        &self,
        stages: &[Stage],
        all: &dyn Fn(&[usize]) -> Result<bool, SculptError>,
    ) -> Result<bool, SculptError> {
        let shards = self.checkpoint.shards();
        let paths: Vec<PathBuf> = stages.iter().map(|stage| shards[stage.shard].path.clone()).collect();
        self.files.order(&paths);
        for stage in stages {
            let shard = &shards[stage.shard];
            self.files.fetch(&shard.path).map_err(SculptError::io("download", &shard.path))?;
            shard.check_header()?;
            if !all(&stage.work)? {
                return Ok(false);
            }
            for &done in &stage.last_of {
                let path = &shards[done].path;
                self.files.release(path).map_err(SculptError::io("remove", path))?;
            }
        }
        Ok(true)
    }

    /// In which order files are needed, if they have to arrive.
    fn stages(&self, items: &[Item], todo: &[usize]) -> Vec<Stage> {
        if !self.files.arrives() {
            return Vec::new();
        }
        schedule::stages(self.plan.needs(items, todo))
    }

    fn check_space(&self, items: u64, stages: &[Stage]) -> Result<(), SculptError> {
        let side: u64 = self.plan.side_files.iter().map(SideFile::len).sum();
        let heads = self.plan.experts.data_offset + self.plan.backbone.header.len() as u64;
        let shards = self.checkpoint.shards();
        let arriving = schedule::most_bytes(stages, |shard| shards[shard].len);
        let here: u64 = stages.iter().map(|stage| self.files.here(&shards[stage.shard].path)).sum();
        check_space(&self.partial.dir, items + side + heads + arriving.saturating_sub(here))
    }

    /// Writes side files and both heads, whose checksums are those of the bytes that were encoded, not of
    /// what the disk made of them.
    fn write_heads(
        &self,
        data: &Data,
        mut experts: ExpertFile,
        items: &[Item],
        crcs: &[u32],
    ) -> Result<(), SculptError> {
        let plan = self.plan;
        let mut backbone_crc = smoe_format::crc::crc32c(&plan.backbone.header);
        for (&item, &crc) in items.iter().zip(crcs) {
            match item {
                Item::Expert(i) => experts.records[i].crc32c = Some(crc),
                // Runs are in file order.
                Item::Run { .. } => {
                    backbone_crc =
                        smoe_format::crc::crc32c_combine(backbone_crc, crc, plan.place(item).1 as usize);
                }
            }
        }
        let mut files = vec![FileEntry::new(file_name::BACKBONE, plan.backbone.file_len, backbone_crc)];
        for side in &plan.side_files {
            files.push(FileEntry::new(side.name, side.len(), self.copy(side)?));
        }
        let Architecture::Manifest(manifest) = &mut experts.architecture else {
            unreachable!("plans are of version 3")
        };
        manifest.files = files;
        data.write_heads(&plan.backbone.header, &experts)?;
        self.partial.sync()
    }

    /// Copies a side file; returns the checksum of what was read.
    fn copy(&self, side: &SideFile) -> Result<u32, SculptError> {
        let bytes = side.read()?;
        let path = self.partial.file(side.name);
        let mut file = File::create(&path).map_err(SculptError::io("create", &path))?;
        file.write_all(&bytes).map_err(SculptError::io("write", &path))?;
        file.sync_all().map_err(SculptError::io("write", &path))?;
        Ok(smoe_format::crc::crc32c(&bytes))
    }
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

/// Gives the finished directory the vault's name, in one step; an old vault goes aside first and is
/// removed after.
pub(crate) fn give_name(partial: &Partial, vault: &Path, progress: &dyn Progress) -> Result<(), SculptError> {
    let parent = parent_of(vault);
    // An empty directory of this name is simply replaced.
    if let Existing::Vault(_) | Existing::Damaged(_) = Existing::at(vault)? {
        let mut aside = old_names(vault)?;
        let old = aside
            .find(|old| fs::symlink_metadata(old).is_err())
            .expect("there are more numbers than directories");
        fs::rename(vault, &old).map_err(SculptError::io("rename", vault))?;
    }
    fs::rename(&partial.dir, vault).map_err(SculptError::io("rename", &partial.dir))?;
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(SculptError::io("write", parent))?;
    remove_old(vault, progress)
}

/// `.NAME.old-1`, `.NAME.old-2`, ...: where replaced vaults are until they are removed.
fn old_names(vault: &Path) -> Result<impl Iterator<Item = PathBuf>, SculptError> {
    let first = hidden(vault, "old")?;
    Ok((1..=u32::MAX).map(move |n| {
        let mut name = first.clone().into_os_string();
        name.push(format!("-{n}"));
        PathBuf::from(name)
    }))
}

/// Removes replaced vaults, also those that an earlier run was killed before removing. What else is in their
/// directories stays.
fn remove_old(vault: &Path, progress: &dyn Progress) -> Result<(), SculptError> {
    let is_ours = |old: &PathBuf| fs::symlink_metadata(old).is_ok_and(|entry| entry.is_dir());
    for old in old_names(vault)?.take_while(is_ours) {
        remove_vault_files(&old, &[])?;
        if fs::remove_dir(&old).is_err() {
            progress.warn(&Warning::LeftBehind { path: old }.to_string());
        }
    }
    Ok(())
}

/// Drops a written file from the page cache, so that reading it back reads the disk.
fn forget(file: &File) {
    #[cfg(target_os = "linux")]
    {
        // Advice: what goes unheard only makes the check weaker.
        let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// Free bytes of the disk that `path` is on.
fn available(path: &Path) -> Result<u64, SculptError> {
    let stat = rustix::fs::statvfs(path).map_err(|e| SculptError::io("read", path)(e.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// The nearest directory above `vault` that is there already.
pub(crate) fn existing_ancestor(vault: &Path) -> &Path {
    parent_of(vault).ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("."))
}

pub(crate) fn check_space(path: &Path, bytes: u64) -> Result<(), SculptError> {
    let (needed, available) = (bytes.saturating_add(RESERVE), available(path)?);
    if needed > available {
        return Err(SculptError::Space { path: path.to_owned(), needed, available });
    }
    Ok(())
}

/// What a sculpt would do.
#[derive(Clone, Debug)]
pub struct DryRun {
    /// The model as it would be in the vault.
    pub spec: ModelSpec,
    /// Everything odd.
    pub warnings: Vec<Warning>,
    /// Bytes of the checkpoint's weights.
    pub checkpoint_bytes: u64,
    /// Weights of the model.
    pub weights: u64,
    /// Weights that a token meets.
    pub active_weights: u64,
    /// Encoding of gate, up and down of the first MoE layer, `q4/64` for example.
    pub expert_encodings: [String; 3],
    /// Encodings of all layers, in words.
    pub widths: Vec<String>,
    /// Routed experts in all.
    pub experts: usize,
    /// Bytes of the largest record: what one slot holds.
    pub record_bytes: u64,
    /// Bytes of `experts.smoe`.
    pub experts_bytes: u64,
    /// Bytes of `backbone.safetensors`, which stays in memory.
    pub backbone_bytes: u64,
    /// Bytes of the files that travel with it.
    pub side_bytes: u64,
    /// Bytes of expert records that a token reads if none is in memory.
    pub token_expert_bytes: u64,
    /// Bytes of the backbone that a token reads: all but the embedding's other rows.
    pub token_backbone_bytes: u64,
    /// Bytes of padding in the records.
    pub padding_bytes: u64,
    /// Of files that arrive, the most that is on the disk at once.
    pub arriving_bytes: u64,
    /// Of files that arrive, what is read before any of them comes, and kept: by it checkpoints are told apart, and codes
    /// decided.
    pub sampled_bytes: u64,
    /// Free bytes that the disk must have.
    pub needed_bytes: u64,
    /// Free bytes that it has, if a vault was named.
    pub available_bytes: Option<u64>,
}

/// Tells what [`sculpt`] would do, without writing anything. Refuses what it would refuse of the checkpoint.
///
/// # Errors
/// As [`sculpt`] for the checkpoint and the settings.
pub fn dry_run(
    checkpoint: &Path,
    vault: Option<&Path>,
    settings: &Settings,
    cancel: &AtomicBool,
) -> Result<DryRun, SculptError> {
    dry_run_of(checkpoint, &OnDisk, vault, settings, cancel)
}

/// As [`dry_run`], of weight files that may not be on the disk yet.
///
/// # Errors
/// As [`dry_run`].
pub fn dry_run_of(
    checkpoint: &Path,
    files: &dyn WeightFiles,
    vault: Option<&Path>,
    settings: &Settings,
    cancel: &AtomicBool,
) -> Result<DryRun, SculptError> {
    let files = &Expected::of(files);
    let checkpoint = Checkpoint::open_of(checkpoint, settings.tokenizer.as_deref(), files)?;
    checkpoint.expect_samples(files)?;
    let settings = &settings.settled(checkpoint.is_coded());
    let plan = Plan::new((&checkpoint, files), settings, cancel)?;
    refuse_loss(&plan, settings)?;
    let spec = &plan.sources.spec;
    let side_bytes = plan.side_files.iter().map(SideFile::len).sum();
    let embedding = |tensor| tensor == BackboneTensor::Embed && !spec.tied_head;
    let token_backbone_bytes =
        plan.backbone.tensors.iter().filter(|t| !embedding(t.tensor)).map(|t| t.len).sum();
    let layers = &plan.experts.layers;
    let per_expert = (3 * spec.moe.d_expert * spec.d_model) as u64;
    let n_moe = spec.layers.iter().filter(|kind| **kind == FfnKind::Moe).count() as u64;
    let backbone_weights: u64 = plan.backbone.tensors.iter().map(|t| (t.rows * t.cols) as u64).sum();
    let embedding_weights: u64 = plan
        .backbone
        .tensors
        .iter()
        .filter(|t| embedding(t.tensor))
        .map(|t| (t.rows.saturating_sub(1) * t.cols) as u64)
        .sum();
    let (mut arriving_bytes, mut sampled_bytes) = (0, 0);
    if files.arrives() {
        // What a step is found by is not read here: it may be much.
        files.only_note();
        plan.expect_step((&checkpoint, files), settings, cancel)?;
        sampled_bytes = files.bytes();
        let (items, shards) = (plan.items(), checkpoint.shards());
        let all: Vec<usize> = (0..items.len()).collect();
        let stages = schedule::stages(plan.needs(&items, &all));
        arriving_bytes = schedule::most_bytes(&stages, |shard| shards[shard].len);
    }
    let available_bytes = match vault {
        None => None,
        Some(vault) => Some(available(existing_ancestor(vault))?),
    };
    Ok(DryRun {
        checkpoint_bytes: checkpoint.bytes(),
        weights: backbone_weights + n_moe * spec.moe.n_experts as u64 * per_expert,
        active_weights: backbone_weights - embedding_weights + n_moe * spec.moe.top_k as u64 * per_expert,
        widths: plan.widths(),
        expert_encodings: layers[0].tensors.map(|t| t.encoding.to_string()),
        experts: plan.experts.records.len(),
        record_bytes: layers.iter().map(|l| l.record_len as u64).max().unwrap_or(0),
        experts_bytes: plan.experts.file_len,
        backbone_bytes: plan.backbone.file_len,
        side_bytes,
        token_expert_bytes: plan.token_expert_bytes(),
        token_backbone_bytes,
        padding_bytes: plan.experts.records.iter().map(|record| record.len - record.used).sum(),
        needed_bytes: plan.total_bytes() + arriving_bytes + sampled_bytes + RESERVE,
        arriving_bytes,
        sampled_bytes,
        available_bytes,
        spec: spec.clone(),
        warnings: plan.sources.warnings,
    })
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
    fn a_disk_without_space_is_named_with_what_is_needed() {
        let here = Path::new(".");
        assert!(check_space(here, 0).is_ok() || available(here).expect("statvfs") < RESERVE);
        match check_space(here, u64::MAX / 2) {
            Err(SculptError::Space { path, needed, available }) => {
                assert_eq!((path.as_path(), needed), (here, u64::MAX / 2 + RESERVE));
                assert!(available < needed);
            }
            other => panic!("{other:?}"),
        }
    }

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
