"""The quantization of a config.json's weights, and the tensors that hold their scales.

Supported: MXFP4, and schemes that store one 8-bit number per weight under the weight's name and
shape, with separate scales; such a weight is exactly number × scale. The rounding of activations
that these schemes define is not applied.

fp8                  E4M3, `weight_scale_inv` per block (DeepSeek-V3, Qwen3) or for a whole tensor;
                     `weight_scale` for a whole tensor where the config has no blocks
fbgemm_fp8           E4M3, `weight_scale` per row
compressed-tensors   E4M3 or int8 (`*-quantized`), `weight_scale` as given by its groups
modelopt             E4M3 (`FP8`), `weight_scale` for a whole tensor
bitsandbytes         int8, `SCB` per row: the largest magnitude there, which 127 stands for
mxfp4                blocks of 32 4-bit numbers, which the checkpoint already combines

GGUF: NVFP4, whose blocks include scales, with a `scale` per matrix or expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.errors import UnsupportedModel
from llmcli.families.rules import Drop, Rename, Rule, ScaleTensor, Transpose
from llmcli.families.scales import FLOAT8, Grid
from llmcli.families.values import ConfigReader, shortened

_KEYS = ("quantization_config", "compression_config", "quantization")
_MOST = 1 << 20  # rows or columns of a block: far above every published block
_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub", "output_scale")
_CACHE = ("q_scale", "k_scale", "v_scale", "kv_scale")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The tensors beside a quantized `weight`: its scale, under one of the names in `grids`.

    `layout`: name of a one-byte tensor with the storage layout.
    """

    grids: Mapping[str, Grid]
    layout: str | None = None


# the factor that llama.cpp applies to a product; `input_scale` is for rounding activations
NVFP4 = Scheme(grids={"scale": Grid(formats=("NVFP4",))})


def scheme(settings: Mapping[str, Any]) -> Scheme | None:
    """The scheme in a config.json; None if its weights have no separate scales.

    Raises UnsupportedModel for other schemes and CheckpointError for contradictory settings.
    """
    values = ConfigReader(settings)
    for key in _KEYS:
        section = values.section(key)
        if section is not None:
            return _scheme(_method(section), section)
    return None


def _scheme(method: str, section: ConfigReader) -> Scheme | None:
    match method:
        case "fp8":
            return _fp8(section)
        case "fbgemm_fp8":
            return Scheme(grids={"weight_scale": Grid(formats=FLOAT8, rows=1)})
        case "compressed-tensors":
            return _compressed(section)
        case "modelopt":
            if (kind := section.text("quant_algo", "unknown")) != "FP8":
                raise _unsupported("modelopt", kind)
            return Scheme(grids={"weight_scale": Grid(formats=FLOAT8)})
        case "bitsandbytes":
            if section.flag("load_in_4bit", False) or not section.flag("load_in_8bit", False):
                raise _unsupported("bitsandbytes", "4 bits")
            grid = Grid(formats=("I8",), rows=1, divisor=127)
            return Scheme(grids={"SCB": grid}, layout="weight_format")
        case "mxfp4":  # no separate scales; see `checkpoints.mxfp4`
            return None
    raise _unsupported(method)


def with_scales(rules: Sequence[Rule], found: Scheme | None) -> tuple[Rule, ...]:
    """A family's rules plus rules for the scales of every tensor that they name."""
    if found is None:
        return tuple(rules)
    if found.layout and any(isinstance(rule, Rename) and Transpose() in rule.ops for rule in rules):
        # it stores a Conv1D transposed
        raise _unsupported("bitsandbytes", "a model with Conv1D")
    more: dict[str, Rule] = {}
    for rule in rules:
        name = rule.source if isinstance(rule, Rename) else rule.pattern
        stem, _, last = name.rpartition(".")
        if last != "weight" or isinstance(rule, ScaleTensor):
            continue
        names = [*found.grids, *([found.layout] if found.layout else [])]
        for suffix in names:
            pattern = f"{stem}.{suffix}"
            if isinstance(rule, Drop):
                more[pattern] = Drop(pattern, rule.reason, rule.within)
            else:
                more[pattern] = ScaleTensor(pattern, name, found.grids.get(suffix), rule.within)
        more |= _unused(stem, rule.within)
    return (*rules, *more.values())


