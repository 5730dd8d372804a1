//! The backbone file: which tensors a model needs besides its routed experts, and where they lie.
//!
//! It is an ordinary safetensors file under our own tensor names. Float tensors keep their dtype and shape;
//! coded ones are `U8` and their encoding and shape stand in `__metadata__` under the tensor's name, as
//! `q8/64 2048x4096`.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::encoding::{Encoding, Uniform, Zero};
use crate::error::FormatError;
use crate::spec::{FfnKind, ModelSpec};

/// A tensor of the backbone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackboneTensor {
    /// `[vocab_size, d_model]`, a row per token.
    Embed,
    /// `[d_model]`, before the head.
    FinalNorm,
    /// `[vocab_size, d_model]`; absent if tied.
    Head,
    /// A tensor of a layer.
    Layer(u32, LayerPart),
}

/// A tensor of a layer's backbone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerPart {
    /// `[d_model]`, before attention.
    AttnNorm,
    /// `[n_heads * head_dim, d_model]`; from a latent of queries, `[n_heads * head_dim, q_rank]`.
    Q,
    /// `[n_kv_heads * head_dim, d_model]`.
    K,
    /// `[n_kv_heads * head_dim, d_model]`.
    V,
    /// `[d_model, n_heads * value_dim]`.
    O,
    /// `[n_heads * head_dim, d_model]`: what heads' outputs are multiplied with, before the sigmoid; of a gated delta net
    /// before SiLU.
    OGate,
    /// `[n_value_heads, d_model]` of a gated delta net, whose queries and keys are `[n_key_heads * key_dim, d_model]`,
    /// its values and gates `[n_value_heads * value_dim, d_model]`: how much of a difference is taken, before the
    /// sigmoid.
    Beta,
    /// `[n_value_heads, d_model]`: what decay is made of.
    Decay,
    /// `[channels, conv_width]`: of queries, keys and values, the oldest position first.
    Conv,
    /// `[n_value_heads]`: logarithms of the rates of decay.
    DecayLog,
    /// `[n_value_heads]`, added to what decay is made of.
    DecayBias,
    /// `[value_dim]`: the norm of each head's output.
    DeltaNorm,
    /// `[n_heads * head_dim]`.
    QBias,
    /// `[n_kv_heads * head_dim]`.
    KBias,
    /// `[n_kv_heads * head_dim]`.
    VBias,
    /// `[d_model]`.
    OBias,
    /// `[head_dim]`; over all heads as one, `[n_heads * head_dim]`.
    QNorm,
    /// `[head_dim]`; over all heads as one, `[n_kv_heads * head_dim]`.
    KNorm,
    /// `[n_heads]`.
    Sinks,
    /// `[q_rank, d_model]`.
    QDown,
    /// `[q_rank]`.
    QDownNorm,
    /// `[kv_rank + rope_dim, d_model]`: the latent, and the rotated part of the key.
    KvDown,
    /// `[kv_rank]`.
    KvDownNorm,
    /// `[n_heads * kv_rank, head_dim - rope_dim]`: head by head, from a query to what meets the latent. It is the
    /// transpose of what would make the head's keys.
    KUp,
    /// `[n_heads * value_dim, kv_rank]`: head by head, from the latent to a value.
    VUp,
    /// `[indexer.n_heads * indexer.head_dim, q_rank]`: the indexer's queries.
    IndexQ,
    /// `[indexer.head_dim, d_model]`: its key.
    IndexK,
    /// `[indexer.head_dim]`, of the key.
    IndexKNorm,
    /// `[indexer.head_dim]`, of that norm.
    IndexKNormBias,
    /// `[indexer.n_heads, d_model]`: the weights of its heads.
    IndexWeights,
    /// `[d_model]`, before the feed-forward part.
    FfnNorm,
    /// `[n_experts, d_model]`.
    Router,
    /// `[n_experts]`, added to the logits.
    RouterBias,
    /// `[n_experts]`, added to the scores for the choice only.
    Correction,
    /// `[width, d_model]` of a dense layer.
    Gate,
    /// `[width, d_model]` of a dense layer.
    Up,
    /// `[d_model, width]` of a dense layer.
    Down,
    /// `[d_shared, d_model]`.
    SharedGate,
    /// `[d_shared, d_model]`.
    SharedUp,
    /// `[d_model, d_shared]`.
    SharedDown,
    /// `[1, d_model]`: the shared expert's weight before the sigmoid.
    SharedScale,
    /// `[n_experts, d_expert]`.
    ExpertGateBias,
    /// `[n_experts, d_expert]`.
    ExpertUpBias,
    /// `[n_experts, d_model]`.
    ExpertDownBias,
}

