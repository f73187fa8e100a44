"""Mixtures of experts of random weights: decode and prompts beside llama.cpp and transformers.

    python tests/benchmarks/mixtures.py [--models qwen3moe gpt-oss deepseek2]
        [--formats Q4_0 Q8_0 BF16] [--against llama.cpp transformers] [--runs 5] [--json]
        [--memory]

Small models with the blocks of Qwen3-30B-A3B (every layer a mixture), of gpt-oss (sinks, biases;
its experts are MXFP4 in every file) and of DeepSeek-V2 (latents, shared experts), written as
GGUF files into `--folder` once. Each row is `llmcli bench --against` on such a file: runs in turns,
the median of their ratios with the lowest and highest. transformers has the same weights in 16
bits. `of read`: the bytes that a step reads, those of chosen experts alone, times tokens/s, over
the rate at which memory is read (`packed.py`).

`--memory`: the first of the models with 8 experts and with 64, in the first of the formats: how
much more than its weights and Python with torch a load holds at most, and a prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from bench_tools import environment, run_llmcli, table
from gguf import GGMLQuantizationType, GGUFReader, quants
from packed import (
    compared,
    copied_metadata,
    finish,
    measuring_options,
    ratio_cell,
    read_cell,
    read_rate,
)

from llmcli.checkpoints import open_model

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16", "F32")
WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, EXPERTS, CHOSEN, HIDDEN = 1024, 12, 16, 4, 128, 32, 8, 512
RANK, CONTENT, ROTATED = 256, 64, 32  # of latents: numbers of one, of a head
NUMBERS = {
    "embedding_length": WIDTH, "block_count": LAYERS, "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD,
    "attention.value_length": HEAD, "rope.dimension_count": HEAD, "context_length": 8192,
    "feed_forward_length": HIDDEN, "expert_count": EXPERTS, "expert_used_count": CHOSEN,
    "expert_feed_forward_length": HIDDEN,
}  # fmt: skip
OWN = {
    "qwen3moe": {},
    "gpt-oss": {"attention.sliding_window": 128, "expert_used_count": 4},
    "deepseek2": {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": RANK,
        "attention.q_lora_rank": 2 * RANK,
        "attention.key_length": RANK + ROTATED, "attention.value_length": RANK,
        "attention.key_length_mla": CONTENT + ROTATED, "attention.value_length_mla": CONTENT,
        "rope.dimension_count": ROTATED, "expert_shared_count": 2, "expert_gating_func": 1,
        "leading_dense_block_count": 0, "expert_used_count": 6,
    },
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]


def attention(model: str) -> Shapes:
    """The matrices of a block's attention."""
    if model == "deepseek2":
        return {
            "attn_q_a": (2 * RANK, WIDTH), "attn_q_b": (HEADS * (CONTENT + ROTATED), 2 * RANK),
            "attn_kv_a_mqa": (RANK + ROTATED, WIDTH),
            "attn_k_b": (HEADS, RANK, CONTENT), "attn_v_b": (HEADS, CONTENT, RANK),
            "attn_output": (WIDTH, HEADS * CONTENT),
        }  # fmt: skip
    rows = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD}
    return {name: (count, WIDTH) for name, count in rows.items()} | {
        "attn_output": (WIDTH, HEADS * HEAD)
    }


def matrices(model: str) -> Shapes:
    """All of a block's, the experts' last."""
    found = attention(model)
    if model == "deepseek2":
        shared = 2 * HIDDEN
        found |= {"ffn_gate_shexp": (shared, WIDTH), "ffn_up_shexp": (shared, WIDTH),
                  "ffn_down_shexp": (WIDTH, shared)}  # fmt: skip
    inside = (EXPERTS, HIDDEN, WIDTH)
    return found | {"ffn_gate_exps": inside, "ffn_up_exps": inside,
                    "ffn_down_exps": (EXPERTS, WIDTH, HIDDEN)}  # fmt: skip


def vectors(model: str) -> Shapes:
    """Norms about 1, then biases about 0, in float32."""
    found: Shapes = {"attn_norm.weight": (WIDTH,)}
    if model == "gpt-oss":
        found |= {
            "post_attention_norm.weight": (WIDTH,), "attn_sinks.weight": (HEADS,),
            "ffn_gate_inp.bias": (EXPERTS,), "ffn_gate_exps.bias": (EXPERTS, HIDDEN),
            "ffn_up_exps.bias": (EXPERTS, HIDDEN), "ffn_down_exps.bias": (EXPERTS, WIDTH),
        }  # fmt: skip
        return found | {f"{name}.bias": shape[:1] for name, shape in attention(model).items()}
    found["ffn_norm.weight"] = (WIDTH,)
    if model == "deepseek2":
        return found | {"attn_kv_a_norm.weight": (RANK,), "attn_q_a_norm.weight": (2 * RANK,)}
    return found | {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}


