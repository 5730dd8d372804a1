//! GGUF files (versions 2 and 3): metadata and the table of tensors.
//!
//! The header is read with positioned reads and believed in nothing: no allocation is larger than the bytes
//! that were really there, and everything that is said of tensors is held against the file's length.

mod arch;
mod model;
mod names;
mod tokenizer;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use serde_json::Value as Json;
use smoe_format::Encoding;

use super::{At, Change, Form, Order, Shard, Span, Stored, Unread, ggml};
use crate::error::{SculptError, Warning};
use crate::files::{WeightFile, WeightFiles};

const MAGIC: &[u8; 4] = b"GGUF";
/// Bounds of what a header may hold: several times what the largest published ones do.
const MAX_HEADER: u64 = 256 << 20;
const MAX_ENTRIES: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 18;
const MAX_ELEMENTS: u64 = 1 << 23;
const MAX_KEY: u64 = 1 << 16;
const MAX_NAME: u64 = 256;
const MAX_SHARDS: u64 = 10_000;
/// Characters of a message, and of a text of the file in one.
const MAX_MESSAGE: usize = 500;
const MAX_SHOWN: usize = 80;
/// Bytes read ahead.
const AHEAD: usize = 64 << 10;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Unsigned(u64),
    Signed(i64),
    /// Of `f32` the shortest decimal, so that 1e-6 stays that.
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Numbers(Vec<f64>),
}

impl Value {
    fn name(&self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "a whole number",
            Self::Float(_) => "a number",
            Self::Bool(_) => "true or false",
            Self::Text(_) => "a text",
            Self::Texts(_) => "a list of texts",
            Self::Numbers(_) => "a list of numbers",
        }
    }
}

/// A tensor as its file describes it, dimensions outermost first.
#[derive(Clone, Debug)]
struct Tensor {
    shard: usize,
    shape: Vec<usize>,
    kind: Type,
    offset: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Type {
    Float(Encoding),
    Blocks(ggml::Kind),
    /// One that this build does not read, by its number.
    Other(u32),
}

impl Type {
    fn of(number: u32) -> Self {
        match number {
            0 => Self::Float(Encoding::F32),
            1 => Self::Float(Encoding::F16),
            30 => Self::Float(Encoding::Bf16),
            _ => ggml::Kind::ALL
                .into_iter()
                .find(|kind| kind.number() == number)
                .map_or(Self::Other(number), Self::Blocks),
        }
    }

    /// Weights and bytes of the smallest unit; `None` for a type that nobody knows.
    fn unit(self) -> Option<(usize, usize)> {
        match self {
            Self::Float(Encoding::F32) => Some((1, 4)),
            Self::Float(_) => Some((1, 2)),
            Self::Blocks(kind) => Some(kind.block()),
            Self::Other(number) => OTHERS.iter().find(|other| other.0 == number).map(|other| other.2),
        }
    }

