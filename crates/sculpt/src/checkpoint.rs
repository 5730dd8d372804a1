//! A checkpoint as it lies on disk: which tensors it has, where, and their rows as `f32`.
//!
//! Only headers are held in memory. Which file counts when several have a tensor is decided here, as the
//! reference (`transformers`) does it, and never silently.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt as _};
use std::path::{Component, Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::Value;
use sha2::{Digest, Sha256};
use smoe_format::{Encoding, file_name};

use crate::error::{SculptError, Warning};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The format's own bound on a header.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of a sampled tensor that go into the fingerprint.
const SAMPLE: u64 = 4096;

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: Value,
    shards: Vec<Shard>,
    tensors: HashMap<String, Stored>,
    /// Where the index puts a tensor that is nowhere.
    absent: BTreeMap<String, String>,
    warnings: Vec<Warning>,
}

#[derive(Debug)]
struct Shard {
    name: String,
    path: PathBuf,
    file: File,
    len: u64,
    header: Vec<u8>,
}

/// A tensor in a shard.
#[derive(Clone, Debug)]
struct Stored {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    offset: u64,
}

/// A float tensor that the model needs, with its shape checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    shard: usize,
    /// F32, F16 or Bf16: its dtype.
    pub encoding: Encoding,
    pub cols: usize,
    offset: u64,
}

impl Source {
    fn element_bytes(&self) -> usize {
        if self.encoding == Encoding::F32 { 4 } else { 2 }
    }
}

