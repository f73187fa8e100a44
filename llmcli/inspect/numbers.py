"""Which number of a model NAME[INDEX] is: a tensor and the place in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from llmcli.config.model import ModelConfig
from llmcli.errors import UsageError
from llmcli.families.sources import sources
from llmcli.graph.graph import graph
from llmcli.graph.indexed import NumberRef
from llmcli.graph.names import Names
from llmcli.graph.plan import parameters, plan
from llmcli.graph.spec import Call, Kind, TensorSpec
from llmcli.records.numbers import did_you_mean

if TYPE_CHECKING:
    from llmcli.text import Tokenizer

# an axis: its word, and its size in the letters of the papers
AXES = {
    "T": ("token", "n"), "S": ("key", "n"), "H": ("head", "h"), "Hk": ("kv head", "h_kv"),
    "D": ("dimension", "d"), "De": ("dimension", "De"), "dh": ("number", "d/h"),
    "dk": ("number", "d_k"), "dv": ("number", "d_v"),
    "F": ("neuron", "F"), "Fs": ("neuron", "Fₛ"), "Fe": ("neuron", "Fₑ"),
    "V": ("vocabulary", "v"), "P": ("position", "positions"), "E": ("expert", "E"),
    "K": ("choice", "K"), "1": ("number", "1"),
}  # fmt: skip

# bytes that are no whole character: as an editor shows them, and as a token's text has them
_PART = re.compile("\N{REPLACEMENT CHARACTER}|" + r"\\x[0-9a-f]{2}")
_BY_NUMBER = "such a token has no text of its own: give its id, or its position in the prompt"

_CACHE = "the prompt is run at once and needs no cache"
_EXAMPLES = "for example `blocks.0.attn.pattern[0,1,0]`, `blocks.0.mlp_out[0,0]` or `logits[-1,0]`"
_KINDS: tuple[Kind, ...] = ("activation", "parameter")
_RAISED = str.maketrans("12345", "¹²³⁴⁵")


def names(config: ModelConfig, tokens: int) -> dict[str, TensorSpec]:
    """Every activation of a prompt of that many tokens, without a batch axis, and every parameter.

    Axes that the papers call the same have the same letter.
    """
    call = Call(batch=1, tokens=tokens, past=0, phase="prefill")
    found = {
        spec.name: replace(spec, axes=_letters(config, spec)[1:], shape=spec.shape[1:])
        for spec in plan(config, call).tensors
    }
    for spec in parameters(config):
        found[spec.name] = replace(spec, axes=_letters(config, spec))
    return found


def _letters(config: ModelConfig, spec: TensorSpec) -> tuple[str, ...]:
    """Its axes; `dk` for `dh` where the heads' sizes are not the width's parts."""
    if spec.layer is None:
        return spec.axes
    documents = graph(config).documents(spec.layer)

    def called(letter: str) -> str:
        same = next((one for one in documents if documents[one] == documents.get(letter)), letter)
        return "dk" if documents.get(same) == "d_k" else same

    return tuple("·".join(map(called, axis.split("·"))) for axis in spec.axes)


def find(wanted: NumberRef, known: dict[str, TensorSpec], config: ModelConfig) -> TensorSpec:
    """The tensor of that name; raises UsageError saying why there is none, or what is similar."""
    name = wanted.name
    names = Names(config, sources(config))
    ours = names.one(name, _KINDS)
    if ours in known:
        return known[ours]
    if ours is not None:  # all that is named and not in a prompt's run is the cache
        use = graph(config).states[ours].holds
        raise UsageError(f"this model has no `{name}` here: {_CACHE}", hint=f"use `{use}`")
    raise _of_letter(wanted, known, config) or names.refusal(name, _KINDS, _EXAMPLES)


def _of_letter(
    wanted: NumberRef, known: dict[str, TensorSpec], config: ModelConfig
) -> UsageError | None:
    """What a letter of the formulas is, such as `A`, `T1` or `T¹`, `H'`, `W_E`; None for others.

    It is the first tensor that they call so; for a hint the index that was typed, where it could be
    one of it.
    """
    letter = wanted.name.replace("'", "′")
    if re.fullmatch(r"T[1-5]", letter):
        letter = letter.translate(_RAISED)
    letters = {"W_E": "embed.W", "W_P": "pos_embed.W", "W_head": "head.W"}
    letters |= {"W_ED": "embed_proj.W", "W_DE": "head_proj.W"}
    if config.head.tied:
        letters["W_head"] = "embed.W"
    for tensor, node in graph(config).nodes.items():
        letters.setdefault(node.letter, tensor)
    letters.setdefault("M", letters.get("S", ""))
    spec = known.get(letters.get(letter, ""))
    if spec is None:
        return None
    items = wanted.items or ()
    typed = tuple(item for item in items if isinstance(item, int))
    fits = len(items) == len(typed) == len(spec.shape) and all(
        -size <= item < size for item, size in zip(typed, spec.shape, strict=True)
    )
    words = ",".join(word.replace(" ", "_") for word in axis_words(spec))
    general = re.sub(r"^blocks\.0\.", "blocks.N.", spec.name)
    role = "the mask in " if wanted.name == "M" else ""
    return UsageError(
        f"`{wanted.name}` is a letter of the formulas, {role}`{general}[{words}]`",
        hint=_example(spec, typed if fits else None),
    )


def _example(spec: TensorSpec, index: tuple[int, ...] | None = None) -> str:
    """A number of the tensor: at `index`, or the last one of the first head."""
    pairs = zip(spec.axes, spec.shape, strict=True)
    last = (0 if letter in ("H", "Hk", "1") else size - 1 for letter, size in pairs)
    words = "; a quoted token such as ' the' stands for its id" * ("V" in spec.axes)
    return f"for example `{spec.name}[{','.join(map(str, index or last))}]`{words}"


def axis_words(spec: TensorSpec) -> tuple[str, ...]:
    """Every axis in words; where there are queries and keys, a token is a `query`."""
    words = AXES | {"T": ("query", "n")} if "S" in spec.axes else AXES
    return tuple(
        " and ".join(words.get(part, (part,))[0] for part in axis.split("·")) for axis in spec.axes
    )


def size_letters(spec: TensorSpec) -> tuple[str, ...]:
    """The size of every axis in the letters of the papers."""
    return tuple(
        "·".join(AXES.get(part, (part,))[-1] for part in axis.split("·")) for axis in spec.axes
    )


def shape_in_letters(spec: TensorSpec) -> str:
    """`h × n × d/h = 9 × 8 × 64`."""
    return f"{' × '.join(size_letters(spec))} = {' × '.join(map(str, spec.shape))}"


def place(
    wanted: NumberRef, spec: TensorSpec, texts: Sequence[str], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The index as numbers from 0; raises UsageError naming the axis that it does not fit."""
    items, words, letters = wanted.items, axis_words(spec), size_letters(spec)
    sizes = [
        f"{word}: {letter} = {size}"
        for word, letter, size in zip(words, letters, spec.shape, strict=True)
    ]
    shown = f"`{spec.name}[{', '.join(sizes)}]`"  # blocks.0.attn.pattern[head: h = 9, …]
    if items is None:
        raise UsageError(f"which number of {shown}?", hint=_example(spec))
    count = len(spec.axes)
    if len(items) == count - 1 and spec.axes[-1] == "1":
        items = (*items, 0)
    if len(items) != count:
        raise UsageError(
            f"{shown} takes {count} ind{'ex' if count == 1 else 'ices'}, not {len(items)}",
            hint=_example(spec),
        )
    found = []
    for item, axis, word, letter, size in zip(
        items, spec.axes, words, letters, spec.shape, strict=True
    ):
        if isinstance(item, int) and not -size <= item < size:
            raise UsageError(
                f"`{item}` is outside the axis {word} of `{spec.name}`: {letter} = {size}",
                hint=f"use 0 to {size - 1}, or -1 for the last",
            )
        if isinstance(item, int):
            found.append(item % size)
        elif axis not in ("T", "S", "V"):
            raise UsageError(
                f"`'{item}'` is a token, and the axis {word} of `{spec.name}` takes a number",
                hint=_example(spec),
            )
        elif tokenizer is None:
            raise UsageError(
                f"`'{item}'` is a token, and the model has no tokenizer",
                hint="give its id or its position as a number",
            )
        else:
            found.append(_id(item, tokenizer) if axis == "V" else _position(item, word, texts))
    return tuple(found)


