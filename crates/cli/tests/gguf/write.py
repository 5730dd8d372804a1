"""Writes the fixture `granitemoe` as a GGUF file with llama.cpp's own package, as its converter does.

    python3 write.py FIXTURE VOCABULARY.json OUT.gguf

Needs `gguf` (PyPI), which brings numpy.
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np


def tensors(path):
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16"
        start, end = entry["data_offsets"]
        words = np.frombuffer(data[8 + n + start : 8 + n + end], dtype="<u2").astype(np.uint32)
        yield name, (words << 16).view(np.float32).reshape(entry["shape"])


def permute(weights, heads):
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


fixture, vocabulary, out = map(Path, sys.argv[1:])
config = json.loads((fixture / "config.json").read_text())
words = json.loads(vocabulary.read_text())
writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GRANITE_MOE])
writer.add_block_count(config["num_hidden_layers"])
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_head_count(config["num_attention_heads"])
writer.add_head_count_kv(config["num_key_value_heads"])
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
writer.add_expert_count(config["num_local_experts"])
writer.add_expert_used_count(config["num_experts_per_tok"])
writer.add_attention_scale(config["attention_multiplier"])
writer.add_embedding_scale(config["embedding_multiplier"])
writer.add_residual_scale(config["residual_multiplier"])
writer.add_logit_scale(config["logits_scaling"])
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("refact")
writer.add_token_list(words["tokens"])
writer.add_token_types([gguf.TokenType.NORMAL] * len(words["tokens"]))
writer.add_token_merges([words["merge"]])
writer.add_eos_token_id(words["eos"])
writer.add_chat_template(words["template"])

names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GRANITE_MOE, config["num_hidden_layers"])
for name, weights in tensors(fixture / "model.safetensors"):
    if name.endswith("self_attn.q_proj.weight"):
        weights = permute(weights, config["num_attention_heads"])
    elif name.endswith("self_attn.k_proj.weight"):
        weights = permute(weights, config["num_key_value_heads"])
    if name.endswith("input_linear.weight"):
        layer = name.split(".")[2]
        for part, half in zip(("gate", "up"), np.split(weights, 2, axis=1)):
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(half))
        continue
    new = names.get_name(name, try_suffixes=(".weight",))
    assert new, name
    writer.add_tensor(new, np.ascontiguousarray(weights))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
