//! Where the reference takes its weights from: a checkpoint, a vault, or a pair of the original's files.

use std::collections::HashMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use smoe_format::backbone::LayerPart;
use smoe_format::entropy::decode_record;
use smoe_format::half::{bf16_to_f32, f16_to_f32};
use smoe_format::original::{checkpoint_name, checkpoint_part};
use smoe_format::{
    Backbone, BackboneTensor, Encoding, ExpertFile, ExpertKey, ModelSpec, Projection, file_name, record_crc,
};

use crate::read;

/// The weights of a model, row-major, by the words of `smoe-format`.
///
/// # Panics
/// Implementations panic if a tensor is missing or damaged.
pub trait Weights {
    /// A tensor of the backbone.
    fn backbone(&self, tensor: BackboneTensor) -> Vec<f64>;
    /// A matrix of a routed expert.
    fn expert(&self, key: ExpertKey, projection: Projection) -> Vec<f64>;
}

impl<W: Weights + ?Sized> Weights for &W {
    fn backbone(&self, tensor: BackboneTensor) -> Vec<f64> {
        (**self).backbone(tensor)
    }
    fn expert(&self, key: ExpertKey, projection: Projection) -> Vec<f64> {
        (**self).expert(key, projection)
    }
}

/// The name of an expert's matrix in a checkpoint.
#[must_use]
pub fn expert_name(key: ExpertKey, projection: Projection) -> String {
    format!("model.layers.{}.mlp.experts.{}.{}_proj.weight", key.layer, key.expert, projection.name())
}

/// The float tensors of safetensors files, in memory.
pub struct Tensors {
    files: Vec<Vec<u8>>,
    /// Name to file, dtype, shape, range of bytes.
    index: HashMap<String, (usize, Dtype, Vec<usize>, std::ops::Range<usize>)>,
}

impl Tensors {
    /// Reads files.
    ///
    /// # Panics
    /// If one cannot be read, is no safetensors file, or names a tensor again.
    #[must_use]
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Self {
        let mut tensors = Self { files: Vec::new(), index: HashMap::new() };
        for path in paths {
            let path = path.as_ref();
            let bytes = read(path);
            SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            let (header, metadata) = SafeTensors::read_metadata(&bytes).expect("read just now");
            for (name, info) in metadata.tensors() {
                let (start, end) = info.data_offsets;
                let entry = (
                    tensors.files.len(),
                    info.dtype,
                    info.shape.clone(),
                    header + 8 + start..header + 8 + end,
                );
                let before = tensors.index.insert(name.clone(), entry);
                assert!(before.is_none(), "{}: `{name}` stands in two files", path.display());
            }
            tensors.files.push(bytes);
        }
        tensors
    }

    /// All names, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// The shape of a tensor.
    ///
    /// # Panics
    /// If there is none of that name.
    #[must_use]
    pub fn shape(&self, name: &str) -> &[usize] {
        &self.entry(name).2
    }

    /// The values of a tensor; `f32` holds each exactly.
    ///
    /// # Panics
    /// If there is none of that name, or it is not of `f32`, `f16` or `bf16`.
    #[must_use]
    pub fn values(&self, name: &str) -> Vec<f32> {
        let (file, dtype, _, range) = self.entry(name);
        let bytes = &self.files[*file][range.clone()];
        let halves = |widen: fn(u16) -> f32| {
            bytes.chunks_exact(2).map(|b| widen(u16::from_le_bytes([b[0], b[1]]))).collect()
        };
        match dtype {
            Dtype::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            Dtype::F16 => halves(f16_to_f32),
            Dtype::BF16 => halves(bf16_to_f32),
            other => panic!("tensor `{name}` is {other:?}"),
        }
    }

    fn entry(&self, name: &str) -> &(usize, Dtype, Vec<usize>, std::ops::Range<usize>) {
        self.index.get(name).unwrap_or_else(|| panic!("no tensor `{name}`"))
    }
}

fn widen(values: Vec<f32>) -> Vec<f64> {
    values.into_iter().map(f64::from).collect()
}

/// A checkpoint in the published layout: `model.safetensors`, or shards with their index.
pub struct CheckpointWeights {
    tensors: Tensors,
    config: serde_json::Value,
    /// Names begin with this, instead of `model`.
    prefix: &'static str,
}

