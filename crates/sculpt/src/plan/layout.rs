//! Where the tensors of a backbone lie in its file, and the runs of rows that are work items.

use std::collections::BTreeMap;

use smoe_format::backbone;
use smoe_format::spec::ModelSpec;
use smoe_format::tile::ROWS;
use smoe_format::{BackboneTensor, Encoding};

use crate::error::SculptError;
use crate::settings::{Role, Settings};
use crate::source::Source;

/// Weights of a run of rows, a work item's reading unit: 4 MiB as `f32`.
const RUN_WEIGHTS: usize = 1 << 20;
/// Data of the backbone file starts at a multiple of this, and so do its larger tensors: whole cache lines.
const BACKBONE_ALIGN: u64 = 64;

/// A backbone tensor with its place in the backbone file, and what its weights come from.
pub(crate) struct Placed<S = Source> {
    pub tensor: BackboneTensor,
    pub source: S,
    pub encoding: Encoding,
    pub rows: usize,
    pub cols: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The backbone file, laid out.
pub(crate) struct BackboneLayout<S = Source> {
    /// Everything before the data.
    pub header: Vec<u8>,
    /// In file order.
    pub tensors: Vec<Placed<S>>,
    pub file_len: u64,
}

impl<S> BackboneLayout<S> {
    /// Lays out tensors whose sources have the given types.
    pub fn new(
        spec: &ModelSpec,
        settings: &Settings,
        sources: impl IntoIterator<Item = (BackboneTensor, S, Encoding)>,
    ) -> Result<Self, SculptError> {
        let mut tensors = Vec::new();
        for (tensor, source, source_type) in sources {
            let encoding = settings.encoding(Role::Backbone(tensor), source_type);
            let (rows, cols) = tensor.shape(spec);
            let len = encoding.tensor_bytes(rows, cols).ok_or_else(|| SculptError::Config {
                key: tensor.to_string(),
                found: format!("{rows}x{cols}"),
                expected: "a tensor of a size that fits".to_owned(),
            })? as u64;
            tensors.push(Placed { tensor, source, encoding, rows, cols, offset: 0, len });
        }
        // Whole cache lines first, so that no odd length moves them off their alignment.
        tensors.sort_by_cached_key(|t| (!t.len.is_multiple_of(BACKBONE_ALIGN), t.tensor.to_string()));
        let mut offset = 0;
        let mut labels = BTreeMap::new();
        let mut entries = serde_json::Map::new();
        for t in &mut tensors {
            let (dtype, shape) = match t.encoding {
                Encoding::F32 => ("F32", None),
                Encoding::F16 => ("F16", None),
                Encoding::Bf16 => ("BF16", None),
                Encoding::Uniform(_) | Encoding::Table(_) => {
                    labels.insert(t.tensor.to_string(), backbone::label(t.encoding, t.rows, t.cols));
                    ("U8", Some(vec![t.len]))
                }
            };
            let matrix = || vec![t.rows as u64, t.cols as u64];
            let shape =
                shape.unwrap_or_else(|| if t.tensor.is_vector() { vec![t.cols as u64] } else { matrix() });
            let entry = serde_json::json!({
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [offset, offset + t.len],
            });
            entries.insert(t.tensor.to_string(), entry);
            t.offset = offset;
            offset += t.len;
        }
        let mut json = serde_json::Map::new();
        if !labels.is_empty() {
            json.insert("__metadata__".to_owned(), serde_json::json!(labels));
        }
        json.append(&mut entries);
        let mut text = serde_json::Value::Object(json).to_string();
        // The format allows spaces behind the JSON.
        while !(8 + text.len() as u64).is_multiple_of(BACKBONE_ALIGN) {
            text.push(' ');
        }
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend_from_slice(text.as_bytes());
        let data = header.len() as u64;
        for t in &mut tensors {
            t.offset += data;
        }
        Ok(Self { header, tensors, file_len: data + offset })
    }

    /// Number and run of every piece of work, in file order.
    pub fn runs(&self) -> impl Iterator<Item = (usize, usize)> {
        let tensors = self.tensors.iter().enumerate();
        tensors.flat_map(|(i, placed)| (0..runs(placed.rows, placed.cols).len()).map(move |run| (i, run)))
    }

    /// Where a run of rows is: first byte and length.
    pub fn place(&self, tensor: usize, run: usize) -> (u64, u64) {
        let t = &self.tensors[tensor];
        let step = run_rows(t.cols);
        let start = row_offset(t.encoding, run * step, t.cols);
        let end =
            if (run + 1) * step >= t.rows { t.len } else { row_offset(t.encoding, (run + 1) * step, t.cols) };
        (t.offset + start, end - start)
    }
}

/// Cuts a tensor into runs of whole blocks of rows.
pub(crate) fn runs(
    rows: usize,
    cols: usize,
) -> impl ExactSizeIterator<Item = std::ops::Range<usize>> + Clone {
    let step = run_rows(cols);
    (0..rows.div_ceil(step)).map(move |i| i * step..((i + 1) * step).min(rows))
}

pub(super) fn run_rows(cols: usize) -> usize {
    (RUN_WEIGHTS / (ROWS * cols.max(1))).max(1) * ROWS
}

/// First byte of row `row`, a multiple of 32, within its tensor.
pub(crate) fn row_offset(encoding: Encoding, row: usize, cols: usize) -> u64 {
    encoding.tensor_bytes(row, cols).expect("the whole tensor's length did not overflow") as u64
}