impl BackboneTensor {
    /// Every tensor that a model needs, in file order of its parts.
    #[must_use]
    pub fn all(spec: &ModelSpec) -> Vec<Self> {
        use LayerPart as P;
        let (a, moe) = (&spec.attention, &spec.moe);
        let mut tensors = vec![Self::Embed];
        for (layer, kind) in spec.layers.iter().enumerate() {
            let mut push = |is_there: bool, parts: &[P]| {
                let parts = parts.iter().filter(|_| is_there);
                tensors.extend(parts.map(|&part| Self::Layer(layer as u32, part)));
            };
            let (is_moe, latent) = (*kind == FfnKind::Moe, a.latent);
            push(true, &[P::AttnNorm]);
            if spec.delta_of(layer).is_some() {
                push(true, &[P::Q, P::K, P::V, P::OGate, P::Beta, P::Decay, P::Conv]);
                push(true, &[P::DecayLog, P::DecayBias, P::DeltaNorm, P::O]);
            } else {
                push(latent.is_some_and(|latent| latent.q_rank > 0), &[P::QDown, P::QDownNorm]);
                push(true, &[P::Q]);
                push(latent.is_some(), &[P::KvDown, P::KvDownNorm, P::KUp, P::VUp]);
                push(latent.is_none(), &[P::K, P::V]);
                push(
                    a.indexer.is_some(),
                    &[P::IndexQ, P::IndexK, P::IndexKNorm, P::IndexKNormBias, P::IndexWeights],
                );
                push(true, &[P::O]);
                push(a.gate, &[P::OGate]);
                push(a.qkv_bias, &[P::QBias, P::KBias, P::VBias]);
                push(a.o_bias, &[P::OBias]);
                push(a.qk_norm, &[P::QNorm, P::KNorm]);
                push(a.sinks, &[P::Sinks]);
            }
            push(true, &[P::FfnNorm]);
            push(!is_moe, &[P::Gate, P::Up, P::Down]);
            push(is_moe, &[P::Router]);
            push(is_moe && moe.router_bias, &[P::RouterBias]);
            push(is_moe && moe.correction_bias, &[P::Correction]);
            push(is_moe && moe.d_shared > 0, &[P::SharedGate, P::SharedUp, P::SharedDown]);
            push(is_moe && moe.shared_gate, &[P::SharedScale]);
            push(is_moe && moe.expert_bias, &[P::ExpertGateBias, P::ExpertUpBias, P::ExpertDownBias]);
        }
        tensors.push(Self::FinalNorm);
        if !spec.tied_head {
            tensors.push(Self::Head);
        }
        tensors
    }

