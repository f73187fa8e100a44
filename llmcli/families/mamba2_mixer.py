"""Reads the Mamba-2 mixer, and which layers have it, from configurations."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import NamedTuple

from llmcli.config.norm import NormConfig
from llmcli.config.ssm import SsmConfig
from llmcli.errors import UnsupportedModel
from llmcli.families.values import MOST, Values, require_divisible, shortened

_RECURRENT = ("mamba", "linear_attention")  # layer types, old and new
_ATTENDS = ("attention", "full_attention")

class Keys(NamedTuple):
    """Keys of a mixer's settings in config.json, in this order."""

    heads: str
    head_dim: str
    groups: str
    state: str
    length: str
    bias: str
    conv_bias: str
    function: str


def from_hf(
    values: Values, keys: Keys, eps: float, bounds: tuple[float, float], *,
    inner: int | None = None,
) -> SsmConfig:  # fmt: skip
    """Read the mixer under these keys; all but the flags are required.

    `bounds`: of dt. `inner`: total width of all heads if known otherwise; the head size is then
    optional. Raises CheckpointError and UnsupportedModel.
    """
    if (function := values.text(keys.function, "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(
            f"`{keys.function}` = `{shortened(function)}` is not supported: Mamba-2 has `silu`"
        )
    heads = values.integer(keys.heads, most=MOST["heads"])
    groups = values.integer(keys.groups, most=heads)
    require_divisible(f"`{keys.heads}`", heads, f"`{keys.groups}`", groups)
    usual = None
    if inner is not None:
        usual = require_divisible("the inner size", inner, f"`{keys.heads}`", heads)
    head_dim = values.integer(keys.head_dim, usual, most=MOST["head_dim"])
    if usual not in (None, head_dim):
        raise values.wrong(keys.head_dim, f"{usual}, as {inner} numbers are in {heads} heads")
    return SsmConfig(
        heads=heads, groups=groups, head_dim=head_dim,
        state=values.integer(keys.state, most=MOST["head_dim"]),
        length=values.integer(keys.length, least=2, most=64),
        norm=NormConfig(kind="rms", eps=eps), least=bounds[0], most=bounds[1],
        bias=values.flag(keys.bias, False), conv_bias=values.flag(keys.conv_bias, True),
    )  # fmt: skip


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
    heads = values.integer("ssm.time_step_rank", most=MOST["heads"])
    inner = values.integer("ssm.inner_size", most=MOST["width"])
    groups = values.integer("ssm.group_count", most=heads)
    require_divisible("`ssm.time_step_rank`", heads, "`ssm.group_count`", groups)
    return SsmConfig(
        heads=heads, groups=groups,
        head_dim=require_divisible("`ssm.inner_size`", inner, "`ssm.time_step_rank`", heads),
        state=values.integer("ssm.state_size", most=MOST["head_dim"]),
        length=values.integer("ssm.conv_kernel", least=2, most=64),
        norm=NormConfig(kind="rms", eps=eps), bias=f"blk.{layer}.ssm_in.bias" in tensors,
        conv_bias=f"blk.{layer}.ssm_conv1d.bias" in tensors,
    )  # fmt: skip


def attending_hf(values: Values, layers: int) -> list[bool]:
    """Whether each layer is attention, by old or new layer types; without types, none is."""
    key = "layer_types" if values.has("layer_types") else "layers_block_type"
    if not values.has(key):
        return [False] * layers
    named = Values({"layer_types": values.raw(key)})
    kinds = named.layer_types(layers, (*_RECURRENT, *_ATTENDS))
    return [kind in _ATTENDS for kind in kinds]
