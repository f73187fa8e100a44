"""What a row says of a model that is loaded, in llama.cpp's words where it has some."""

from __future__ import annotations

import llmcli
from llmcli.model import Model, dtype_name
from llmcli.reports.bench import Ran

# llama.cpp's words: of a cache, of a file's weights, of a backend
CACHE_TYPES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_FILE_TYPES = {"float64": "all F64", "float32": "all F32", "float16": "F16", "bfloat16": "BF16"}
_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "meta": "meta"}


def ran_of(model: Model, load_s: float) -> Ran:
    """What is said of a model that was loaded in so many seconds."""
    numbers = sum(slot.numel() for slot in model.decoder.slots.values())
    dtype, kind = dtype_name(model.dtype), model.device.type
    layers = len(model.config.layers)
    return Ran(
        engine="llmcli",
        version=llmcli.__version__,
        model_type=f"{model.config.model_type} {_size(numbers)} {_FILE_TYPES[dtype]}",
        model_size=model.weight_bytes,
        model_n_params=numbers,
        backend=_BACKENDS[kind],
        device=str(model.device),
        dtype=dtype,
        type_k=CACHE_TYPES[dtype],
        n_gpu_layers=layers + 1 if kind in ("cuda", "mps") else 0,  # the head counts as one
        load_s=load_s,
        bits_per_weight=8 * model.weight_bytes / numbers,
    )


def _size(numbers: int) -> str:
    """`135M`, `1.5B`, `8B`: as models are called."""
    if numbers < 1e9:
        return f"{numbers / 1e6:.0f}M"
    return f"{numbers / 1e9:.1f}".removesuffix(".0") + "B"
