//! `experts.smoe`: header, SARC, config block, tables, then one aligned record per expert.
//!
//! ```text
//! 0     header (64)                     fields of versions 1 and 2 at the same places
//! 64    SARC (128)
//! 192   extension (64)                  version 3 only: checksum, file length, table offsets
//! 256   encodings | layers | experts | config block (JSON) | zeros
//! data  record 0 | record 1 | ...       each a multiple of 16 KiB, no gaps, to the end of the file;
//!                                       layers that are built alike may have the same ones
//! ```
//!
//! All offsets are from the start of the file, all numbers little-endian. Everything before `data` is
//! covered by one crc32c, every record by its own: no byte of the file is unwatched.

use serde::{Deserialize, Serialize};

use crate::encoding::{Encoding, Uniform, Zero};
use crate::sarc::{SARC_BYTES, Sarc, Seen};
use crate::spec::ModelSpec;
use crate::table::Table;
use crate::wire::{Bytes, Put};
use crate::{Backbone, ExpertKey, FormatError, RECORD_ALIGN, entropy, original};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;
/// The version that this build writes.
pub const VERSION: u32 = 3;
pub(crate) const MAGIC: [u8; 8] = [0x53, 0x4d, 0x4f, 0x45, 0xde, 0xea, 0x00, 0x01];
const EXTENSION_MAGIC: &[u8; 4] = b"SMV3";
const EXTENSION_BYTES: usize = 64;
/// Feature flag: records are entropy-coded.
const CODED_FLAG: u32 = 1;
const EXTENSION_OFFSET: usize = HEADER_BYTES + SARC_BYTES;
const ENCODING_BYTES: usize = 32;
/// First byte of a table's levels in its entry.
const LEVELS_AT: usize = 8;
const LAYER_BYTES: usize = 112;
const EXPERT_BYTES: usize = 48;
/// Header and tables may not be larger: a quarter million experts fit.
const MAX_HEAD: u64 = 64 << 20;
/// A record may not be larger; its length is a u32 in the tables and one read for the system.
const MAX_RECORD: usize = 1 << 30;
/// Tensors of a record start at multiples of this: whole cache lines.
pub const TENSOR_ALIGN: usize = 64;

/// One of the three matrices of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Projection {
    /// `[d_expert, d_model]`.
    Gate,
    /// `[d_expert, d_model]`.
    Up,
    /// `[d_model, d_expert]`.
    Down,
}

impl Projection {
    /// In the order of a record.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// Rows and columns.
    #[must_use]
    pub const fn shape(self, spec: &ModelSpec) -> (usize, usize) {
        match self {
            Self::Gate | Self::Up => (spec.moe.d_expert, spec.d_model),
            Self::Down => (spec.d_model, spec.moe.d_expert),
        }
    }

    /// Its name in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate",
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

/// A tensor inside the records of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its encoding.
    pub encoding: Encoding,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// First byte within the record, a multiple of [`TENSOR_ALIGN`].
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// How the records of one MoE layer are built; all experts of a layer alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerTable {
    /// Index of the layer.
    pub layer: u32,
    /// Experts of the layer.
    pub n_experts: u32,
    /// Bytes of a record in memory, a multiple of [`RECORD_ALIGN`].
    pub record_len: usize,
    /// Gate, up, down.
    pub tensors: [TensorEntry; 3],
}

impl LayerTable {
    /// The table of a layer whose projections have the given encodings.
    ///
    /// # Errors
    /// If a size overflows.
    pub fn new(layer: u32, spec: &ModelSpec, encodings: [Encoding; 3]) -> Result<Self, FormatError> {
        let mut end = 0usize;
        let mut tensors = Vec::with_capacity(3);
        for (projection, encoding) in Projection::ALL.into_iter().zip(encodings) {
            let (rows, cols) = projection.shape(spec);
            let len = encoding.tensor_bytes(rows, cols).filter(|len| *len < 1 << 40).ok_or_else(|| {
                FormatError::Config { what: format!("an expert of layer {layer} is too large") }
            })?;
            tensors.push(TensorEntry { encoding, rows, cols, offset: end, len });
            end = (end + len).next_multiple_of(TENSOR_ALIGN);
        }
        if end > MAX_RECORD {
            return Err(FormatError::Config { what: format!("an expert of layer {layer} is too large") });
        }
        Ok(Self {
            layer,
            n_experts: spec.moe.n_experts as u32,
            record_len: end.next_multiple_of(RECORD_ALIGN),
            tensors: [tensors[0], tensors[1], tensors[2]],
        })
    }

