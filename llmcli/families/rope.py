"""RoPE settings of checkpoints → `RopeConfig`.

The config.json form follows `modeling_rope_utils.py` of transformers 5: `rope_parameters`, before
version 5 `rope_scaling` beside `rope_theta`; `rope_type`, in old files `type`. GGUF follows
`llama-model.cpp` and `llama-context.cpp` of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from llmcli.config.attention import (
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from llmcli.config.frequencies import frequencies
from llmcli.config.model import ModelConfig
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families.values import LIMITS, ConfigReader, shortened

T = TypeVar("T")
DEFAULT_THETA = 10000.0
GGUF_FACTORS = "rope_freqs.weight"
# YaRN keys, read for few architectures (`yarn_as_written`)
GGUF_YARN = tuple(
    f"rope.scaling.yarn_{one}" for one in ("beta_fast", "beta_slow", "log_multiplier")
)
GGUF_LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
_LARGEST = 3.4e38  # in float32
_HF_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_ORIGINAL = ("yarn", "llama3", "longrope")  # kinds that use the original length


def rope_from_hf(
    values: ConfigReader, *, head_dim: int, context: int, share: float | None = None
) -> RopeConfig:
    """Read the RoPE settings of a config.json, for heads of size `head_dim`.

    `share`: default fraction of a head with RoPE; None: the type always rotates whole heads. Raises
    CheckpointError for invalid values and UnsupportedModel for an unknown kind.
    """
    scaled = _settings(values)
    if scaled.has("full_attention") or scaled.has("sliding_attention"):
        raise UnsupportedModel("rotary positions that differ by layer type are not supported")
    kind = _kind(scaled)
    if kind not in _HF_KINDS:
        raise UnsupportedModel(
            f"rotary positions of kind `{shortened(kind)}` are not supported",
            hint=f"supported kinds: {', '.join(_HF_KINDS)}",
        )
    theta_at = scaled if scaled.contains("rope_theta") else values
    theta = theta_at.number("rope_theta", _unless_null(theta_at, "rope_theta", DEFAULT_THETA))
    dims = head_dim
    # other kinds ignore the fraction
    if kind not in ("default", "proportional") or share is not None:
        part_at = scaled if scaled.has("partial_rotary_factor") else values
        usual = _unless_null(scaled, "partial_rotary_factor", share or 1.0)
        dims = int(head_dim * _fraction(part_at, usual))
    _check_dims(dims, head_dim)
    # A length beside the RoPE settings takes precedence over one inside, as in transformers.
    length_at = values if values.has("original_max_position_embeddings") else scaled
    key = "original_max_position_embeddings"
    longest = _unless_null(length_at, key, context) if kind in _ORIGINAL else context
    original = length_at.integer(key, longest, most=LIMITS["positions"])
    scaling = _hf_scaling(kind, scaled, dims, context, original)
    _check_theta(theta, scaling)
    return RopeConfig(theta=theta, dims=dims, scaling=scaling)


def check_rotations(model: ModelConfig) -> None:
    """Raise ArithmeticError if settings give angles or factors beyond float32."""
    parts = (part for layer in model.layers for part in layer.parts)
    ropes: set[Any] = {getattr(part, "rope", None) for part in parts} - {None}
    for rope in ropes:
        if isinstance(rope.scaling, LongRopeScaling | FrequencyFactors):
            continue  # individual divisors, some of them read later
        try:
            found, factor = frequencies(rope, model.context)
        except ValueError as error:  # logarithm of an overflow
            raise ArithmeticError from error
        if not all(abs(one) * model.context < _LARGEST for one in (*found, factor)):
            raise ArithmeticError


def scores_yarn_from_hf(values: ConfigReader) -> float:
    """Additional factor on attention scores: `mscale(factor, mscale_all_dim)²`.

    Only with `mscale_all_dim` (DeepSeek-V2; other attentions do not read it).
    """
    scaled = _settings(values)
    multiplier = scaled.number("mscale_all_dim", 0.0, above=False)
    if _kind(scaled) == "default" or not multiplier:
        return 1.0
    return _mscale(scaled.number("factor"), multiplier) ** 2


def scores_yarn_from_gguf(rope: RopeConfig, values: ConfigReader) -> tuple[RopeConfig, float]:
    """Additional factor on scores of a GGUF file, and the RoPE without its factor on cos and sin.

    The converter writes 0.1 · `mscale_all_dim` in float32; llama.cpp assumes an equal `mscale`.
    """
    multiplier = round(10 * values.number(GGUF_YARN[2], 0.0, above=False), 6)
    if not isinstance(rope.scaling, YarnScaling) or not multiplier:
        return rope, 1.0
    scaling = replace(rope.scaling, attention_factor=1.0)
    return replace(rope, scaling=scaling), _mscale(scaling.factor, multiplier) ** 2


def _settings(values: ConfigReader) -> ConfigReader:
    """The RoPE settings: an old `rope_scaling` replaces `rope_parameters`, as in transformers."""
    return values.section("rope_scaling") or values.section("rope_parameters") or ConfigReader({})


def _kind(scaled: ConfigReader) -> str:
    key = "rope_type" if scaled.contains("rope_type") else "type"
    return scaled.text(key, _unless_null(scaled, key, "default"))


def _unless_null(values: ConfigReader, key: str, default: T) -> T | None:
    """The default, or None for an explicit null, with which transformers fails."""
    return None if values.contains(key) else default


def renamed_kinds(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A config.json with other names for some kinds of RoPE."""
    changed = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type", rope.get("type"))
            if isinstance(kind, str) and kind in names:
                changed[key] = {**rope, "rope_type": names[kind]}
    return changed


