"""A small GGUF model that runs: one Llama layer over the 256 bytes, whole or in three parts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf_bytes import ARRAY, F32, I32, STRING, U16, U32, gguf, pair, tensor

from llmcli.text.spelling import byte_letters

_WIDTH, _HIDDEN = 32, 48


def shapes(width: int = _WIDTH, hidden: int = _HIDDEN) -> dict[str, tuple[int, ...]]:
    """Of every tensor."""
    return {
        "token_embd.weight": (256, width), "output_norm.weight": (width,),
        **{f"blk.0.attn_{part}.weight": (width, width) for part in ("q", "k", "v", "output")},
        **{f"blk.0.{part}_norm.weight": (width,) for part in ("attn", "ffn")},
        **{f"blk.0.ffn_{part}.weight": (hidden, width) for part in ("gate", "up")},
        "blk.0.ffn_down.weight": (width, hidden),
    }  # fmt: skip


def metadata(**other: int) -> list[bytes]:
    """Of a Llama over the 256 bytes, with these sizes instead."""
    sizes = {
        "embedding_length": _WIDTH, "block_count": 1, "context_length": 64,
        "feed_forward_length": _HIDDEN, "attention.head_count": 4, **other,
    }  # fmt: skip
    return [
        pair("general.architecture", STRING, "llama"),
        *(pair(f"llama.{key}", U32, value) for key, value in sizes.items()),
        pair("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        pair("tokenizer.ggml.model", STRING, "gpt2"),
        pair("tokenizer.ggml.pre", STRING, "smollm"),
        pair("tokenizer.ggml.tokens", ARRAY, (STRING, list(byte_letters()))),
        pair("tokenizer.ggml.token_type", ARRAY, (I32, [1] * 256)),
        pair("tokenizer.ggml.merges", ARRAY, (STRING, [])),
        pair("tokenizer.ggml.eos_token_id", U32, 0),
    ]


def write_file(
    path: Path, pairs: list[bytes], tensors: Mapping[str, tuple[int, bytes, Sequence[int]]]
) -> None:
    """Tensors are (type, bytes, shape)."""
    rows, data = [], b""
    for name, (kind, raw, shape) in tensors.items():
        rows.append(tensor(name, shape[::-1], kind, len(data)))
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(gguf(pairs, rows, data))


def write_model(path: Path, *, parts: int = 1, more: list[bytes] | None = None) -> list[Path]:
    """The model in one file at `path`, or in `parts` files beside it; the files in order.

    `more`: further metadata of the one file, or of the first.
    """
    draw = np.random.default_rng(0)
    arrays = {
        name: (0, draw.normal(len(shape) == 1, 0.3, shape).astype(np.float32).tobytes(), shape)
        for name, shape in shapes().items()
    }
    if parts == 1:
        write_file(path, metadata() + (more or []), arrays)
        return [path]
    names = list(arrays)
    cuts = [len(names) * part // parts for part in range(parts + 1)]
    files = []
    for part in range(parts):
        own = [pair("split.no", U16, part), pair("split.count", U16, parts)]
        own += [pair("split.tensors.count", I32, len(names))]
        held = {name: arrays[name] for name in names[cuts[part] : cuts[part + 1]]}
        files.append(path.with_name(f"{path.stem}-{part + 1:05d}-of-{parts:05d}.gguf"))
        pairs = metadata() + own + (more or []) if part == 0 else own
        write_file(files[-1], pairs, held)
    return files
