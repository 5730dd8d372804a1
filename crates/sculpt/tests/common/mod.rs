//! Checkpoints made by code, tiny and random, and what the tests do with vaults.
#![allow(dead_code, clippy::print_stderr)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::{Value, json};
use smoe_format::half::{f32_to_bf16, f32_to_f16};
use smoe_format::{Backbone, Encoding, ExpertFile};
use smoe_sculpt::{BackboneBits, Outcome, Progress, Recipe, SculptError, Settings, sculpt};

/// A directory of the shared materials, if there is one here.
pub fn shared(name: &str) -> Option<PathBuf> {
    let shared = std::env::var_os("SMOE_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let path = shared.join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED: no {}", path.display());
    None
}

/// xorshift64*: the same numbers on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }

    pub fn weight(&mut self) -> f32 {
        // Some groups larger than others, some weights zero.
        let unit = (self.next() >> 40) as f32 / 8_388_608.0 - 1.0;
        if self.below(50) == 0 { 0.0 } else { unit * 0.1 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    Bf16,
    F16,
    F32,
}

impl Type {
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
        }
    }

    pub fn encoding(self) -> Encoding {
        match self {
            Self::Bf16 => Encoding::Bf16,
            Self::F16 => Encoding::F16,
            Self::F32 => Encoding::F32,
        }
    }

    fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::Bf16 => values.iter().flat_map(|&v| f32_to_bf16(v).to_le_bytes()).collect(),
            Self::F16 => values.iter().flat_map(|&v| f32_to_f16(v).to_le_bytes()).collect(),
            Self::F32 => values.iter().flat_map(|&v| v.to_le_bytes()).collect(),
        }
    }
}

/// A tensor of a checkpoint in the making.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn new(ty: Type, shape: &[usize], values: &[f32]) -> Self {
        Self { dtype: ty.name().to_owned(), shape: shape.to_vec(), bytes: ty.bytes(values) }
    }

    pub fn encoding(&self) -> Encoding {
        Type::ALL.into_iter().find(|ty| ty.name() == self.dtype).expect("float").encoding()
    }

    pub fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.shape.iter().product()];
        let n = values.len();
        self.encoding().decode_row(&self.bytes, n, 0, &mut values);
        values
    }
}

/// A checkpoint in memory, to be spoiled and written.
#[derive(Clone, Debug)]
pub struct Tiny {
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
    pub side: BTreeMap<String, Vec<u8>>,
}

impl Tiny {
    /// `qwen3_moe`: 3 layers, the first dense; odd widths, so that nothing fits its tiles.
    pub fn qwen3(ty: Type, seed: u64) -> Self {
        let config = json!({
            "model_type": "qwen3_moe", "hidden_size": 72, "intermediate_size": 80, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 150,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "num_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 40, "norm_topk_prob": true, "decoder_sparse_step": 1,
            "mlp_only_layers": [0], "tie_word_embeddings": false, "hidden_act": "silu",
            "rope_theta": 1e6, "rope_scaling": null, "attention_bias": false,
        });
        Self::fill(config, ty, seed)
    }

    /// `deepseek`: 3 layers, the first dense, shared experts.
    pub fn deepseek(ty: Type, seed: u64) -> Self {
        let config = json!({
            "model_type": "deepseek", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 130,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "n_routed_experts": 5,
            "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
            "norm_topk_prob": false, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "scoring_func": "softmax", "tie_word_embeddings": false, "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        });
        Self::fill(config, ty, seed)
    }

    /// Tensors that a config needs, by the names of the Llama lineage written out here once more.
    pub fn fill(config: Value, ty: Type, seed: u64) -> Self {
        let mut random = Random(seed * 2 + 1);
        let mut tensors = BTreeMap::new();
        let mut put = |name: String, shape: &[usize]| {
            let values: Vec<f32> = (0..shape.iter().product()).map(|_| random.weight()).collect();
            tensors.insert(name, Tensor::new(ty, shape, &values));
        };
        let n = |key: &str| config[key].as_u64().expect(key) as usize;
        let (d, heads, kv) = (n("hidden_size"), n("num_attention_heads"), n("num_key_value_heads"));
        let hd = config["head_dim"].as_u64().map_or(d / heads, |n| n as usize);
        let qwen = config["model_type"] == "qwen3_moe";
        let experts = if qwen { n("num_experts") } else { n("n_routed_experts") };
        let f = n("moe_intermediate_size");
        put("model.embed_tokens.weight".into(), &[n("vocab_size"), d]);
        put("model.norm.weight".into(), &[d]);
        if config["tie_word_embeddings"] != true {
            put("lm_head.weight".into(), &[n("vocab_size"), d]);
        }
        for layer in 0..n("num_hidden_layers") {
            let p = format!("model.layers.{layer}");
            put(format!("{p}.input_layernorm.weight"), &[d]);
            put(format!("{p}.post_attention_layernorm.weight"), &[d]);
            put(format!("{p}.self_attn.q_proj.weight"), &[heads * hd, d]);
            put(format!("{p}.self_attn.k_proj.weight"), &[kv * hd, d]);
            put(format!("{p}.self_attn.v_proj.weight"), &[kv * hd, d]);
            put(format!("{p}.self_attn.o_proj.weight"), &[d, heads * hd]);
            if qwen {
                put(format!("{p}.self_attn.q_norm.weight"), &[hd]);
                put(format!("{p}.self_attn.k_norm.weight"), &[hd]);
            }
            let mut ffn = |prefix: &str, width: usize| {
                put(format!("{p}.mlp.{prefix}gate_proj.weight"), &[width, d]);
                put(format!("{p}.mlp.{prefix}up_proj.weight"), &[width, d]);
                put(format!("{p}.mlp.{prefix}down_proj.weight"), &[d, width]);
            };
            let dense = if qwen {
                let step = config["decoder_sparse_step"].as_u64().unwrap_or(1) as usize;
                (layer + 1) % step != 0
                    || config["mlp_only_layers"].as_array().is_some_and(|l| l.contains(&json!(layer)))
            } else {
                layer < n("first_k_dense_replace")
            };
            if dense {
                ffn("", n("intermediate_size"));
                continue;
            }
            for expert in 0..experts {
                ffn(&format!("experts.{expert}."), f);
            }
            if !qwen && n("n_shared_experts") > 0 {
                ffn("shared_experts.", n("n_shared_experts") * f);
            }
            put(format!("{p}.mlp.gate.weight"), &[experts, d]);
        }
        Self { config, tensors, side: BTreeMap::new() }
    }

    /// Writes config and side files, and the weights as one file or as `shards` files with an index.
    pub fn write(&self, dir: &Path, shards: usize) {
        std::fs::create_dir_all(dir).expect("dir");
        std::fs::write(dir.join("config.json"), serde_json::to_vec_pretty(&self.config).expect("json"))
            .expect("config");
        for (name, bytes) in &self.side {
            std::fs::write(dir.join(name), bytes).expect("side file");
        }
        let all: Vec<(&String, &Tensor)> = self.tensors.iter().collect();
        if shards == 0 {
            write_safetensors(&dir.join("model.safetensors"), &all);
            return;
        }
        let mut map = serde_json::Map::new();
        for shard in 0..shards {
            let name = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
            // Round robin: an expert's tensors are in different files.
            let mine: Vec<_> = all.iter().copied().skip(shard).step_by(shards).collect();
            for (tensor, _) in &mine {
                map.insert((*tensor).clone(), json!(name));
            }
            write_safetensors(&dir.join(&name), &mine);
        }
        let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).expect("index");
    }
}

pub fn write_safetensors(path: &Path, tensors: &[(&String, &Tensor)]) {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for (name, tensor) in tensors {
        let start = data.len();
        data.extend_from_slice(&tensor.bytes);
        header.insert(
            (*name).clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()]}),
        );
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&data);
    std::fs::write(path, bytes).expect("safetensors");
}

