//! The original's files: versions 1 and 2, row-major codes, the checkpoint's own tensor names.
//!
//! They are read, never written. A record's codes are re-tiled on their way into a slot ([`retile`]), so
//! that from there on an original vault is a version 3 vault of symmetric codes.

use crate::backbone::{BackboneTensor, LayerPart};
use crate::encoding::{Encoding, Uniform, Zero};
use crate::expert_file::{Architecture, ExpertFile, LayerTable, Projection, RecordEntry, TensorEntry};
use crate::sarc::{Sarc, Seen};
use crate::tile::ROWS;
use crate::wire::Bytes;
use crate::{ExpertKey, FormatError, ModelSpec, RECORD_ALIGN};

/// The ending of a backbone file beside `NAME.smoe`.
pub const BACKBONE_SUFFIX: &str = ".scout.safetensors";
/// The head's name in the backbone; absent if tied.
pub const HEAD: &str = "lm_head.weight";

const EXPERT_BYTES: u64 = 48;
const DESCRIPTOR_BYTES: u64 = 44;

/// The name of a backbone tensor in a checkpoint of the Llama lineage, which the original's files keep.
#[must_use]
pub fn checkpoint_name(tensor: BackboneTensor) -> String {
    let (layer, part) = match tensor {
        BackboneTensor::Embed => return "model.embed_tokens.weight".to_owned(),
        BackboneTensor::FinalNorm => return "model.norm.weight".to_owned(),
        BackboneTensor::Head => return HEAD.to_owned(),
        BackboneTensor::Layer(layer, part) => (layer, part),
    };
    format!("model.layers.{layer}.{}", checkpoint_part(part))
}

/// The name of a layer's tensor behind `model.layers.N.`, as most families have it.
#[must_use]
pub const fn checkpoint_part(part: LayerPart) -> &'static str {
    match part {
        LayerPart::AttnNorm => "input_layernorm.weight",
        LayerPart::Q => "self_attn.q_proj.weight",
        LayerPart::K => "self_attn.k_proj.weight",
        LayerPart::V => "self_attn.v_proj.weight",
        LayerPart::O => "self_attn.o_proj.weight",
        // Published attention has it in its `q_proj`, head by head.
        LayerPart::OGate => "self_attn.gate_proj.weight",
        LayerPart::Beta => "linear_attn.in_proj_b.weight",
        LayerPart::Decay => "linear_attn.in_proj_a.weight",
        LayerPart::Conv => "linear_attn.conv1d.weight",
        LayerPart::DecayLog => "linear_attn.A_log",
        LayerPart::DecayBias => "linear_attn.dt_bias",
        LayerPart::DeltaNorm => "linear_attn.norm.weight",
        LayerPart::QBias => "self_attn.q_proj.bias",
        LayerPart::KBias => "self_attn.k_proj.bias",
        LayerPart::VBias => "self_attn.v_proj.bias",
        LayerPart::OBias => "self_attn.o_proj.bias",
        LayerPart::QNorm => "self_attn.q_norm.weight",
        LayerPart::KNorm => "self_attn.k_norm.weight",
        LayerPart::Sinks => "self_attn.sinks",
        LayerPart::QDown => "self_attn.q_a_proj.weight",
        LayerPart::QDownNorm => "self_attn.q_a_layernorm.weight",
        LayerPart::KvDown => "self_attn.kv_a_proj_with_mqa.weight",
        LayerPart::KvDownNorm => "self_attn.kv_a_layernorm.weight",
        // One tensor has both, head by head.
        LayerPart::KUp | LayerPart::VUp => "self_attn.kv_b_proj.weight",
        LayerPart::IndexQ => "self_attn.indexer.wq_b.weight",
        LayerPart::IndexK => "self_attn.indexer.wk.weight",
        LayerPart::IndexKNorm => "self_attn.indexer.k_norm.weight",
        LayerPart::IndexKNormBias => "self_attn.indexer.k_norm.bias",
        LayerPart::IndexWeights => "self_attn.indexer.weights_proj.weight",
        LayerPart::FfnNorm => "post_attention_layernorm.weight",
        LayerPart::Router => "mlp.gate.weight",
        LayerPart::RouterBias => "mlp.gate.bias",
        LayerPart::Correction => "mlp.gate.e_score_correction_bias",
        LayerPart::Gate => "mlp.gate_proj.weight",
        LayerPart::Up => "mlp.up_proj.weight",
        LayerPart::Down => "mlp.down_proj.weight",
        LayerPart::SharedGate => "mlp.shared_experts.gate_proj.weight",
        LayerPart::SharedUp => "mlp.shared_experts.up_proj.weight",
        LayerPart::SharedDown => "mlp.shared_experts.down_proj.weight",
        LayerPart::SharedScale => "mlp.shared_expert_gate.weight",
        LayerPart::ExpertGateBias => "mlp.experts.gate_proj.bias",
        LayerPart::ExpertUpBias => "mlp.experts.up_proj.bias",
        LayerPart::ExpertDownBias => "mlp.experts.down_proj.bias",
    }
}

