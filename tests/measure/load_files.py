"""Checkpoints for the tests of `llmcli load`: whole ones, and ways to plant a fault in them."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import save_file
from tiny_checkpoints import LLAMA, llama_tensors, write_llama

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.load.measure.run import check_files, measure_load
from llmcli.commands.load.report import LoadReport
from llmcli.records.work import Stages


def loaded(path: Path, dtype: str = "float32") -> LoadReport:
    """What `llmcli load` tells of it."""
    checkpoint = open_checkpoint(path)
    return measure_load(checkpoint, Stages(), device="cpu", dtype=dtype, quantize="auto")[1]


def checked(path: Path) -> LoadReport:
    """What `llmcli load --check` tells of it."""
    return check_files(open_checkpoint(path), Stages())


def check(report: LoadReport, name: str):
    """The check of that name."""
    return next(check for check in report.checks if check.name == name)


def llama(more=None, without="", files=None, **settings):
    """Writes the tiny Llama with other tensors and settings, and files beside it."""

    def write(folder: Path) -> Path:
        tensors = llama_tensors() | (more or {})
        tensors.pop(without, None)
        path = write_llama(folder / "m", tensors, **settings)
        for name, text in (files or {}).items():
            (path / name).write_text(text)
        return path

    return write


def write_sharded(folder: Path, **metadata: object) -> Path:
    """The tiny Llama in two shards with an index, whose `metadata` is the one given."""
    write_llama(folder)
    (folder / "model.safetensors").unlink()
    names = list(llama_tensors())
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: llama_tensors()[name] for name in part}, folder / file)
    index = {name: file for file, part in shards.items() for name in part}
    document = {"metadata": metadata, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder


def write_split(folder: Path) -> Path:
    """The same in three files of at most eight tensors, as `llama-gguf-split` makes them."""
    folder.mkdir()
    write_gguf(folder / "m", parts=8)
    return folder


def write_gguf(path: Path, *, blocks: bool = True, parts: int = 0, **metadata: object) -> Path:
    """The tiny Llama as GGUF, its matrices in Q8_0; `metadata` keys with `__` for a dot.

    Integers are written as 32 bits, None leaves a key out.
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