    fn name(self) -> String {
        match self {
            Self::Float(ty) => ty.to_string().to_uppercase(),
            Self::Blocks(kind) => kind.name().to_owned(),
            Self::Other(number) => {
                let known = OTHERS.iter().find(|other| other.0 == number);
                known.map_or_else(|| format!("GGUF type {number}"), |other| other.1.to_owned())
            }
        }
    }
}

/// Types that this build does not read, for messages and to check the places of the others.
const OTHERS: &[(u32, &str, (usize, usize))] = &[
    (10, "Q2_K", (256, 84)),
    (11, "Q3_K", (256, 110)),
    (16, "IQ2_XXS", (256, 66)),
    (17, "IQ2_XS", (256, 74)),
    (18, "IQ3_XXS", (256, 98)),
    (19, "IQ1_S", (256, 50)),
    (21, "IQ3_S", (256, 110)),
    (22, "IQ2_S", (256, 82)),
    (23, "IQ4_XS", (256, 136)),
    (24, "I8", (1, 1)),
    (25, "I16", (1, 2)),
    (26, "I32", (1, 4)),
    (27, "I64", (1, 8)),
    (28, "F64", (1, 8)),
    (29, "IQ1_M", (256, 56)),
    (34, "TQ1_0", (256, 54)),
    (35, "TQ2_0", (256, 66)),
    (40, "NVFP4", (64, 36)),
];

/// What a checkpoint needs of GGUF files.
pub(crate) struct Opened {
    pub shards: Vec<Shard>,
    /// `config.json` as the model's family has it.
    pub config: Json,
    pub tensors: HashMap<String, Stored>,
    pub spans: BTreeMap<String, Span>,
    pub metadata: Metadata,
    pub warnings: Vec<Warning>,
}

/// Opens a GGUF file, or all files of a split one of which `path` is one. A dense one only if it is to be cut into
/// `experts`, and is of an architecture where that can be said.
pub(crate) fn open(
    path: &Path,
    experts: Option<usize>,
    files: &dyn WeightFiles,
) -> Result<Opened, SculptError> {
    let (shard, metadata, tensors) = read(path, 0, files)?;
    let count = metadata.unsigned("split.count")?.unwrap_or(1);
    let mut shards = vec![shard];
    let mut all = tensors;
    let mut metadata = metadata;
    if count > 1 {
        if count > MAX_SHARDS {
            return Err(metadata.bad("split.count", &format!("at most {MAX_SHARDS}")));
        }
        let total = metadata.unsigned("split.tensors.count")?;
        (shards, all) = (Vec::new(), Vec::new());
        for no in 0..count {
            let file = split_name(path, no, count).ok_or_else(|| SculptError::Gguf {
                file: path.to_owned(),
                at: 0,
                what: format!(
                    "it is one of {count} files, whose names must end in -{:05}-of-{count:05}.gguf",
                    no + 1
                ),
            })?;
            let (shard, of_file, tensors) = read(&file, no as usize, files)?;
            let said = (of_file.unsigned("split.no")?, of_file.unsigned("split.count")?);
            if said != (Some(no), Some(count)) {
                let what =
                    format!("it says that it is number {:?} of {:?}, not {no} of {count}", said.0, said.1);
                return Err(SculptError::Gguf { file, at: 0, what });
            }
            if no == 0 {
                metadata = of_file;
            }
            shards.push(shard);
            all.extend(tensors);
        }
        if let Some(total) = total.filter(|&total| total != all.len() as u64) {
            let what = format!("its parts have {} tensors, it says {total}", all.len());
            return Err(SculptError::Gguf { file: path.to_owned(), at: 0, what });
        }
    }
    let mut by_name: BTreeMap<String, Tensor> = BTreeMap::new();
    for (name, tensor) in all {
        if let Some(first) = by_name.get(&name) {
            return Err(SculptError::Ambiguous {
                first: shards[first.shard].name.clone(),
                second: shards[tensor.shard].name.clone(),
                tensor: name,
            });
        }
        by_name.insert(name, tensor);
    }
    if let Some(experts) = experts {
        metadata.cut_dense(experts)?;
    }
    let mut warnings = Vec::new();
    let (config, tensors) = model::model(&metadata, &by_name, &mut warnings)?;
    let span = |tensor: &Tensor| {
        let at = At { shard: tensor.shard, offset: tensor.offset };
        Span { at, bytes: tensor.bytes }
    };
    let spans = by_name.iter().map(|(name, tensor)| (name.clone(), span(tensor))).collect();
    Ok(Opened { shards, config, tensors, spans, metadata, warnings })
}

/// A name without the number of a part, if it is that of one.
pub(crate) fn without_part(name: &str) -> Option<String> {
    let (stem, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = stem.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    (digits(count) && digits(number)).then(|| format!("{stem}-of-{count}.gguf"))
}

/// The name of part `no` of a split file, after the name of any of its parts.
fn split_name(path: &Path, no: u64, count: u64) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (stem, number) = stem.rsplit_once('-')?;
    let digits = number.len() == 5 && number.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| path.with_file_name(format!("{stem}-{:05}-of-{count:05}.gguf", no + 1)))
}

/// A tensor by its name.
type Named = (String, Tensor);

/// Reads one file.
fn read(
    path: &Path,
    shard: usize,
    files: &dyn WeightFiles,
) -> Result<(Shard, Metadata, Vec<Named>), SculptError> {
    let file = files.open(path).map_err(SculptError::io("open", path))?;
    let len = file.bytes().map_err(SculptError::io("read", path))?;
    let mut cursor = Cursor { path, file: &*file, len, at: 0, elements: 0, ahead: Vec::new(), ahead_at: 0 };
    let (metadata, tensors, data) = cursor.header(shard)?;
    let mut header = vec![0; data.min(len) as usize];
    file.read_exact_at(&mut header, 0).map_err(SculptError::io("read", path))?;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok((Shard { name, path: path.to_owned(), file, len, header, read: AtomicU64::new(0) }, metadata, tensors))
}

