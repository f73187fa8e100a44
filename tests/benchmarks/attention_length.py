"""Time and memory of all head metrics of one layer against the length of the prompt.

    python tests/benchmarks/attention_length.py [--lengths 1024,2048] [--threads 2] [--json]

A layer of SmolLM2's shape with random weights (9 heads, 3 key/value heads of 64 numbers), float32,
a fresh process for each length. Memory is the most that the process held, above what it held with
the model loaded; beside it what the layer's matrices would take as a whole.
"""

from __future__ import annotations

import json

from bench_tools import arguments, environment, run_python, table

LENGTHS = "1024,2048,4096,8192,16384,32768"
HEADS = 9
LIMIT = 2 << 30  # bytes above the model, at every length
MIXER = """AttentionConfig(
    heads=9, kv_heads=3, head_dim=64, value_dim=64, scores=ScoreConfig(scale=0.125),
    rope=RopeConfig(theta=1e5, dims=64),
)"""

CODE = """
import json, re, time
import torch
from llmcli.config.model import *
from llmcli.loading.load import randomize
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.inspect.passes import Passes
from llmcli.model import Model
from llmcli.decoder.decoder import Decoder
from llmcli.graph.precision import Precision
from llmcli.config.attention import AttentionConfig, RopeConfig, ScoreConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.norm import NormConfig
from llmcli.config.ssm import SsmConfig

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
decoder = Decoder(config, Precision.of("float32"), device="cpu")
randomize(decoder, 0)
{prepare}
model = Model(
    name="random", config=config, decoder=decoder, tokenizer=None, checkpoint=None,
    eos_ids=frozenset(), random_seed=0,
)
ids = torch.randint(8192, (length,), generator=torch.Generator().manual_seed(0)).tolist()
measure_attention(Passes(model, ids[:64]))  # what is allocated once
before = held("VmRSS")
start = time.perf_counter()
report = measure_attention(Passes(model, ids))
seconds = time.perf_counter() - start
checks = {{check.name: [check.value, check.tolerance] for check in report.checks}}
lives = [head.metrics.get("half_life") for head in report.layers[0].heads]
print(json.dumps({{
    "seconds": seconds, "before": before, "ok": report.ok, "checks": checks,
    "half_lives": [life if life is not None and life < length else None for life in lives],
}}))
"""


def measured(
    mixer: str, heads: int, length: int, threads: int, prepare: str = ""
) -> dict[str, object]:
    """One length in a process of its own: seconds, bytes above the model, the checks.

    `mixer` is the code of its configuration, `prepare` what is done with the random weights.
    """
    code = CODE.format(length=length, mixer=mixer, prepare=prepare)
    ran = run_python(code, threads=threads)
    found = json.loads(ran.stdout)
    return {
        "length": length,
        "bytes_above_model": ran.peak - found.pop("before"),
        "whole_maps_bytes": heads * length**2 * 4,
        **found,
    }


def show(title: str, found: list[dict[str, object]], limit: int, threads: int, document: bool):
    """Prints the table, or the document."""
    if document:
        print(json.dumps({"environment": environment(threads), "lengths": found}))
        return
    rows = [["tokens", "seconds", "MiB above the model", "MiB a token", "whole maps", "checks"]]
    for one in found:
        above, length = one["bytes_above_model"] / 2**20, one["length"]
        rows.append([
            str(length), f"{one['seconds']:.1f}",
            f"{above:.0f}" + ("" if one["bytes_above_model"] < limit else " TOO MUCH"),
            f"{above / length:.3f}", f"{one['whole_maps_bytes'] / 2**20:.0f} MiB",
            "hold" if one["ok"] else f"RED {one['checks']}",
        ])  # fmt: skip
    print(table(f"all head metrics of one {title}, {threads} threads", rows))


def main() -> None:
    options = arguments(__doc__, lengths=LENGTHS, threads=2).parse_args()
    lengths = map(int, options.lengths.split(","))
    found = [measured(MIXER, HEADS, length, options.threads) for length in lengths]
    show("layer", found, LIMIT, options.threads, options.json)


if __name__ == "__main__":
    main()
