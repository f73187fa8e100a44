"""Time and memory of all head metrics of one recurrent layer against the length of the prompt.

    python tests/benchmarks/linear_maps.py [--mixer ssm] [--lengths 1024,2048] [--heads 4] [--json]

A gated DeltaNet with heads as in Qwen3-Next (keys and values of 128 numbers), or Mamba-2 with
states of 128 × 64, random weights, float32, a fresh process for each length. Memory is the most
that the process held, above what it held with the model loaded; beside it what the layer's maps
would take as a whole.
"""

from __future__ import annotations

import argparse
import json

from bench_tools import environment, run_python, table

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
LIMIT = 3 << 30  # bytes above the model, at every length
MIXERS = {
    "delta": "DeltaConfig(heads={heads}, key_heads={heads}, key_dim=128, value_dim=128, length=4, "
    "norm=norm)",
    "ssm": "SsmConfig(heads={heads}, head_dim=64, groups=1, state=128, length=4, norm=norm)",
}

CODE = """
import json, re, time
import torch
from llmcli.config import *
from llmcli.loading.load import randomize
from llmcli.commands.attention.measure.run import measure_attention
from llmcli.model import Model
from llmcli.nn.decoder import Decoder
from llmcli.parts.delta.config import DeltaConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig
from llmcli.parts.ssm.config import SsmConfig

def held(mark):
    return int(re.search(mark + r":\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024

length, norm = {length}, NormConfig(kind="rms", eps=1e-5)
mixer = {mixer}
ffn = MlpConfig(hidden=1536, activation="silu", gated=True)
config = ModelConfig(
    family="random", model_type="random", vocab=8192, width=576, context=length,
    layers=(sequential(mixer, ffn, norm=norm),), embedding=EmbeddingConfig(),
    final_norm=norm, head=HeadConfig(tied=True),
)
decoder = Decoder(config, device="cpu", dtype=torch.float32)
randomize(decoder, 0)
# half-lives from a few tokens to thousands, as trained models have them
rates = decoder.weight("blocks.0.{prefix}.A_log").dense()
rates.copy_(torch.linspace(-8.0, 0.0, len(rates)))
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
lives = [head.metrics["half_life"] for head in report.layers[0].heads]
print(json.dumps({{
    "seconds": seconds, "before": before, "ok": report.ok, "checks": checks,
    "half_lives": [life if life < length else None for life in lives],
}}))
"""


def measured(mixer: str, heads: int, length: int, threads: int) -> dict[str, object]:
    """One length in a process of its own: seconds, bytes above the model, the checks."""
    code = CODE.format(
        length=length, mixer=MIXERS[mixer].format(heads=heads),
        prefix={"delta": "linattn", "ssm": "ssm"}[mixer],
    )  # fmt: skip
    ran = run_python(code, threads=threads)
    found = json.loads(ran.stdout)
    return {
        "length": length,
        "seconds": found["seconds"],
        "bytes_above_model": ran.peak - found["before"],
        "whole_maps_bytes": heads * length**2 * 4,
        "half_lives": found["half_lives"],
        "ok": found["ok"],
        "checks": found["checks"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixer", choices=tuple(MIXERS), default="delta")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    found = [
        measured(options.mixer, options.heads, length, options.threads) for length in lengths
    ]  # fmt: skip
    if options.json:
        print(json.dumps({"environment": environment(options.threads), "lengths": found}))
        return
    rows = [["tokens", "seconds", "MiB above the model", "MiB a token", "whole maps", "checks"]]
    for one in found:
        above, length = one["bytes_above_model"] / 2**20, one["length"]
        rows.append(
            [
                str(length),
                f"{one['seconds']:.1f}",
                f"{above:.0f}" + ("" if one["bytes_above_model"] < LIMIT else " TOO MUCH"),
                f"{above / length:.3f}",
                f"{one['whole_maps_bytes'] / 2**20:.0f} MiB",
                "hold" if one["ok"] else f"RED {one['checks']}",
            ]
        )
    words = f"all head metrics of one {options.mixer} layer, {options.heads} heads"
    print(table(f"{words}, {options.threads} threads", rows))


if __name__ == "__main__":
    main()
