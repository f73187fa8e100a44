"""Time and memory of all head metrics of one layer against the length of the prompt.

    python tests/benchmarks/attention_length.py [--lengths 1024,2048] [--threads 2] [--json]

A layer of SmolLM2's shape with random weights (9 heads, 3 key/value heads of 64 numbers), float32,
a fresh process for each length. Memory is the most that the process held, above what it held with
the model loaded; beside it what the layer's matrices would take as a whole.
"""

from __future__ import annotations

import argparse
import json

from bench_tools import environment, run_python, table

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
HEADS = 9
LIMIT = 2 << 30  # bytes above the model, at every length

CODE = """
import json, re, time
import torch
from llmcli.config import *
from llmcli.loading.load import randomize
from llmcli.commands.attention.measure.run import measure_attention
from llmcli.model import Model
from llmcli.nn.decoder import Decoder

def held(mark):
    return int(re.search(mark + r":\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024

length, norm = {length}, NormConfig(kind="rms", eps=1e-5)
mixer = AttentionConfig(
    heads={heads}, kv_heads=3, head_dim=64, value_dim=64, scale=0.125,
    rope=RopeConfig(theta=1e5, dims=64),
)
ffn = MlpConfig(hidden=1536, activation="silu", gated=True)
config = ModelConfig(
    family="random", model_type="random", vocab=8192, width=576, context=length,
    layers=(sequential(mixer, ffn, norm=norm),), embedding=EmbeddingConfig(),
    final_norm=norm, head=HeadConfig(tied=True),
)
decoder = Decoder(config, device="cpu", dtype=torch.float32)
randomize(decoder, 0)
model = Model(
    name="random", config=config, decoder=decoder, tokenizer=None, checkpoint=None,
    eos_ids=frozenset(), random_seed=0,
)
ids = torch.randint(8192, (length,), generator=torch.Generator().manual_seed(0)).tolist()
measure_attention(model, ids[:64])  # what is allocated once
before = held("VmRSS")
start = time.perf_counter()
report = measure_attention(model, ids)
seconds = time.perf_counter() - start
checks = {{check.name: [check.value, check.tolerance] for check in report.checks}}
print(json.dumps({{"seconds": seconds, "before": before, "ok": report.ok, "checks": checks}}))
"""


def measured(length: int, threads: int) -> dict[str, object]:
    """One length in a process of its own: seconds, bytes above the model, the checks."""
    ran = run_python(CODE.format(length=length, heads=HEADS), threads=threads)
    found = json.loads(ran.stdout)
    return {
        "length": length,
        "seconds": found["seconds"],
        "bytes_above_model": ran.peak - found["before"],
        "whole_matrices_bytes": HEADS * length**2 * 4,
        "ok": found["ok"],
        "checks": found["checks"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    found = [measured(length, options.threads) for length in lengths]
    if options.json:
        print(json.dumps({"environment": environment(options.threads), "lengths": found}))
        return
    rows = [["tokens", "seconds", "MiB above the model", "MiB a token", "whole matrices", "checks"]]
    for one in found:
        above, length = one["bytes_above_model"] / 2**20, one["length"]
        rows.append(
            [
                str(length),
                f"{one['seconds']:.1f}",
                f"{above:.0f}" + ("" if one["bytes_above_model"] < LIMIT else " TOO MUCH"),
                f"{above / length:.3f}",
                f"{one['whole_matrices_bytes'] / 2**20:.0f} MiB",
                "hold" if one["ok"] else "RED",
            ]
        )
    print(table(f"all head metrics of one layer, {options.threads} threads", rows))


if __name__ == "__main__":
    main()
