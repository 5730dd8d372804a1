//! Whether a vault is whole: every record, every file, every byte of the head.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use smoe_format::expert_file::FileEntry;
use smoe_format::{
    Backbone, BackboneTensor, ExpertFile, ExpertKey, FormatError, ModelSpec, file_name, original,
    record_crc_start,
};

use crate::encode::crc_at;
use crate::error::SculptError;
use crate::plan::parent_of;
use crate::progress::Progress;
use crate::vault::{head_bytes, read_backbone};
use crate::{spec_from_config, workers};

/// Bytes of a listed file that one worker checks at a time.
const PART: u64 = 8 << 20;

/// Something that is wrong with a vault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file's name.
    pub file: String,
    /// What is wrong with it.
    pub what: Damage,
}

/// What is wrong with a file of a vault.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Damage {
    /// It is not there.
    Missing,
    /// It is no part of the vault.
    Unexpected,
    /// It has another length.
    Length {
        /// Length by the vault's head.
        expected: u64,
        /// Length found.
        found: u64,
    },
    /// Its bytes are not those that were written.
    Checksum {
        /// Checksum by the vault's head.
        expected: u32,
        /// Checksum of the bytes.
        found: u32,
    },
    /// A record's bytes are not those that were written.
    Record {
        /// The expert.
        key: ExpertKey,
        /// Checksum by the vault's head.
        expected: u32,
        /// Checksum of the bytes.
        found: u32,
    },
    /// The file ends before this record does.
    RecordCut {
        /// The expert.
        key: ExpertKey,
    },
    /// The operating system cannot read it.
    Unreadable(String),
    /// Its head or header contradicts itself, its checksum, or the model.
    Contents(String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.file)?;
        match &self.what {
            Damage::Missing => f.write_str("is missing"),
            Damage::Unexpected => f.write_str("is no part of the vault"),
            Damage::Length { expected, found } => write!(f, "has {found} bytes instead of {expected}"),
            Damage::Checksum { expected, found } => {
                write!(f, "is damaged: checksum {found:08x}, expected {expected:08x}")
            }
            Damage::Record { key, expected, found } => {
                write!(f, "{key} is damaged: checksum {found:08x}, expected {expected:08x}")
            }
            Damage::RecordCut { key } => write!(f, "{key} is cut off by the end of the file"),
            Damage::Unreadable(what) => write!(f, "cannot be read: {what}"),
            Damage::Contents(what) => f.write_str(what),
        }
    }
}

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The vault's version, if its head reads.
    pub version: Option<u32>,
    /// Everything that is wrong; empty if the vault is whole.
    pub problems: Vec<Problem>,
    /// Bytes whose checksums were compared.
    pub bytes: u64,
    /// Records whose checksums were compared.
    pub records: usize,
    /// The files carry checksums. The original's do not: only their structure was checked.
    pub checksums: bool,
}

impl Report {
    fn add(&mut self, file: &str, what: Damage) {
        self.problems.push(Problem { file: file.to_owned(), what });
    }

    fn add_error(&mut self, file: &str, error: &SculptError) {
        let what = match error {
            SculptError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => Damage::Missing,
            SculptError::Io { source, .. } => Damage::Unreadable(source.to_string()),
            SculptError::Vault { source, .. } => Damage::Contents(source.to_string()),
            other => Damage::Contents(other.to_string()),
        };
        self.add(file, what);
    }
}

/// Checks a vault: a directory, an `experts.smoe` in one, or an original `NAME.smoe` with its
/// `NAME.scout.safetensors`. It never ends at the first problem.
///
/// # Errors
/// If there is nothing at `path`, or the caller wants to stop. Damage is no error: it is in the report.
pub fn verify(
    path: &Path,
    threads: Option<usize>,
    progress: &dyn Progress,
    stop: &AtomicBool,
) -> Result<Report, SculptError> {
    let meta = fs::metadata(path).map_err(SculptError::io("open", path))?;
    if meta.is_dir() {
        check_directory(path, &[], threads, progress, stop)
    } else if path.file_name().is_some_and(|name| name == file_name::EXPERTS) {
        check_directory(parent_of(path), &[], threads, progress, stop)
    } else {
        Ok(check_original(path))
    }
}