    /// True if records of the other layer are built alike.
    fn is_like(&self, other: &Self) -> bool {
        (self.n_experts, self.record_len, self.tensors) == (other.n_experts, other.record_len, other.tensors)
    }

    /// Bytes that tensors occupy; the rest of the record is padding.
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        self.tensors[2].offset + self.tensors[2].len
    }
}

/// Where an expert's record lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordEntry {
    /// The expert.
    pub key: ExpertKey,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes on disk.
    pub len: u64,
    /// Those up to the end of the last tensor; the rest is padding.
    pub used: u64,
    /// [`crate::record_crc`]; the original's files have none.
    pub crc32c: Option<u32>,
}

/// A file of the vault directory besides `experts.smoe`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// crc32c of its bytes, eight hexadecimal digits.
    pub crc32c: String,
}

impl FileEntry {
    /// An entry for a file of `bytes` bytes with checksum `crc32c`.
    #[must_use]
    pub fn new(name: &str, bytes: u64, crc32c: u32) -> Self {
        // Eight digits always, so that the head's length does not depend on the value.
        Self { name: name.to_owned(), bytes, crc32c: format!("{crc32c:08x}") }
    }
}

/// Where a vault came from: enough to tell whether a sculpt would make the same one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Hash of the checkpoint's config, tensor headers and file sizes.
    pub fingerprint: String,
    /// The sculptor's settings that decide the bytes.
    pub settings: String,
}

/// The config block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The model.
    pub spec: ModelSpec,
    /// Where it came from.
    pub source: Provenance,
    /// Every other file of the vault directory.
    pub files: Vec<FileEntry>,
}

/// What the header says of the model.
#[derive(Clone, Debug, PartialEq)]
pub enum Architecture {
    /// Version 3: everything.
    Manifest(Box<Manifest>),
    /// Versions 1 and 2: a SARC block (version 2), and what the header shows.
    Original {
        /// The architecture block; version 1 has none.
        sarc: Option<Sarc>,
        /// What header and table show. `tied_head` is false until the backbone is read.
        seen: Seen,
    },
}

/// The head of an expert file: everything before the records.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertFile {
    /// 1, 2 or 3.
    pub version: u32,
    /// The model.
    pub architecture: Architecture,
    /// MoE layers, ascending.
    pub layers: Vec<LayerTable>,
    /// Every expert, by layer and then expert.
    pub records: Vec<RecordEntry>,
    /// Row-major tensors of the original's records, parallel to `records`; empty in version 3.
    pub original: Vec<original::Descriptors>,
    /// Records are entropy-coded ([`crate::entropy`]): each has a length of its own, and is decoded into what the
    /// layer table describes.
    pub coded: bool,
    /// First byte of the first record.
    pub data_offset: u64,
    /// Length that the file must have.
    pub file_len: u64,
}

impl ExpertFile {
    /// Bytes before the records, from the first [`HEADER_BYTES`] of the file.
    ///
    /// # Errors
    /// If this is no vault, of an unknown version, or the length is absurd.
    pub fn head_len(header: &[u8], file_len: u64) -> Result<u64, FormatError> {
        let b = Bytes::at(header, "vault header", 0, HEADER_BYTES as u64)?;
        b.magic(&MAGIC)?;
        if !(1..=VERSION).contains(&b.u32(8)) {
            return Err(FormatError::Version { found: b.u32(8) });
        }
        let data_offset = b.u64(32);
        if data_offset > file_len {
            let needed = data_offset;
            return Err(FormatError::Truncated {
                what: "header and tables",
                offset: 0,
                needed,
                available: file_len,
            });
        }
        if !(HEADER_BYTES as u64..=MAX_HEAD).contains(&data_offset)
            || !data_offset.is_multiple_of(RECORD_ALIGN as u64)
        {
            let rule = format!("a multiple of {RECORD_ALIGN} up to {MAX_HEAD}");
            return Err(b.bad("data offset", data_offset, rule));
        }
        Ok(data_offset)
    }

