"""From a name that was typed to a tensor, where letters of the formulas are none."""

from __future__ import annotations

import re

from llmcli.anatomy.graph import graph
from llmcli.anatomy.indexed import Wanted
from llmcli.anatomy.names import Names
from llmcli.commands.explain.measure.index import axis_words
from llmcli.commands.explain.measure.names import Axes
from llmcli.config import ModelConfig
from llmcli.errors import UsageError
from llmcli.families.sources import sources
from llmcli.graph.spec import Kind
from llmcli.observe.rules import rules

_CACHE = "`explain` runs the prompt at once and needs no cache"
_EXAMPLES = "for example `blocks.0.attn.pattern[0,1,0]`, `blocks.0.mlp_out[0,0]` or `logits[-1,0]`"
_KINDS: tuple[Kind, ...] = ("activation", "parameter")
_RAISED = str.maketrans("12345", "¹²³⁴⁵")


def find(wanted: Wanted, known: dict[str, Axes], config: ModelConfig) -> Axes:
    """The tensor that was meant; raises UsageError saying why it is not there, or what is."""
    name = wanted.name
    names = Names(config, sources(config))
    ours = names.one(name, _KINDS)
    if ours in known:
        return known[ours]
    if ours is not None:  # all that is named and not in a prompt's run is the cache
        use = graph(config).states[ours].holds
        raise UsageError(f"this model has no `{name}` here: {_CACHE}", hint=f"use `{use}`")
    meant = _by_letter(name, known, config)
    if meant is not None:
        raise _of_letter(wanted, meant)
    raise names.refusal(name, _KINDS, _EXAMPLES)


def _by_letter(name: str, known: dict[str, Axes], config: ModelConfig) -> Axes | None:
    """The first tensor that the formulas call so: `A`, `T1` or `T¹`, `H'`, `W_E`."""
    letter = name.replace("'", "′")
    if re.fullmatch(r"T[1-5]", letter):
        letter = letter.translate(_RAISED)
    letters = {"W_E": "embed.W", "W_P": "pos_embed.W", "W_head": "head.W"}
    if config.head.tied:
        letters["W_head"] = "embed.W"
    for tensor, rule in rules(config).items():
        letters.setdefault(rule.letter, tensor)
    letters.setdefault("M", letters.get("S", ""))
    return known.get(letters.get(letter, ""))


def _of_letter(wanted: Wanted, axes: Axes) -> UsageError:
    """What the letter is, and for a hint the same place by its name."""
    first = f"{axes.name}[{','.join(_place(wanted, axes))}]"
    words = ",".join(word.replace(" ", "_") for word in axis_words(axes))
    general = re.sub(r"^blocks\.0\.", "blocks.N.", axes.name)
    role = "the mask in " if wanted.name == "M" else ""
    return UsageError(
        f"`{wanted.name}` is a letter of the formulas, {role}`{general}[{words}]`",
        hint=f"for example `{first}`",
    )


def _place(wanted: Wanted, axes: Axes) -> list[str]:
    """The index that was typed where it could be one of this tensor, else its last number."""
    items = wanted.items or ()
    numbers = [item for item in items if isinstance(item, int)]
    if len(items) == len(numbers) == len(axes.sizes) and all(
        -size <= item < size for item, size in zip(numbers, axes.sizes, strict=True)
    ):
        return [str(item) for item in numbers]
    return ["0" if letter in ("H", "Hk", "1") else str(size - 1)
            for letter, size in zip(axes.letters, axes.sizes, strict=True)]  # fmt: skip
