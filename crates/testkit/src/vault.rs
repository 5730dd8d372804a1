//! Writes small vaults (version 3) from any [`Weights`], in memory and without a sculptor, so that store and
//! engine can be tested before and apart from it.

use std::collections::HashMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use smoe_format::backbone::label;
use smoe_format::entropy::decode_record;
use smoe_format::expert_file::{Architecture, FileEntry, Manifest, Provenance};
use smoe_format::half::{bf16_to_f32, f32_to_bf16};
use smoe_format::{
    BackboneTensor, Encoding, ExpertFile, ModelSpec, Projection, Table, file_name, record_crc,
};

use crate::weights::Weights;
use crate::{read, write};

/// The encoding of a label, level tables included, which `str::parse` refuses: those that have a name, and made up
/// levels in no order for `t2/64` and the like.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn encoding(label: &str) -> Encoding {
    if let Ok(encoding) = label.parse() {
        return encoding;
    }
    let levels = |bits: u8| (0..1 << bits).map(|code| (code * 89 + 40) as u8 as i8).collect::<Vec<i8>>();
    let (kind, group) = label.split_once('/').expect(label);
    let table = match kind {
        "mxfp4" => Some(Table::MXFP4),
        "iq4_nl" => Some(Table::IQ4_NL),
        "t2" => Table::new(2, 64, &levels(2)),
        "t3" => Table::new(3, 64, &levels(3)),
        "t4" => Table::new(4, 64, &levels(4)),
        _ => None,
    };
    Encoding::Table(table.and_then(|table| table.with_group(group.parse().ok()?)).expect(label))
}

/// Writes a vault into `dir`, which must exist.
///
/// `experts` gives the encodings of gate, up and down of a layer, `backbone` those of the backbone's matrices.
/// Norms and routers are bf16 where that is exact, else f32. `side_files` are further files: name and bytes.
///
/// # Panics
/// If a file cannot be written or a weight is no finite `f32`.
pub fn write_vault(
    dir: &Path,
    spec: &ModelSpec,
    weights: &impl Weights,
    experts: impl Fn(u32) -> [Encoding; 3],
    backbone: impl Fn(BackboneTensor) -> Encoding,
    side_files: &[(&str, Vec<u8>)],
) {
    let backbone = backbone_bytes(spec, weights, backbone);
    write(&dir.join(file_name::BACKBONE), &backbone);
    let entry =
        |name: &str, bytes: &[u8]| FileEntry::new(name, bytes.len() as u64, smoe_format::crc::crc32c(bytes));
    let mut files = vec![entry(file_name::BACKBONE, &backbone)];
    for (name, bytes) in side_files {
        write(&dir.join(name), bytes);
        files.push(entry(name, bytes));
    }

    let source = Provenance { fingerprint: "testkit".to_owned(), settings: "testkit".to_owned() };
    let manifest = Manifest { spec: spec.clone(), source, files };
    let mut file = ExpertFile::plan(manifest, experts).expect("a small model");
    let mut records = Vec::new();
    for i in 0..file.records.len() {
        let key = file.records[i].key;
        let table = file.table(key.layer).expect("a planned layer");
        let mut record = vec![0; table.record_len];
        for (projection, tensor) in Projection::ALL.into_iter().zip(table.tensors) {
            let values = narrow(&weights.expert(key, projection));
            tensor.encoding.encode(
                &values,
                tensor.cols,
                &mut record[tensor.offset..tensor.offset + tensor.len],
            );
        }
        file.records[i].crc32c = Some(record_crc(key, &record));
        records.extend(record);
    }
    debug_assert!(matches!(file.architecture, Architecture::Manifest(_)));
    let mut bytes = file.head_bytes();
    bytes.extend(records);
    assert_eq!(bytes.len() as u64, file.file_len, "length of the expert file");
    write(&dir.join(file_name::EXPERTS), &bytes);
}

/// Writes the entropy-coded vault in `from` into `to`, which must exist, with the same codes in records that lie on
/// disk as they do in memory.
///
/// # Panics
/// If a file cannot be read or written, or `from` is no such vault.
pub fn entropy_decode(from: &Path, to: &Path) {
    let bytes = read(&from.join(file_name::EXPERTS));
    let coded = ExpertFile::parse(&bytes, bytes.len() as u64).expect("a vault");
    assert!(coded.coded, "entropy-coded");
    let manifest = coded.manifest().expect("of version 3").clone();
    for name in manifest.files.iter().map(|entry| &entry.name) {
        write(&to.join(name), &read(&from.join(name)));
    }
    let table = |layer: u32| coded.table(layer).expect("a planned layer");
    let mut file =
        ExpertFile::plan(manifest, |layer| table(layer).tensors.map(|t| t.encoding)).expect("as before");
    let mut records = Vec::new();
    for (record, coded) in file.records.iter_mut().zip(&coded.records) {
        let raw = &bytes[coded.offset as usize..][..coded.len as usize];
        let mut plain = vec![0; record.len as usize];
        decode_record(raw, raw.len(), table(record.key.layer), &mut plain, |block| block.decode())
            .expect("whole");
        record.crc32c = Some(record_crc(record.key, &plain));
        records.extend(plain);
    }
    let mut bytes = file.head_bytes();
    bytes.extend(records);
    write(&to.join(file_name::EXPERTS), &bytes);
}

fn backbone_bytes(
    spec: &ModelSpec,
    weights: &impl Weights,
    encoding_of: impl Fn(BackboneTensor) -> Encoding,
) -> Vec<u8> {
    let mut labels = HashMap::new();
    let mut stored = Vec::new();
    for tensor in BackboneTensor::all(spec) {
        let (rows, cols) = tensor.shape(spec);
        let values = narrow(&weights.backbone(tensor));
        let encoding = if tensor.may_be_coded() {
            encoding_of(tensor)
        } else if values.iter().all(|&v| bf16_to_f32(f32_to_bf16(v)) == v) {
            Encoding::Bf16
        } else {
            Encoding::F32
        };
        let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).expect("a small model")];
        encoding.encode(&values, cols, &mut bytes);
        let dtype = match encoding {
            Encoding::F32 => Dtype::F32,
            Encoding::F16 => Dtype::F16,
            Encoding::Bf16 => Dtype::BF16,
            Encoding::Uniform(_) | Encoding::Table(_) => Dtype::U8,
        };
        let shape = match (encoding.is_float(), tensor.is_vector()) {
            (false, _) => vec![bytes.len()],
            (true, true) => vec![cols],
            (true, false) => vec![rows, cols],
        };
        if !encoding.is_float() {
            labels.insert(tensor.to_string(), label(encoding, rows, cols));
        }
        stored.push((tensor.to_string(), dtype, shape, bytes));
    }
    let views = stored.iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).expect("shape and bytes agree"))
    });
    safetensors::serialize(views, Some(labels)).expect("distinct names")
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values
        .iter()
        .map(|&v| {
            let narrow = v as f32;
            assert!(narrow.is_finite(), "a weight is {v}");
            narrow
        })
        .collect()
}