    /// Reads the head: the first [`Self::head_len`] bytes of a file of `file_len` bytes.
    ///
    /// # Errors
    /// If any of it is damaged or contradicts itself.
    pub fn parse(head: &[u8], file_len: u64) -> Result<Self, FormatError> {
        let head_len = Self::head_len(head, file_len)?;
        let header = Bytes::at(head, "header and tables", 0, head_len)?;
        if header.u32(8) < VERSION {
            return original::parse(header.slice(), file_len);
        }
        parse_v3(header.slice(), file_len)
    }

    /// Lays out a version 3 file: sizes and offsets of everything, checksums still zero.
    ///
    /// # Errors
    /// If a size overflows.
    pub fn plan(manifest: Manifest, encodings: impl Fn(u32) -> [Encoding; 3]) -> Result<Self, FormatError> {
        Self::plan_shared(manifest, encodings, usize::MAX)
    }

    /// The same with the records of `unique` layers only: MoE layer number i, dense ones not counted, has
    /// those of MoE layer number i mod `unique`. For vaults that are made to be measured.
    ///
    /// # Errors
    /// If a size overflows, or layers that are to share are coded differently.
    pub fn plan_shared(
        manifest: Manifest,
        encodings: impl Fn(u32) -> [Encoding; 3],
        unique: usize,
    ) -> Result<Self, FormatError> {
        let spec = &manifest.spec;
        let layers = spec
            .moe_layers()
            .map(|layer| LayerTable::new(layer as u32, spec, encodings(layer as u32)))
            .collect::<Result<Vec<_>, _>>()?;
        let records = layers
            .iter()
            .flat_map(|table| {
                (0..table.n_experts).map(|expert| RecordEntry {
                    key: ExpertKey { layer: table.layer, expert },
                    offset: 0,
                    len: table.record_len as u64,
                    used: table.used_bytes() as u64,
                    crc32c: Some(0),
                })
            })
            .collect();
        let mut file = Self {
            version: VERSION,
            architecture: Architecture::Manifest(Box::new(manifest)),
            layers,
            records,
            original: Vec::new(),
            coded: false,
            data_offset: 0,
            file_len: 0,
        };
        file.data_offset = file.head_bytes().len() as u64;
        let mut starts = Vec::with_capacity(file.layers.len());
        let mut records = file.records.iter_mut();
        file.file_len = file.data_offset;
        for (i, table) in file.layers.iter().enumerate() {
            let twin = i % unique.max(1);
            let shared = twin < i;
            if shared && !table.is_like(&file.layers[twin]) {
                let what = format!("layer {} cannot have the records of another encoding", table.layer);
                return Err(FormatError::Config { what });
            }
            let mut offset = if shared { starts[twin] } else { file.file_len };
            starts.push(offset);
            for record in records.by_ref().take(table.n_experts as usize) {
                record.offset = offset;
                offset += record.len;
            }
            file.file_len = file.file_len.max(offset);
        }
        Ok(file)
    }

    /// Makes it a file of entropy-coded records, of `used` bytes each, padding not counted: in the order of
    /// `records`, which lie without gaps as those of a plan do.
    ///
    /// # Panics
    /// If there are not as many lengths as records.
    pub fn set_coded(&mut self, used: &[u64]) {
        assert_eq!(used.len(), self.records.len(), "lengths of records");
        self.coded = true;
        let mut end = self.data_offset;
        for (record, &used) in self.records.iter_mut().zip(used) {
            record.offset = end;
            record.used = used;
            record.len = used.next_multiple_of(RECORD_ALIGN as u64);
            end += record.len;
        }
        self.file_len = end;
    }

