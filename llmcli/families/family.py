"""The Family type and the lookup of a checkpoint's family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmcli.config.model import ModelConfig
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families.multimodal import text_settings, with_prefixes
from llmcli.families.quantized import NVFP4, Scheme, scale_names, scheme, with_scales
from llmcli.families.read import gguf_ignored
from llmcli.families.record import Family
from llmcli.families.rope import check_rotations
from llmcli.families.rules import Plan, Rename, Rule, plan
from llmcli.families.scales import FLOAT8
from llmcli.families.unsupported import Kind, meant, needed_parts, needs, run_instead
from llmcli.families.values import farthest, shortened
from llmcli.records.numbers import did_you_mean

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint

_FILES = (
    "gpt2", "dense", "gpts", "gemma", "gemma4", "qwen", "mixtures", "deepseek", "hybrids",
)  # modules of this package that define families
_PIECE = 1 << 22  # bytes compared at a time


def find(model_type: str, kind: Kind) -> Family:
    """Find the family of a `model_type` (or GGUF architecture).

    Raises UnsupportedModel, which names the missing parts if they are known.
    """
    known = {name: family for family in families() for name in family.types(kind)}
    if model_type not in known:
        raise _unsupported(model_type, kind, tuple(known))
    return known[model_type]


def _unsupported(model_type: str, kind: Kind, known: tuple[str, ...]) -> UnsupportedModel:
    parts, hint = needed_parts(model_type, kind), None
    message = f"`{shortened(model_type)}` is not supported{needs(parts)}"
    if not parts and (name := meant(model_type, known)):
        key = "model_type" if kind == "safetensors" else "general.architecture"
        hint = f"{did_you_mean([name])} see `{key}` in its configuration"
    if other := run_instead(model_type):
        hint = f"run another model of about its size, for example `-m {other}`"
    return UnsupportedModel(message, hint=hint)


def families() -> tuple[Family, ...]:
    """Every family, in display order."""
    # imported on call: every family's module builds on ones that import this one
    files = (vars(import_module(f"llmcli.families.{name}")) for name in _FILES)
    found = (one for file in files for one in file.values() if isinstance(one, Family))
    return tuple({family.name: family for family in found}.values())


def describe(checkpoint: Checkpoint) -> ModelConfig:
    """Build the ModelConfig from a checkpoint's configuration, without reading weights.

    Raises CheckpointError for a missing, contradictory or impossible configuration and
    UnsupportedModel for an unsupported architecture.
    """
    return _described(checkpoint)[1]


def ignored_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """GGUF metadata (key → value) that llama.cpp does not read for the file's architecture."""
    if checkpoint.kind != "gguf":
        return {}
    arch = checkpoint.model_type
    return gguf_ignored(checkpoint.metadata, arch, reads=find(arch, "gguf").gguf_reads)


def translate(checkpoint: Checkpoint) -> tuple[ModelConfig, tuple[Rule, ...]]:
    """The ModelConfig of a checkpoint, and the rules that load its tensors.

    Raises the errors of `describe`.
    """
    family, config, found = _described(checkpoint)
    if checkpoint.kind == "gguf":
        blocks = any(info.format == "NVFP4" for info in checkpoint.tensors.values())
        return config, with_scales(family.rules_gguf(config), NVFP4 if blocks else None)
    multimodal = checkpoint.model_type in family.hf_multimodal
    config, rules = _with_the_head_as_stored(checkpoint, family, config, found, multimodal)
    return config, with_scales(rules, found)


Shapes = Mapping[str, tuple[int, ...]]


def planned(
    checkpoint: Checkpoint, rules: Sequence[Rule], config: ModelConfig, shapes: Shapes
) -> Plan:
    """Plan how tensors fill the parameters in `shapes`; in GGUF, surplus tensors are unexpected.

    Surplus tensors are accepted by transformers and refused by llama.cpp. An unused scale of an
    8-bit matrix is not surplus: without it the matrix would be wrong.
    """
    todo, tensors = plan(checkpoint.tensors, rules, config), checkpoint.tensors
    if checkpoint.kind == "gguf":
        return todo
    matrices = {name: f"{name.rpartition('.')[0]}.weight" for name in todo.unexpected}
    in_8_bits = {name for name, info in tensors.items() if info.format in FLOAT8}
    scales = [name for name, matrix in matrices.items() if matrix in in_8_bits]
    return todo.without_surplus(shapes, keep=scales)


