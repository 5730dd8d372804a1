"""Writes a random Q4_0 GGUF of Qwen3-30B-A3B's shape, cut to some layers: what llama.cpp is measured on.

    python gguf_shape.py OUT.gguf --layers 12 --gguf-py PATH

PATH is the folder `gguf-py` of a llama.cpp source tree. The tokeniser is left out: llama-bench feeds ids.
"""

import argparse
import sys

import numpy as np

SHAPE = dict(d_model=2048, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8, d_expert=768, vocab=151936)


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("out")
    args.add_argument("--layers", type=int, default=12)
    args.add_argument("--gguf-py", required=True)
    args.add_argument("--seed", type=int, default=1)
    args = args.parse_args()
    sys.path.insert(0, args.gguf_py)
    import gguf

    s = SHAPE
    rng = np.random.default_rng(args.seed)
    writer = gguf.GGUFWriter(args.out, "qwen3moe")
    writer.add_block_count(args.layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(s["d_model"])
    writer.add_feed_forward_length(6144)
    writer.add_head_count(s["heads"])
    writer.add_head_count_kv(s["kv_heads"])
    writer.add_key_length(s["head_dim"])
    writer.add_value_length(s["head_dim"])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(s["experts"])
    writer.add_expert_used_count(s["top_k"])
    writer.add_expert_feed_forward_length(s["d_expert"])
    writer.add_vocab_size(s["vocab"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)

    tensors = []

    def coded(name, *shape, gain=1.0):
        tensors.append((name, shape, gain))
        rows = int(np.prod(shape[:-1]))
        bytes_per_row = shape[-1] // 32 * 18
        writer.add_tensor_info(
            name, [*shape[:-1], bytes_per_row], np.dtype(np.uint8), rows * bytes_per_row,
            raw_dtype=gguf.GGMLQuantizationType.Q4_0,
        )

    def floats(name, *shape):
        tensors.append((name, shape, None))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(shape)) * 4)

    d, heads, kv = s["d_model"], s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
    coded("token_embd.weight", s["vocab"], d)
    for i in range(args.layers):
        b = f"blk.{i}."
        floats(b + "attn_norm.weight", d)
        coded(b + "attn_q.weight", heads, d)
        coded(b + "attn_k.weight", kv, d)
        coded(b + "attn_v.weight", kv, d)
        coded(b + "attn_output.weight", d, heads, gain=0.1)
        floats(b + "attn_q_norm.weight", s["head_dim"])
        floats(b + "attn_k_norm.weight", s["head_dim"])
        floats(b + "ffn_norm.weight", d)
        floats(b + "ffn_gate_inp.weight", s["experts"], d)
        coded(b + "ffn_gate_exps.weight", s["experts"], s["d_expert"], d)
        coded(b + "ffn_up_exps.weight", s["experts"], s["d_expert"], d)
        coded(b + "ffn_down_exps.weight", s["experts"], d, s["d_expert"], gain=0.1)
    floats("output_norm.weight", d)
    coded("output.weight", s["vocab"], d)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, gain in tensors:
        if gain is None:
            values = np.ones(shape, np.float32)
            if name.endswith("gate_inp.weight"):
                values = rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1], dtype=np.float32)
            writer.write_tensor_data(values)
            continue
        blocks = rng.integers(0, 256, (int(np.prod(shape)) // 32, 18), np.uint8)
        scale = np.float16(gain / np.sqrt(shape[-1]) / 4.6)
        blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        writer.write_tensor_data(blocks.reshape(*shape[:-1], -1))
    writer.close()


if __name__ == "__main__":
    main()
