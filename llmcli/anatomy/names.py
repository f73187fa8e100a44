"""The names of a model's tensors, and from a name or pattern that was typed to these names.

One vocabulary for every view: what a model has (`known`), which of it a pattern means (`select`),
what another program's name is called here (`canonical`) and the other way round (`aliases`). The
end of a name stands for all names that end so: `pattern`, `attn.z`, `3.resid_post`,
`hook_resid_pre`. A refusal says why a name is missing, or which one is near it. `Names` holds all
of it for one model and is what to keep where several names are resolved.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from llmcli.anatomy.aliases import UNLIKE, Sources, others
from llmcli.anatomy.graph import graph
from llmcli.anatomy.missing import either, layers_there_are, near, why_absent
from llmcli.anatomy.model import parameters, states
from llmcli.anatomy.plan import plan
from llmcli.config import ModelConfig
from llmcli.errors import UsageError
from llmcli.graph.spec import Call, Kind, TensorSpec

NO_SOURCES: Sources = MappingProxyType({})
LOOKED_AT: tuple[Kind, ...] = ("activation", "state")

_LISTED = "`llmcli shapes --names` has them all"
_GLOB = re.compile(r"[*?\[]")
_IN_A_BLOCK = re.compile(r"^(blocks|cache)\.\d+\.")
_BLOCK = re.compile(r"blocks\.[^.]+\.")
# a block's number, or a range of them, negative ones counted from the last
_LAYERS = re.compile(
    r"(?:(?<=^)|(?<=\.))(?P<part>blocks|cache|layers|h|blk)\."
    r"(?P<first>-?\d{1,6})(?:-(?P<last>-?\d{1,6}))?(?=\.|$)"
)
_BARE_NUMBER = re.compile(r"-?\d{1,6}(?:--?\d{1,6})?\.")  # `3.attn.z`, `0-3.mlp_out`
_NUMBER = re.compile(r"(?:blocks\.)?(\d{1,6})\.")


@dataclass(frozen=True, kw_only=True)
class Named:
    """One name: what it is, in which block, its axes (`B H T dh`) and the formula that makes it."""

    name: str
    kind: Kind
    layer: int | None
    axes: tuple[str, ...]
    formula: str


def known(config: ModelConfig) -> dict[str, Named]:
    """Every tensor of the model: its parameters, then activations and states as they come to be.

    With what the fused attention never writes: `attn.scores`, `attn.pattern`, `attn.result`. A
    layer's part of the cache stands where it is written, before its scores.
    """
    specs = list(parameters(config))
    kept: dict[str, list[TensorSpec]] = {}
    for row, spec in zip(
        graph(config).states.values(), states(config, batch=1, capacity=1), strict=True
    ):
        kept.setdefault(row.before, []).append(spec)
    call = Call(batch=1, tokens=1, past=0, phase="prefill")
    for spec in plan(config, call).tensors:
        specs += kept.get(spec.name, ())
        specs.append(spec)
    return {
        spec.name: Named(
            name=spec.name, kind=spec.kind, layer=spec.layer, axes=spec.axes, formula=spec.formula
        )
        for spec in specs
    }


def canonical(name: str, config: ModelConfig, sources: Sources = NO_SOURCES) -> str | None:
    """What a name is called here; None where this model has no tensor of that name.

    `sources`: `families.sources.sources(config)`, for the names of transformers and llama.cpp.
    Raises UsageError for what means several tensors (`c_attn`) or not the same everywhere.
    """
    return Names(config, sources).canonical(name)


def select(
    pattern: str,
    config: ModelConfig,
    *,
    kinds: Sequence[Kind] = LOOKED_AT,
    sources: Sources = NO_SOURCES,
) -> tuple[str, ...]:
    """The names of those kinds that `pattern` means; see `Names.select`."""
    return Names(config, sources).select(pattern, kinds)


def aliases(name: str, config: ModelConfig, sources: Sources = NO_SOURCES) -> tuple[str, ...]:
    """What others call one of our names: TransformerLens first, the checkpoint's names last.

    Each of them alone means this one tensor: a fused tensor is nobody's alias. Of names that
    differ in what stands before or after them (`layers.0…` of a bare decoder) the long one.
    """
    return Names(config, sources).aliases(name)


class Names:
    """The names of one model and what others call them."""

    def __init__(self, config: ModelConfig, sources: Sources = NO_SOURCES) -> None:
        self.config = config
        self.sources = sources
        self.known: Mapping[str, Named] = known(config)

    def canonical(self, name: str) -> str | None:
        """As the function of that name says."""
        if name in self.known:
            return name
        _refuse_unlike(name)
        meant = self._others.get(name, ())
        if len(meant) > 1:
            raise UsageError(f"`{name}` holds several tensors in one", hint=f"use {either(meant)}")
        return meant[0] if meant and meant[0] in self.known else None

    def one(self, name: str, kinds: Sequence[Kind]) -> str | None:
        """The name that is meant by it or by its end; None where there is none.

        Raises UsageError where several names of those kinds end so, and as `canonical` does.
        """
        found = self.canonical(name)
        if found is not None:
            return found
        ending = self._ending(name)
        meant = [n for n in self.known if n in ending and self.known[n].kind in kinds]
        if len(meant) > 1:
            few = meant if len(meant) <= 4 else [*meant[:2], meant[-1]]
            raise UsageError(
                f"`{name}` is the end of {len(meant)} names",
                hint=f"name one of them: {either(few)}",
            )
        return meant[0] if meant else None

    def aliases(self, name: str) -> tuple[str, ...]:
        """As the function of that name says."""
        theirs = self._theirs.get(name, [])
        # not those that another one of them has in it: a decoder without its head writes names
        # without what stands before them, and `blk.0.attn_q` is `blk.0.attn_q.weight`
        return tuple(
            a
            for a in theirs
            if f"{a}.weight" not in theirs and not any(b.endswith(f".{a}") for b in theirs)
        )

    def select(self, pattern: str, kinds: Sequence[Kind] = LOOKED_AT) -> tuple[str, ...]:
        """The names of those kinds that a pattern means, in execution order, each once.

        Names, aliases and globs (`*` also across dots, `?`, `[qk]`), separated by commas; where a
        block's number stands also a range `0-3` and numbers from the end, `-1`, `-2--1`. What
        matches nothing as a whole is the end of names. Raises UsageError for what matches nothing
        then, saying why, and for names of other kinds.
        """
        items = [item.strip() for item in pattern.split(",")]
        if not all(items):
            raise UsageError(
                f"`{pattern}` has an empty name", hint="for example `blocks.*.attn.pattern`"
            )
        chosen: set[str] = set()
        for item in items:
            chosen |= self._chosen(item, kinds)
        return tuple(name for name in self.known if name in chosen)

    def refusal(self, name: str, kinds: Sequence[Kind], otherwise: str = _LISTED) -> UsageError:
        """Why there is no such name among those kinds; `otherwise`: the hint if none is near."""
        return self._refusal(name, name, kinds, otherwise, globs=False)

    @cached_property
    def _others(self) -> dict[str, tuple[str, ...]]:
        return others(self.config, self.sources)

    @cached_property
    def _theirs(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, meant in self._others.items():
            if len(meant) == 1 and name not in self.known:
                found.setdefault(meant[0], []).append(name)
        return found

    def _chosen(self, item: str, kinds: Sequence[Kind]) -> set[str]:
        """What one item of a pattern means: blocks of a range may lack it, not all of them."""
        _refuse_unlike(item)
        blocks = tuple(_expanded(item, self.config))
        every = {name for one in blocks for name in self._matched(one)}
        every = every or {name for one in blocks for name in self._ending(one)}
        found = {name for name in every if self.known[name].kind in kinds}
        if found:
            return found
        if every:
            kind = self.known[min(every)].kind
            raise UsageError(
                f"`{item}` is {_a(kind)}, not {' or '.join(map(_a, kinds))}",
                hint="for example `blocks.*.attn.pattern`",
            )
        raise self._matches_nothing(blocks[0], item, kinds)

    def _matched(self, item: str) -> set[str]:
        """What an item without ranges means, of any kind."""
        if _GLOB.search(item):
            return self._globbed(item)
        name = self.canonical(item)
        return set() if name is None else {name}

    def _globbed(self, glob: str) -> set[str]:
        """Our names that match; only where none does, the names of others."""
        matches = re.compile(fnmatch.translate(glob)).match
        ours = {name for name in self.known if matches(name)}
        if ours:
            return ours
        theirs = (meant for name, meant in self._others.items() if matches(name))
        return {name for meant in theirs for name in meant if name in self.known}

    def _ending(self, item: str) -> set[str]:
        """The names, of any kind, that end so, in its block where it has one; else those that
        others call so.
        """
        block = _NUMBER.match(item)
        within, tail = (f"blocks.{block[1]}.", item[block.end() :]) if block else ("", item)
        ends = re.compile(fnmatch.translate(f"*.{tail}")).match
        ours = {name for name in self.known if name.startswith(within) and ends(name)}
        if ours or not re.search("[a-z]", tail, re.I) or self._is_part(tail):
            return ours
        theirs = (meant for name, meant in self._others.items() if ends(name))
        found = {name for meant in theirs for name in meant if name in self.known}
        return {name for name in found if name.startswith(within)}

    def _is_part(self, name: str) -> bool:
        """Whether it is what names have before a dot: `blocks.0.attn`, `attn`."""
        return any(f".{name}." in f".{one}" for one in self.known)

    def _matches_nothing(self, first: str, typed: str, kinds: Sequence[Kind]) -> UsageError:
        """`first`: the item for the first of its range's blocks."""
        if self._is_part(first):
            return UsageError(
                f"`{typed}` is a part of the model, no tensor", hint=f"use `{typed}.*`"
            )
        example = re.sub(r"(?<=\.)\*(?=\.)", "0", first, count=1)  # a name that it could mean
        return self._refusal(typed, example, kinds, _LISTED, globs=not _BLOCK.match(first))

    def _refusal(
        self, typed: str, example: str, kinds: Sequence[Kind], otherwise: str, *, globs: bool
    ) -> UsageError:
        """`globs`: what is near a name without a block is that of all blocks, `blocks.*.attn.q`."""
        plain = self._others.get(example, (example,))[0]
        reason = why_absent(plain, self.config) or self._why_no_name_ends(plain)
        *others, last = kinds
        sought = f"{', '.join(others)} or {last}" if others else last
        message = f"there is no {sought} `{typed}`"
        if reason:
            message = f"this model has no `{typed}`: {reason}"
        elif _GLOB.search(typed):
            message = f"`{typed}` matches no {sought}"
        there = [n for n, named in self.known.items() if named.kind in kinds]
        close = near(plain, there, graph(self.config))
        if not close:
            return UsageError(message, hint=otherwise)
        # in the blocks that were typed: `blocks.*.` where only the rest is wrong
        one, blocks = _BLOCK.match(example), _BLOCK.match(typed)
        if one and blocks:
            close = tuple(name.replace(one[0], blocks[0], 1) for name in close)
        elif globs:
            close = tuple(dict.fromkeys(_IN_A_BLOCK.sub(r"\1.*.", name) for name in close))
        return UsageError(message, hint=f"did you mean {either(close)}?")

    def _why_no_name_ends(self, tail: str) -> str:
        """The reason where no name of ours or of others ends so, empty where nothing is known."""
        tail = _NUMBER.sub("", tail)
        for name, meant in self._others.items():
            if name.endswith(f".{tail}") and (why := why_absent(meant[0], self.config)):
                return why
        for part in ("attn", "mlp"):
            why = why_absent(f"{part}.{tail}", self.config)
            if why and why != why_absent(f"{part}.-", self.config):  # not said of the whole part
                return why
        return ""


