"""Tiny checkpoints with weights of 8 bits, as the common tools write them, and what they mean."""

import torch
from tiny_checkpoints import llama_tensors, write_llama

FP8 = torch.float8_e4m3fn
BLOCK = (8, 16)  # divides some of the matrices' sides, not all


def _group(kind, strategy, **more):
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True} | more
    return {
        "quant_method": "compressed-tensors", "ignore": ["lm_head"],
        "format": "int-quantized" if kind == "int" else "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def _fp8(**more):
    return {"quant_method": "fp8", **more}


_BLOCKS = {"weight_block_size": list(BLOCK)}
_ALL, _ROW = (None, None), (1, None)
# name → (quantization_config, dtype of the weights, block of a scale, its name)
SCHEMES = {
    "fp8-blocks": (
        _fp8(**_BLOCKS, activation_scheme="dynamic"), FP8, BLOCK, "weight_scale_inv",
    ),
    "fp8-default": (_fp8(), FP8, (128, 128), "weight_scale_inv"),
    "fp8-null": (_fp8(weight_block_size=None), FP8, _ALL, "weight_scale_inv"),
    "fp8-auto": (_fp8(activation_scheme="static"), FP8, _ALL, "weight_scale"),
    "fp8-e5m2": (_fp8(**_BLOCKS), torch.float8_e5m2, BLOCK, "weight_scale_inv"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, FP8, _ROW, "weight_scale"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, FP8, _ALL, "weight_scale"),
    "float-tensor": (_group("float", "tensor"), FP8, _ALL, "weight_scale"),
    "float-channel": (_group("float", "channel"), FP8, _ROW, "weight_scale"),
    "float-blocks": (
        _group("float", "block", block_structure=list(BLOCK)), FP8, BLOCK, "weight_scale",
    ),
    "int-channel": (_group("int", "channel"), torch.int8, _ROW, "weight_scale"),
    "int-group": (_group("int", "group", group_size=16), torch.int8, (1, 16), "weight_scale"),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, torch.int8, _ROW, "SCB",
    ),
}  # fmt: skip


def sides(block, shape):
    """Rows and columns of a block, of the whole matrix where it says None."""
    return [side if size is None else size for size, side in zip(block, shape, strict=True)]


def spread(scales, block, shape):
    """The scale of every number: `scales` `[down, across]` repeated over the blocks."""
    rows, columns = sides(block, shape)
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


def quantize(weight, dtype, block, *, over=1):
    """A matrix as (numbers of 8 bits, float32 scales `[down, across]`): value = number·scale/over.

    Every block has a scale of its own, far from the others'.
    """
    rows, columns = sides(block, weight.shape)
    down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    padded = torch.zeros(down * rows, across * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = padded.view(down, rows, across, columns).abs().amax((1, 3)).clamp(min=1e-6)
    scales = largest * over / most
    numbers = (weight / spread(scales / over, block, weight.shape)).clamp(-most, most)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scales


def quantized(tensors, scheme, *, skip=("embed_tokens", "lm_head")):
    """`tensors` with their matrices quantized: (what a file holds, its meaning in float64)."""
    _, dtype, block, suffix = SCHEMES[scheme]
    over = 127 if suffix == "SCB" else 1
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or any(part in name for part in skip):
            stored[name], meant[name] = tensor, tensor.double()
            continue
        numbers, scales = quantize(tensor, dtype, block, over=over)
        stem = name.removesuffix(".weight")
        stored[name] = numbers
        meant[name] = numbers.double() * spread(scales.double() / over, block, tensor.shape)
        if block == (None, None):
            scales = scales.reshape(())
        elif suffix == "SCB":
            scales = scales.reshape(-1)
            stored[f"{stem}.weight_format"] = torch.zeros((), dtype=torch.uint8)
        stored[f"{stem}.{suffix}"] = scales
    return stored, meant


def write_quantized(folder, scheme, *, change=None, **config):
    """The tiny Llama in `folder` with that scheme; `change` may edit the tensors of the file."""
    stored, meant = quantized(llama_tensors(), scheme)
    if change is not None:
        change(stored)
    config = {"quantization_config": SCHEMES[scheme][0]} | config
    return write_llama(folder, stored, **config), meant