/// With the original's rule, whose codes tests can compute.
pub fn settings(bits: u8, backbone: BackboneBits) -> Settings {
    Settings { bits, backbone, recipe: Recipe::Absmax, threads: Some(1), ..Settings::default() }
}

pub fn run(checkpoint: &Path, vault: &Path, settings: &Settings) -> Result<Outcome, SculptError> {
    sculpt(checkpoint, vault, settings, &(), &AtomicBool::new(false))
}

/// Keeps warnings and can cancel after so many bytes.
pub struct Watch<'a> {
    pub warnings: Mutex<Vec<String>>,
    pub advanced: AtomicU64,
    pub cancel: &'a AtomicBool,
    pub after: u64,
}

impl<'a> Watch<'a> {
    pub fn new(cancel: &'a AtomicBool, after: u64) -> Self {
        Self { warnings: Mutex::default(), advanced: AtomicU64::new(0), cancel, after }
    }

    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().expect("lock").clone()
    }
}

impl Progress for Watch<'_> {
    fn advance(&self, bytes: u64) {
        if self.advanced.fetch_add(bytes, Ordering::Relaxed) + bytes >= self.after {
            self.cancel.store(true, Ordering::Relaxed);
        }
    }

    fn warn(&self, message: &str) {
        self.warnings.lock().expect("lock").push(message.to_owned());
    }
}

/// Runs and returns the outcome with the warnings.
pub fn watched(
    checkpoint: &Path,
    vault: &Path,
    settings: &Settings,
) -> (Result<Outcome, SculptError>, Vec<String>) {
    let stop = AtomicBool::new(false);
    let watch = Watch::new(&stop, u64::MAX);
    let outcome = sculpt(checkpoint, vault, settings, &watch, &stop);
    (outcome, watch.warnings())
}

/// All files of a vault.
pub fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    std::fs::read_dir(dir)
        .expect("vault")
        .map(|entry| {
            let entry = entry.expect("entry");
            let name = entry.file_name().into_string().expect("UTF-8");
            (name, std::fs::read(entry.path()).expect("file"))
        })
        .collect()
}

/// A vault read whole.
pub struct Vault {
    pub experts: ExpertFile,
    pub backbone: Backbone,
    pub experts_bytes: Vec<u8>,
    pub backbone_bytes: Vec<u8>,
}

impl Vault {
    pub fn open(dir: &Path) -> Self {
        let experts_bytes = std::fs::read(dir.join("experts.smoe")).expect("experts");
        let backbone_bytes = std::fs::read(dir.join("backbone.safetensors")).expect("backbone");
        let len = experts_bytes.len() as u64;
        let head_len = ExpertFile::head_len(&experts_bytes, len).expect("head") as usize;
        let experts = ExpertFile::parse(&experts_bytes[..head_len], len).expect("head");
        let first = *backbone_bytes.first_chunk().expect("8 bytes");
        let header_len = Backbone::header_len(first, backbone_bytes.len() as u64).expect("header") as usize;
        let backbone =
            Backbone::parse(&backbone_bytes[..header_len], backbone_bytes.len() as u64).expect("backbone");
        Self { experts, backbone, experts_bytes, backbone_bytes }
    }

    pub fn backbone_tensor(&self, name: &str) -> (Encoding, &[u8]) {
        let stored = self.backbone.get(name).unwrap_or_else(|| panic!("no {name}"));
        (stored.encoding, &self.backbone_bytes[stored.bytes.start as usize..stored.bytes.end as usize])
    }
}
