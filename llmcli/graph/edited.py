"""Parses `NAME[INDEX]=WHAT` of `--edit`: which numbers of which activations become what.

No torch: a wrong one is refused before weights are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

from llmcli.errors import UsageError
from llmcli.graph.names import Names
from llmcli.graph.spec import TensorSpec
from llmcli.records.numbers import either

Verb = Literal["zero", "mean", "scale", "add", "from", "noise"]
Span = tuple[int | None, int | None]  # the first and the one after the last, as of a slice
Places = tuple[tuple[str, Span], ...]  # of every axis but the batch

TOKENS = ("T", "S")  # axes whose length is known with the prompt
EXAMPLE = 'for example "blocks.5.attn.z[H=3]=zero" or "8.resid_post=add steer.npz:happy * 4"'

_EDIT = re.compile(r"(?P<name>[^\[=]+)(?:\[(?P<index>[^\]]*)\]\s*)?=(?P<what>.*)", re.DOTALL)
_ITEM = re.compile(
    r"(?:(?P<axis>[A-Za-z]\w*)\s*=\s*)?(?P<first>-?\d{1,9})?((?P<colon>:)(?P<last>-?\d{1,9})?)?",
    re.ASCII,
)
_ARRAY = re.compile(r"(?P<path>.+?\.(?:npz|npy|safetensors))(?::(?P<key>.+))?", re.DOTALL)
_QUOTED = re.compile(r"([\"'])(.+)\1", re.DOTALL)
_USAGE = {
    "zero": "zero",
    "mean": "mean, or mean FILE with a prompt on each line",
    "scale": "scale 0.5",
    "add": "add FILE or add FILE:KEY, with * 8 behind it",
    "from": 'from "OTHER PROMPT", from FILE or from FILE:KEY',
    "noise": "noise 0.1",
}


@dataclass(frozen=True, kw_only=True)
class EditRequest:
    """One `--edit`: in each of these activations the numbers at `places` change.

    `places`: by name, an axis and a span for all axes but the batch. `scale` multiplies by
    `number`; `add` adds `number` times the array `key` of the file `path`; `from` takes the same
    place of another `prompt`'s run, or of the array; `mean` is over the tokens of the prompt, or of
    the prompts in the text file `path`; `noise` is normal with the standard deviation `number`,
    drawn from `seed`. `option` is where `text` was given.
    """

    text: str
    places: Mapping[str, Places]
    verb: Verb
    number: float = 1.0
    path: str = ""
    key: str | None = None
    prompt: str | None = None
    seed: int = 0
    option: str = "--edit"

    @property
    def given(self) -> str:
        """As it was given, with the option."""
        return f"{self.option} {self.text}"

    @property
    def of_prompt(self) -> bool:
        """Whether it depends on the prompt's activations."""
        return self.verb == "mean" and not self.path

    @property
    def of_length(self) -> bool:
        """Whether it depends on the prompt's length."""
        relative = any(end < 0 for name in self.places for end in self.ends(name))
        return relative or self.prompt is not None

    def ends(self, name: str) -> list[int]:
        """The ends of spans of tokens of one of the activations, as far as there are any."""
        spans = [span for axis, span in self.places[name] if axis in TOKENS]
        return [end for span in spans for end in span if end is not None]


def parse_edit(
    text: str, names: Names, seed: int = 0, *, option: str = "--edit", what: str = ""
) -> EditRequest:
    """One edit; names may be globs, ranges of layers and other programs' names.

    With `what` the text is NAME[INDEX] alone, as another `option` has it. Raises UsageError for
    other text, unknown names, axes and numbers, and for what is no file.
    """
    given = f"{option} {text}"
    match = _EDIT.fullmatch(f"{text.strip()}={what}" if what else text.strip())
    if match is None:
        raise UsageError(f"`{given}` is not NAME[INDEX]=WHAT", hint=EXAMPLE)
    chosen = names.select(match["name"].strip(), ("activation",))
    items = [] if match["index"] is None else match["index"].split(",")
    places = {name: _places(names.known[name], items, given) for name in chosen}
    return replace(_what(match["what"].strip(), text, places), seed=seed, option=option)


