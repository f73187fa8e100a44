"""Packed weights beside llama.cpp on the same file, and beside the rate at which memory is read.

    python tests/benchmarks/packed.py [--formats Q4_0 Q4_1 Q8_0] [--shapes 1.7B 8B] [--runs 5]
        [--transformers] [--around Q4_0] [--alone] [--digits] [--json]

`--formats`: SmolLM2 with all its matrices in one format. `--shapes`: random blocks in the
configuration of a model of that size, as a Q4_K_M file mixes them (values and the second half of
the down projections in Q6_K), with as many layers as `--layers` says; tokens/s of the whole model
follow from the seconds of these layers and of the head. The files are made in `--folder` once.

Each row is `llmcli bench --against llama.cpp`, or with `--transformers` beside that, which has the
same weights in 16 or 32 bits: runs in turns, the median of their ratios with the lowest and
highest. `of read` is the bytes of all weights times tokens/s over the read rate: the best sum over
512 MiB by one thread or all, in small pages or huge ones.

`--around`: of SmolLM2 in that format what surrounds a step. Decode after 4,096 tokens against what
its bytes make of decode after none; `generate` against `bench`; beside a busy program against
alone; a process's first token against `import torch`; its peak against that of Python with torch,
the weights and the cache. Fresh processes in turns, `--runs` of each.

`--digits`: activations of 16 bits against those of 8, fresh processes in turns, `--runs` of each;
at another level of the kernels with $LLMCLI_KERNELS.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_tools import environment, run_llmcli, run_python, spread, table
from busy_neighbour import neighbours
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from llmcli.checkpoints import open_model

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16")
# width, layers, heads, kv heads, hidden, vocabulary
SHAPES = {"1.7B": (2048, 24, 32, 32, 8192, 49152), "8B": (4096, 32, 32, 8, 14336, 128256)}
GENERATED = 256  # tokens of a text
# Bytes of a block of 256, and where its float16 factors are.
K_BLOCKS = {"Q4_K": (144, (0, 2)), "Q6_K": (210, (208,))}


def requantized(source: Path, format: str, path: Path) -> None:
    """Every matrix of a GGUF file in another format."""
    reader = GGUFReader(source)
    writer = copied_metadata(reader, path)
    kind = GGMLQuantizationType[format]
    for one in reader.tensors:
        values = quants.dequantize(one.data, one.tensor_type).reshape(tuple(one.shape)[::-1])
        if values.ndim == 1:
            writer.add_tensor(one.name, values.astype(np.float32))
        else:
            writer.add_tensor(one.name, quants.quantize(values, kind), raw_dtype=kind)
    finish(writer)


def random_model(source: Path, shape: str, layers: int, path: Path) -> None:
    """Random blocks in a configuration of that size; the tokenizer of `source`, filled up."""
    width, _, heads, kv_heads, hidden, vocab = SHAPES[shape]
    size = width // heads
    numbers = {
        "embedding_length": width, "block_count": layers, "feed_forward_length": hidden,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads,
        "rope.dimension_count": size, "vocab_size": vocab, "context_length": 8192,
    }  # fmt: skip
    writer = copied_metadata(GGUFReader(source), path, numbers, vocab)
    draw = np.random.default_rng(0)

    def blocks(name: str, rows: int, columns: int, format: str) -> None:
        nbytes, factors = K_BLOCKS[format]
        data = draw.integers(0, 256, (rows, columns // 256, nbytes), dtype=np.uint8)
        scale = np.float16(2e-4 if format == "Q6_K" else 1e-4).tobytes()
        for at in factors:
            data[:, :, at : at + 2] = np.frombuffer(scale, np.uint8)
        kind = GGMLQuantizationType[format]
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=kind)

    blocks("token_embd.weight", vocab, width, "Q4_K")
    for layer in range(layers):
        more = "Q6_K" if layer % 2 else "Q4_K"
        for name, rows, columns, format in (
            ("attn_q", width, width, "Q4_K"), ("attn_k", kv_heads * size, width, "Q4_K"),
            ("attn_v", kv_heads * size, width, more), ("attn_output", width, width, "Q4_K"),
            ("ffn_gate", hidden, width, "Q4_K"), ("ffn_up", hidden, width, "Q4_K"),
            ("ffn_down", width, hidden, more),
        ):  # fmt: skip
            blocks(f"blk.{layer}.{name}.weight", rows, columns, format)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    blocks("output.weight", vocab, width, "Q6_K")
    finish(writer)


def copied_metadata(
    reader: GGUFReader, path: Path, numbers: dict[str, int] | None = None, vocab: int = 0,
    arch: str = "llama",
) -> GGUFWriter:  # fmt: skip
    """A writer with the metadata of a file, some numbers of the architecture changed.

    Those of another architecture are of `arch` in the new file.
    """
    writer = GGUFWriter(path, arch)
    changed = {f"{arch}.{name}": value for name, value in (numbers or {}).items()}
    for name, field in reader.fields.items():
        name = name.replace("llama.", f"{arch}.", 1)
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value, kind = field.contents(), field.types[0]
        if name.startswith("tokenizer.ggml.tokens") and vocab:
            value = [*value, *(f"<extra {i}>" for i in range(len(value), vocab))]
        if name.startswith("tokenizer.ggml.token_type") and vocab:
            value = [*value, *[1] * (vocab - len(value))]
        value = changed.pop(name, value)
        sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=sub)
    for name, value in changed.items():
        writer.add_key_value(name, value, GGUFValueType.UINT32)
    return writer


def finish(writer: GGUFWriter) -> None:
    """Writes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_rate() -> float:
    """Bytes a second of the best way to read 512 MiB."""
    size, best = 512 << 20, 0.0
    for huge in (False, True):
        memory = mmap.mmap(-1, size)
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        numbers = torch.frombuffer(memory, dtype=torch.int64)
        numbers.fill_(1)
        for threads in {1, torch.get_num_threads()}:
            torch.set_num_threads(threads)
            for _ in range(6):
                start = time.perf_counter()
                numbers.sum()
                best = max(best, size / (time.perf_counter() - start))
    return best