/// Checks a vault directory in which files called `allowed` may be, too.
pub(crate) fn check_directory(
    dir: &Path,
    allowed: &[&str],
    threads: Option<usize>,
    progress: &dyn Progress,
    stop: &AtomicBool,
) -> Result<Report, SculptError> {
    let mut report = Report { checksums: true, ..Report::default() };
    let mut expected: BTreeSet<String> = allowed.iter().map(|&name| name.to_owned()).collect();
    expected.insert(file_name::EXPERTS.to_owned());
    expected.insert(file_name::BACKBONE.to_owned());

    progress.phase("checking");
    let experts = open_experts(dir, &mut report);
    let manifest = experts.as_ref().and_then(|(file, ..)| file.manifest());
    let listed: &[FileEntry] = manifest.map_or(&[], |manifest| &manifest.files);
    expected.extend(listed.iter().map(|entry| entry.name.clone()));
    if manifest.is_none() {
        // Without a list there is no telling which of these belong.
        expected.extend(file_name::SIDE_FILES.map(str::to_owned));
    } else if !listed.iter().any(|entry| entry.name == file_name::BACKBONE) {
        report.add(file_name::EXPERTS, Damage::Contents("lists no backbone.safetensors".to_owned()));
    }
    check_backbone(dir, manifest.map(|manifest| &manifest.spec), &mut report);
    let files = open_listed(dir, listed, &mut report);

    let mut pieces = Vec::new();
    if let Some((file, _, len)) = &experts {
        for (i, record) in file.records.iter().enumerate() {
            if record.offset + record.len > *len {
                report.add(file_name::EXPERTS, Damage::RecordCut { key: record.key });
            } else {
                pieces.push(Piece::Record(i));
            }
        }
    }
    for (file, open) in files.iter().enumerate() {
        let parts = 0..open.entry.bytes.div_ceil(PART);
        pieces.extend(parts.map(|part| {
            let offset = part * PART;
            Piece::Part { file, offset, len: PART.min(open.entry.bytes - offset) }
        }));
    }
    let len_of = |piece: &Piece| match piece {
        Piece::Record(i) => experts.as_ref().map_or(0, |(file, ..)| file.records[*i].len),
        Piece::Part { len, .. } => *len,
    };
    report.bytes = pieces.iter().map(len_of).sum();
    report.records = pieces.iter().filter(|piece| matches!(piece, Piece::Record(_))).count();
    progress.start(report.bytes);

    let checksums: Vec<OnceLock<u32>> = pieces.iter().map(|_| OnceLock::new()).collect();
    let unreadable: Mutex<Vec<(usize, String)>> = Mutex::default();
    let done = workers::for_each(workers::count(threads, 1 << 20), pieces.len(), stop, |i, buffer| {
        let read = match (&pieces[i], &experts) {
            (Piece::Record(r), Some((file, handle, _))) => {
                let record = &file.records[*r];
                crc_at(handle, record.offset, record.len, record_crc_start(record.key), buffer)
            }
            (Piece::Part { file, offset, len }, _) => crc_at(&files[*file].handle, *offset, *len, 0, buffer),
            (Piece::Record(_), None) => unreachable!("records come from the expert file"),
        };
        match read {
            Ok(crc) => _ = checksums[i].set(crc),
            Err(e) => unreadable.lock().expect("no worker panics").push((i, e.to_string())),
        }
        progress.advance(len_of(&pieces[i]));
        Ok(())
    })?;
    if !done {
        return Err(SculptError::Stopped);
    }
    let mut unreadable = unreadable.into_inner().expect("no worker panics");
    unreadable.sort();
    for (i, what) in unreadable {
        match (&pieces[i], &experts) {
            (Piece::Record(r), Some((file, ..))) => {
                let what = format!("{}: {what}", file.records[*r].key);
                report.add(file_name::EXPERTS, Damage::Unreadable(what));
            }
            (Piece::Part { file, .. }, _) => {
                report.add(&files[*file].entry.name, Damage::Unreadable(what));
            }
            (Piece::Record(_), None) => {}
        }
    }
    compare(&pieces, &checksums, experts.as_ref().map(|(file, ..)| file), &files, &mut report);

    match fs::read_dir(dir) {
        Ok(entries) => {
            let names: BTreeSet<String> =
                entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
            for name in names.difference(&expected) {
                report.add(name, Damage::Unexpected);
            }
        }
        Err(e) => report.add(".", Damage::Unreadable(e.to_string())),
    }
    Ok(report)
}

/// A piece of a verification.
enum Piece {
    /// A record by number.
    Record(usize),
    /// A part of a listed file.
    Part { file: usize, offset: u64, len: u64 },
}

struct Listed<'a> {
    entry: &'a FileEntry,
    handle: File,
}

/// The expert file, if its head reads: also the open file and its real length.
fn open_experts(dir: &Path, report: &mut Report) -> Option<(ExpertFile, File, u64)> {
    let name = file_name::EXPERTS;
    let (head, file, len) = match head_bytes(&dir.join(name)) {
        Ok(read) => read,
        Err(e) => {
            report.add_error(name, &e);
            return None;
        }
    };
    let mut parsed = ExpertFile::parse(&head, len);
    if let Err(FormatError::Truncated { what: "expert file", needed, .. }) = parsed {
        report.add(name, Damage::Length { expected: needed, found: len });
        // The head is whole: go on with the records that are there.
        parsed = ExpertFile::parse(&head, needed);
    }
    match parsed {
        Ok(parsed) => {
            report.version = Some(parsed.version);
            if parsed.manifest().is_none() {
                let what = format!("is an original's version {} file", parsed.version);
                report.add(name, Damage::Contents(what));
                return None;
            }
            Some((parsed, file, len))
        }
        Err(e) => {
            report.add(name, Damage::Contents(e.to_string()));
            None
        }
    }
}

