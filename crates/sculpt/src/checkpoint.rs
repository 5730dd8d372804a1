//! A checkpoint as it lies on disk: which tensors it has, where, and their rows.
//!
//! Only headers are held in memory. Which file counts when several have a tensor is decided here, as the
//! reference (`transformers`) does it, and never silently. Whatever the files are, tensors go by the names of
//! an unpacked safetensors checkpoint of one tensor per matrix: packed and stacked ones are resolved on
//! opening (the module `source`).

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use safetensors::tensor::Metadata;
use serde_json::Value;
use sha2::{Digest, Sha256};
use smoe_format::file_name;

use crate::config::family_of;
use crate::error::{SculptError, Warning};
use crate::family::{Hybrid, Place};
use crate::files::{self, OnDisk, WeightFiles};
use crate::source::{
    At, Codes, Files, Form, Packing, Part, Raw, Rows, Shard, Source, Span, Stored, Unread, gguf, resolve,
};

const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The format's own bound on a header.
const MAX_HEADER: u64 = 100_000_000;
/// Names shown of a longer list.
const EXAMPLES: usize = 12;
/// Bytes of a sampled tensor that go into the fingerprint.
const SAMPLE: u64 = 4096;

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    /// What describes the model; how its weights are packed is left out.
    config: Value,
    shards: Vec<Shard>,
    tensors: HashMap<String, Stored>,
    /// The tensors of the files, before packed and stacked ones were resolved.
    spans: BTreeMap<String, Span>,
    /// Where the index puts a tensor that is nowhere.
    absent: BTreeMap<String, String>,
    warnings: Vec<Warning>,
    /// Of GGUF files, from which side files are made.
    metadata: Option<gguf::Metadata>,
    /// Where the tokenizer is to be taken from instead.
    tokenizer: Option<PathBuf>,
}

/// A file that travels with a vault.
#[derive(Clone, Debug)]
pub(crate) struct SideFile {
    pub name: &'static str,
    pub content: Content,
}

/// What a side file is made of.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// Copied from here; its length.
    File(PathBuf, u64),
    /// Made of a GGUF file's metadata.
    Made(Vec<u8>),
}

impl SideFile {
    pub fn len(&self) -> u64 {
        match &self.content {
            Content::File(_, len) => *len,
            Content::Made(bytes) => bytes.len() as u64,
        }
    }

    /// Its bytes.
    pub fn read(&self) -> Result<Cow<'_, [u8]>, SculptError> {
        match &self.content {
            Content::File(path, len) => {
                let bytes = std::fs::read(path).map_err(SculptError::io("read", path))?;
                if bytes.len() as u64 != *len {
                    return Err(SculptError::Changed { path: path.clone() });
                }
                Ok(Cow::Owned(bytes))
            }
            Content::Made(bytes) => Ok(Cow::Borrowed(bytes)),
        }
    }
}

impl Checkpoint {
    /// Opens a directory, a single `.safetensors` file with `config.json` beside it, or a `.gguf` file (of a
    /// split one any part, or the directory that holds it alone), and reads all headers.
    ///
    /// # Errors
    /// If something is missing, cut short, or ambiguous; named.
    pub fn open(path: &Path) -> Result<Self, SculptError> {
        Self::open_of(path, None, &OnDisk)
    }