impl CheckpointWeights {
    /// Reads the checkpoint in `dir`.
    ///
    /// # Panics
    /// If a file cannot be read, or the index and the shards contradict each other.
    #[must_use]
    pub fn open(dir: &Path) -> Self {
        let mut config: serde_json::Value =
            serde_json::from_slice(&read(&dir.join("config.json"))).unwrap_or_else(|e| panic!("config: {e}"));
        let mut prefix = "model";
        if config["text_config"].is_object() {
            config = config["text_config"].take();
            prefix = "model.language_model";
        }
        let index_path = dir.join("model.safetensors.index.json");
        if !index_path.exists() {
            return Self { tensors: Tensors::open(&[dir.join("model.safetensors")]), config, prefix };
        }
        let index: serde_json::Value =
            serde_json::from_slice(&read(&index_path)).unwrap_or_else(|e| panic!("index: {e}"));
        let map = index["weight_map"].as_object().expect("an index has a weight_map");
        let mut files: Vec<&str> = map.values().map(|v| v.as_str().expect("a file name")).collect();
        files.sort_unstable();
        files.dedup();
        let paths: Vec<_> = files.iter().map(|file| dir.join(file)).collect();
        let tensors = Tensors::open(&paths);
        for (name, file) in map {
            let (at, ..) = tensors.entry(name);
            assert_eq!(Some(files[*at]), file.as_str(), "where the index says `{name}` is");
        }
        assert_eq!(tensors.index.len(), map.len(), "tensors in shards and index");
        Self { tensors, config, prefix }
    }

    /// A tensor under its published name behind the prefix.
    fn plain(&self, name: &str) -> Vec<f64> {
        let name = match name.strip_prefix("model.") {
            Some(rest) => format!("{}.{rest}", self.prefix),
            None => name.to_owned(),
        };
        widen(self.tensors.values(&name))
    }

    /// Parts of layers of Qwen3-Next and Qwen3.5, whose norms are of 1 + weight, and which have several matrices in
    /// one; `None` for those that are as everywhere.
    fn hybrid(&self, layer: u32, part: LayerPart) -> Option<Vec<f64>> {
        use LayerPart as P;
        let named = |name: &str| self.plain(&format!("model.layers.{layer}.{name}"));
        let is_linear = self.config["layer_types"][layer as usize] == "linear_attention";
        let d = self.size("hidden_size");
        // Of every `of` rows, `n` from `first` on.
        let rows = |values: Vec<f64>, of: usize, first: usize, n: usize| -> Vec<f64> {
            values.chunks(of * d).flat_map(|head| head[first * d..(first + n) * d].to_vec()).collect()
        };
        let [key_heads, value_heads, key_dim, value_dim] =
            ["num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"]
                .map(|key| self.size(&format!("linear_{key}")));
        let per = value_heads / key_heads;
        let (wide, of) = (per * value_dim, 2 * (key_dim + per * value_dim));
        let keys = key_heads * key_dim;
        let is_joined = self.family() == "qwen3_next";
        let joined = |first, n| rows(named("linear_attn.in_proj_qkvz.weight"), of, first, n);
        let scalars = |first| rows(named("linear_attn.in_proj_ba.weight"), 2 * per, first, per);
        let apart = |first, n| {
            let all = 2 * keys + value_heads * value_dim;
            rows(named("linear_attn.in_proj_qkv.weight"), all, first, n)
        };
        let head = self.size("head_dim");
        Some(match (part, is_linear, is_joined) {
            (P::AttnNorm | P::FfnNorm | P::QNorm | P::KNorm, ..) => {
                named(checkpoint_part(part)).into_iter().map(|w| f64::from(1.0 + w as f32)).collect()
            }
            (P::SharedGate | P::SharedUp | P::SharedDown, ..) => {
                named(&checkpoint_part(part).replace("shared_experts", "shared_expert"))
            }
            (P::Q, false, _) => rows(named("self_attn.q_proj.weight"), 2 * head, 0, head),
            (P::OGate, false, _) => rows(named("self_attn.q_proj.weight"), 2 * head, head, head),
            (P::Q, true, true) => joined(0, key_dim),
            (P::K, true, true) => joined(key_dim, key_dim),
            (P::V, true, true) => joined(2 * key_dim, wide),
            (P::OGate, true, true) => joined(2 * key_dim + wide, wide),
            (P::Beta, true, true) => scalars(0),
            (P::Decay, true, true) => scalars(per),
            (P::Q, true, false) => apart(0, keys),
            (P::K, true, false) => apart(keys, keys),
            (P::V, true, false) => apart(2 * keys, value_heads * value_dim),
            (P::OGate, true, false) => named("linear_attn.in_proj_z.weight"),
            (P::O, true, _) => named("linear_attn.out_proj.weight"),
            _ => return None,
        })
    }