def _places(spec: TensorSpec, items: Sequence[str], given: str) -> Places:
    """The span of every axis of an activation; all of an axis that has no item."""
    axes, sizes = spec.axes[1:], dict(zip(spec.axes[1:], spec.shape[1:], strict=True))
    found: dict[str, Span] = dict.fromkeys(axes, (None, None))
    shown = f"`{spec.name}[{', '.join(axes)}]`"
    for number, item in enumerate(items):
        match = _ITEM.fullmatch(item.strip())
        if match is None or match["first"] is match["colon"] is None:
            raise UsageError(
                f"`{item.strip()}` in `{given}` is not a place such as 3, T=-1 or H=0:4",
                hint=EXAMPLE,
            )
        axis = match["axis"] or (axes[number] if number < len(axes) else "")
        if axis not in found:
            raise UsageError(
                f"`{item.strip()}`: {shown} has no such axis", hint=f"it has {either(axes)}"
            )
        first, last = (None if end is None else int(end) for end in match.group("first", "last"))
        size = None if axis in TOKENS else sizes[axis]
        if found[axis] != (None, None):
            raise UsageError(f"`{given}` names the axis {axis} twice", hint=EXAMPLE)
        if first is not None and not match["colon"]:
            last = first + 1
        elif first is not None and last is not None and last <= first and first * last >= 0:
            raise UsageError(
                f"`{item.strip()}` in `{given}` is an empty range",
                hint="its end is not in it: 2:5 are 2, 3 and 4",
            )
        found[axis] = (first, last)
        if size is not None:
            found[axis] = start, stop = from_start((first, last), size)
            if not 0 <= (start or 0) < (size if stop is None else stop) <= size:
                raise UsageError(
                    f"`{item.strip()}` is outside of the axis {axis} of `{spec.name}`",
                    hint=f"use 0 to {size - 1}, or -1 for the last",
                )
    return tuple(found.items())


def from_start(span: Span, size: int) -> Span:
    """The span with negative ends counted from `size`; a single negative place is one place."""
    first, last = span
    if first is not None and first < 0:
        last = last if last is None else last + size * (last < 0 or last == first + 1)
        return first + size, last
    return first, last if last is None or last >= 0 else last + size


def _what(what: str, text: str, places: Mapping[str, Places]) -> EditRequest:
    """The edit that `what` means, without a look at its file."""
    word, _, rest = what.partition(" ")
    rest = rest.strip()
    if word not in _USAGE:
        raise UsageError(
            f"`{what}` in `--edit {text}` is not an edit", hint=f"use {either(list(_USAGE))}"
        )
    verb = cast(Verb, word)
    found = partial(EditRequest, text=text, places=places, verb=verb)
    array, quoted = _ARRAY.fullmatch(rest), _QUOTED.fullmatch(rest)
    if verb == "add":
        file, star, by = rest.rpartition("*")
        array = _ARRAY.fullmatch((file if star else rest).strip())
        number = _number(by) if star else 1.0
        if array is not None and number is not None:
            return found(number=number, path=array["path"], key=array["key"])
    elif verb in ("scale", "noise"):
        number = _number(rest)
        if number is not None and (verb == "scale" or number >= 0):
            return found(number=number)
    elif verb == "from" and quoted is not None:
        return found(prompt=quoted[2])
    elif verb == "from" and array is not None:
        return found(path=array["path"], key=array["key"])
    elif verb == "mean" or (verb == "zero" and not rest):
        return found(path=rest)
    raise UsageError(
        f"`{what}` in `--edit {text}` cannot be read", hint=f"use {_USAGE[verb]}"
    )


def _number(text: str) -> float | None:
    """A finite number."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