    /// As [`Checkpoint::open`], with the directory from which tokenizer and templates are to be taken, and with weight
    /// files that may not be on the disk yet. `config.json`, the index and the side files must be.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_of(
        path: &Path,
        tokenizer: Option<&Path>,
        files: &dyn WeightFiles,
    ) -> Result<Self, SculptError> {
        if let Some(dir) = tokenizer
            && !dir.join("tokenizer.json").is_file()
        {
            let what = "it has no tokenizer.json".to_owned();
            return Err(SculptError::Tokenizer { file: dir.to_owned(), what });
        }
        let named = path.extension().is_some_and(|e| e == "gguf") && files.has(path);
        let gguf = if named { Some(path.to_owned()) } else { gguf_in(path, files)? };
        let mut checkpoint = match gguf {
            Some(gguf) => Self::open_gguf(&gguf, files)?,
            None => Self::open_safetensors(path, files)?,
        };
        checkpoint.tokenizer = tokenizer.map(Path::to_owned);
        Ok(checkpoint)
    }

    /// Opens a dense GGUF file of llama's architecture as if its config were that of `n_experts` experts a layer, of
    /// which all are used; its tensors are those that it has.
    pub(crate) fn open_dense(path: &Path, n_experts: usize) -> Result<Self, SculptError> {
        Self::of_gguf(path, gguf::open(path, Some(n_experts), &OnDisk)?)
    }

    fn open_gguf(path: &Path, files: &dyn WeightFiles) -> Result<Self, SculptError> {
        Self::of_gguf(path, gguf::open(path, None, files)?)
    }

    fn of_gguf(path: &Path, opened: gguf::Opened) -> Result<Self, SculptError> {
        let gguf::Opened { shards, config, tensors, spans, metadata, warnings } = opened;
        let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok(Self {
            dir: dir.to_owned(),
            config,
            shards,
            tensors,
            spans,
            absent: BTreeMap::new(),
            warnings,
            metadata: Some(metadata),
            tokenizer: None,
        })
    }

    fn open_safetensors(path: &Path, files: &dyn WeightFiles) -> Result<Self, SculptError> {
        let nothing = |what: &str| SculptError::NoCheckpoint { path: path.to_owned(), what: what.to_owned() };
        let (dir, single) = if path.is_dir() {
            (path.to_owned(), None)
        } else if files.has(path) && path.extension().is_some_and(|e| e == "safetensors") {
            let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            (dir.to_owned(), path.file_name().and_then(|n| n.to_str()).map(str::to_owned))
        } else {
            return Err(nothing("it is neither a directory nor a .safetensors or .gguf file"));
        };
        let config_path = dir.join("config.json");
        if !config_path.is_file() {
            return Err(nothing("it has neither config.json nor a GGUF file without safetensors beside it"));
        }
        let config = std::fs::read(&config_path).map_err(SculptError::io("read", &config_path))?;
        let mut config = serde_json::from_slice(&config).map_err(SculptError::json(&config_path))?;
        let mut packing = Packing::take(&mut config)?;

        let mut warnings = Vec::new();
        let (names, index) = match single {
            Some(name) => (vec![name], None),
            None => match (files.has(&dir.join(SINGLE)), dir.join(INDEX).is_file()) {
                (true, both) => {
                    if both {
                        let (used, ignored) = (SINGLE.to_owned(), INDEX.to_owned());
                        warnings.push(Warning::TwoForms { used, ignored });
                    }
                    (vec![SINGLE.to_owned()], None)
                }
                (false, true) => {
                    let index = read_index(&dir, files)?;
                    let mut names: Vec<String> = index.values().cloned().collect();
                    names.sort();
                    names.dedup();
                    (names, Some(index))
                }
                (false, false) => {
                    return Err(nothing("it has neither model.safetensors nor model.safetensors.index.json"));
                }
            },
        };
        let mut checkpoint = Self {
            shards: names.iter().map(|name| Shard::open(&dir, name, files)).collect::<Result<_, _>>()?,
            dir,
            config,
            tensors: HashMap::new(),
            spans: BTreeMap::new(),
            absent: BTreeMap::new(),
            warnings,
            metadata: None,
            tokenizer: None,
        };
        let mut raw = checkpoint.collect(index.unwrap_or_default())?;
        let family = family_of(&checkpoint.config).ok();
        if family.is_some_and(|family| family.text.is_some()) {
            raw = packing.publish(raw);
        }
        let halves = family.is_some_and(|family| family.hybrid != Hybrid::None);
        checkpoint.tensors = resolve(&raw, &packing, halves);
        checkpoint.spans = raw.into_iter().map(|(name, tensor)| (name, tensor.span())).collect();
        Ok(checkpoint)
    }

    /// The tensors of the shards' headers.
    fn collect(&mut self, index: BTreeMap<String, String>) -> Result<HashMap<String, Raw>, SculptError> {
        let mut tensors: HashMap<String, Raw> = HashMap::new();
        for (shard, Shard { name: file, path, header, .. }) in self.shards.iter().enumerate() {
            let metadata: Metadata =
                serde_json::from_slice(header).map_err(|e| SculptError::Safetensors {
                    file: path.clone(),
                    what: format!("its header does not read: {e}"),
                })?;
            let data = header.len() as u64 + 8;
            let (expected, found) = (data + metadata.data_len() as u64, self.shards[shard].len);
            if expected != found {
                return Err(SculptError::FileLength { file: path.clone(), expected, found });
            }
            for name in metadata.offset_keys() {
                let Some(info) = metadata.info(&name) else { continue };
                let new = Raw {
                    shard,
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    offset: data + info.data_offsets.0 as u64,
                };
                let Some(old) = tensors.get(&name) else {
                    tensors.insert(name, new);
                    continue;
                };
                let other = &self.shards[old.shard].name;
                let (used, ignored) = match index.get(&name) {
                    Some(named) if named == file => (file, other),
                    Some(named) if named == other => (other, file),
                    _ => {
                        return Err(SculptError::Ambiguous {
                            tensor: name,
                            first: other.clone(),
                            second: file.clone(),
                        });
                    }
                };
                self.warnings.push(Warning::Duplicate {
                    tensor: name.clone(),
                    used: used.clone(),
                    ignored: ignored.clone(),
                });
                if used == file {
                    tensors.insert(name, new);
                }
            }
        }
        for (tensor, named) in index {
            match tensors.get(&tensor) {
                None => {
                    self.absent.insert(tensor, named);
                }
                Some(stored) if self.shards[stored.shard].name != named => {
                    let found = self.shards[stored.shard].name.clone();
                    self.warnings.push(Warning::Misplaced { tensor, named, found });
                }
                Some(_) => {}
            }
        }
        Ok(tensors)
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `config.json`.
    #[must_use]
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// What was odd on opening.
    #[must_use]
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Bytes of the weight files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.len).sum()
    }

    /// Bytes of weights that were read so far, of all files.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.shards.iter().map(|shard| shard.read.load(Ordering::Relaxed)).sum()
    }

    /// Names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// True if there is a tensor called `name`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A missing tensor's name, with what the index says of it.
    pub(crate) fn describe_missing(&self, name: &str) -> String {
        match self.absent.get(name) {
            Some(file) => format!("{name} (the index puts it into {file}, which lacks it)"),
            None => name.to_owned(),
        }
    }

    /// True if some weights are stored as codes.
    #[must_use]
    pub fn is_coded(&self) -> bool {
        self.tensors.values().any(|stored| stored.form.as_ref().is_ok_and(Form::has_codes))
    }

    /// Where the tokenizer lies, if that is a directory.
    pub(crate) fn tokenizer_dir(&self) -> Option<&Path> {
        let own = self.metadata.is_none().then_some(self.dir.as_path());
        self.tokenizer.as_deref().or(own)
    }

    /// The side files that this checkpoint has.
    pub(crate) fn side_files(&self) -> Result<Vec<SideFile>, SculptError> {
        let mut made = match &self.metadata {
            Some(metadata) => metadata.side_files(&self.config, self.tokenizer.is_none())?,
            None => Vec::new(),
        };
        let mut found = Vec::new();
        for name in file_name::SIDE_FILES {
            if let Some(i) = made.iter().position(|(of, _)| *of == name) {
                found.push(SideFile { name, content: Content::Made(made.swap_remove(i).1) });
                continue;
            }
            let dir = if name == "config.json" { Some(self.dir.as_path()) } else { self.tokenizer_dir() };
            let Some(dir) = dir else { continue };
            let path = dir.join(name);
            match std::fs::metadata(&path) {
                Ok(meta) if meta.is_file() => {
                    found.push(SideFile { name, content: Content::File(path, meta.len()) });
                }
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(SculptError::io("read", &path)(e)),
            }
        }
        Ok(found)
    }

    /// The matrix at `place`, whose tensor must have its shape and a type that is read; `None` if there is none.
    pub(crate) fn source(&self, place: &Place) -> Result<Option<Source>, SculptError> {
        let Place { name, shape, part } = place;
        let Some(stored) = self.tensors.get(name) else { return Ok(None) };
        let file = self.shards[stored.shard].path.clone();
        let tensor = name.clone();
        let mut form = match &stored.form {
            Ok(form) => *form,
            Err(Unread::Type(found)) => {
                return Err(SculptError::Dtype { tensor, file, found: found.clone() });
            }
            Err(Unread::Packed(what)) => {
                return Err(SculptError::Packed { tensor, file, what: what.clone() });
            }
        };
        // Some write a vector as a matrix of one row.
        let is_row = matches!((&stored.shape[..], &shape[..]), (&[1, n], &[m]) if n == m);
        if stored.shape != *shape && !is_row {
            let (expected, found) = (shape.clone(), stored.shape.clone());
            return Err(SculptError::Shape { tensor, file, expected, found });
        }
        if let Form::Gptq(gptq) = &mut form {
            gptq.examine(self.files())?;
        }
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().rev().skip(1).product();
        let (encoding, order) = (form.encoding(), stored.order);
        Ok(Some(
            Source { encoding, rows, cols, form, order, part: Part::Whole }.part(stored.change.part(*part)),
        ))
    }

    fn files(&self) -> Files<'_> {
        Files::new(&self.shards)
    }

    /// The weight files; by their place in this list items name them.
    pub(crate) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Reads whole rows of a float tensor as they are into `out`, by way of `raw`.
    pub(crate) fn read_raw(
        &self,
        source: &Source,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        out: &mut Vec<u8>,
    ) -> Result<(), SculptError> {
        source.read_raw(self.files(), rows, raw, out)
    }

    /// Reads whole rows as `f32` into `values`, by way of `raw`.
    pub(crate) fn read_rows(
        &self,
        source: &Source,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        values: &mut Vec<f32>,
    ) -> Result<(), SculptError> {
        source.read_rows(self.files(), rows, raw, &mut Codes::default(), values)
    }

    /// Reads whole rows of a tensor that is kept as codes.
    pub(crate) fn read_codes(
        &self,
        source: &Source,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        codes: &mut Codes,
    ) -> Result<(), SculptError> {
        source.read_codes(self.files(), rows, raw, codes)
    }

    /// A hash by which two checkpoints can be told apart without reading them whole.
    ///
    /// It covers the side files, every safetensors header, the files' lengths, and 4 KiB out of the middle
    /// of every tensor that is no routed expert and of one in 64 of those: two fine-tunes of one model have
    /// equal headers.
    ///
    /// # Errors
    /// If a file does not read.
    pub fn fingerprint(&self) -> Result<String, SculptError> {
        let mut hash = Sha256::new();
        let mut put = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        for side in self.side_files()? {
            put(side.name.as_bytes());
            put(&side.read()?);
        }
        for shard in &self.shards {
            put(shard.name.as_bytes());
            put(&shard.header);
            put(&shard.len.to_le_bytes());
        }
        let mut sample = Vec::new();
        for (name, at, len) in self.samples() {
            sample.resize(len, 0);
            self.files().read(at, &mut sample)?;
            put(name.as_bytes());
            put(&sample);
        }
        Ok(hex(&hash.finalize()))
    }

    /// What the fingerprint takes out of tensors: name, place, bytes.
    fn samples(&self) -> impl Iterator<Item = (&str, At, usize)> {
        let taken = |name: &str| {
            !name.contains(".experts.") || smoe_format::crc::crc32c(name.as_bytes()).is_multiple_of(64)
        };
        self.spans.iter().filter(move |(name, _)| taken(name)).map(|(name, span)| {
            let len = span.bytes.min(SAMPLE);
            (name.as_str(), span.at.skip((span.bytes - len) / 2), len as usize)
        })
    }

    /// Tells `files` what the fingerprint will read.
    pub(crate) fn expect_samples(&self, files: &dyn WeightFiles) -> Result<(), SculptError> {
        self.expect(files, self.samples().map(|(_, at, len)| Span { at, bytes: len as u64 }))
    }

    /// Tells `files` which rows will be read before any file is fetched: what decides codes.
    pub(crate) fn expect_rows(&self, files: &dyn WeightFiles, rows: &[Rows]) -> Result<(), SculptError> {
        if !files.arrives() {
            return Ok(());
        }
        let noted = RefCell::default();
        let (mut raw, mut codes, mut values) = (Vec::new(), Codes::default(), Vec::new());
        for (source, rows) in rows {
            let noting = Files::noting(&self.shards, &noted);
            source.read_rows(noting, rows.clone(), &mut raw, &mut codes, &mut values)?;
        }
        self.expect(files, noted.into_inner().into_iter())
    }

    fn expect(&self, files: &dyn WeightFiles, spans: impl Iterator<Item = Span>) -> Result<(), SculptError> {
        let place = |Span { at, bytes }| files::Place {
            path: &self.shards[at.shard].path,
            offset: at.offset,
            bytes: bytes as usize,
        };
        files.expect(&spans.map(place).collect::<Vec<_>>()).map_err(SculptError::io("read", &self.dir))
    }

    /// Which files these are, not only what they hold ([`WeightFile::stamp`](crate::WeightFile::stamp)). Unfinished work goes on
    /// only from the very files that it was begun with; a vault does not know it.
    ///
    /// # Errors
    /// If a file cannot be examined.
    pub fn identity(&self) -> Result<String, SculptError> {
        let mut hash = Sha256::new();
        for shard in &self.shards {
            hash.update(shard.name.as_bytes());
            hash.update(shard.file.stamp().map_err(SculptError::io("read", &shard.path))?);
        }
        Ok(hex(&hash.finalize())[..16].to_owned())
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Shard {
    fn open(dir: &Path, name: &str, files: &dyn WeightFiles) -> Result<Self, SculptError> {
        let path = dir.join(name);
        let file = files.open(&path).map_err(SculptError::io("open", &path))?;
        let len = file.bytes().map_err(SculptError::io("read", &path))?;
        let bad = |what: String| SculptError::Safetensors { file: path.clone(), what };
        let mut first = [0; 8];
        if len < 8 {
            return Err(bad(format!("{len} bytes are no safetensors file")));
        }
        file.read_exact_at(&mut first, 0).map_err(SculptError::io("read", &path))?;
        let header_len = u64::from_le_bytes(first);
        if header_len > MAX_HEADER {
            return Err(bad(format!("a header of {header_len} bytes is no safetensors header")));
        }
        if header_len + 8 > len {
            return Err(SculptError::FileLength { file: path, expected: header_len + 8, found: len });
        }
        let mut header = vec![0; header_len as usize];
        file.read_exact_at(&mut header, 8).map_err(SculptError::io("read", &path))?;
        Ok(Self { name: name.to_owned(), path, file, len, header, read: AtomicU64::new(0) })
    }

    /// Checks that the file still begins with the header that the plan was made from.
    pub fn check_header(&self) -> Result<(), SculptError> {
        let start = if self.name.ends_with(".gguf") { 0 } else { 8 };
        let mut header = vec![0; self.header.len()];
        self.file.read_exact_at(&mut header, start).map_err(SculptError::io("read", &self.path))?;
        if header == self.header { Ok(()) } else { Err(SculptError::Changed { path: self.path.clone() }) }
    }
}

/// The one GGUF file of a directory that has no safetensors, or of a split one its first part; `None` if there is none.
/// What sees images (`mmproj-`) does not count.
fn gguf_in(dir: &Path, files: &dyn WeightFiles) -> Result<Option<PathBuf>, SculptError> {
    if !dir.is_dir() || files.has(&dir.join(SINGLE)) || dir.join(INDEX).is_file() {
        return Ok(None);
    }
    // By the name without the part's number.
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for entry in std::fs::read_dir(dir).map_err(SculptError::io("read", dir))? {
        let name = entry.map_err(SculptError::io("read", dir))?.file_name();
        let Some(name) = name.to_str() else { continue };
        // Perhaps those of another model, whose index is missing.
        if name.ends_with(".safetensors") {
            return Ok(None);
        }
        if !name.ends_with(".gguf") {
            continue;
        }
        if name.starts_with("mmproj") {
            continue;
        }
        let whole = gguf::without_part(name).unwrap_or_else(|| name.to_owned());
        let first = found.entry(whole).or_insert_with(|| name.to_owned());
        if name < first.as_str() {
            name.clone_into(first);
        }
    }
    let names: Vec<&str> = found.values().map(String::as_str).collect();
    match names[..] {
        [] => Ok(None),
        [name] => Ok(Some(dir.join(name))),
        [..] => {
            let more = names.len().saturating_sub(EXAMPLES);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let listed = names.iter().take(EXAMPLES).copied().collect::<Vec<_>>().join(", ");
            let what = format!("it has several GGUF files; name one: {listed}{more}");
            Err(SculptError::NoCheckpoint { path: dir.to_owned(), what })
        }
    }
}

/// Tensor to file name; all files are there.
fn read_index(dir: &Path, files: &dyn WeightFiles) -> Result<BTreeMap<String, String>, SculptError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let path = dir.join(INDEX);
    let bytes = std::fs::read(&path).map_err(SculptError::io("read", &path))?;
    let Index { weight_map } = serde_json::from_slice(&bytes).map_err(SculptError::json(&path))?;
    let mut tensors: BTreeMap<&str, usize> = BTreeMap::new();
    for file in weight_map.values() {
        *tensors.entry(file).or_default() += 1;
    }
    for file in tensors.keys() {
        let inside = Path::new(file).components().all(|part| matches!(part, Component::Normal(_)));
        if !inside || file.is_empty() {
            return Err(SculptError::Json { path, what: format!("`{file}` is no file name") });
        }
    }
    if tensors.is_empty() {
        return Err(SculptError::Json { path, what: "its weight_map is empty".to_owned() });
    }
    let mut missing = tensors.iter().filter(|(file, _)| !files.has(&dir.join(file)));
    if let Some((file, &count)) = missing.next() {
        return Err(SculptError::MissingShard {
            index: path,
            file: (*file).to_owned(),
            tensors: count,
            missing: 1 + missing.count(),
            shards: tensors.len(),
        });
    }
    Ok(weight_map)
}
