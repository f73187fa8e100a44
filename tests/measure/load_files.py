"""Checkpoints as they are, and with other tensors, settings and metadata."""

import gguf
import numpy as np
from tiny_checkpoints import LLAMA, llama_tensors, write_llama


def writer(write):
    """Of `write(folder, …)`: called with the rest it gives what writes into a folder."""
    return lambda *rest, **named: lambda folder: write(folder, *rest, **named)


@writer
def llama(folder, more=None, without="", files=None, **settings):
    """The tiny Llama with other tensors and settings, and files beside it."""
    tensors = llama_tensors() | (more or {})
    tensors.pop(without, None)
    path = write_llama(folder / "m", tensors, **settings)
    for name, text in (files or {}).items():
        (path / name).write_text(text)
    return path


def write_gguf(path, *, blocks=True, parts=0, **metadata):
    """The tiny Llama as GGUF, its matrices in Q8_0; `metadata` keys with `__` for a dot.

    Integers are written as 32 bits.
    """
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=parts)
    writer.add_layer_norm_rms_eps(1e-5)
    sizes = {
        "context_length": LLAMA["max_position_embeddings"], "block_count": 2,
        "embedding_length": LLAMA["hidden_size"], "feed_forward_length": 64,
        "attention__head_count": LLAMA["num_attention_heads"],
        "attention__head_count_kv": LLAMA["num_key_value_heads"], "rope__dimension_count": 8,
    }  # fmt: skip
    for key, value in ({f"llama__{key}": size for key, size in sizes.items()} | metadata).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_string
        add(key.replace("__", "."), value)
    draw = np.random.default_rng(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for ours, tensor in llama_tensors().items():
        name = names.get_name(ours, [".weight"])
        shape = [64 if size == 48 else size for size in tensor.shape]  # whole blocks of 32
        values = draw.normal(0, 0.3, shape).astype(np.float32)
        if values.ndim == 2 and blocks:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
