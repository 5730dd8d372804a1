//! Tiny models as published checkpoints.

use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use smoe_format::half::{f32_to_bf16, f32_to_f16};
use smoe_format::original::checkpoint_name;
use smoe_format::spec::{FfnKind, RopeScaling};
use smoe_format::{BackboneTensor, ExpertKey, Projection};

use super::{TinyModel, tokenizer};
use crate::fixtures::yarn;
use crate::weights::expert_name;
use crate::write;

/// Number format of a checkpoint. Tiny models' weights are exact in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    /// What most are published in.
    Bf16,
    /// Half precision.
    F16,
    /// Single precision.
    F32,
}

/// Where `config.json` keeps what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConfigStyle {
    /// As most published checkpoints: `rope_theta` and `rope_scaling` at the top, `num_experts`,
    /// `torch_dtype`.
    Hub,
    /// As newer libraries write: `rope_parameters`, `num_local_experts`, `dtype`.
    Nested,
}

/// How a checkpoint is written.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointOptions {
    /// Files that the tensors are dealt to; 1 gives `model.safetensors` and no index.
    pub shards: usize,
    /// Number format.
    pub dtype: Float,
    /// Form of the config.
    pub config: ConfigStyle,
    /// Also a byte-level tokenizer and a chat template; needs a vocabulary of [`tokenizer::SIZE`] or more.
    pub tokenizer: bool,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        Self { shards: 1, dtype: Float::Bf16, config: ConfigStyle::Hub, tokenizer: true }
    }
}

