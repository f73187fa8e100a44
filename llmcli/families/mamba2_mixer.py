"""Reads the Mamba-2 mixer, and which layers have it, from configurations."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace

from llmcli.config.norm import NormConfig
from llmcli.config.ssm import SsmConfig
from llmcli.errors import UnsupportedModel
from llmcli.families.values import MOST, Values, require_divisible, shortened

_RECURRENT = ("mamba", "linear_attention")  # layer types, old and new
_ATTENDS = ("attention", "full_attention")
# heads, groups, state (DeltaNet: a key's size), length of the convolution
GGUF_SIZES = ("ssm.time_step_rank", "ssm.group_count", "ssm.state_size", "ssm.conv_kernel")

def from_hf(
    values: Values, keys: str, eps: float, bounds: tuple[float, float], *, inner: int | None = None
) -> SsmConfig:
    """Read the mixer; all settings but the flags are required.

    `keys`: those of heads, groups, state, length of the convolution, head size, the biases of
    projections and of the convolution, and the activation. `bounds`: of dt. `inner`: total width of
    all heads if known otherwise; the head size is then optional. Raises CheckpointError and
    UnsupportedModel.
    """
    *sizes, head_size, bias, conv_bias, function = keys.split()
    if (name := values.text(function, "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(
            f"`{function}` = `{shortened(name)}` is not supported: Mamba-2 has `silu`"
        )
    ssm, usual = _sizes(values, sizes, eps), None
    if inner is not None:
        usual = require_divisible("the inner size", inner, f"`{sizes[0]}`", ssm.heads)
    head_dim = values.integer(head_size, usual, most=MOST["head_dim"])
    if usual not in (None, head_dim):
        raise values.wrong(head_size, f"{usual}, as {inner} numbers are in {ssm.heads} heads")
    return replace(
        ssm,
        head_dim=head_dim,
        least=bounds[0],
        most=bounds[1],
        bias=values.flag(bias, False),
        conv_bias=values.flag(conv_bias, True),
    )


def _sizes(values: Values, keys: Sequence[str], eps: float) -> SsmConfig:
    """The mixer by heads, groups, state and length of the convolution, with heads of no size."""
    heads = values.integer(keys[0], most=MOST["heads"])
    groups = values.integer(keys[1], most=heads)
    require_divisible(f"`{keys[0]}`", heads, f"`{keys[1]}`", groups)
    state = values.integer(keys[2], most=MOST["head_dim"])
    length = values.integer(keys[3], least=2, most=64)
    norm = NormConfig(kind="rms", eps=eps)
    return SsmConfig(
        heads=heads, groups=groups, head_dim=0, state=state, length=length, norm=norm
    )


def bounds(values: Values) -> tuple[float, float]:
    """The range that dt is clamped to (`time_step_limit`); (0, ∞) if absent."""
    key = "time_step_limit"
    if not values.has(key):
        return 0.0, math.inf
    least, most = values.numbers(key, 2, above=False, infinite=True)
    if least > most:
        raise values.wrong(key, "two numbers, the lower one first")
    return least, most


def from_gguf(values: Values, tensors: Container[str], layer: int, eps: float) -> SsmConfig:
    """The mixer of a GGUF layer; dt is not clamped. `values` has the architecture as prefix."""
    ssm = _sizes(values, GGUF_SIZES, eps)
    inner = values.integer("ssm.inner_size", most=MOST["width"])
    return replace(
        ssm,
        head_dim=require_divisible("`ssm.inner_size`", inner, f"`{GGUF_SIZES[0]}`", ssm.heads),
        bias=f"blk.{layer}.ssm_in.bias" in tensors,
        conv_bias=f"blk.{layer}.ssm_conv1d.bias" in tensors,
    )


def attending_hf(values: Values, layers: int) -> list[bool]:
    """Whether each layer is attention, by old or new layer types; without types, none is."""
    key = "layer_types" if values.has("layer_types") else "layers_block_type"
    if not values.has(key):
        return [False] * layers
    named = Values({"layer_types": values.raw(key)})
    kinds = named.layer_types(layers, (*_RECURRENT, *_ATTENDS))
    return [kind in _ATTENDS for kind in kinds]