def write(source: Path, model: str, format: str, path: Path, count: int = EXPERTS) -> None:
    """A file of random weights with the tokenizer of `source`."""
    reader, draw = GGUFReader(source), np.random.default_rng(0)
    numbers = NUMBERS | OWN[model] | {"expert_count": count}
    writer = copied_metadata(reader, path, numbers, arch=model)
    vocab = len(reader.fields["tokenizer.ggml.tokens"].data)

    def matrix(name: str, *shape: int, as_: str = format, spread: float = 0.6) -> None:
        values = draw.standard_normal(shape, np.float32) * np.float32(spread / shape[-1] ** 0.5)
        kind = GGMLQuantizationType[as_]
        writer.add_tensor(f"{name}.weight", quants.quantize(values, kind), raw_dtype=kind)

    matrix("token_embd", vocab, WIDTH)
    for layer in range(LAYERS):
        for name, shape in matrices(model).items():
            own = "MXFP4" if model == "gpt-oss" and name.endswith("exps") else format
            matrix(f"blk.{layer}.{name}", *_with(count, shape), as_=own)
        matrix(f"blk.{layer}.ffn_gate_inp", count, WIDTH, as_="F32", spread=2.0)
        for name, shape in vectors(model).items():
            shape = _with(count, shape)
            about = 1.0 if "norm" in name else 0.0
            values = about + 0.1 * draw.standard_normal(shape, np.float32)
            writer.add_tensor(f"blk.{layer}.{name}", values.astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    matrix("output", vocab, WIDTH)
    finish(writer)


def _with(count: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """So many experts, where its first axis is theirs."""
    return (count, *shape[1:]) if shape[0] == EXPERTS else shape


def made(folder: Path, model: str, format: str, count: int = EXPERTS) -> Path:
    """The file, which is written where it is not there."""
    path = folder / f"{model}-{format}-{count}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(open_model("smollm2").path, model, format, path, count)
    return path


def memory(args: argparse.Namespace) -> list[tuple[str, ...]]:
    """MiB beside the weights, for 8 experts and for 64."""
    model, format, rows = args.models[0], args.formats[0], []
    for count in (8, 64):
        path = made(args.folder, model, format, count)
        command = ["bench", "-m", str(path), "-p", str(args.prompt), "-n", "0", "-r", "1"]
        (row,) = json.loads(run_llmcli([*command, "--no-ceilings", "-o", "json"]).stdout)
        weights = row["model_size"]
        more = [
            (row[f"{phase}_resident_bytes"] - row["base_bytes"] - weights) / 2**20
            for phase in ("load", "prefill")
        ]
        rows.append((f"{model} {format}", f"{count}", f"{weights / 2**20:.0f}",
                     *(f"{one:.1f}" for one in more)))  # fmt: skip
    return rows


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Names and files."""
    for model in args.models:
        for format in args.formats:
            yield f"{model} {format}", made(args.folder, model, format)


def main() -> int:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(OWN), choices=OWN)
    parser.add_argument("--formats", nargs="*", default=["Q4_0", "Q8_0", "BF16"], choices=FORMATS)
    peers = ["llama.cpp", "transformers"]
    parser.add_argument("--against", nargs="*", default=peers, choices=peers)
    measuring_options(parser, "/tmp/mixtures")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    if args.memory:
        heads = ("model", "experts", "weights", "load", f"prompt of {args.prompt}")
        print(table("MiB; the last two beside the weights", [heads, *memory(args)]))
        print(environment(torch.get_num_threads()))
        return 0
    rows, results = [], []
    for name, path in cases(args):
        for peer in args.against:
            found = compared(path, args, peer)
            rate = read_rate()
            results.append({"model": name, "peer": peer, "read_rate": rate, **found})
            for test in ("prefill", "decode"):
                one = found[test]
                read = read_cell(one["bytes"] / args.tokens, one["tokens_per_second"], rate)
                rows.append((
                    name, test, f"{one['tokens_per_second']:.1f}", peer, f"{one['theirs']:.1f}",
                    ratio_cell(one), read if test == "decode" else "",
                ))  # fmt: skip
    if args.json:
        print(json.dumps({"environment": environment(torch.get_num_threads()), "results": results}))
        return 0
    heads = ("model", "test", "tokens/s", "peer", "tokens/s", "ratio", "of read")
    print(table("median of runs in turns (lowest to highest)", [heads, *rows]))
    print(environment(torch.get_num_threads()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