impl TinyModel {
    /// Every tensor of the checkpoint by its published name, with its shape.
    #[must_use]
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, Vec<f32>)> {
        let mut tensors = Vec::new();
        for tensor in BackboneTensor::all(&self.spec) {
            let (rows, cols) = tensor.shape(&self.spec);
            let shape = if tensor.is_vector() { vec![cols] } else { vec![rows, cols] };
            tensors.push((checkpoint_name(tensor), shape, self.backbone_values(tensor)));
        }
        for layer in self.spec.moe_layers() {
            for expert in 0..self.spec.moe.n_experts {
                let key = ExpertKey { layer: layer as u32, expert: expert as u32 };
                for projection in Projection::ALL {
                    let (rows, cols) = projection.shape(&self.spec);
                    let values = self.expert_values(key, projection);
                    tensors.push((expert_name(key, projection), vec![rows, cols], values));
                }
            }
        }
        tensors
    }

    /// Writes a checkpoint into `dir`, which must exist.
    ///
    /// # Panics
    /// If a file cannot be written, or the family's config has no words for the spec or the options.
    pub fn write_checkpoint(&self, dir: &Path, options: CheckpointOptions) {
        let family = &self.spec.model_type;
        assert!(matches!(family.as_str(), "qwen3_moe" | "deepseek"), "no config for `{family}`");
        let config = self.config(options);
        write(&dir.join("config.json"), pretty(&config).as_bytes());
        for (name, bytes) in self.side_files(options.tokenizer) {
            write(&dir.join(name), &bytes);
        }

        let mut shards = vec![Vec::new(); options.shards];
        let mut weight_map = Map::new();
        let file_name = |shard: usize| match options.shards {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", shard + 1),
        };
        let mut total_size = 0;
        for (i, (name, shape, values)) in self.tensors().into_iter().enumerate() {
            let bytes = options.dtype.bytes(&values);
            total_size += bytes.len();
            // Dealt out like cards, so that no layer lies whole in one file.
            let shard = i % options.shards;
            weight_map.insert(name.clone(), json!(file_name(shard)));
            shards[shard].push((name, shape, bytes));
        }
        for (shard, tensors) in shards.iter().enumerate() {
            let views = tensors.iter().map(|(name, shape, bytes)| {
                let dtype = options.dtype.dtype();
                (name, TensorView::new(dtype, shape.clone(), bytes).expect("shape and bytes agree"))
            });
            let metadata = [("format".to_owned(), "pt".to_owned())].into();
            let bytes = safetensors::serialize(views, Some(metadata)).expect("distinct names");
            write(&dir.join(file_name(shard)), &bytes);
        }
        if options.shards > 1 {
            let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
            write(&dir.join("model.safetensors.index.json"), pretty(&index).as_bytes());
        }
    }

    /// `generation_config.json` and, if asked for, the tokenizer's files.
    pub(super) fn side_files(&self, with_tokenizer: bool) -> Vec<(&'static str, Vec<u8>)> {
        let generation = json!({ "do_sample": false, "eos_token_id": self.eos(with_tokenizer) });
        let mut files = vec![("generation_config.json", pretty(&generation).into_bytes())];
        if with_tokenizer {
            let (size, vocab) = (tokenizer::SIZE, self.spec.vocab_size);
            assert!(vocab >= size, "a vocabulary of {vocab}, the tokenizer has {size}");
            files.push(("tokenizer.json", pretty(&tokenizer::tokenizer()).into_bytes()));
            files.push(("tokenizer_config.json", pretty(&tokenizer::config()).into_bytes()));
            files.push(("chat_template.jinja", tokenizer::CHAT_TEMPLATE.as_bytes().to_vec()));
        }
        files
    }

    fn eos(&self, with_tokenizer: bool) -> usize {
        if with_tokenizer { tokenizer::IM_END as usize } else { self.spec.vocab_size - 1 }
    }

    /// `config.json`.
    pub(super) fn config(&self, options: CheckpointOptions) -> Value {
        let spec = &self.spec;
        let a = &spec.attention;
        let mut config = json!({
            "model_type": spec.model_type,
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": null,
            "eos_token_id": self.eos(options.tokenizer),
            "head_dim": a.head_dim,
            "hidden_act": "silu",
            "hidden_size": spec.d_model,
            "initializer_range": 0.02,
            "max_position_embeddings": spec.max_context,
            "moe_intermediate_size": spec.moe.d_expert,
            "norm_topk_prob": spec.moe.norm_topk,
            "num_attention_heads": a.n_heads,
            "num_experts_per_tok": spec.moe.top_k,
            "num_hidden_layers": spec.n_layers(),
            "num_key_value_heads": a.n_kv_heads,
            "rms_norm_eps": spec.rms_norm_eps,
            "tie_word_embeddings": spec.tied_head,
            "use_cache": true,
            "vocab_size": spec.vocab_size,
        });
        let map = config.as_object_mut().expect("made above");
        // `f32` in decimal is longer as `f64`; published files have the short form.
        map["rms_norm_eps"] =
            spec.rms_norm_eps.to_string().parse::<f64>().map(Value::from).expect("a number");
        let dense: Vec<(usize, usize)> = spec
            .layers
            .iter()
            .enumerate()
            .filter_map(|(i, kind)| match kind {
                FfnKind::Dense(width) => Some((i, *width)),
                FfnKind::Moe => None,
            })
            .collect();
        let width = dense.first().map_or(spec.moe.d_expert * 2, |d| d.1);
        assert!(dense.iter().all(|d| d.1 == width), "a config has one dense width");
        map.insert("intermediate_size".to_owned(), json!(width));

        let nested = options.config == ConfigStyle::Nested;
        let family = match spec.model_type.as_str() {
            "qwen3_moe" => {
                assert!(a.qk_norm && spec.moe.d_shared == 0, "not of the Qwen3-MoE family");
                let layers: Vec<usize> = dense.iter().map(|d| d.0).collect();
                let experts = if nested { "num_local_experts" } else { "num_experts" };
                json!({
                    "architectures": ["Qwen3MoeForCausalLM"],
                    "decoder_sparse_step": 1,
                    "mlp_only_layers": layers,
                    experts: spec.moe.n_experts,
                    "output_router_logits": false,
                    "router_aux_loss_coef": 0.001,
                    "sliding_window": null,
                    "use_sliding_window": false,
                })
            }
            "deepseek" => {
                assert!(!a.qk_norm && a.n_heads * a.head_dim == spec.d_model, "not of the DeepSeek family");
                assert!(dense.iter().enumerate().all(|(i, d)| i == d.0), "dense layers come first");
                assert!(spec.moe.d_shared.is_multiple_of(spec.moe.d_expert), "whole shared experts");
                json!({
                    "architectures": ["DeepseekForCausalLM"],
                    "first_k_dense_replace": dense.len(),
                    "moe_layer_freq": 1,
                    "n_routed_experts": spec.moe.n_experts,
                    "n_shared_experts": spec.moe.d_shared / spec.moe.d_expert,
                    "pretraining_tp": 1,
                    "scoring_func": "softmax",
                })
            }
            // A vault needs no more than the name.
            _ => json!({}),
        };
        map.extend(family.as_object().expect("made above").clone());

        let scaling = scaling(&spec.rope.scaling);
        let dtype = json!(options.dtype.name());
        if nested {
            let mut rope = scaling.unwrap_or_else(|| json!({ "rope_type": "default" }));
            rope["rope_theta"] = json!(spec.rope.theta);
            map.insert("rope_parameters".to_owned(), rope);
            map.insert("dtype".to_owned(), dtype);
        } else {
            map.insert("rope_theta".to_owned(), json!(spec.rope.theta));
            map.insert("rope_scaling".to_owned(), scaling.unwrap_or(Value::Null));
            map.insert("torch_dtype".to_owned(), dtype);
        }
        config
    }
}

/// RoPE scaling as configs say it; what has its default is left out, as in published ones.
fn scaling(scaling: &RopeScaling) -> Option<Value> {
    match *scaling {
        RopeScaling::None => None,
        RopeScaling::Linear { factor } => Some(json!({ "rope_type": "linear", "factor": factor })),
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor, truncate } => {
            let mut value = json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original_context,
            });
            let RopeScaling::Yarn { attention_factor: default, .. } = yarn(factor, original_context) else {
                unreachable!("yarn() makes YaRN")
            };
            for (name, found, default) in [
                ("beta_fast", beta_fast, 32.0),
                ("beta_slow", beta_slow, 1.0),
                ("attention_factor", attention_factor, default),
            ] {
                if found != default {
                    value[name] = json!(found);
                }
            }
            if !truncate {
                value["truncate"] = json!(false);
            }
            Some(value)
        }
    }
}

pub(super) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

impl Float {
    const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::F32 => "float32",
        }
    }

    const fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
            Self::F32 => Dtype::F32,
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
