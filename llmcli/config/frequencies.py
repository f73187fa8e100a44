"""RoPE frequencies, computed one by one as in the papers and reference code.

Independent of `ops.rope.frequencies`.
"""

from __future__ import annotations

import math

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


def frequencies(rope: RopeConfig, length: int) -> tuple[list[float], float]:
    """Radians per position of every pair, and the factor on cos and sin.

    `length`: length of the sequence, for the dynamic kinds.
    """
    pairs, scaling = range(rope.dims // 2), rope.scaling
    plain = [rope.theta ** (-2 * i / rope.dims) for i in pairs]
    match scaling:
        case None:
            return plain, 1.0
        case LinearScaling():
            return [omega / scaling.factor for omega in plain], 1.0
        case DynamicScaling():
            ratio = max(length, scaling.original) / scaling.original
            stretch = scaling.factor * ratio - (scaling.factor - 1)
            theta = rope.theta * stretch ** (rope.dims / (rope.dims - 2))
            return [theta ** (-2 * i / rope.dims) for i in pairs], 1.0
        case Llama3Scaling():
            return [_llama3(omega, scaling) for omega in plain], 1.0
        case YarnScaling():
            low, high = _ramp(rope, scaling)
            shares = [min(max((i - low) / (high - low), 0.0), 1.0) for i in pairs]
            stretched = [
                omega * (1 - share) + omega / scaling.factor * share
                for omega, share in zip(plain, shares, strict=True)
            ]
            return stretched, scaling.attention_factor
        case LongRopeScaling():
            divisors = scaling.long if length > scaling.original else scaling.short
            divided = [omega / by for omega, by in zip(plain, divisors, strict=True)]
            return divided, scaling.attention_factor
        case FrequencyFactors():
            return [omega / by for omega, by in zip(plain, scaling.factors, strict=True)], 1.0
        case ProportionalScaling():
            turned = [omega / scaling.factor for omega in plain[: scaling.pairs]]
            return turned + [0.0] * (len(plain) - scaling.pairs), 1.0


def _llama3(omega: float, scaling: Llama3Scaling) -> float:
    """Keep wavelengths below original/high, stretch those above original/low, blend between."""
    wavelength = 2 * math.pi / omega
    if wavelength < scaling.original / scaling.high:
        return omega
    if wavelength > scaling.original / scaling.low:
        return omega / scaling.factor
    smooth = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    return (1 - smooth) * omega / scaling.factor + smooth * omega


def _ramp(rope: RopeConfig, scaling: YarnScaling) -> tuple[float, float]:
    """The range of pairs that YaRN blends: those with `beta` rotations in the trained length."""
    ends = []
    for beta in (scaling.beta_fast, scaling.beta_slow):
        turns = scaling.original / (beta * 2 * math.pi)
        ends.append(rope.dims * math.log(turns) / (2 * math.log(rope.theta)))
    low, high = ends
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    return low, high + 0.001 if low == high else high  # the reference's guard against width 0