    /// Rows and columns; a vector has one row.
    #[must_use]
    pub fn shape(self, spec: &ModelSpec) -> (usize, usize) {
        use LayerPart as P;
        let (a, moe, d) = (&spec.attention, &spec.moe, spec.d_model);
        let (heads, kv_heads) = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim);
        let norm = |heads: usize| if a.qk_norm_whole { heads } else { a.head_dim };
        let (layer, part) = match self {
            Self::Embed | Self::Head => return (spec.vocab_size, d),
            Self::FinalNorm => return (1, d),
            Self::Layer(layer, part) => (layer, part),
        };
        let dense = match spec.layers[layer as usize] {
            FfnKind::Dense(width) => width,
            FfnKind::Moe => 0,
        };
        if let Some(delta) = spec.delta_of(layer as usize) {
            let (keys, values, heads) = (delta.keys(), delta.values(), delta.n_value_heads);
            match part {
                P::Q | P::K => return (keys, d),
                P::V | P::OGate => return (values, d),
                P::O => return (d, values),
                P::Beta | P::Decay => return (heads, d),
                P::Conv => return (delta.channels(), delta.conv_width),
                P::DecayLog | P::DecayBias => return (1, heads),
                P::DeltaNorm => return (1, delta.value_dim),
                _ => {}
            }
        }
        // What is not of the model has no shape.
        let (q_rank, kv_rank, rope_dim) = a.latent.map_or((0, 0, 0), |l| (l.q_rank, l.kv_rank, l.rope_dim));
        let (index_heads, index_dim) = a.indexer.map_or((0, 0), |i| (i.n_heads, i.head_dim));
        match part {
            P::AttnNorm | P::FfnNorm | P::OBias => (1, d),
            P::Q => (heads, if q_rank > 0 { q_rank } else { d }),
            P::K | P::V => (kv_heads, d),
            P::O => (d, a.n_heads * a.value_dim()),
            P::OGate => (a.n_heads * a.value_dim(), d),
            P::Beta | P::Decay | P::Conv | P::DecayLog | P::DecayBias | P::DeltaNorm => (0, 0),
            P::QBias => (1, heads),
            P::KBias | P::VBias => (1, kv_heads),
            P::QNorm => (1, norm(heads)),
            P::KNorm => (1, norm(kv_heads)),
            P::Sinks => (1, a.n_heads),
            P::QDown => (q_rank, d),
            P::QDownNorm => (1, q_rank),
            P::KvDown => (kv_rank + rope_dim, d),
            P::KvDownNorm => (1, kv_rank),
            P::KUp => (a.n_heads * kv_rank, a.head_dim - rope_dim),
            P::VUp => (a.n_heads * a.value_dim(), kv_rank),
            P::IndexQ => (index_heads * index_dim, q_rank),
            P::IndexK => (index_dim, d),
            P::IndexKNorm | P::IndexKNormBias => (1, index_dim),
            P::IndexWeights => (index_heads, d),
            P::Router => (moe.n_experts, d),
            P::RouterBias | P::Correction => (1, moe.n_experts),
            P::Gate | P::Up => (dense, d),
            P::Down => (d, dense),
            P::SharedGate | P::SharedUp => (moe.d_shared, d),
            P::SharedDown => (d, moe.d_shared),
            P::SharedScale => (1, d),
            P::ExpertGateBias | P::ExpertUpBias => (moe.n_experts, moe.d_expert),
            P::ExpertDownBias => (moe.n_experts, d),
        }
    }

    /// A vector: one-dimensional in the file.
    #[must_use]
    pub fn is_vector(self) -> bool {
        use LayerPart as P;
        let Self::Layer(_, part) = self else { return self == Self::FinalNorm };
        match part {
            P::AttnNorm | P::FfnNorm | P::QNorm | P::KNorm | P::QDownNorm | P::KvDownNorm => true,
            P::IndexKNorm | P::IndexKNormBias => true,
            P::QBias | P::KBias | P::VBias | P::OBias | P::Sinks | P::RouterBias | P::Correction => true,
            P::DecayLog | P::DecayBias | P::DeltaNorm => true,
            P::OGate | P::Beta | P::Decay | P::Conv => false,
            P::Q | P::K | P::V | P::O | P::QDown | P::KvDown | P::KUp | P::VUp => false,
            P::Router | P::Gate | P::Up | P::Down | P::SharedGate | P::SharedUp | P::SharedDown => false,
            P::SharedScale | P::ExpertGateBias | P::ExpertUpBias | P::ExpertDownBias => false,
            P::IndexQ | P::IndexK | P::IndexWeights => false,
        }
    }

    /// May be coded. Norms, biases, routers, the weights of an indexer's heads and what decides how a state decays are not:
    /// they are small, and choices must be the model's own.
    #[must_use]
    pub fn may_be_coded(self) -> bool {
        use LayerPart as P;
        let is_kept = matches!(
            self,
            Self::Layer(
                _,
                P::Router
                    | P::IndexWeights
                    | P::SharedScale
                    | P::ExpertGateBias
                    | P::ExpertUpBias
                    | P::ExpertDownBias
                    | P::Beta
                    | P::Decay
                    | P::Conv
            )
        );
        !self.is_vector() && !is_kept
    }
}