    fn family(&self) -> &str {
        self.config["model_type"].as_str().expect("a model type")
    }

    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap_or_else(|| panic!("config key `{key}`")) as usize
    }

    /// Element (row, column) of a tensor that was made by `at`.
    fn rearranged(
        &self,
        name: &str,
        (rows, cols): (usize, usize),
        at: impl Fn(usize, usize) -> usize,
    ) -> Vec<f64> {
        let values = self.tensors.values(name);
        let each = (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c)));
        each.map(|(r, c)| f64::from(values[at(r, c)])).collect()
    }

    /// The tensors by their own names.
    #[must_use]
    pub const fn tensors(&self) -> &Tensors {
        &self.tensors
    }
}

impl Weights for CheckpointWeights {
    fn backbone(&self, tensor: BackboneTensor) -> Vec<f64> {
        use LayerPart as P;
        let is_hybrid = self.family().starts_with("qwen3_next") || self.family().starts_with("qwen3_5");
        let BackboneTensor::Layer(layer, part) = tensor else {
            let values = self.plain(&checkpoint_name(tensor));
            return match tensor {
                BackboneTensor::FinalNorm if is_hybrid => {
                    values.into_iter().map(|w| f64::from(1.0 + w as f32)).collect()
                }
                _ => values,
            };
        };
        if let Some(values) = is_hybrid.then(|| self.hybrid(layer, part)).flatten() {
            return values;
        }
        let named = |name: &str| format!("model.layers.{layer}.{name}");
        match (self.family(), part) {
            ("mixtral" | "minimax_m2", P::Router) => {
                widen(self.tensors.values(&named("block_sparse_moe.gate.weight")))
            }
            ("minimax_m2", P::Correction) => {
                widen(self.tensors.values(&named("block_sparse_moe.e_score_correction_bias")))
            }
            ("ernie4_5_moe", P::Correction) => {
                widen(self.tensors.values(&named("mlp.moe_statics.e_score_correction_bias")))
            }
            ("granitemoe", P::Router) => {
                widen(self.tensors.values(&named("block_sparse_moe.router.layer.weight")))
            }
            ("qwen2_moe", P::SharedGate | P::SharedUp | P::SharedDown) => {
                let name = checkpoint_name(tensor).replace(".shared_experts.", ".shared_expert.");
                widen(self.tensors.values(&name))
            }
            ("gpt_oss", P::Router) => widen(self.tensors.values(&named("mlp.router.weight"))),
            ("gpt_oss", P::RouterBias) => widen(self.tensors.values(&named("mlp.router.bias"))),
            ("gpt_oss", P::ExpertGateBias | P::ExpertUpBias) => {
                let (n, f) = (self.size("num_local_experts"), self.size("intermediate_size"));
                let odd = usize::from(part == P::ExpertUpBias);
                let name = named("mlp.experts.gate_up_proj_bias");
                self.rearranged(&name, (n, f), |e, i| e * 2 * f + 2 * i + odd)
            }
            ("gpt_oss", P::ExpertDownBias) => {
                widen(self.tensors.values(&named("mlp.experts.down_proj_bias")))
            }
            (_, P::KUp | P::VUp) => {
                let (heads, rank) = (self.size("num_attention_heads"), self.size("kv_lora_rank"));
                let (keys, values) = (self.size("qk_nope_head_dim"), self.size("v_head_dim"));
                let name = named("self_attn.kv_b_proj.weight");
                let line = |head: usize, i: usize| (head * (keys + values) + i) * rank;
                if part == P::KUp {
                    self.rearranged(&name, (heads * rank, keys), |r, i| line(r / rank, i) + r % rank)
                } else {
                    self.rearranged(&name, (heads * values, rank), |r, c| {
                        line(r / values, keys + r % values) + c
                    })
                }
            }
            (_, P::Q) if self.config["q_lora_rank"].is_number() => {
                widen(self.tensors.values(&named("self_attn.q_b_proj.weight")))
            }
            _ => self.plain(&checkpoint_name(tensor)),
        }
    }

