"""RoPE (Su et al. 2021, arXiv 2104.09864) and its scaling methods.

Axes: B batch, H heads, T tokens, dh size of a head, R rotated dimensions, N = R/2 frequencies.
Dimension i of a head is paired with i + N (the "half" layout).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmcli.config.attention import (
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)
from llmcli.ops import compiled


def frequencies(config: RopeConfig, length: int) -> tuple[Tensor, float]:
    """Radians per position of each pair, `[N]` float64 on the CPU, and the factor on cos and sin.

    `length`: current length of the sequence, used by the dynamic and LongRoPE kinds only.
    """
    plain_N = _powers(config.theta, config.dims)
    match config.scaling:
        case None:
            return plain_N, 1.0
        case LinearScaling(factor=factor):
            return plain_N / factor, 1.0
        case DynamicScaling() as scaling:
            return _dynamic(config, scaling, length), 1.0
        case Llama3Scaling() as scaling:
            return _llama3(plain_N, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(plain_N, config, scaling), scaling.attention_factor
        case LongRopeScaling() as scaling:
            divisors = scaling.long if length > scaling.original else scaling.short
            divisors_N = torch.tensor(divisors, dtype=torch.float64)
            return plain_N / divisors_N, scaling.attention_factor
        case FrequencyFactors(factors=factors):
            return plain_N / torch.tensor(factors, dtype=torch.float64), 1.0
        case ProportionalScaling(pairs=pairs, factor=factor):
            plain_N[pairs:] = 0
            return plain_N / factor, 1.0


def depends_on_length(config: RopeConfig) -> bool:
    """Whether the frequencies change while a sequence grows."""
    return isinstance(config.scaling, DynamicScaling | LongRopeScaling)


def tables(frequencies_N: Tensor, positions: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """`cos` and signed `sin` for `rotate`: positions `[...]` → two `[..., R]` in float64.

    Both halves have the same angles; the first half of `sin` is negated, so that `x cos + swap(x)
    sin` is the rotation. Angles are products in float64: float32 loses 1e-5 radians at position
    300.
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies_N
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x_BTHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions of every head; `cos`, `sin` `[T, 1, R]` or `[B, T, 1, R]`.

    Computed in the tables' dtype (at least float32), returned in the dtype of `x`.
    """
    if compiled.takes(x_BTHd, cos, narrow=True):
        cosines, sines = (table.reshape(-1, table.shape[-1]) for table in (cos, sin))
        each = x_BTHd.shape[1] if cos.ndim == 4 else 0  # table rows per sequence
        starts_B = torch.arange(x_BTHd.shape[0] if each else 1) * each
        return compiled.rotate(x_BTHd, cosines, sines, starts_B)
    rotated = cos.shape[-1]
    whole = rotated == x_BTHd.shape[-1]
    head = x_BTHd if whole else x_BTHd[..., :rotated]
    if x_BTHd.is_cuda:  # a launch widens its operands and rounds its result
        scaled = head * cos
        turned = torch.empty_like(scaled, dtype=head.dtype)
        torch.addcmul(scaled, head.roll(rotated // 2, -1), sin, out=turned)
    else:
        head = head.to(cos.dtype)
        turned = torch.addcmul(head * cos, head.roll(rotated // 2, -1), sin).to(x_BTHd.dtype)
    return turned if whole else torch.cat((turned, x_BTHd[..., rotated:]), -1)


def _powers(theta: float, dims: int) -> Tensor:
    """`theta^(-2i/R)` for i = 0 … N-1, float64."""
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    return torch.pow(torch.tensor(theta, dtype=torch.float64), -exponents)


def _dynamic(config: RopeConfig, scaling: DynamicScaling, length: int) -> Tensor:
    """NTK by the sequence length: the base grows beyond the trained length."""
    stretch = scaling.factor * max(length, scaling.original) / scaling.original
    stretch -= scaling.factor - 1
    return _powers(config.theta * stretch ** (config.dims / (config.dims - 2)), config.dims)


def _llama3(plain_N: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep wavelengths below original/high, divide those above original/low, blend between."""
    wavelengths_N = 2 * math.pi / plain_N
    ramp_N = (scaling.original / wavelengths_N - scaling.low) / (scaling.high - scaling.low)
    keep_N = ramp_N.clamp(0, 1)
    return keep_N * plain_N + (1 - keep_N) * plain_N / scaling.factor


def _yarn(plain_N: Tensor, config: RopeConfig, scaling: YarnScaling) -> Tensor:
    """Keep frequencies with many rotations in the trained length, divide those with few."""

    def dimension_of(turns: float) -> float:
        # the index i whose wavelength fits `turns` times into the trained length
        ratio = scaling.original / (turns * 2 * math.pi)
        return config.dims * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dims - 1)
    if low == high:
        high += 0.001  # the reference's guard against a ramp of no width
    index_N = torch.arange(config.dims // 2, dtype=torch.float64)
    divide_N = ((index_N - low) / (high - low)).clamp(0, 1)
    return plain_N * (1 - divide_N) + plain_N / scaling.factor * divide_N
