"""A small GGUF model that runs: one Llama layer over the 256 bytes, whole or in three parts."""

from pathlib import Path

import numpy as np
from gguf_bytes import ARRAY, F32, I32, STRING, U16, U32, gguf, pair, tensor

from llmcli.text.spelling import byte_letters

_WIDTH, _HIDDEN = 32, 48
_SHAPES = {
    "token_embd.weight": (256, _WIDTH), "output_norm.weight": (_WIDTH,),
    **{f"blk.0.attn_{part}.weight": (_WIDTH, _WIDTH) for part in ("q", "k", "v", "output")},
    **{f"blk.0.{part}_norm.weight": (_WIDTH,) for part in ("attn", "ffn")},
    **{f"blk.0.ffn_{part}.weight": (_HIDDEN, _WIDTH) for part in ("gate", "up")},
    "blk.0.ffn_down.weight": (_WIDTH, _HIDDEN),
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


def _file(pairs: list[bytes], arrays: dict[str, np.ndarray]) -> bytes:
    rows, data = [], b""
    for name, array in arrays.items():
        rows.append(tensor(name, array.shape[::-1], 0, len(data)))
        data += array.tobytes()  # every length is a multiple of the alignment
    return gguf(pairs, rows, data)


def write_model(path: Path, *, parts: int = 1, more: list[bytes] | None = None) -> list[Path]:
    """The model in one file at `path`, or in `parts` files beside it; the files in order.

    `more`: further metadata of the one file, or of the first.
    """
    draw = np.random.default_rng(0)
    arrays = {
        name: draw.normal(1.0 if len(shape) == 1 else 0.0, 0.3, shape).astype(np.float32)
        for name, shape in _SHAPES.items()
    }
    if parts == 1:
        path.write_bytes(_file(metadata() + (more or []), arrays))
        return [path]
    names = list(arrays)
    cuts = [len(names) * part // parts for part in range(parts + 1)]
    files = []
    for part in range(parts):
        own = [pair("split.no", U16, part), pair("split.count", U16, parts)]
        own += [pair("split.tensors.count", I32, len(names))]
        held = {name: arrays[name] for name in names[cuts[part] : cuts[part + 1]]}
        files.append(path.with_name(f"{path.stem}-{part + 1:05d}-of-{parts:05d}.gguf"))
        files[-1].write_bytes(_file(metadata() + own + (more or []) if part == 0 else own, held))
    return files