def _described(checkpoint: Checkpoint) -> tuple[Family, ModelConfig, Scheme | None]:
    model_type, settings = checkpoint.model_type, checkpoint.config or {}  # may raise
    if checkpoint.kind == "gguf":
        family = find(model_type, "gguf")
        read = partial(family.from_gguf, settings, checkpoint.tensors)
        return family, _checked(read, settings), None
    multimodal = [family for family in families() if model_type in family.hf_multimodal]
    if multimodal:
        settings = text_settings(settings)
        family = _of_text(model_type, settings["model_type"], multimodal)
    else:
        if model_type == "mistral" and "layer_types" in settings:  # like transformers' AutoConfig,
            model_type = "ministral"  # but not for the text model of a multimodal one
            settings = {**settings, "model_type": model_type}
        family = find(model_type, "safetensors")
    if settings.get("use_bidirectional_attention") not in (None, False, "vision"):
        parts = needs(["bidirectional attention"])
        raise UnsupportedModel(f"`use_bidirectional_attention` is not supported{parts}")
    return family, _checked(partial(family.from_hf, settings), settings), scheme(settings)


def _checked(read: Callable[[], ModelConfig], settings: Mapping[str, Any]) -> ModelConfig:
    """Call `read`; raises CheckpointError if a value computed from the settings is not finite."""
    try:
        model = read()
        check_rotations(model)
    except ArithmeticError:
        key, value = farthest(settings)
        raise CheckpointError(
            f"the configuration says `{shortened(key)}` is `{shortened(value)}`:"
            " what is computed from it is not finite"
        ) from None
    return model


def _of_text(whole: str, text: str, multimodal: Iterable[Family]) -> Family:
    """The family of the text model in a multimodal one."""
    for family in multimodal:
        if text in (*family.hf_types, *family.hf_texts):
            return family
    parts = needs(needed_parts(text, "safetensors"))
    raise UnsupportedModel(
        f"`{shortened(whole)}` with a text model `{shortened(text)}` is not supported{parts}"
    )


def _with_the_head_as_stored(
    checkpoint: Checkpoint,
    family: Family,
    config: ModelConfig,
    found: Scheme | None,
    multimodal: bool,
) -> tuple[ModelConfig, tuple[Rule, ...]]:
    """Follow the file if it stores an output head although the configuration ties it.

    Like transformers 5: a head without an embedding tensor fills the embedding, a head that differs
    from the embedding stays separate, an equal one is dropped.
    """
    untied = replace(config, head=replace(config.head, tied=False))
    rules, separate = (_rules(family, one, multimodal) for one in (config, untied))
    heads = [name for name in _sources("head.W", separate) if name in checkpoint.tensors]
    if not config.head.tied or not heads:
        return config, rules
    sources = [name for name in _sources("embed.W", rules) if name in checkpoint.tensors]
    if not sources:
        others = [rule for rule in rules if isinstance(rule, Rename) or rule.pattern not in heads]
        return config, (*(Rename(head, "embed.W") for head in heads), *others)
    if not all(_same(checkpoint, head, sources[0], found) for head in heads):
        return untied, separate
    return config, rules


def _rules(family: Family, config: ModelConfig, multimodal: bool) -> tuple[Rule, ...]:
    rules = family.rules_hf(config)
    return with_prefixes(rules) if multimodal else rules


def _sources(target: str, rules: tuple[Rule, ...]) -> list[str]:
    return [rule.source for rule in rules if isinstance(rule, Rename) and rule.target == target]


def _same(checkpoint: Checkpoint, one: str, other: str, found: Scheme | None) -> bool:
    """Whether two tensors and their scales, if any, are equal."""
    pairs = [(one, other), *zip(scale_names(one, found), scale_names(other, found), strict=True)]
    there = [tuple(name in checkpoint.tensors for name in pair) for pair in pairs]
    return all(
        first == second and (not first or _same_bytes(checkpoint, *pair))
        for pair, (first, second) in zip(pairs, there, strict=True)
    )


def _same_bytes(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two tensors are equal bytewise, compared in pieces to bound memory."""
    first, second = checkpoint.tensors[one], checkpoint.tensors[other]
    if (first.format, first.shape) != (second.format, second.shape):
        return False
    return all(
        checkpoint.read(one, start, stop) == checkpoint.read(other, start, stop)
        for start in range(0, first.nbytes, _PIECE)
        for stop in (min(start + _PIECE, first.nbytes),)
    )
