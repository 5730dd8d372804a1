//! The head of a version 3 file: written, and read with everything checked.

use super::{Architecture, ExpertFile, HEADER_BYTES, LayerTable, MAGIC, Manifest, RecordEntry, VERSION};
use crate::encoding::{Encoding, Uniform, Zero};
use crate::sarc::{SARC_BYTES, Sarc};
use crate::spec::ModelSpec;
use crate::table::Table;
use crate::wire::{Bytes, Put};
use crate::{ExpertKey, FormatError, RECORD_ALIGN, entropy};

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

impl ExpertFile {
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

pub(super) fn parse_v3(head: &[u8], file_len: u64) -> Result<ExpertFile, FormatError> {
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
