"""Makes ggml.bin: random blocks of each type of ggml and the weights that the `gguf` package reads out of them.

    pip install gguf numpy && python ggml.py

For each type: its number and the bytes and weights that follow (each a little-endian u32), the bytes, the weights
as f32.
"""

import struct
from pathlib import Path

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type

# Where the f16 numbers of a block are.
HALVES = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
    Type.IQ4_NL: [0],
    Type.MXFP4: [],
}

random = np.random.default_rng(20)
out = b""
for kind, halves in HALVES.items():
    weights, size = GGML_QUANT_SIZES[kind]
    n = 2 if weights == 256 else 6
    blocks = random.integers(0, 256, (n, size), dtype=np.uint8)
    for at in halves:
        # Numbers of the usual size, of both signs.
        numbers = (random.standard_normal(n) * 0.02).astype("<f2")
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(n, 2)
    if kind == Type.MXFP4:
        blocks[:, 0] = [0, 1, 2, 110, 120, 127]
    values = quants.dequantize(blocks.reshape(-1), kind).astype("<f4").reshape(-1)
    out += struct.pack("<III", int(kind), blocks.size, values.size) + blocks.tobytes() + values.tobytes()
Path(__file__).with_name("ggml.bin").write_bytes(out)