def compared(path: Path, args: argparse.Namespace, peer: str | None) -> dict[str, Any]:
    """`llmcli bench` on that file, beside that peer: its rows of both tests, ours."""
    tests = ["-p", str(args.prompt), "-n", str(args.tokens), "-r", str(args.runs)]
    command = [sys.executable, "-m", "llmcli", "bench", "-m", str(path), *tests, "-o", "json"]
    if peer is not None:
        command += ["--against", peer]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    rows = json.loads(done.stdout)
    ours = [row for row in rows if row["engine"] == "llmcli"]
    theirs = [row for row in rows if row["engine"] != "llmcli"] or [{"avg_ts": None}] * 2
    found = {"bytes": ours[0]["model_size"]}
    for test, own, other in zip(("prefill", "decode"), ours, theirs, strict=True):
        ratios = own.get("against_ratios") or []
        found[test] = {
            "tokens_per_second": own["avg_ts"], "bytes": own["bytes"], "theirs": other["avg_ts"],
            "ratio": own.get("against_ratio"), "lowest": min(ratios, default=None),
            "highest": max(ratios, default=None),
        }  # fmt: skip
    return found


def digits(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Rates with activations of 16 bits over those with 8: each pair's, of both tests."""
    tests = ["-p", f"{args.prompt}", "-n", f"{args.tokens}", "-r", "2", "--no-ceilings"]
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    for _ in range(args.runs):
        rates = [
            [row["avg_ts"] for row in json.loads(run_llmcli([
                "bench", "-m", str(path), *tests, "-o", "json", "--activations", bits
            ]).stdout)]
            for bits in ("16", "8")
        ]  # fmt: skip
        for test, wide, narrow in zip(ratios, *rates, strict=True):
            ratios[test].append(wide / narrow)
    return ratios


def decode(path: Path, *options: str, tokens: int = 48) -> list[dict[str, Any]]:
    """Rows of `llmcli bench` that only write."""
    command = ["bench", "-m", str(path), "-p", "0", "-n", f"{tokens}", "-r", "3", "--no-ceilings"]
    return json.loads(run_llmcli([*command, "-o", "json", *options]).stdout)


def generated(path: Path, *options: str) -> float:
    """Tokens per second of `llmcli generate`, its second token's recording included."""
    text = ["generate", "The story begins", "--raw", "-m", str(path), "-n", f"{GENERATED}"]
    ran = run_llmcli([*text, "--ignore-eos", "--seed", "1", "-q", "--json", *options])
    return json.loads(ran.stdout)["timings"]["generated_tokens_per_s"]


def around(path: Path, runs: int) -> list[tuple[str, str, str]]:
    """What surrounds a step: name, ratios, what is wanted."""
    found: dict[str, list[float]] = {}
    for _ in range(runs):
        near, far = decode(path, "-d", "0,4096")
        (long,) = decode(path, tokens=GENERATED)
        predicted = near["avg_ts"] * near["bytes"] / far["bytes"]
        base = run_python("import torch")
        first = run_llmcli(["generate", "Hello", "-m", str(path), "-n", "1", "-q"])
        peak = run_llmcli(["generate", "Hello", "-m", str(path), "-n", "64", "--ignore-eos", "-q"])
        with neighbours(1):
            (beside,) = decode(path)
        for name, value in (
            ("decode after 4,096 tokens ÷ what its bytes predict", far["avg_ts"] / predicted),
            ("generate ÷ bench", generated(path) / long["avg_ts"]),
            ("generate, top-k off, repetition penalty ÷ bench",
             generated(path, "--top-k", "0", "--repetition-penalty", "1.1") / long["avg_ts"]),
            ("alone ÷ beside a busy program", near["avg_ts"] / beside["avg_ts"]),
            ("first token − import torch, seconds", first.seconds - base.seconds),
            ("peak − Python with torch − weights, MiB",
             (peak.peak - base.peak - near["model_size"]) / 2**20),
        ):  # fmt: skip
            found.setdefault(name, []).append(value)
    wanted = ("≥ 0.85", "≥ 0.90", "≥ 0.80", "≤ 3", "≤ 0.2", "≤ 100 + a tenth of the weights")
    return [
        (name, spread(values), want)
        for (name, values), want in zip(found.items(), wanted, strict=True)
    ]


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Names and files, which are made where they are not there."""
    source = open_model("smollm2").path
    args.folder.mkdir(parents=True, exist_ok=True)
    for format in args.formats:
        path = args.folder / f"smollm2-{format}.gguf"
        if not path.exists():
            requantized(source, format, path)
        yield f"SmolLM2 {format}", path
    for shape in args.shapes:
        layers = min(args.layers, SHAPES[shape][1])
        path = args.folder / f"{shape}-{layers}.gguf"
        if not path.exists():
            random_model(source, shape, layers, path)
        yield f"{shape}, {layers} of {SHAPES[shape][1]} layers, Q4_K mix", path


def measuring_options(parser: argparse.ArgumentParser, folder: str) -> None:
    """Those of every benchmark that compares `llmcli bench` on files that it makes in `folder`."""
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(folder))
    parser.add_argument("--json", action="store_true")


def ratio_cell(one: dict[str, Any]) -> str:
    """The median of a test's ratios, and their range."""
    if one["ratio"] is None:
        return "—"
    return f"{one['ratio']:.2f} ({one['lowest']:.2f}–{one['highest']:.2f})"


def read_cell(nbytes: float, tokens_per_second: float, rate: float) -> str:
    """The share of the read rate at which so many bytes are read for every token."""
    return f"{nbytes * tokens_per_second / rate:.0%} of {rate / 1e9:.1f} GB/s"


def main() -> int:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", default=["Q4_0", "Q4_1", "Q8_0"], choices=FORMATS)
    parser.add_argument("--shapes", nargs="*", default=["1.7B", "8B"], choices=SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    measuring_options(parser, "/tmp/packed-models")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument(
        "--transformers", action="store_true", help="beside transformers in place of llama.cpp"
    )
    parser.add_argument("--around", choices=FORMATS)
    parser.add_argument("--digits", action="store_true", help="16 against 8 bits of activations")
    args = parser.parse_args()
    if args.around:
        ((_, path),) = cases(argparse.Namespace(**vars(args) | {
            "formats": [args.around], "shapes": []
        }))  # fmt: skip
        rows = around(path, args.runs)
        print(table(f"SmolLM2 {args.around}", [("", "median (range)", "wanted"), *rows]))
        print(environment(torch.get_num_threads()))
        return 0
    if args.digits:
        found = {name: digits(path, args) for name, path in cases(args)}
        rows = [(name, *map(spread, one.values())) for name, one in found.items()]
        print(table("16 ÷ 8 bits, median (range)", [("", "prefill", "decode"), *rows]))
        print(environment(torch.get_num_threads()))
        return 0
    peer = None if args.alone else "transformers" if args.transformers else "llama.cpp"
    results = {}
    for name, path in cases(args):
        results[name] = compared(path, args, peer) | {"read_rate": read_rate()}
    if args.json:
        print(json.dumps({"environment": environment(torch.get_num_threads()), "results": results}))
        return 0
    rows = []
    for name, found in results.items():
        for test in ("prefill", "decode"):
            one = found[test]
            read = read_cell(found["bytes"], one["tokens_per_second"], found["read_rate"])
            rows.append((
                name, test, f"{one['tokens_per_second']:.1f}",
                "—" if one["theirs"] is None else f"{one['theirs']:.1f}", ratio_cell(one),
                read if test == "decode" else "",
            ))  # fmt: skip
    heads = ("model", "test", "tokens/s", peer or "", "ratio", "of read")
    print(table("median of runs in turns (lowest to highest)", [heads, *rows]))
    print(environment(torch.get_num_threads()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