fn check_backbone(dir: &Path, spec: Option<&ModelSpec>, report: &mut Report) {
    let name = file_name::BACKBONE;
    match read_backbone(&dir.join(name)) {
        Ok((backbone, _)) => {
            if let Some(spec) = spec {
                require_all(&backbone, spec, |tensor| tensor.to_string(), name, report);
            }
        }
        // A missing file and one that cannot be read are named with the listed files.
        Err(SculptError::Io { .. }) if spec.is_some() => {}
        Err(e) => report.add_error(name, &e),
    }
}

fn require_all(
    backbone: &Backbone,
    spec: &ModelSpec,
    name_of: impl Fn(BackboneTensor) -> String,
    file: &str,
    report: &mut Report,
) {
    for tensor in BackboneTensor::all(spec) {
        if let Err(e) = backbone.require(spec, tensor, &name_of(tensor)) {
            report.add(file, Damage::Contents(e.to_string()));
        }
    }
}

fn open_listed<'a>(dir: &Path, listed: &'a [FileEntry], report: &mut Report) -> Vec<Listed<'a>> {
    let mut files = Vec::new();
    for entry in listed {
        let name = &entry.name;
        if Path::new(name).file_name() != Some(name.as_ref()) {
            report
                .add(file_name::EXPERTS, Damage::Contents(format!("lists `{name}`, which is no file name")));
            continue;
        }
        let path = dir.join(name);
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        match opened {
            Ok((found, handle)) if found == entry.bytes => files.push(Listed { entry, handle }),
            Ok((found, _)) => report.add(name, Damage::Length { expected: entry.bytes, found }),
            Err(e) => report.add_error(name, &SculptError::io("open", &path)(e)),
        }
    }
    files
}

/// Compares the checksums of pieces with those that the head lists.
fn compare(
    pieces: &[Piece],
    checksums: &[OnceLock<u32>],
    experts: Option<&ExpertFile>,
    files: &[Listed<'_>],
    report: &mut Report,
) {
    let mut whole: Vec<Option<u32>> = vec![Some(0); files.len()];
    for (piece, crc) in pieces.iter().zip(checksums) {
        match piece {
            Piece::Record(i) => {
                let Some(record) = experts.map(|file| &file.records[*i]) else { continue };
                if let (Some(&found), Some(expected)) = (crc.get(), record.crc32c)
                    && found != expected
                {
                    report.add(file_name::EXPERTS, Damage::Record { key: record.key, expected, found });
                }
            }
            Piece::Part { file, len, .. } => {
                let both = whole[*file].zip(crc.get());
                whole[*file] = both.map(|(a, &b)| smoe_format::crc::crc32c_combine(a, b, *len as usize));
            }
        }
    }
    for (file, found) in files.iter().zip(whole) {
        let Some(found) = found else { continue };
        match u32::from_str_radix(&file.entry.crc32c, 16) {
            Ok(expected) if expected == found => {}
            Ok(expected) => report.add(&file.entry.name, Damage::Checksum { expected, found }),
            Err(_) => {
                let what = format!("lists a checksum `{}` for {}", file.entry.crc32c, file.entry.name);
                report.add(file_name::EXPERTS, Damage::Contents(what));
            }
        }
    }
}

/// The backbone file of an original `NAME.smoe`.
pub(crate) fn original_backbone(path: &Path) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(original::BACKBONE_SUFFIX);
    path.with_file_name(name)
}

fn check_original(path: &Path) -> Report {
    let mut report = Report::default();
    let shown = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let experts = match head_bytes(path) {
        Ok((head, _, len)) => match ExpertFile::parse(&head, len) {
            Ok(file) => {
                report.version = Some(file.version);
                Some(file)
            }
            Err(e) => {
                report.add(&shown(path), Damage::Contents(e.to_string()));
                None
            }
        },
        Err(e) => {
            report.add_error(&shown(path), &e);
            None
        }
    };
    let backbone_path = original_backbone(path);
    match (read_backbone(&backbone_path), experts) {
        (Err(e), _) => report.add_error(&shown(&backbone_path), &e),
        (Ok(_), None) => {}
        (Ok((backbone, _)), Some(experts)) => match original_spec(&experts, &backbone, path) {
            Ok(spec) => {
                if let Err(e) = experts.check(&spec) {
                    report.add(&shown(path), Damage::Contents(e.to_string()));
                }
                require_all(&backbone, &spec, original::checkpoint_name, &shown(&backbone_path), &mut report);
            }
            Err(e) => report.add_error(&shown(path), &e),
        },
    }
    report
}

/// The model of an original pair; a version 1 file needs the checkpoint's `config.json` beside it.
pub(crate) fn original_spec(
    experts: &ExpertFile,
    backbone: &Backbone,
    path: &Path,
) -> Result<ModelSpec, SculptError> {
    let config = path.with_file_name("config.json");
    if experts.version == 1 && config.is_file() {
        let bytes = fs::read(&config).map_err(SculptError::io("read", &config))?;
        let value = serde_json::from_slice(&bytes).map_err(SculptError::json(&config))?;
        return Ok(spec_from_config(&value)?.0);
    }
    experts.spec(backbone).map_err(|source| SculptError::Vault { path: path.to_owned(), source })
}