impl fmt::Display for BackboneTensor {
    /// The name in the file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embed => f.write_str("embed"),
            Self::FinalNorm => f.write_str("final_norm"),
            Self::Head => f.write_str("head"),
            Self::Layer(layer, part) => {
                let part = match part {
                    LayerPart::AttnNorm => "attn_norm",
                    LayerPart::Q => "q",
                    LayerPart::K => "k",
                    LayerPart::V => "v",
                    LayerPart::O => "o",
                    LayerPart::OGate => "o_gate",
                    LayerPart::Beta => "beta",
                    LayerPart::Decay => "decay",
                    LayerPart::Conv => "conv",
                    LayerPart::DecayLog => "decay_log",
                    LayerPart::DecayBias => "decay_bias",
                    LayerPart::DeltaNorm => "delta_norm",
                    LayerPart::QBias => "q_bias",
                    LayerPart::KBias => "k_bias",
                    LayerPart::VBias => "v_bias",
                    LayerPart::OBias => "o_bias",
                    LayerPart::QNorm => "q_norm",
                    LayerPart::KNorm => "k_norm",
                    LayerPart::Sinks => "sinks",
                    LayerPart::QDown => "q_down",
                    LayerPart::QDownNorm => "q_down_norm",
                    LayerPart::KvDown => "kv_down",
                    LayerPart::KvDownNorm => "kv_down_norm",
                    LayerPart::KUp => "k_up",
                    LayerPart::VUp => "v_up",
                    LayerPart::IndexQ => "index_q",
                    LayerPart::IndexK => "index_k",
                    LayerPart::IndexKNorm => "index_k_norm",
                    LayerPart::IndexKNormBias => "index_k_norm_bias",
                    LayerPart::IndexWeights => "index_weights",
                    LayerPart::FfnNorm => "ffn_norm",
                    LayerPart::Router => "router",
                    LayerPart::RouterBias => "router_bias",
                    LayerPart::Correction => "correction",
                    LayerPart::Gate => "gate",
                    LayerPart::Up => "up",
                    LayerPart::Down => "down",
                    LayerPart::SharedGate => "shared_gate",
                    LayerPart::SharedUp => "shared_up",
                    LayerPart::SharedDown => "shared_down",
                    LayerPart::SharedScale => "shared_scale",
                    LayerPart::ExpertGateBias => "expert_gate_bias",
                    LayerPart::ExpertUpBias => "expert_up_bias",
                    LayerPart::ExpertDownBias => "expert_down_bias",
                };
                write!(f, "layers.{layer}.{part}")
            }
        }
    }
}

/// A tensor as it lies in the backbone file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its encoding.
    pub encoding: Encoding,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Its bytes, counted from the start of the file.
    pub bytes: Range<u64>,
}

/// The header of a backbone file.
#[derive(Clone, Debug)]
pub struct Backbone {
    tensors: HashMap<String, StoredTensor>,
    /// Length that the file must have.
    pub file_len: u64,
}

/// The header may not be larger; the largest published models have some ten thousand tensors.
const MAX_HEADER: u64 = 64 << 20;

impl Backbone {
    /// Length of the header, its 8-byte length field included, from the first 8 bytes of the file.
    ///
    /// # Errors
    /// If it is absurd or longer than the file.
    pub fn header_len(first: [u8; 8], file_len: u64) -> Result<u64, FormatError> {
        let len = u64::from_le_bytes(first);
        match len.checked_add(8) {
            Some(total) if len <= MAX_HEADER && total <= file_len => Ok(total),
            _ => {
                Err(FormatError::Backbone { what: format!("header of {len} bytes in a file of {file_len}") })
            }
        }
    }

    /// Reads the header: the first [`Self::header_len`] bytes of the file.
    ///
    /// # Errors
    /// If it is no safetensors header, leaves holes, or a coded tensor contradicts its encoding.
    pub fn parse(header: &[u8], file_len: u64) -> Result<Self, FormatError> {
        let fail = |what: String| FormatError::Backbone { what };
        let (Some(first), Some(json)) = (header.first_chunk(), header.get(8..)) else {
            return Err(fail(format!("header of {} bytes", header.len())));
        };
        // `SafeTensors::read_metadata` wants the data behind the header too.
        let data = Self::header_len(*first, file_len)?;
        let json = json.get(..data as usize - 8).ok_or_else(|| fail("the header is cut short".to_owned()))?;
        let metadata: safetensors::tensor::Metadata =
            serde_json::from_slice(json).map_err(|e| fail(format!("not a safetensors file: {e}")))?;
        let expected = data + metadata.data_len() as u64;
        if expected != file_len {
            return Err(fail(format!("the file has {file_len} bytes, its header says {expected}")));
        }
        let labels = metadata.metadata().clone().unwrap_or_default();
        let mut tensors = HashMap::new();
        for (name, info) in metadata.tensors() {
            let bytes = data + info.data_offsets.0 as u64..data + info.data_offsets.1 as u64;
            let (encoding, rows, cols) = match labels.get(&name) {
                Some(label) if info.dtype == safetensors::Dtype::U8 => parse_label(label)
                    .map_err(|e| fail(format!("tensor `{name}`: encoding `{label}` is not known: {e}")))?,
                Some(_) => return Err(fail(format!("tensor `{name}` is coded and not of dtype U8"))),
                None => {
                    // Original backbones carry tensors that are no weights of ours; what a model needs and
                    // finds in no usable form is missed by name in `require`.
                    let encoding = match info.dtype {
                        safetensors::Dtype::F32 => Encoding::F32,
                        safetensors::Dtype::F16 => Encoding::F16,
                        safetensors::Dtype::BF16 => Encoding::Bf16,
                        _ => continue,
                    };
                    match info.shape[..] {
                        [cols] => (encoding, 1, cols),
                        [rows, cols] => (encoding, rows, cols),
                        _ => continue,
                    }
                }
            };
            if encoding.tensor_bytes(rows, cols).map(|n| n as u64) != Some(bytes.end - bytes.start) {
                return Err(fail(format!(
                    "tensor `{name}`: {} bytes are not {encoding} {rows}x{cols}",
                    bytes.end - bytes.start
                )));
            }
            tensors.insert(name, StoredTensor { encoding, rows, cols, bytes });
        }
        Ok(Self { tensors, file_len })
    }

