"""What block formats cost: perplexity of a page and KL to float32, weights and activations apart.

    python tests/benchmarks/quantization.py [--formats Q4_0 Q8_0 …] [--tokens 1024] [--json]

SmolLM2's matrices, as its file has them, are the model that is compared with, in float32. Each
format is those matrices once more, quantized by the gguf package, or by llama.cpp where it is
installed: its mixtures (`Q4_K_M`) have K blocks only where 256 divides the width. `weights`: its
blocks dequantized, all in float32; `packed`: as llmcli runs it, activations rounded to 8 bits for
products, keys and values in bfloat16. KL in nats per token of the page (LICENSE): of the weights
to the model, of packed to the weights, of packed to the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch
from bench_tools import ROOT, environment, table
from packed import requantized
from torch import Tensor

from llmcli.checkpoints import open_model
from llmcli.engine.session import Session
from llmcli.loading.load import load

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")
MIXTURES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")


def mixed(source: Path, name: str, path: Path) -> None:
    """The model of a file in one of llama.cpp's mixtures."""
    import ctypes

    import llama_cpp

    wanted = llama_cpp.llama_model_quantize_default_params()
    wanted.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    files = str(source).encode(), str(path).encode()
    if llama_cpp.llama_model_quantize(*files, ctypes.byref(wanted)):
        raise SystemExit(f"llama.cpp cannot quantize to {name}")


def stored(path: Path) -> str:
    """The formats of a file's matrices, most numbers first."""
    count: Counter[str] = Counter()
    for one in open_model(str(path)).tensors.values():
        if len(one.shape) == 2:
            count[one.format] += one.shape[0] * one.shape[1]
    return " + ".join(f"{name} {n / count.total():.0%}" for name, n in count.most_common())


def log_probs(path: Path, ids: list[int], **options: str) -> Tensor:
    """`[T, V]` in float64, of a model in one pass."""
    model = load(str(path), **options)
    session = Session(model.decoder, 1, len(ids))
    logits = model.decoder(torch.tensor([ids]), session.state)
    return logits[0].double().log_softmax(-1)


def divergence(p: Tensor, q: Tensor) -> float:
    """Mean over the tokens of KL(p ‖ q), in nats."""
    return float((p.exp() * (p - q)).sum(-1).mean())


def main() -> int:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/packed-models"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    source = open_model("smollm2").path
    page = (ROOT / "LICENSE").read_text(encoding="utf-8")
    tokenizer = load(str(source)).tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(page)[: args.tokens]
    following = torch.tensor(ids[1:])

    def perplexity(found: Tensor) -> float:
        return float((-found[:-1].gather(1, following[:, None]).mean()).exp())

    base = log_probs(source, ids, dtype="float32")
    shipped = log_probs(source, ids)
    rows = {
        "as shipped (Q4_1 + Q8_0)": {
            "weights": perplexity(base), "packed": perplexity(shipped), "kl_weights": 0.0,
            "kl_activations": divergence(base, shipped), "kl": divergence(base, shipped),
        }
    }  # fmt: skip
    for name in args.formats:
        path = args.folder / f"smollm2-{name}.gguf"
        if not path.exists() and name in MIXTURES:
            wide = args.folder / "smollm2-F16.gguf"
            if not wide.exists():
                requantized(source, "F16", wide)
            mixed(wide, name, path)
        elif not path.exists():
            requantized(source, name, path)
        weights = log_probs(path, ids, dtype="float32")
        packed = log_probs(path, ids)
        rows[f"{name} ({stored(path)})" if name in MIXTURES else name] = {
            "weights": perplexity(weights), "packed": perplexity(packed),
            "kl_weights": divergence(base, weights),
            "kl_activations": divergence(weights, packed), "kl": divergence(base, packed),
        }  # fmt: skip
    if args.json:
        print(json.dumps({"environment": environment(torch.get_num_threads()), "rows": rows}))
        return 0
    heads = ("format", "perplexity of weights", "packed", "KL of weights", "activations", "both")
    body = [
        (name, f"{r['weights']:.3f}", f"{r['packed']:.3f}", f"{r['kl_weights']:.5f}",
         f"{r['kl_activations']:.5f}", f"{r['kl']:.5f}")
        for name, r in rows.items()
    ]  # fmt: skip
    print(table(f"SmolLM2, {len(ids)} tokens of LICENSE", [heads, *body]))
    print(environment(torch.get_num_threads()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