def _expanded(item: str, config: ModelConfig) -> Iterator[str]:
    """An item for every block of its range, the numbers counted from 0."""
    typed = item
    if _BARE_NUMBER.match(item):
        item = f"blocks.{item}"
    found = _LAYERS.search(item)
    if found is None:
        yield item
        return
    layers = len(config.layers)
    numbers = [int(number) for number in (found["first"], found["last"]) if number is not None]
    if not all(-layers <= number < layers for number in numbers):
        part = "cache" if found["part"] == "cache" else "blocks"
        raise UsageError(
            f"this model has no `{typed}`: {layers_there_are(config, part)}",
            hint=f"the last is `{part}.-1`, all are `{part}.*`",
        )
    first, last = numbers[0] % layers, numbers[-1] % layers
    if first > last:
        raise UsageError(f"`{item}` begins after its end", hint=f"the range is `{last}-{first}`")
    for number in range(first, last + 1):
        yield f"{item[: found.start()]}{found['part']}.{number}{item[found.end() :]}"


def _refuse_unlike(name: str) -> None:
    """Raises UsageError for a name of others that is not one thing."""
    whole = f"blocks.{name}" if _BARE_NUMBER.match(name) else f"blocks.*.{name}"
    for pattern, words, ours, which in UNLIKE:
        ways = (re.fullmatch(pattern, one) for one in (name, whole, f"ln1.{name}"))
        if found := next(filter(None, ways), None):
            instead = [use.format(**found.groupdict()) for use in ours]
            raise UsageError(f"`{name}` {words}", hint=f"use {either(instead)}, {which}")


def _a(kind: Kind) -> str:
    return f"{'an' if kind[0] == 'a' else 'a'} {kind}"
