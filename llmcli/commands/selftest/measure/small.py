"""The small models with weights, on any device and in any dtype."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from llmcli.config import ModelConfig
from llmcli.formats.dense import writable
from llmcli.formats.packed import Packed
from llmcli.model import Model
from llmcli.nn.decoder import Decoder
from llmcli.ops.quant import dequantize
from llmcli.ops.quant.decode import FORMATS
from llmcli.ops.quant.encode import quantize

DENSE: Mapping[str, str] = {}
# where a block of a format has float16 factors
_FACTORS = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "Q5_1": (0, 2), "MXFP4": (),
}  # fmt: skip


def random_decoder(
    config: ModelConfig,
    dtype: torch.dtype = torch.float64,
    seed: int = 3,
    formats: Mapping[str, str] = DENSE,
) -> Decoder:
    """On the CPU: matrices that keep the size of a row, norm weights about 1, biases about 0.3.

    With `formats` as a GGUF file is run: float32, keys and values in bfloat16.
    """
    decoder = Decoder(
        config, device="cpu", dtype=torch.float32 if formats else dtype, formats=formats,
        cache_dtype=torch.bfloat16 if formats else None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for name in decoder.weight_names:
        weight = decoder.weight(name)
        if isinstance(weight, Packed):
            *rows, columns = weight.shape
            raw = random_blocks(weight.format, prod(rows), columns, generator)
            weight.write(torch.arange(len(raw)), raw)
            continue
        slot = writable(weight)
        values = torch.randn(slot.shape, generator=generator, dtype=torch.float64)
        last = name.rpartition(".")[2]
        if last == "w":
            values = 1 + 0.3 * values
        elif last.startswith("b"):
            values = 0.3 * values
        elif last in ("sink", "expert_factor", "D"):
            pass
        elif last in ("A_log", "dt_bias"):
            values = 0.5 * values
        elif "embed" not in name:
            values = 1.5 * values / slot.shape[1] ** 0.5
        slot.copy_(values)
    return decoder


def random_blocks(
    format: str, rows: int, columns: int, generator: torch.Generator
) -> Tensor:
    """Rows of blocks as a file has them, uint8: random codes, numbers of the size of the others."""
    wanted = 1.5 / columns**0.5
    if format in ("Q8_0", "Q4_1"):
        return quantize(wanted * torch.randn(rows, columns, generator=generator), format)
    elements, size = FORMATS[format]
    shape = rows, columns // elements, size
    raw = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    if format == "MXFP4":  # powers of two
        raw[..., 0] = torch.randint(121, 125, shape[:2], generator=generator)
        return raw.flatten(1)
    factors = {
        at: 0.5 + torch.rand(shape[:2], generator=generator) for at in _FACTORS.get(format, (0,))
    }
    by: float | None = 1.0
    for by in (1.0, None):
        if by is None:  # now that it is known how large the numbers are
            large = dequantize(raw.flatten(1), format, dtype=torch.float32)
            by = wanted / float(large.square().mean().sqrt())
        for at, factor in factors.items():
            raw[..., at : at + 2] = (by * factor).half()[..., None].view(torch.uint8)
    return raw.flatten(1)


def copied(decoder: Decoder, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """Copy dense weights to a device, rounded to a dtype."""
    there = Decoder(decoder.config, device=device, dtype=dtype)
    for name in decoder.weight_names:
        writable(there.weight(name)).copy_(writable(decoder.weight(name)))
    return there


def as_model(decoder: Decoder) -> Model:
    """The model that loading would return, without checkpoint and tokenizer."""
    return Model(
        name="small", config=decoder.config, decoder=decoder, tokenizer=None,
        checkpoint=None, eos_ids=frozenset(), random_seed=3,  # type: ignore[arg-type]
    )  # fmt: skip
