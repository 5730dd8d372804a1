//! The work of a sculpt: what is done already, encoding the rest in stages, and what stands around the data.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use smoe_format::expert_file::{Architecture, FileEntry};
use smoe_format::{ExpertFile, RECORD_ALIGN, entropy, file_name};

use super::place::check_space;
use crate::checkpoint::{Checkpoint, SideFile};
use crate::coded::{self, Claim, Placing};
use crate::encode::{Scratch, crc_at, crc_start, encode_record, write_item, write_record};
use crate::error::{SculptError, Warning};
use crate::files::WeightFiles;
use crate::journal::{self, Journal};
use crate::partial::{JOURNAL, Ledger, Partial};
use crate::plan::{Item, Plan, worker_bytes};
use crate::progress::Progress;
use crate::schedule::{self, Stage};
use crate::settings::Settings;
use crate::workers;

pub(super) struct Work<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) files: &'a dyn WeightFiles,
    pub(super) plan: &'a Plan,
    /// [`Plan::decided`].
    pub(super) decided: u32,
    pub(super) settings: &'a Settings,
    pub(super) partial: &'a Partial,
    pub(super) progress: &'a dyn Progress,
    pub(super) cancel: &'a AtomicBool,
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
    pub(super) fn run(&self, pieces: &HashMap<String, u32>) -> Result<(), SculptError> {
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