/// Reads a header from its start.
struct Cursor<'a> {
    path: &'a Path,
    file: &'a dyn WeightFile,
    len: u64,
    at: u64,
    /// Elements of arrays so far.
    elements: u64,
    ahead: Vec<u8>,
    ahead_at: u64,
}

impl Cursor<'_> {
    fn fail<T>(&self, at: u64, what: impl Into<String>) -> Result<T, SculptError> {
        let mut what = what.into();
        // A key of the file may be 64 KiB long.
        if let Some((end, _)) = what.char_indices().nth(MAX_MESSAGE) {
            what.replace_range(end.., "...");
        }
        Err(SculptError::Gguf { file: self.path.to_owned(), at, what })
    }

    /// The next bytes; no more than the file has.
    fn bytes(&mut self, n: u64, what: &str) -> Result<&[u8], SculptError> {
        let end = self.at.checked_add(n).filter(|&end| end <= self.len);
        let Some(end) = end else {
            return self.fail(self.at, format!("the file ends within {what} of {n} bytes"));
        };
        if end > MAX_HEADER {
            return self.fail(self.at, format!("{what}: a header of more than {MAX_HEADER} bytes"));
        }
        let held = self.ahead_at..self.ahead_at + self.ahead.len() as u64;
        if self.at < held.start || end > held.end {
            let size = n.max(AHEAD as u64).min(self.len - self.at) as usize;
            self.ahead.resize(size, 0);
            self.file.read_exact_at(&mut self.ahead, self.at).map_err(SculptError::io("read", self.path))?;
            self.ahead_at = self.at;
        }
        let from = (self.at - self.ahead_at) as usize;
        self.at = end;
        Ok(&self.ahead[from..from + n as usize])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], SculptError> {
        let bytes = self.bytes(N as u64, what)?;
        Ok(bytes.try_into().expect("as many as asked for"))
    }

    fn u32(&mut self, what: &str) -> Result<u32, SculptError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, SculptError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A number that must not be above `most`.
    fn count(&mut self, what: &str, most: u64) -> Result<u64, SculptError> {
        let at = self.at;
        match self.u64(what)? {
            n if n <= most => Ok(n),
            n => self.fail(at, format!("{n} {what}, at most {most} are possible")),
        }
    }

    fn text(&mut self, what: &str, most: u64) -> Result<String, SculptError> {
        let at = self.at;
        let n = self.u64(what)?;
        if n > most {
            return self.fail(at, format!("{what} of {n} bytes, at most {most} are possible"));
        }
        let bytes = self.bytes(n, what)?.to_vec();
        match String::from_utf8(bytes) {
            Ok(text) => Ok(text),
            Err(_) => self.fail(at, format!("{what} is no UTF-8")),
        }
    }

    fn header(&mut self, shard: usize) -> Result<(Metadata, Vec<Named>, u64), SculptError> {
        if self.array::<4>("magic")? != *MAGIC {
            return self.fail(0, "it does not begin with GGUF");
        }
        match self.u32("version")? {
            2 | 3 => {}
            version if matches!(version.swap_bytes(), 1..=3) => {
                return self.fail(4, "its numbers are big-endian, which this build does not read");
            }
            version => return self.fail(4, format!("version {version}, this build reads 2 and 3")),
        }
        let n_tensors = self.count("tensors", MAX_TENSORS)?;
        let n_entries = self.count("entries of metadata", MAX_ENTRIES)?;
        let mut values = BTreeMap::new();
        for _ in 0..n_entries {
            let at = self.at;
            let key = self.text("a key", MAX_KEY)?;
            let value = self.value(&key)?;
            if values.insert(key.clone(), value).is_some() {
                return self.fail(at, format!("`{key}` stands twice"));
            }
        }
        let metadata = Metadata { file: self.path.to_owned(), values };
        let alignment = match metadata.unsigned("general.alignment")? {
            None => 32,
            Some(n) if n.is_power_of_two() && (8..=1 << 20).contains(&n) => n,
            Some(_) => return Err(metadata.bad("general.alignment", "a power of two from 8 to 1048576")),
        };
        let mut tensors = Vec::new();
        let mut spans = Vec::new();
        for _ in 0..n_tensors {
            let (name, tensor, at) = self.tensor(shard)?;
            if !tensor.offset.is_multiple_of(alignment) {
                return self
                    .fail(at, format!("`{name}` begins at {}, no multiple of {alignment}", tensor.offset));
            }
            let end = tensor.offset.checked_add(tensor.bytes);
            let Some(end) = end else { return self.fail(at, format!("`{name}` begins too far on")) };
            spans.push((tensor.offset, end, name.clone(), at));
            tensors.push((name, tensor));
        }
        let data = self.at.next_multiple_of(alignment);
        spans.sort();
        for pair in spans.windows(2) {
            if pair[1].0 < pair[0].1 {
                return self.fail(pair[1].3, format!("`{}` overlaps `{}`", pair[1].2, pair[0].2));
            }
        }
        if let Some((_, end, name, at)) = spans.last()
            && data.checked_add(*end).is_none_or(|end| end > self.len)
        {
            return self.fail(
                *at,
                format!("`{name}` ends at byte {end} of the data, and the file is cut off before it"),
            );
        }
        for (_, tensor) in &mut tensors {
            // Until here from the start of the data.
            tensor.offset += data;
        }
        Ok((metadata, tensors, data))
    }

    /// Name, tensor, and where it is described.
    fn tensor(&mut self, shard: usize) -> Result<(String, Tensor, u64), SculptError> {
        let at = self.at;
        let name = self.text("a tensor's name", MAX_NAME)?;
        let n_dims = self.u32("dimensions")?;
        if !(1..=4).contains(&n_dims) {
            return self.fail(at, format!("`{name}` has {n_dims} dimensions"));
        }
        let mut shape = Vec::new();
        let mut weights = 1u64;
        for _ in 0..n_dims {
            let n = self.u64("a dimension")?;
            let product = weights.checked_mul(n).filter(|&w| n > 0 && w <= 1 << 48);
            let Some(product) = product else {
                return self.fail(at, format!("`{name}` has a dimension of {n}"));
            };
            weights = product;
            shape.push(n as usize);
        }
        // Innermost first in the file.
        shape.reverse();
        let kind = Type::of(self.u32("a type")?);
        let offset = self.u64("an offset")?;
        let Some((unit, unit_bytes)) = kind.unit() else {
            return self.fail(at, format!("`{name}` is of {}, which nobody knows", kind.name()));
        };
        let cols = shape.last().copied().unwrap_or(1);
        if !cols.is_multiple_of(unit) {
            return self.fail(at, format!("`{name}` has rows of {cols}, no whole blocks of {}", kind.name()));
        }
        let bytes = weights / unit as u64 * unit_bytes as u64;
        Ok((name, Tensor { shard, shape, kind, offset, bytes }, at))
    }

    fn value(&mut self, key: &str) -> Result<Value, SculptError> {
        let at = self.at;
        match self.u32(key)? {
            9 => {
                let ty = self.u32(key)?;
                let n = self.count(&format!("elements of `{key}`"), MAX_ELEMENTS)?;
                self.elements += n;
                if self.elements > MAX_ELEMENTS {
                    return self.fail(at, format!("arrays of more than {MAX_ELEMENTS} elements in all"));
                }
                if ty == 8 {
                    let mut texts = Vec::new();
                    for _ in 0..n {
                        texts.push(self.text(key, MAX_HEADER)?);
                    }
                    return Ok(Value::Texts(texts));
                }
                let mut numbers = Vec::new();
                for _ in 0..n {
                    numbers.push(match self.scalar(ty, key, at)? {
                        Value::Unsigned(n) => n as f64,
                        Value::Signed(n) => n as f64,
                        Value::Float(x) => x,
                        Value::Bool(b) => f64::from(u8::from(b)),
                        _ => return self.fail(at, format!("`{key}` is a list of lists")),
                    });
                }
                Ok(Value::Numbers(numbers))
            }
            ty => self.scalar(ty, key, at),
        }
    }

    fn scalar(&mut self, ty: u32, key: &str, at: u64) -> Result<Value, SculptError> {
        Ok(match ty {
            0 => Value::Unsigned(self.array::<1>(key)?[0].into()),
            1 => Value::Signed(i8::from_le_bytes(self.array(key)?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array(key)?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array(key)?).into()),
            4 => Value::Unsigned(self.u32(key)?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array(key)?).into()),
            6 => {
                let x = f32::from_le_bytes(self.array(key)?);
                Value::Float(x.to_string().parse().unwrap_or(f64::NAN))
            }
            7 => Value::Bool(self.array::<1>(key)?[0] != 0),
            8 => Value::Text(self.text(key, MAX_HEADER)?),
            10 => Value::Unsigned(self.u64(key)?),
            11 => Value::Signed(i64::from_le_bytes(self.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => return self.fail(at, format!("`{key}` is of the unknown type {other}")),
        })
    }
}