def scale_names(weight: str, found: Scheme | None) -> tuple[str, ...]:
    """Possible names of a tensor's scale."""
    stem = weight.removesuffix(".weight")
    return () if found is None else tuple(f"{stem}.{suffix}" for suffix in found.grids)


def _unused(stem: str, within: Mapping[str, Sequence[int]]) -> dict[str, Rule]:
    """Drops of activation and cache scales, under the names of a module and its parent."""
    parent = stem.rpartition(".")[0]
    patterns = {f"{stem}.{suffix}": "activations" for suffix in _ACTIVATIONS}
    for module in (stem, parent):
        patterns |= {f"{module}.{suffix}": "keys and values" for suffix in _CACHE}
    return {
        pattern: Drop(pattern, f"a scale for rounding {what}, which are not rounded here", within)
        for pattern, what in patterns.items()
    }


def _method(section: ConfigReader) -> str:
    if section.has("quant_method"):
        return section.text("quant_method")
    if section.has("config_groups"):  # old files, under the key `compression_config`
        return "compressed-tensors"
    if section.has("load_in_8bit") or section.has("load_in_4bit"):
        return "bitsandbytes"
    return "mlx" if section.has("group_size") and section.has("bits") else "unknown"


def _fp8(section: ConfigReader) -> Scheme:
    """DeepSeek-V3's scheme: a `weight_block_size` of null is one scale; if absent, 128 × 128."""
    whole = Grid(formats=FLOAT8)
    if section.contains("weight_block_size"):
        key = "weight_block_size"
        grid = _blocks(section, key, FLOAT8) if section.has(key) else whole
        return Scheme(grids={"weight_scale_inv": grid, "weight_scale": grid})
    usual = Grid(formats=FLOAT8, rows=128, columns=128)
    return Scheme(grids={"weight_scale_inv": usual, "weight_scale": whole})


def _blocks(section: ConfigReader, key: str, formats: tuple[str, ...]) -> Grid:
    sizes = section.raw(key)
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        raise section.invalid(key, "a list of 2 numbers")
    rows, columns = (ConfigReader({key: size}).integer(key, most=_MOST) for size in sizes)
    return Grid(formats=formats, rows=rows, columns=columns)


def _compressed(section: ConfigReader) -> Scheme:
    sparse = section.section("sparsity_config")
    if sparse is not None and sparse.text("format", "dense") != "dense":
        raise _unsupported("compressed-tensors", sparse.text("format"))
    groups = section.raw("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise section.invalid("config_groups", "an object with groups")
    usual = section.text("format", "unknown")
    found = set()
    for group in groups.values():
        values = ConfigReader({"group": group}).section("group")
        if values is None:
            raise section.invalid("config_groups", "an object with groups")
        found.add(_group(values, usual))
    if len(found) != 1:  # groups match modules by patterns
        raise _unsupported("compressed-tensors", "groups of different schemes")
    return Scheme(grids={"weight_scale": found.pop()})


def _group(group: ConfigReader, usual: str) -> Grid:
    """The scale grid of one group of compressed-tensors."""
    form = group.text("format", usual)
    weights = group.section("weights")
    if form not in ("float-quantized", "int-quantized", "naive-quantized") or weights is None:
        raise _unsupported("compressed-tensors", form)
    if weights.integer("num_bits", 8, most=64) != 8 or not weights.flag("symmetric", True):
        raise _unsupported("compressed-tensors", "other than 8 bits around zero")
    formats = ("I8",) if weights.text("type", "int") == "int" else FLOAT8
    strategy = weights.text("strategy", "tensor")
    match strategy:
        case "tensor" | "channel":
            return Grid(formats=formats, rows=1 if strategy == "channel" else None)
        case "group":
            columns = weights.integer("group_size", most=_MOST)
            return Grid(formats=formats, rows=1, columns=columns)
        case "block":
            return _blocks(weights, "block_structure", formats)
    raise _unsupported("compressed-tensors", f"scales by {strategy}")


def _unsupported(method: str, what: str = "") -> UnsupportedModel:
    words = f" ({shortened(what)})" if what else ""
    return UnsupportedModel(
        f"weights quantized with `{shortened(method)}`{words} are not supported",
        hint="use the unquantized checkpoint or a GGUF file of the same model",
    )
