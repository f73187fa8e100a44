"""Freeze what llama.cpp computes: `python make_llama_cpp_figures.py SMOLLM2.gguf`.

Needs llama-cpp-python (the figures were made with 0.3.36) and PYTHONPATH=tests/text. Writes
llama_cpp_smollm2.json next to this file: the mean log-probability of the tokens of page.txt, and 64
greedy tokens for three prompts; text is taken raw, without BOS, and greedy decoding goes on past
tokens that end a text.

llama.cpp rounds the activations to 8 bits for its matrix products with quantized weights
(Q8_0 or Q8_1 blocks of 32), so its figures differ slightly from those of exact arithmetic on the
same weights. The cache is float32 and attention is not fused, so that nothing else is rounded.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from make_llama_cpp_ids import ids_of, piece, provenance_of

HERE = Path(__file__).parent
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
]
CONTEXT, THREADS, LIMIT = 1024, 2, 64
_GGML_F32 = 0


def main(path: Path) -> None:
    """Compute the figures and write them."""
    provenance = provenance_of(__file__)
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    vocab = llama_cpp.llama_model_get_vocab(model)
    page = (HERE / "page.txt").read_text(encoding="utf-8")
    ids = ids_of(vocab, page, True)
    logprobs = _logprobs(model, vocab, ids)
    figures = {
        "provenance": provenance | {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "flags": f"CPU, n_ctx {CONTEXT}, n_threads {THREADS}, type_k f32, type_v f32, "
            "flash attention off, no BOS, raw text",
            "activations": "8-bit blocks in products with quantized weights",
        },
        "page": {
            "file": "page.txt",
            "sha256": hashlib.sha256(page.encode()).hexdigest(),
            "ids": ids,
            "tokens_scored": len(logprobs),
            "mean_logprob": float(np.mean(logprobs)),
            "logprobs": [round(float(value), 6) for value in logprobs],
        },
        "greedy": [_greedy(model, vocab, prompt) for prompt in PROMPTS],
    }
    target = HERE / "llama_cpp_smollm2.json"
    target.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _context(model: Any) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = CONTEXT
    parameters.n_threads = parameters.n_threads_batch = THREADS
    parameters.type_k = parameters.type_v = _GGML_F32
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return llama_cpp.llama_init_from_model(model, parameters)


def _logits(context: Any, vocab: Any, ids: list[int], start: int) -> np.ndarray:
    """Logits `[len(ids), V]` of `ids` put at positions `start` and on."""
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for index, token in enumerate(ids):
        batch.token[index] = token
        batch.pos[index] = start + index
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = 0
        batch.logits[index] = True
    assert llama_cpp.llama_decode(context, batch) == 0
    width = llama_cpp.llama_vocab_n_tokens(vocab)
    rows = [llama_cpp.llama_get_logits_ith(context, index)[:width] for index in range(len(ids))]
    llama_cpp.llama_batch_free(batch)
    return np.array(rows, dtype=np.float64)


def _logprobs(model: Any, vocab: Any, ids: list[int]) -> np.ndarray:
    """Log-probability of every token but the first, given those before it."""
    context = _context(model)
    logits = _logits(context, vocab, ids, 0)[:-1]
    llama_cpp.llama_free(context)
    top = logits.max(axis=1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    return logits[np.arange(len(ids) - 1), ids[1:]] - total


def _greedy(model: Any, vocab: Any, prompt: str) -> dict[str, Any]:
    context = _context(model)
    prompt_ids = ids_of(vocab, prompt, True)
    new, found, margins = prompt_ids, [], []
    for _ in range(LIMIT):
        at = 0 if new is prompt_ids else len(prompt_ids) + len(found) - 1
        row = _logits(context, vocab, new, at)[-1]
        found.append(int(row.argmax()))
        second, first = np.partition(row, -2)[-2:]
        margins.append(round(float(first - second), 4))
        new = found[-1:]
    llama_cpp.llama_free(context)
    pieces = b"".join(piece(vocab, token) for token in found)
    text = pieces.decode("utf-8", "replace")
    return {
        "prompt": prompt, "prompt_ids": prompt_ids, "ids": found, "text": text, "margins": margins,
    }  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