impl Checkpoint {
    /// Opens a directory, or a single `.safetensors` file with `config.json` beside it, and reads all headers.
    ///
    /// # Errors
    /// If something is missing, cut short, or ambiguous; named.
    pub fn open(path: &Path) -> Result<Self, SculptError> {
        let nothing = |what: &str| SculptError::NoCheckpoint { path: path.to_owned(), what: what.to_owned() };
        let (dir, single) = if path.is_dir() {
            (path.to_owned(), None)
        } else if path.is_file() && path.extension().is_some_and(|e| e == "safetensors") {
            let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            (dir.to_owned(), path.file_name().and_then(|n| n.to_str()).map(str::to_owned))
        } else {
            return Err(nothing("it is neither a directory nor a .safetensors file"));
        };
        let config_path = dir.join("config.json");
        if !config_path.is_file() {
            return Err(nothing("it has no config.json"));
        }
        let config = std::fs::read(&config_path).map_err(SculptError::io("read", &config_path))?;
        let config = serde_json::from_slice(&config).map_err(SculptError::json(&config_path))?;

        let mut warnings = Vec::new();
        let (names, index) = match single {
            Some(name) => (vec![name], None),
            None => match (dir.join(SINGLE).is_file(), dir.join(INDEX).is_file()) {
                (true, both) => {
                    if both {
                        let (used, ignored) = (SINGLE.to_owned(), INDEX.to_owned());
                        warnings.push(Warning::TwoForms { used, ignored });
                    }
                    (vec![SINGLE.to_owned()], None)
                }
                (false, true) => {
                    let index = read_index(&dir)?;
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
            shards: names.iter().map(|name| Shard::open(&dir, name)).collect::<Result<_, _>>()?,
            dir,
            config,
            tensors: HashMap::new(),
            absent: BTreeMap::new(),
            warnings,
        };
        checkpoint.collect(index.unwrap_or_default())?;
        Ok(checkpoint)
    }

    /// Fills the tensor table from the shards' headers.
    fn collect(&mut self, index: BTreeMap<String, String>) -> Result<(), SculptError> {
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
                let new = Stored {
                    shard,
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    offset: data + info.data_offsets.0 as u64,
                };
                let Some(old) = self.tensors.get(&name) else {
                    self.tensors.insert(name, new);
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
                    self.tensors.insert(name, new);
                }
            }
        }
        for (tensor, named) in index {
            match self.tensors.get(&tensor) {
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
        Ok(())
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

    /// The side files that this checkpoint has, with their lengths.
    pub(crate) fn side_files(&self) -> Result<Vec<(&'static str, PathBuf, u64)>, SculptError> {
        let mut found = Vec::new();
        for name in file_name::SIDE_FILES {
            let path = self.dir.join(name);
            match std::fs::metadata(&path) {
                Ok(meta) if meta.is_file() => found.push((name, path, meta.len())),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(SculptError::io("read", &path)(e)),
            }
        }
        Ok(found)
    }

    /// The tensor `name`, which must have this shape and a float type; `None` if there is none.
    pub(crate) fn source(&self, name: &str, shape: &[usize]) -> Result<Option<Source>, SculptError> {
        let Some(stored) = self.tensors.get(name) else { return Ok(None) };
        let file = || self.shards[stored.shard].path.clone();
        let tensor = || name.to_owned();
        let encoding = match stored.dtype {
            Dtype::F32 => Encoding::F32,
            Dtype::F16 => Encoding::F16,
            Dtype::BF16 => Encoding::Bf16,
            other => {
                return Err(SculptError::Dtype {
                    tensor: tensor(),
                    file: file(),
                    found: format!("{other:?}"),
                });
            }
        };
        if stored.shape != shape {
            return Err(SculptError::Shape {
                tensor: tensor(),
                file: file(),
                expected: shape.to_vec(),
                found: stored.shape.clone(),
            });
        }
        let cols = shape.last().copied().unwrap_or(1);
        Ok(Some(Source { shard: stored.shard, encoding, cols, offset: stored.offset }))
    }

    /// Reads whole rows as they are into `raw`.
    pub(crate) fn read_raw(
        &self,
        source: &Source,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
    ) -> Result<(), SculptError> {
        let row = source.cols * source.element_bytes();
        raw.resize(rows.len() * row, 0);
        let shard = &self.shards[source.shard];
        shard
            .file
            .read_exact_at(raw, source.offset + (rows.start * row) as u64)
            .map_err(SculptError::io("read", &shard.path))
    }

    /// Reads whole rows as `f32` into `values`, by way of `raw`.
    pub(crate) fn read_rows(
        &self,
        source: &Source,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        values: &mut Vec<f32>,
    ) -> Result<(), SculptError> {
        self.read_raw(source, rows.clone(), raw)?;
        values.resize(rows.len() * source.cols, 0.0);
        let n = values.len();
        // All rows as one long row.
        source.encoding.decode_row(raw, n, 0, values);
        Ok(())
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
        for (name, path, _) in self.side_files()? {
            put(name.as_bytes());
            put(&std::fs::read(&path).map_err(SculptError::io("read", &path))?);
        }
        for shard in &self.shards {
            put(shard.name.as_bytes());
            put(&shard.header);
            put(&shard.len.to_le_bytes());
        }
        let mut names: Vec<&String> = self.tensors.keys().collect();
        names.sort();
        let mut sample = Vec::new();
        for name in names {
            if name.contains(".experts.") && !crc32c::crc32c(name.as_bytes()).is_multiple_of(64) {
                continue;
            }
            let stored = &self.tensors[name];
            let bits = stored.shape.iter().product::<usize>() as u64 * stored.dtype.bitsize() as u64;
            let len = (bits / 8).min(SAMPLE);
            sample.resize(len as usize, 0);
            let shard = &self.shards[stored.shard];
            shard
                .file
                .read_exact_at(&mut sample, stored.offset + (bits / 8 - len) / 2)
                .map_err(SculptError::io("read", &shard.path))?;
            put(name.as_bytes());
            put(&sample);
        }
        Ok(hex(&hash.finalize()))
    }

    /// Which files these are, not only what they hold: lengths and times of change. Unfinished work goes on
    /// only from the very files that it was begun with; a vault does not know it.
    ///
    /// # Errors
    /// If a file cannot be examined.
    pub fn identity(&self) -> Result<String, SculptError> {
        let mut hash = Sha256::new();
        for shard in &self.shards {
            let meta = shard.file.metadata().map_err(SculptError::io("read", &shard.path))?;
            hash.update(shard.name.as_bytes());
            for value in [meta.len() as i64, meta.mtime(), meta.mtime_nsec()] {
                hash.update(value.to_le_bytes());
            }
        }
        Ok(hex(&hash.finalize())[..16].to_owned())
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Shard {
    fn open(dir: &Path, name: &str) -> Result<Self, SculptError> {
        let path = dir.join(name);
        let file = File::open(&path).map_err(SculptError::io("open", &path))?;
        let len = file.metadata().map_err(SculptError::io("read", &path))?.len();
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
        Ok(Self { name: name.to_owned(), path, file, len, header })
    }
}

/// Tensor to file name; all files are there.
fn read_index(dir: &Path) -> Result<BTreeMap<String, String>, SculptError> {
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
    let mut missing = tensors.iter().filter(|(file, _)| !dir.join(file).is_file());
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