def of_layer_type(config: Mapping[str, Any], kind: str, *, theta: float) -> dict[str, Any]:
    """A config.json as if all layers had type `kind` (`full_attention`, `sliding_attention`).

    Since transformers 5, `rope_parameters` has settings per type. Before, `rope_scaling` and
    `rope_theta` applied to full attention only; the default base is `theta`.
    """
    nested = config.get("rope_parameters")
    own = ConfigReader(nested).section(kind) if isinstance(nested, Mapping) else None
    settings = {} if own is None else own.all()
    if kind == "full_attention":
        old = config.get("rope_scaling")
        settings |= old if isinstance(old, Mapping) else {}
        theta = config.get("rope_theta") or theta
    return {**config, "rope_parameters": {"rope_theta": theta, **settings}, "rope_scaling": None}


def rope_from_gguf(
    values: ConfigReader, tensors: Container[str], *, head_dim: int, context: int
) -> RopeConfig:
    """Read the RoPE settings of GGUF metadata; `values` has the architecture as prefix.

    A tensor of frequency factors is named in the scaling; the loader reads it. Raises
    CheckpointError and UnsupportedModel.
    """
    dims = values.integer("rope.dimension_count", head_dim, most=LIMITS["head_dim"])
    _check_dims(dims, head_dim)
    theta = values.number("rope.freq_base", DEFAULT_THETA)
    scaling = _gguf_scaling(values, tensors, context)
    _check_theta(theta, scaling)
    if GGUF_FACTORS in tensors:
        if scaling is not None:
            raise UnsupportedModel(
                f"the file has both `{GGUF_FACTORS}` and rotary scaling in its metadata"
            )
        scaling = FrequencyFactors(source=GGUF_FACTORS)
    return RopeConfig(theta=theta, dims=dims, scaling=scaling)