    fn expert(&self, key: ExpertKey, projection: Projection) -> Vec<f64> {
        let layer = key.layer;
        match self.family() {
            "mixtral" | "minimax_m2" => {
                let w = ["w1", "w3", "w2"][projection as usize];
                let name = format!("model.layers.{layer}.block_sparse_moe.experts.{}.{w}.weight", key.expert);
                widen(self.tensors.values(&name))
            }
            "granitemoe" => {
                let (d, f) = (self.size("hidden_size"), self.size("intermediate_size"));
                let (name, first, (rows, cols)) = match projection {
                    Projection::Gate => ("input_linear", 0, (f, d)),
                    Projection::Up => ("input_linear", f, (f, d)),
                    Projection::Down => ("output_linear", 0, (d, f)),
                };
                let height = if projection == Projection::Down { d } else { 2 * f };
                let first = key.expert as usize * height + first;
                let name = format!("model.layers.{layer}.block_sparse_moe.{name}.weight");
                self.rearranged(&name, (rows, cols), |r, c| (first + r) * cols + c)
            }
            "gpt_oss" => {
                let (d, f) = (self.size("hidden_size"), self.size("intermediate_size"));
                let first = key.expert as usize * d * f;
                let name = |which: &str| format!("model.layers.{layer}.mlp.experts.{which}");
                match projection {
                    Projection::Down => self.rearranged(&name("down_proj"), (d, f), |r, c| first + c * d + r),
                    Projection::Gate | Projection::Up => {
                        let odd = usize::from(projection == Projection::Up);
                        let at = |r: usize, c: usize| 2 * first + c * 2 * f + 2 * r + odd;
                        self.rearranged(&name("gate_up_proj"), (f, d), at)
                    }
                }
            }
            _ => self.plain(&expert_name(key, projection)),
        }
    }
}

/// A vault directory (version 3), every tensor decoded by its encoding's scalar definition.
pub struct VaultWeights {
    spec: ModelSpec,
    experts: ExpertFile,
    experts_bytes: Vec<u8>,
    backbone: Backbone,
    backbone_bytes: Vec<u8>,
}

impl VaultWeights {
    /// Reads the vault in `dir`.
    ///
    /// # Panics
    /// If a file cannot be read or parsed, or is not of version 3.
    #[must_use]
    pub fn open(dir: &Path) -> Self {
        let experts_bytes = read(&dir.join(file_name::EXPERTS));
        let len = experts_bytes.len() as u64;
        let head = ExpertFile::head_len(&experts_bytes, len).unwrap_or_else(|e| panic!("{e}")) as usize;
        let experts = ExpertFile::parse(&experts_bytes[..head], len).unwrap_or_else(|e| panic!("{e}"));
        let manifest = experts.manifest().expect("a version 3 vault, OriginalWeights reads the others");
        let spec = manifest.spec.clone();

        let backbone_bytes = read(&dir.join(file_name::BACKBONE));
        let backbone =
            Backbone::parse(&backbone_bytes, backbone_bytes.len() as u64).unwrap_or_else(|e| panic!("{e}"));
        Self { spec, experts, experts_bytes, backbone, backbone_bytes }
    }

    /// The model, as the vault's config block says.
    #[must_use]
    pub const fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The head of the expert file.
    #[must_use]
    pub const fn experts(&self) -> &ExpertFile {
        &self.experts
    }
}

fn decode(encoding: Encoding, bytes: &[u8], rows: usize, cols: usize) -> Vec<f64> {
    let mut values = vec![0.0f32; rows * cols];
    for (row, values) in values.chunks_mut(cols).enumerate() {
        encoding.decode_row(bytes, cols, row, values);
    }
    widen(values)
}

impl Weights for VaultWeights {
    fn backbone(&self, tensor: BackboneTensor) -> Vec<f64> {
        let stored =
            self.backbone.require(&self.spec, tensor, &tensor.to_string()).unwrap_or_else(|e| panic!("{e}"));
        let bytes = &self.backbone_bytes[stored.bytes.start as usize..stored.bytes.end as usize];
        decode(stored.encoding, bytes, stored.rows, stored.cols)
    }