    /// Bytes of the longest record on disk.
    #[must_use]
    pub fn longest_record(&self) -> u64 {
        self.records.iter().map(|record| record.len).max().unwrap_or(0)
    }

    /// The manifest; the original's files have none.
    #[must_use]
    pub fn manifest(&self) -> Option<&Manifest> {
        match &self.architecture {
            Architecture::Manifest(manifest) => Some(manifest),
            Architecture::Original { .. } => None,
        }
    }

    /// The model. What the original's files leave open is read off their backbone.
    ///
    /// # Errors
    /// For version 1, which names no architecture; and if the block is out of bounds.
    pub fn spec(&self, backbone: &Backbone) -> Result<ModelSpec, FormatError> {
        match &self.architecture {
            Architecture::Manifest(manifest) => Ok(manifest.spec.clone()),
            Architecture::Original { sarc: None, .. } => Err(FormatError::Config {
                what: "a version 1 file does not name its architecture; put the checkpoint's config.json beside it"
                    .to_owned(),
            }),
            Architecture::Original { sarc: Some(sarc), seen } => {
                let tied_head = backbone.get(original::HEAD).is_none();
                let spec = sarc.to_spec(&Seen { tied_head, ..seen.clone() });
                spec.validate()?;
                Ok(spec)
            }
        }
    }

    /// Checks that every MoE layer of `spec`, and no other, has its experts, in its shapes.
    ///
    /// # Errors
    /// Names the layers of the table.
    pub fn check(&self, spec: &ModelSpec) -> Result<(), FormatError> {
        let fits = |table: &LayerTable| {
            let mut shapes = Projection::ALL.iter().zip(&table.tensors);
            table.n_experts as usize == spec.moe.n_experts
                && shapes.all(|(p, t)| p.shape(spec) == (t.rows, t.cols))
        };
        let listed: Vec<usize> = self.layers.iter().map(|table| table.layer as usize).collect();
        if self.layers.iter().all(fits) && listed == spec.moe_layers().collect::<Vec<_>>() {
            return Ok(());
        }
        let what = format!("the experts of layers {listed:?} are not those of the model");
        Err(FormatError::Config { what })
    }