def _gguf_scaling(values: ConfigReader, tensors: Container[str], context: int) -> RopeScaling:
    """Phi-3's LongRoPE by its tensors of divisors, else what the metadata say.

    YaRN as in llama.cpp: the temperature from the factor, times the file's `attn_factor`. Its
    context divides by 1 + 0.1 ln(factor) and its kernel multiplies by it again, so the temperature
    is applied once to cos and sin. The `yarn_…` keys have no effect: `gguf_ignored`.
    """
    key, most = "rope.scaling.original_context_length", LIMITS["positions"]
    if all(name in tensors for name in GGUF_LONGROPE):
        return LongRopeScaling(
            short=(),
            long=(),
            sources=GGUF_LONGROPE,
            original=values.integer(key, context, most=most),
            attention_factor=values.number("rope.scaling.attn_factor", 1.0),
        )
    kind = values.text("rope.scaling.type", "linear")  # llama.cpp's default with a bare factor
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"rotary scaling of kind `{shortened(kind)}` is not supported in GGUF files",
            hint="supported kinds: none, linear, yarn, and frequency factors in a tensor",
        )
    old = values.number("rope.scale_linear", 0.0, above=False)  # the key's name until 2023
    factor = values.number("rope.scaling.factor", old, above=False) or 1.0
    attention = values.number("rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        original = values.integer(key, context, most=most)
        attention *= _mscale(factor)
        return YarnScaling(factor=factor, original=original, attention_factor=attention)
    if attention != 1.0:
        raise UnsupportedModel("factors of yarn under another kind of scaling are not supported")
    return None if kind == "none" or factor == 1.0 else LinearScaling(factor=factor)


def yarn_as_written(rope: RopeConfig, values: ConfigReader) -> RopeConfig:
    """YaRN with the file's `yarn_…` settings, which llama.cpp reads for few architectures."""
    if not isinstance(rope.scaling, YarnScaling):
        return rope
    fast, slow, multiplier = (
        values.number(key, usual, above=above)
        for key, usual, above in zip(GGUF_YARN, (32.0, 1.0, 0.0), (True, True, False), strict=True)
    )
    attention = rope.scaling.attention_factor / _mscale(rope.scaling.factor, multiplier)
    scaling = replace(rope.scaling, beta_fast=fast, beta_slow=slow, attention_factor=attention)
    return replace(rope, scaling=scaling)


def _hf_scaling(
    kind: str, scaled: ConfigReader, dims: int, context: int, original: int
) -> RopeScaling:
    match kind:
        case "linear":
            return LinearScaling(factor=scaled.number("factor"))
        case "dynamic":  # the base grows beyond `max_position_embeddings`, not an original length
            if dims <= 2:
                raise CheckpointError(
                    f"dynamic rotary scaling needs more than {dims} rotated numbers"
                )
            factor = scaled.number("factor", least=1.0, above=False)
            return DynamicScaling(factor=factor, original=context)
        case "llama3":
            low, high = scaled.number("low_freq_factor"), scaled.number("high_freq_factor")
            if high <= low:
                raise CheckpointError(
                    f"`high_freq_factor` {high:g} has to be greater than `low_freq_factor` {low:g}"
                )
            factor = scaled.number("factor")
            return Llama3Scaling(factor=factor, low=low, high=high, original=original)
        case "yarn":
            return _yarn(scaled, context, original)
        case "longrope":
            return _longrope(scaled, dims, context, original)
        case "proportional":  # a fraction of the pairs, with the frequencies of a whole head
            fraction = _fraction(scaled, _unless_null(scaled, "partial_rotary_factor", 1.0))
            pairs = int(fraction * dims // 2)
            return ProportionalScaling(pairs=pairs, factor=scaled.number("factor", 1.0))
    return None


def _yarn(scaled: ConfigReader, context: int, original: int) -> YarnScaling:
    if not scaled.contains("factor"):  # null: the ratio of the lengths, as in transformers
        raise scaled.invalid("factor", "a finite number")
    factor = scaled.number("factor", context / original)
    attention = scaled.optional_number("attention_factor", above=False)
    if attention is None:
        mscale = scaled.number("mscale", 0.0, above=False)
        all_dims = scaled.number("mscale_all_dim", 0.0, above=False)
        attention = _mscale(factor)
        if mscale and all_dims:
            attention = _mscale(factor, mscale) / _mscale(factor, all_dims)
    return YarnScaling(
        factor=factor,
        original=original,
        attention_factor=attention,
        # 0 counts as absent, as in the reference
        beta_fast=scaled.number("beta_fast", 32.0, above=False) or 32.0,
        beta_slow=scaled.number("beta_slow", 1.0, above=False) or 1.0,
        truncate=scaled.flag("truncate", True),
    )


def _longrope(scaled: ConfigReader, dims: int, context: int, original: int) -> LongRopeScaling:
    factor = scaled.number("factor", context / original)
    attention = scaled.optional_number("attention_factor", above=False)
    if attention is None:
        if factor > 1.0 and original == 1:
            raise CheckpointError("longrope needs an `original_max_position_embeddings` above 1")
        grown = factor > 1.0
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if grown else 1.0
    return LongRopeScaling(
        short=scaled.numbers("short_factor", dims // 2),
        long=scaled.numbers("long_factor", dims // 2),
        original=original,
        attention_factor=attention,
    )


def _mscale(factor: float, multiplier: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0


def _fraction(values: ConfigReader, usual: float | None) -> float:
    fraction = values.number("partial_rotary_factor", usual)
    if fraction > 1.0:
        raise values.invalid("partial_rotary_factor", "a number above 0, at most 1")
    return fraction


def _check_theta(theta: float, scaling: RopeScaling) -> None:
    if isinstance(scaling, YarnScaling) and theta <= 1.0:  # it divides by log(base)
        raise CheckpointError(f"yarn needs a `rope_theta` above 1, not {theta:g}")


def _check_dims(dims: int, head_dim: int) -> None:
    if dims < 2 or dims % 2 or dims > head_dim:
        raise CheckpointError(
            f"{dims} rotated numbers in a head of {head_dim}: it must be an even number, at least 2"
        )