def _id(text: str, tokenizer: Tokenizer) -> int:
    """The id of a quoted token."""
    ids = tokenizer.encode(text, add_bos=False)
    if len(ids) == 1:
        return ids[0]
    if _PART.search(text):
        raise UsageError(f"`{text}` has part of a character in it", hint=_BY_NUMBER)
    if not ids:
        raise UsageError("an empty token", hint="put a token between the quotes, or give its id")
    spaced = f" {text}"
    if not text.startswith(" ") and len(tokenizer.encode(spaced, add_bos=False)) == 1:
        hint = did_you_mean([f"'{spaced}'"]) + " a word in a text begins with its space"
    else:
        hint = "give one of them, or its id"
        if not text.startswith(" "):
            hint += "; a word in a text usually begins with a space"
        if any(_PART.search(tokenizer.token_text(id)) for id in ids):
            hint = _BY_NUMBER
    split = ", ".join(f"`{tokenizer.token_text(id)}` ({id})" for id in ids[:12])
    more = ", …" if len(ids) > 12 else ""
    raise UsageError(f"`{text}` is {len(ids)} tokens, not one: {split}{more}", hint=hint)


def _position(text: str, word: str, texts: Sequence[str]) -> int:
    """The position of a quoted token in the prompt."""
    if _PART.search(text):
        raise UsageError(
            f"`{text}` has part of a character in it", hint=f"give the position of the {word}"
        )
    found = [at for at, token in enumerate(texts) if token == text]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"the token `{text}` occurs {len(found)} times in the prompt, at "
            f"{', '.join(map(str, found[:12]))}{', …' if len(found) > 12 else ''}",
            hint=f"give the position of the {word} you mean",
        )
    whole = [token for token in texts if not _PART.search(token)]
    close = [token for token in whole if token.strip() == text.strip()]
    close = close or get_close_matches(text, whole, 1)
    listed = ", ".join(f"{at} `{token}`" for at, token in enumerate(texts[:12]))
    meant = did_you_mean([f"'{close[0]}'"]) + " " if close else ""
    raise UsageError(
        f"no token of the prompt is `{text}`",
        hint=f"{meant}its tokens are {listed}{', …' if len(texts) > 12 else ''}",
    )
