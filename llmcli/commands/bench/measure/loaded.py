"""What a row says of a model that is loaded, in llama.cpp's words where it has some."""

from __future__ import annotations

import torch

import llmcli
from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.commands.bench.report.llama_words import CACHE_OF, FILE_OF
from llmcli.commands.bench.report.results import Ran
from llmcli.model import Model
from llmcli.reports.text import PhasePeak

_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "meta": "meta"}


def ran_of(
    model: Model,
    load_s: float | None,
    *,
    numbers: Arithmetic | None = None,
    base: int | None = None,
    peak: PhasePeak | None = None,
    on: torch.device | None = None,
) -> Ran:
    """What is said of a model that was loaded in so many seconds.

    `numbers`: another arithmetic than its own. `base`, `peak`: bytes held before that and in it.
    `on`: where a model of which there are only shapes was to be loaded.
    """
    device = on or model.device
    count, kind = model.parameter_count, device.type
    numbers = numbers or model.arithmetic
    formats = numbers.describe(model.config)
    weights = formats["weight_format"]
    file = FILE_OF.get(weights, weights.partition(" ")[0])
    layers = len(model.config.layers)
    return Ran(
        engine="llmcli",
        version=llmcli.__version__,
        model_type=f"{model.config.model_type} {_size(count)} {file}",
        model_size=model.weight_bytes,
        model_n_params=count,
        backend=_BACKENDS[kind],
        device=str(device),
        dtype=numbers.dtype,
        weight_format=weights,
        product_format=numbers.products,
        type_k=CACHE_OF[numbers.cache],
        n_gpu_layers=layers + 1 if kind in ("cuda", "mps") else 0,  # the head counts as one
        load_s=load_s,
        bits_per_weight=8 * model.weight_bytes / count,
        base_bytes=base,
        load_peak=peak,
    )


def bos_of(model: Model) -> int | None:
    """The id that its tokenizer puts in front of a text, None where it puts none."""
    tokenizer = model.tokenizer
    return tokenizer.bos_id if tokenizer is not None and tokenizer.add_bos else None


def _size(numbers: int) -> str:
    """`135M`, `1.5B`, `8B`: as models are called."""
    if numbers < 1e9:
        return f"{numbers / 1e6:.0f}M"
    return f"{numbers / 1e9:.1f}".removesuffix(".0") + "B"
