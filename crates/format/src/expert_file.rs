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

mod head;

use serde::{Deserialize, Serialize};

use crate::encoding::Encoding;
use crate::sarc::{Sarc, Seen};
use crate::spec::ModelSpec;
use crate::wire::Bytes;
use crate::{Backbone, ExpertKey, FormatError, RECORD_ALIGN, original};
use head::parse_v3;

/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;
/// The version that this build writes.
pub const VERSION: u32 = 3;
pub(crate) const MAGIC: [u8; 8] = [0x53, 0x4d, 0x4f, 0x45, 0xde, 0xea, 0x00, 0x01];
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

    /// The table of a layer.
    #[must_use]
    pub fn table(&self, layer: u32) -> Option<&LayerTable> {
        self.layers.binary_search_by_key(&layer, |table| table.layer).ok().map(|i| &self.layers[i])
    }
}