    /// Writes the head of a version 3 file, checksum included. Its length does not depend on checksums.
    ///
    /// # Panics
    /// On an original's head, which is never written.
    #[must_use]
    pub fn head_bytes(&self) -> Vec<u8> {
        let Architecture::Manifest(manifest) = &self.architecture else {
            panic!("only version 3 heads are written")
        };
        let spec = &manifest.spec;
        let mut encodings: Vec<Encoding> = Vec::new();
        for tensor in self.layers.iter().flat_map(|table| &table.tensors) {
            if !encodings.contains(&tensor.encoding) {
                encodings.push(tensor.encoding);
            }
        }
        let encodings_offset = EXTENSION_OFFSET + EXTENSION_BYTES;
        let layers_offset = encodings_offset + encodings.len() * ENCODING_BYTES;
        let experts_offset = layers_offset + self.layers.len() * LAYER_BYTES;
        let config_offset = experts_offset + self.records.len() * EXPERT_BYTES;
        let config = serde_json::to_vec(manifest).unwrap_or_default();
        let (bits, group) = match encodings.first() {
            Some(Encoding::F32) => (32, 0),
            Some(Encoding::F16 | Encoding::Bf16) | None => (16, 0),
            Some(coded) => coded.tiles().map_or((0, 0), |t| (u32::from(t.bits()), t.group() as u32)),
        };

        let mut out = Vec::with_capacity(config_offset + config.len() + RECORD_ALIGN);
        out.put(&MAGIC);
        out.put_u32(VERSION);
        out.put_u32(self.layers.len() as u32);
        out.put_u32(spec.moe.n_experts as u32);
        out.put_u32(self.records.len() as u32);
        out.put_u64(experts_offset as u64);
        out.put_u64((config_offset + config.len()).next_multiple_of(RECORD_ALIGN) as u64);
        for value in [group, bits, spec.d_model as u32, spec.vocab_size as u32, spec.moe.d_expert as u32] {
            out.put_u32(value);
        }
        out.put_u32(HEADER_BYTES as u32);
        out.put(&Sarc::from_spec(spec).to_bytes());

        out.put(EXTENSION_MAGIC);
        out.put_u32(EXTENSION_BYTES as u32);
        out.put_u32(if self.coded { CODED_FLAG } else { 0 });
        out.put_u32(0);
        out.put_u64(self.file_len);
        for value in [
            config_offset as u32,
            config.len() as u32,
            encodings_offset as u32,
            encodings.len() as u32,
            layers_offset as u32,
        ] {
            out.put_u32(value);
        }
        out.resize(encodings_offset, 0);

        for encoding in &encodings {
            out.put(&encoding_bytes(*encoding));
        }
        for table in &self.layers {
            for value in [table.layer, table.n_experts, table.record_len as u32, 0] {
                out.put_u32(value);
            }
            for t in &table.tensors {
                let id = encodings.iter().position(|e| *e == t.encoding).unwrap_or(0);
                for value in [id as u32, t.rows as u32, t.cols as u32, 0] {
                    out.put_u32(value);
                }
                out.put_u64(t.offset as u64);
                out.put_u64(t.len as u64);
            }
        }
        for record in &self.records {
            out.put_u32(record.key.layer);
            out.put_u32(record.key.expert);
            out.put_u64(record.offset);
            out.put_u64(record.used);
            out.put_u64(record.len);
            out.put_u32(record.crc32c.unwrap_or(0));
            out.put_u32(u32::MAX);
            out.put_u64(0);
        }
        out.put(&config);
        out.resize(out.len().next_multiple_of(RECORD_ALIGN), 0);
        let crc = crate::crc::crc32c(&out);
        out[EXTENSION_OFFSET + 12..EXTENSION_OFFSET + 16].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// The table of a layer.
    #[must_use]
    pub fn table(&self, layer: u32) -> Option<&LayerTable> {
        self.layers.binary_search_by_key(&layer, |table| table.layer).ok().map(|i| &self.layers[i])
    }
}

fn encoding_bytes(encoding: Encoding) -> [u8; ENCODING_BYTES] {
    let mut b = [0; ENCODING_BYTES];
    match encoding {
        Encoding::F32 => b[0] = 0,
        Encoding::F16 => b[0] = 1,
        Encoding::Bf16 => b[0] = 2,
        Encoding::Uniform(u) => {
            b[0] = 3;
            b[3] = if u.zero() == Zero::Affine { 2 } else { 0 };
        }
        Encoding::Table(table) => {
            b[0] = 4;
            let levels = &mut b[LEVELS_AT..LEVELS_AT + table.register().len()];
            levels.copy_from_slice(&table.register().map(i8::cast_unsigned));
        }
    }
    if let Some(tiles) = encoding.tiles() {
        b[1] = tiles.bits();
        b[2] = 1;
        b[4..6].copy_from_slice(&(tiles.group() as u16).to_le_bytes());
        b[6..8].copy_from_slice(&1u16.to_le_bytes());
    }
    b
}

fn parse_encoding(b: Bytes<'_>) -> Result<Encoding, FormatError> {
    // Decide by writing the candidate again: a reserved field that is set is then a mismatch, not a guess.
    let candidate = match b.u8(0) {
        0 => Some(Encoding::F32),
        1 => Some(Encoding::F16),
        2 => Some(Encoding::Bf16),
        3 => {
            let zero = if b.u8(3) == 2 { Zero::Affine } else { Zero::Symmetric };
            Uniform::new(b.u8(1), usize::from(b.u16(4)), zero).map(Encoding::Uniform)
        }
        4 => {
            let n = 1usize << b.u8(1).min(4);
            let levels: Vec<i8> =
                b.slice()[LEVELS_AT..LEVELS_AT + n].iter().map(|l| l.cast_signed()).collect();
            Table::new(b.u8(1), usize::from(b.u16(4)), &levels).map(Encoding::Table)
        }
        _ => None,
    };
    candidate
        .filter(|encoding| encoding_bytes(*encoding)[..] == *b.slice())
        .ok_or_else(|| b.bad("encoding", format!("{:02x?}", b.slice()), "this build does not know it"))
}

fn parse_v3(head: &[u8], file_len: u64) -> Result<ExpertFile, FormatError> {
    let header = Bytes::at(head, "vault header", 0, HEADER_BYTES as u64)?;
    let ext = Bytes::at(head, "extension block", EXTENSION_OFFSET as u64, EXTENSION_BYTES as u64)?;
    ext.magic(EXTENSION_MAGIC)?;
    let expected = ext.u32(12);
    let crc_at = EXTENSION_OFFSET + 12;
    let found = crate::crc::crc32c_append(
        crate::crc::crc32c_append(crate::crc::crc32c(&head[..crc_at]), &[0; 4]),
        &head[crc_at + 4..],
    );
    if found != expected {
        return Err(FormatError::HeadChecksum { expected, found });
    }
    if ext.u32(8) & !CODED_FLAG != 0 {
        return Err(ext.bad("feature flags", ext.u32(8), "this build knows bit 0 only"));
    }
    let coded = ext.u32(8) & CODED_FLAG != 0;
    if ext.u32(4) as usize != EXTENSION_BYTES {
        return Err(ext.bad("size of the extension block", ext.u32(4), "64 is known"));
    }
    ext.zero(44..EXTENSION_BYTES)?;
    if ext.u64(16) != file_len {
        return Err(FormatError::Truncated {
            what: "expert file",
            offset: 0,
            needed: ext.u64(16),
            available: file_len,
        });
    }

    let config = Bytes::at(head, "config block", u64::from(ext.u32(24)), u64::from(ext.u32(28)))?;
    let manifest: Manifest =
        serde_json::from_slice(config.slice()).map_err(|e| FormatError::Config { what: e.to_string() })?;
    let spec = &manifest.spec;
    spec.validate()?;
    let sarc = Sarc::parse(head, u64::from(header.u32(60)))?;
    if header.u32(60) as usize != HEADER_BYTES || sarc != Sarc::from_spec(spec) {
        return Err(FormatError::Config { what: "it contradicts the SARC block".to_owned() });
    }
    let shape = [spec.moe.n_experts, spec.d_model, spec.vocab_size, spec.moe.d_expert].map(|n| n as u32);
    if [16, 48, 52, 56].map(|at| header.u32(at)) != shape {
        return Err(FormatError::Config { what: "it contradicts the header".to_owned() });
    }

    let encodings_at = u64::from(ext.u32(32));
    let encodings = (0..u64::from(ext.u32(36)))
        .map(|i| {
            let at = encodings_at + i * ENCODING_BYTES as u64;
            parse_encoding(Bytes::at(head, "encoding table", at, ENCODING_BYTES as u64)?)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let layers = parse_layers(head, u64::from(ext.u32(40)), spec, &encodings)?;
    let data_offset = header.u64(32);
    let total = layers.iter().map(|table| table.n_experts).sum::<u32>();
    if header.u32(12) as usize != layers.len() || header.u32(20) != total {
        return Err(header.bad("expert count", header.u32(20), format!("the layer table has {total}")));
    }
    let (records, end) = parse_records(head, header.u64(24), data_offset, &layers, coded)?;
    if end != file_len {
        return Err(header.bad("end of the records", end, format!("the file ends at {file_len}")));
    }
    Ok(ExpertFile {
        version: VERSION,
        architecture: Architecture::Manifest(Box::new(manifest)),
        layers,
        records,
        original: Vec::new(),
        coded,
        data_offset,
        file_len,
    })
}

fn parse_layers(
    head: &[u8],
    offset: u64,
    spec: &ModelSpec,
    encodings: &[Encoding],
) -> Result<Vec<LayerTable>, FormatError> {
    spec.moe_layers()
        .enumerate()
        .map(|(i, layer)| {
            let at = offset + (i * LAYER_BYTES) as u64;
            let b = Bytes::at(head, "layer table", at, LAYER_BYTES as u64)?;
            let mut kinds = [Encoding::F32; 3];
            for (p, kind) in kinds.iter_mut().enumerate() {
                let id = b.u32(16 + 32 * p) as usize;
                *kind =
                    *encodings.get(id).ok_or_else(|| b.bad("encoding id", id, "in the encoding table"))?;
            }
            b.zero(12..16)?;
            (0..3).try_for_each(|p| b.zero(16 + 32 * p + 12..16 + 32 * p + 16))?;
            // The table says again what follows from spec and encodings; both must agree.
            let table = LayerTable::new(layer as u32, spec, kinds)?;
            let tensors = table.tensors.iter().enumerate().all(|(p, t)| {
                let at = 16 + 32 * p;
                (b.u32(at + 4) as usize, b.u32(at + 8) as usize) == (t.rows, t.cols)
                    && (b.u64(at + 16), b.u64(at + 24)) == (t.offset as u64, t.len as u64)
            });
            let found = (b.u32(0), b.u32(4), b.u32(8) as usize);
            if !tensors || found != (table.layer, table.n_experts, table.record_len) {
                return Err(b.bad("layer entry", format!("{found:?}"), format!("{table:?}")));
            }
            Ok(table)
        })
        .collect()
}

/// The records, and where the last of them in the file ends.
fn parse_records(
    head: &[u8],
    offset: u64,
    data_offset: u64,
    layers: &[LayerTable],
    coded: bool,
) -> Result<(Vec<RecordEntry>, u64), FormatError> {
    let mut end = data_offset;
    let mut records: Vec<RecordEntry> = Vec::new();
    // Where each layer's records start. A layer has records of its own, behind all before, or all of those of
    // an earlier layer that is built alike: never a part of them, and nothing between.
    let mut starts: Vec<(u64, usize)> = Vec::with_capacity(layers.len());
    for (i, table) in layers.iter().enumerate() {
        let first = Bytes::at(
            head,
            "expert table",
            offset + (records.len() * EXPERT_BYTES) as u64,
            EXPERT_BYTES as u64,
        )?;
        let start = first.u64(8);
        let twin = (0..i).find(|&twin| starts[twin].0 == start && layers[twin].is_like(table));
        let twin = twin.map(|twin| starts[twin].1);
        let mut next = if twin.is_some() { start } else { end };
        starts.push((next, records.len()));
        for expert in 0..table.n_experts {
            let key = ExpertKey { layer: table.layer, expert };
            let at = offset + (records.len() * EXPERT_BYTES) as u64;
            let b = Bytes::at(head, "expert table", at, EXPERT_BYTES as u64)?;
            let found = ExpertKey { layer: b.u32(0), expert: b.u32(4) };
            if found != key {
                return Err(FormatError::Record { key, what: format!("its entry is of {found}") });
            }
            let (start, used, len) = (b.u64(8), b.u64(16), b.u64(24));
            // A record that is not coded has its layer's length; one that is has its own, within bounds, and that
            // of the record that it shares.
            let (used_there, len_there) = match twin.map(|first| records[first + expert as usize]) {
                Some(record) => (record.used, record.len),
                None if coded => {
                    let most = entropy::max_record_len(table) as u64;
                    let used = used.clamp(entropy::RECORD_HEAD_BYTES as u64, most);
                    (used, used.next_multiple_of(RECORD_ALIGN as u64))
                }
                None => (table.used_bytes() as u64, table.record_len as u64),
            };
            if start != next || len != len_there {
                return Err(FormatError::Record {
                    key,
                    what: format!("record at {start}, {len} bytes; expected {next}, {len_there}"),
                });
            }
            if b.u32(36) != u32::MAX {
                return Err(FormatError::Record { key, what: "has an encoding of its own".to_owned() });
            }
            if used != used_there {
                return Err(FormatError::Record { key, what: format!("{used} bytes are used") });
            }
            b.zero(40..EXPERT_BYTES)?;
            records.push(RecordEntry { key, offset: start, len, used, crc32c: Some(b.u32(32)) });
            next = start.saturating_add(len);
        }
        end = end.max(next);
    }
    Ok((records, end))
}
