"""Finds and opens checkpoints: headers, configuration, bytes. No torch."""

from llmcli.checkpoints.catalog import CATALOG, CatalogEntry, cache_dir
from llmcli.checkpoints.checkpoint import Checkpoint, open_checkpoint
from llmcli.checkpoints.gguf import read_gguf
from llmcli.checkpoints.locate import open_model
from llmcli.checkpoints.safetensors import read_safetensors
from llmcli.checkpoints.tensors import GGML_TYPES, SAFETENSORS_BITS, TensorInfo

__all__ = [
    "CATALOG",
    "GGML_TYPES",
    "SAFETENSORS_BITS",
    "CatalogEntry",
    "Checkpoint",
    "TensorInfo",
    "cache_dir",
    "open_checkpoint",
    "open_model",
    "read_gguf",
    "read_safetensors",
]