    /// The tensor called `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name)
    }

    /// All tensors and their names, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &StoredTensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The tensor that `spec` needs under `name`, with its shape checked.
    ///
    /// # Errors
    /// If it is missing or has another shape.
    pub fn require(
        &self,
        spec: &ModelSpec,
        tensor: BackboneTensor,
        name: &str,
    ) -> Result<&StoredTensor, FormatError> {
        let fail = |what: String| FormatError::Tensor { name: name.to_owned(), what };
        let stored = self.get(name).ok_or_else(|| fail("is missing".to_owned()))?;
        let (rows, cols) = tensor.shape(spec);
        if (stored.rows, stored.cols) != (rows, cols) {
            return Err(fail(format!(
                "has shape {}x{}, the model needs {rows}x{cols}",
                stored.rows, stored.cols
            )));
        }
        if !stored.encoding.is_float() && !tensor.may_be_coded() {
            return Err(fail(format!("is coded as {}, it must be a float", stored.encoding)));
        }
        Ok(stored)
    }
}

/// The metadata entry of a coded tensor.
#[must_use]
pub fn label(encoding: Encoding, rows: usize, cols: usize) -> String {
    format!("{encoding} {rows}x{cols}")
}

fn parse_label(label: &str) -> Result<(Encoding, usize, usize), UnknownEncoding> {
    let unknown = || UnknownEncoding::Label { label: label.to_owned() };
    let (encoding, shape) = label.split_once(' ').ok_or_else(unknown)?;
    let (rows, cols) = shape.split_once('x').ok_or_else(unknown)?;
    let (Ok(rows), Ok(cols)) = (rows.parse(), cols.parse()) else { return Err(unknown()) };
    Ok((encoding.parse()?, rows, cols))
}

impl FromStr for Encoding {
    type Err = UnknownEncoding;

    /// Reads what `Display` writes: `bf16`, `q4/64`, `q4a/64`. Level tables are refused: a label has no room for
    /// their levels, so only experts have them, whose table of encodings does.
    fn from_str(s: &str) -> Result<Self, UnknownEncoding> {
        let unknown = || UnknownEncoding::Label { label: s.to_owned() };
        match s {
            "f32" => return Ok(Self::F32),
            "f16" => return Ok(Self::F16),
            "bf16" => return Ok(Self::Bf16),
            _ => {}
        }
        let kind = s.split_once('/').map_or(s, |(kind, _)| kind);
        if matches!(kind, "mxfp4" | "iq4_nl" | "t2" | "t3" | "t4") {
            return Err(UnknownEncoding::Table { label: s.to_owned() });
        }
        let (code, group) = s.strip_prefix('q').and_then(|s| s.split_once('/')).ok_or_else(unknown)?;
        let (bits, zero) = match code.strip_suffix('a') {
            Some(bits) => (bits, Zero::Affine),
            None => (code, Zero::Symmetric),
        };
        let (Ok(bits), Ok(group)) = (bits.parse(), group.parse()) else { return Err(unknown()) };
        Uniform::new(bits, group, zero).map(Self::Uniform).ok_or_else(unknown)
    }
}

/// A label that names no encoding, or not all of one.
#[derive(Debug, thiserror::Error)]
pub enum UnknownEncoding {
    /// No encoding is called that.
    #[error("`{label}` names no encoding")]
    Label {
        /// The label.
        label: String,
    },
    /// A level table, whose levels no label can give.
    #[error("`{label}` is a level table; only routed experts can have those")]
    Table {
        /// The label.
        label: String,
    },
}