/// Corrects a RoPE base that the original's tool is known to have missed, and says so.
///
/// The tool read `rope_theta` at the top level of a config only; for the newer style, which has it inside
/// `rope_parameters`, it wrote its default of 10,000. Qwen3-MoE was published with 1,000,000 and more, never
/// with 10,000, so there that value means "not read", and the family's published base is taken.
#[must_use]
pub fn mend_rope(spec: &mut ModelSpec) -> Option<String> {
    const MISSED: f64 = 10_000.0;
    const QWEN3_MOE: f64 = 1_000_000.0;
    if spec.model_type != "qwen3_moe" || spec.rope.theta != MISSED {
        return None;
    }
    spec.rope.theta = QWEN3_MOE;
    Some(format!(
        "the file gives RoPE base {MISSED}, which the original tool wrote when it did not find it; taking \
         {QWEN3_MOE}, as Qwen3-MoE was published. The checkpoint's config.json beside the file decides"
    ))
}

/// A row-major tensor inside an original's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    rows: usize,
    cols: usize,
    packed: usize,
    scales: usize,
}

/// Gate, up, down.
pub type Descriptors = [Descriptor; 3];

/// Reads the head of a version 1 or 2 file.
pub(crate) fn parse(head: &[u8], file_len: u64) -> Result<ExpertFile, FormatError> {
    let b = Bytes::at(head, "vault header", 0, 64)?;
    let version = b.u32(8);
    let (n_layers, n_experts, total) = (b.u32(12), b.u32(16), b.u32(20));
    if u64::from(n_layers) * u64::from(n_experts) != u64::from(total) || total == 0 {
        return Err(b.bad("expert count", total, format!("{n_layers} layers of {n_experts}")));
    }
    let (group, bits) = (b.u32(40), b.u32(44));
    let uniform = match bits {
        2 | 4 => Uniform::new(bits as u8, group as usize, Zero::Symmetric),
        _ => None,
    };
    let Some(uniform) = uniform else {
        return Err(b.bad(
            "bits and group",
            format!("{bits} and {group}"),
            "2 or 4 bits in groups of 16 to 128",
        ));
    };
    let (d_model, d_expert) = (b.u32(48) as usize, b.u32(56) as usize);
    let table_offset = b.u64(24);
    let sarc = match (version, b.u32(60)) {
        (1, _) => None,
        (_, offset) => Some(Sarc::parse(head, u64::from(offset))?),
    };

    let mut entries = Vec::new();
    for i in 0..u64::from(total) {
        let at = table_offset.saturating_add(i * EXPERT_BYTES);
        let e = Bytes::at(head, "expert table", at, EXPERT_BYTES)?;
        let key = ExpertKey { layer: e.u32(0), expert: e.u32(4) };
        let (offset, raw, padded) = (e.u64(8), e.u64(16), e.u64(24));
        let inside = offset >= head.len() as u64
            && offset.checked_add(padded).is_some_and(|end| end <= file_len)
            && raw <= padded
            && offset.is_multiple_of(RECORD_ALIGN as u64)
            && padded.is_multiple_of(RECORD_ALIGN as u64)
            && padded < 1 << 32;
        if !inside || key.expert >= n_experts {
            let what = format!("record at {offset}, {raw} of {padded} bytes, does not fit the file");
            return Err(FormatError::Record { key, what });
        }
        let at = table_offset
            .saturating_add(u64::from(total) * EXPERT_BYTES)
            .saturating_add(i * 3 * DESCRIPTOR_BYTES);
        let mut tensors = [Descriptor { rows: 0, cols: 0, packed: 0, scales: 0 }; 3];
        for (p, projection) in Projection::ALL.into_iter().enumerate() {
            let d = Bytes::at(head, "tensor descriptor", at + p as u64 * DESCRIPTOR_BYTES, DESCRIPTOR_BYTES)?;
            tensors[p] = descriptor(d, p, projection, uniform, (d_model, d_expert), raw)?;
        }
        entries.push((RecordEntry { key, offset, len: padded, used: raw, crc32c: None }, tensors));
    }
    entries.sort_by_key(|(record, _)| record.key);
    let mut layer_ids: Vec<u32> = entries.iter().map(|(record, _)| record.key.layer).collect();
    layer_ids.dedup();
    for (i, (record, _)) in entries.iter().enumerate() {
        let expected = ExpertKey {
            layer: layer_ids[(i / n_experts as usize).min(layer_ids.len() - 1)],
            expert: i as u32 % n_experts,
        };
        if record.key != expected {
            return Err(FormatError::Record { key: expected, what: "is not in the table".to_owned() });
        }
    }
    if let Some(sarc) = &sarc
        && layer_ids.last().is_some_and(|last| *last >= sarc.n_layers)
    {
        return Err(b.bad("layer count", sarc.n_layers, "above the last layer of the expert table"));
    }

    let layers = layer_ids
        .iter()
        .map(|&layer| {
            let mut end = 0;
            let tensors = entries[0].1.map(|d| {
                let encoding = Encoding::Uniform(uniform);
                let len = encoding.tensor_bytes(d.rows, d.cols).unwrap_or(0);
                let tensor = TensorEntry { encoding, rows: d.rows, cols: d.cols, offset: end, len };
                end += len;
                tensor
            });
            LayerTable { layer, n_experts, record_len: end.next_multiple_of(RECORD_ALIGN), tensors }
        })
        .collect();
    let (records, original) = entries.into_iter().unzip();
    Ok(ExpertFile {
        version,
        architecture: Architecture::Original {
            sarc,
            seen: Seen {
                d_model,
                vocab_size: b.u32(52) as usize,
                n_experts: n_experts as usize,
                moe_layers: layer_ids,
                tied_head: false,
            },
        },
        layers,
        records,
        original,
        coded: false,
        data_offset: b.u64(32),
        file_len,
    })
}