    fn expert(&self, key: ExpertKey, projection: Projection) -> Vec<f64> {
        let record = self.experts.records.iter().find(|r| r.key == key).unwrap_or_else(|| panic!("no {key}"));
        let bytes = &self.experts_bytes[record.offset as usize..(record.offset + record.len) as usize];
        assert_eq!(record.crc32c, Some(record_crc(key, bytes)), "checksum of {key}");
        let table = self.experts.table(key.layer).expect("a record's layer has a table");
        let tensor = table.tensors[projection as usize];
        let mut tiles = Vec::new();
        let bytes = if self.experts.coded {
            tiles.resize(table.record_len, 0);
            decode_record(bytes, bytes.len(), table, &mut tiles, |block| block.decode())
                .unwrap_or_else(|e| panic!("{key}: {e}"));
            &tiles
        } else {
            bytes
        };
        decode(tensor.encoding, &bytes[tensor.offset..tensor.offset + tensor.len], tensor.rows, tensor.cols)
    }
}

/// A `.smoe` file of version 2 and its backbone, as the original writes them: parsed and decoded here from
/// the bytes, in `f64`, by nothing but the layout's description.
pub struct OriginalWeights {
    bytes: Vec<u8>,
    backbone: Tensors,
    group: usize,
    bits: usize,
    experts: HashMap<ExpertKey, [Matrix; 3]>,
}

/// Row-major codes and scales; offsets are of the file.
#[derive(Clone, Copy)]
struct Matrix {
    weights: usize,
    packed: usize,
    scales: usize,
}

impl OriginalWeights {
    /// Reads a pair.
    ///
    /// # Panics
    /// If a file cannot be read or is not what the layout says.
    #[must_use]
    pub fn open(experts: &Path, backbone: &Path) -> Self {
        let bytes = read(experts);
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes")) as usize;
        assert_eq!(bytes[..8], [0x53, 0x4d, 0x4f, 0x45, 0xde, 0xea, 0x00, 0x01], "magic");
        assert!(matches!(u32_at(8), 1 | 2), "version {}", u32_at(8));
        let (total, table) = (u32_at(20) as usize, u64_at(24));
        let (group, bits) = (u32_at(40) as usize, u32_at(44) as usize);
        assert!(matches!(bits, 2 | 4), "{bits} bits");

        let mut experts = HashMap::new();
        for i in 0..total {
            let entry = table + 48 * i;
            let key = ExpertKey { layer: u32_at(entry), expert: u32_at(entry + 4) };
            let record = u64_at(entry + 8);
            let matrices = [0, 1, 2].map(|kind| {
                let d = table + 48 * total + 44 * (3 * i + kind);
                assert_eq!(usize::from(bytes[d]), kind, "type of descriptor {kind} of {key}");
                Matrix {
                    weights: u32_at(d + 4) as usize * u32_at(d + 8) as usize,
                    packed: record + u64_at(d + 12),
                    scales: record + u64_at(d + 28),
                }
            });
            assert!(experts.insert(key, matrices).is_none(), "{key} twice");
        }
        let backbone = Tensors::open(&[backbone]);
        Self { bytes, backbone, group, bits, experts }
    }
}

impl Weights for OriginalWeights {
    fn backbone(&self, tensor: BackboneTensor) -> Vec<f64> {
        widen(self.backbone.values(&checkpoint_name(tensor)))
    }

    fn expert(&self, key: ExpertKey, projection: Projection) -> Vec<f64> {
        let matrix = self.experts.get(&key).unwrap_or_else(|| panic!("no {key}"))[projection as usize];
        let per_byte = 8 / self.bits;
        let levels = 1u32 << self.bits;
        let zero = f64::from(levels - 1) / 2.0;
        (0..matrix.weights)
            .map(|i| {
                let byte = u32::from(self.bytes[matrix.packed + i / per_byte]);
                let code = (byte >> (i % per_byte * self.bits)) % levels;
                let at = matrix.scales + i / self.group * 2;
                let scale = binary16(u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]));
                (f64::from(code) - zero) / zero * scale
            })
            .collect()
    }
}

/// The value of a finite binary16, from its fields.
fn binary16(half: u16) -> f64 {
    let sign = if half >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from((half >> 10) & 31), f64::from(half & 1023));
    assert!(exponent < 31, "a scale is not finite");
    match exponent {
        0 => sign * fraction * 2f64.powi(-24),
        _ => sign * (1024.0 + fraction) * 2f64.powi(exponent - 25),
    }
}