/// Metadata by key.
#[derive(Debug)]
pub(crate) struct Metadata {
    file: PathBuf,
    values: BTreeMap<String, Value>,
}

impl Metadata {
    fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    fn bad(&self, key: &str, expected: &str) -> SculptError {
        let found = match self.get(key) {
            None => "missing".to_owned(),
            Some(Value::Unsigned(n)) => n.to_string(),
            Some(Value::Signed(n)) => n.to_string(),
            Some(Value::Float(x)) => x.to_string(),
            Some(Value::Bool(b)) => b.to_string(),
            Some(Value::Text(text)) if text.chars().nth(MAX_SHOWN).is_none() => format!("{text:?}"),
            Some(other) => other.name().to_owned(),
        };
        let (file, key, expected) = (self.file.clone(), key.to_owned(), expected.to_owned());
        SculptError::Metadata { file, key, found, expected }
    }

    fn unsigned(&self, key: &str) -> Result<Option<u64>, SculptError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(n)) => Ok(Some(*n)),
            Some(Value::Signed(n)) if *n >= 0 => Ok(Some(*n as u64)),
            Some(_) => Err(self.bad(key, "a whole number")),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&str>, SculptError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.bad(key, "a text")),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, SculptError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.bad(key, "true or false")),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f64>, SculptError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(x)) if x.is_finite() => Ok(Some(*x)),
            Some(Value::Unsigned(n)) => Ok(Some(*n as f64)),
            Some(_) => Err(self.bad(key, "a number")),
        }
    }

    /// Says of a dense model that it has experts, all of which are used.
    fn cut_dense(&mut self, experts: usize) -> Result<(), SculptError> {
        const ARCH: &str = "llama";
        let architecture = "general.architecture";
        if self.text(architecture)? != Some(ARCH) {
            return Err(self.bad(architecture, ARCH));
        }
        let key = |name: &str| format!("{ARCH}.{name}");
        if self.unsigned(&key("expert_count"))?.unwrap_or(0) != 0 {
            return Err(self.bad(&key("expert_count"), "none: a dense model"));
        }
        let width = key("feed_forward_length");
        let whole = self.unsigned(&width)?.unwrap_or(0);
        if !experts.is_power_of_two() || !whole.is_multiple_of(experts as u64) || whole == 0 {
            return Err(self.bad(&width, &format!("a multiple of {experts}, and that a power of two")));
        }
        for (name, n) in [
            ("expert_count", experts as u64),
            ("expert_used_count", experts as u64),
            ("expert_feed_forward_length", whole / experts as u64),
        ] {
            self.values.insert(key(name), Value::Unsigned(n));
        }
        Ok(())
    }

    /// The files that travel with a vault, made of the metadata.
    pub fn side_files(
        &self,
        config: &Json,
        with_tokenizer: bool,
    ) -> Result<Vec<(&'static str, Vec<u8>)>, SculptError> {
        tokenizer::side_files(self, config, with_tokenizer)
    }
}

/// A text of the file as a message shows it: its beginning.
fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// A tensor, or the part of one that begins `skip` bytes on.
fn stored(tensor: &Tensor, shape: Vec<usize>, skip: u64, order: Order) -> Stored {
    let at = At { shard: tensor.shard, offset: tensor.offset + skip };
    let form = match tensor.kind {
        Type::Float(ty) => Ok(Form::Float { at, ty }),
        Type::Blocks(kind) => Ok(Form::Ggml { at, kind }),
        Type::Other(_) => Err(Unread::Type(tensor.kind.name())),
    };
    Stored { shape, shard: tensor.shard, form, order, change: Change::None }
}