fn descriptor(
    d: Bytes<'_>,
    index: usize,
    projection: Projection,
    uniform: Uniform,
    (d_model, d_expert): (usize, usize),
    raw: u64,
) -> Result<Descriptor, FormatError> {
    let (rows, cols) = (d.u32(4) as usize, d.u32(8) as usize);
    let expected = match projection {
        Projection::Gate | Projection::Up => (d_expert, d_model),
        Projection::Down => (d_model, d_expert),
    };
    if usize::from(d.u8(0)) != index || (rows, cols) != expected {
        let found = format!("type {}, {rows}x{cols}", d.u8(0));
        return Err(d.bad("tensor descriptor", found, format!("type {index}, {expected:?}")));
    }
    let (packed, packed_size) = (d.u64(12), d.u64(20));
    let (scales, scales_size) = (d.u64(28), d.u64(36));
    let weights = rows as u64 * cols as u64;
    let inside = |start: u64, size: u64| start.checked_add(size).is_some_and(|end| end <= raw);
    let whole_groups = cols.is_multiple_of(uniform.group());
    if !whole_groups
        || packed_size != weights * u64::from(uniform.bits()) / 8
        || scales_size != weights / uniform.group() as u64 * 2
        || !inside(packed, packed_size)
        || !inside(scales, scales_size)
    {
        return Err(d.bad(
            "tensor descriptor",
            format!("{packed_size} + {scales_size} bytes"),
            "of its shape",
        ));
    }
    Ok(Descriptor { rows, cols, packed: packed as usize, scales: scales as usize })
}

/// Copies the tensors of an original's record into tiles.
///
/// `raw` is the record as on disk, `out` at least `table.record_len` long; bytes of `out` that belong to no
/// tensor are not touched.
///
/// # Panics
/// If `raw` is shorter than its descriptors, which [`ExpertFile::parse`] checked, say.
pub fn retile(raw: &[u8], descriptors: &Descriptors, table: &LayerTable, out: &mut [u8]) {
    for (d, t) in descriptors.iter().zip(&table.tensors) {
        let Encoding::Uniform(uniform) = t.encoding else { continue };
        let (bits, group) = (usize::from(uniform.bits()), uniform.group());
        let per_byte = 8 / bits;
        let groups = uniform.groups(d.cols);
        let tensor = &mut out[t.offset..t.offset + t.len];
        tensor.fill(0);
        let mut codes = [0u8; 128];
        for (i, tile) in tensor.chunks_exact_mut(uniform.tile_bytes()).enumerate() {
            let (block, g) = (i / groups, i % groups);
            for row in block * ROWS..((block + 1) * ROWS).min(d.rows) {
                let first = row * d.cols + g * group;
                for (col, code) in codes[..group].iter_mut().enumerate() {
                    let weight = first + col;
                    let byte = raw[d.packed + weight / per_byte];
                    *code = (byte >> (weight % per_byte * bits)) & uniform.max_code();
                }
                let at = d.scales + first / group * 2;
                let scale = u16::from_le_bytes([raw[at], raw[at + 1]]);
                uniform.write_row(tile, row % ROWS, &codes[..group], scale, 0);
            }
        }
    }
}
