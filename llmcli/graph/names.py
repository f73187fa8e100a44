"""The names of a model's tensors, and their resolution from user input.

Shared by all views: a model's names (`known`), pattern matching (`select`), other programs' names →
ours (`canonical`) and back (`aliases`). A suffix stands for all names ending in it: `pattern`,
`attn.z`, `3.resid_post`, `hook_resid_pre`. Errors explain why a name is missing, or suggest a
similar one. `Names` caches all of it for one model.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from types import MappingProxyType

from llmcli.config.model import ModelConfig
from llmcli.errors import UsageError
from llmcli.graph.absent import absence_reason, blocks_of
from llmcli.graph.aliases import UNLIKE, UNLIKE_POST_NORM, Sources, foreign_names, others
from llmcli.graph.graph import graph
from llmcli.graph.plan import parameters, plan, states
from llmcli.graph.spec import Call, Kind, TensorSpec
from llmcli.records.numbers import did_you_mean, either

NO_SOURCES: Sources = MappingProxyType({})
LOOKED_AT: tuple[Kind, ...] = ("activation", "state")

_LISTED = "`llmcli shapes --names` has them all"
_GLOB = re.compile(r"[*?\[]")
_IN_A_BLOCK = re.compile(r"^(blocks|cache)\.\d+\.")
_BLOCK = re.compile(r"blocks\.[^.]+\.")
# a block's number or range; negative ones count from the end
_LAYERS = re.compile(
    r"(?:(?<=^)|(?<=\.))(?P<part>blocks|cache|layers|h|blk)\."
    r"(?P<first>-?\d{1,6})(?:-(?P<last>-?\d{1,6}))?(?=\.|$)"
)
_BARE_NUMBER = re.compile(r"-?\d{1,6}(?:--?\d{1,6})?\.")  # `3.attn.z`, `0-3.mlp_out`
_NUMBER = re.compile(r"(?:blocks\.)?(\d{1,6})\.")


def known(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the model: parameters, then activations and states in execution order.

    Described for one token of one sequence. Includes tensors that fused attention does not store:
    `attn.scores`, `attn.pattern`, `attn.result`. A layer's cache comes where it is written, before
    its scores.
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
    return {spec.name: spec for spec in specs}


class Names:
    """The names of one model and other programs' names for them.

    `sources`: `families.sources.sources(config)`, for names of transformers and llama.cpp.
    """

    def __init__(self, config: ModelConfig, sources: Sources = NO_SOURCES) -> None:
        self.config = config
        self.sources = sources
        self.known: Mapping[str, TensorSpec] = known(config)

    def canonical(self, name: str) -> str | None:
        """Our name for a name of any program; None if this model has no such tensor.

        Raises UsageError for ambiguous names: several tensors (`c_attn`), or version-dependent
        ones.
        """
        if name in self.known:
            return name
        _refuse_unlike(name, self.config)
        meant = self._others.get(name, ())
        if len(meant) > 1:
            raise UsageError(f"`{name}` holds several tensors in one", hint=f"use {_either(meant)}")
        return meant[0] if meant and meant[0] in self.known else None

    def one(self, name: str, kinds: Sequence[Kind]) -> str | None:
        """Resolve a name or suffix to one name of these kinds; None if there is none.

        Raises UsageError if several names match, and errors of `canonical`.
        """
        found = self.canonical(name)
        if found is not None:
            return found
        ending = self._ending(name)
        meant = [n for n in self.known if n in ending and self.known[n].kind in kinds]
        if len(meant) > 1:
            few = meant if len(meant) <= 4 else [*meant[:2], meant[-1]]
            raise UsageError(
                f"{len(meant)} names end in `{name}`",
                hint=f"name one of them: {_either(few)}",
            )
        return meant[0] if meant else None

    def aliases(self, name: str) -> tuple[str, ...]:
        """Other programs' names for one of ours: TransformerLens first, checkpoint names last.

        Each alias means exactly this tensor; fused tensors are no aliases. Of names that differ by
        a prefix or suffix (`layers.0…` of a bare decoder) only the longest.
        """
        theirs = self._theirs.get(name, [])
        # without names contained in another: a bare decoder's names lack a prefix, and
        # `blk.0.attn_q` is `blk.0.attn_q.weight`
        return tuple(
            a
            for a in theirs
            if f"{a}.weight" not in theirs and not any(b.endswith(f".{a}") for b in theirs)
        )

    def select(self, pattern: str, kinds: Sequence[Kind] = LOOKED_AT) -> tuple[str, ...]:
        """The names of these kinds that match a pattern, in execution order without duplicates.

        Patterns are comma-separated names, aliases and globs (`*` also across dots, `?`, `[qk]`); a
        block's number may be a range `0-3` or count from the end, `-1`, `-2--1`. An item that
        matches no whole name is matched as a suffix. Raises UsageError with the reason if nothing
        matches, and for names of other kinds.
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
        """The error for an unknown name; `otherwise`: the hint if no name is similar."""
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
        """The names that match one item; some but not all blocks of a range may lack it."""
        _refuse_unlike(item, self.config)
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
        """The names of any kind that match an item without ranges."""
        if _GLOB.search(item):
            return self._globbed(item)
        name = self.canonical(item)
        return set() if name is None else {name}

    def _globbed(self, glob: str) -> set[str]:
        """Our matching names; if there are none, other programs' matching names."""
        matches = re.compile(fnmatch.translate(glob)).match
        ours = {name for name in self.known if matches(name)}
        if ours:
            return ours
        theirs = (meant for name, meant in self._others.items() if matches(name))
        return {name for meant in theirs for name in meant if name in self.known}

    def _ending(self, item: str) -> set[str]:
        """Names of any kind with this suffix (in its block if given), else by others' names."""
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
        """Whether `name` is a component before a dot: `blocks.0.attn`, `attn`."""
        return any(f".{name}." in f".{one}" for one in self.known)

    def _matches_nothing(self, first: str, typed: str, kinds: Sequence[Kind]) -> UsageError:
        """The error if nothing matches; `first`: the item for the first block of its range."""
        if self._is_part(first):
            return UsageError(
                f"`{typed}` is a part of the model, not a tensor", hint=f"use `{typed}.*`"
            )
        example = re.sub(r"(?<=\.)\*(?=\.)", "0", first, count=1)  # an example name
        return self._refusal(typed, example, kinds, _LISTED, globs=not _BLOCK.match(first))

    def _refusal(
        self, typed: str, example: str, kinds: Sequence[Kind], otherwise: str, *, globs: bool
    ) -> UsageError:
        """The error for an unknown name; `globs`: suggest `blocks.*.attn.q` without a block."""
        plain = self._others.get(example, (example,))[0]
        reason = absence_reason(plain, self.config) or self._why_no_name_ends(plain)
        *others, last = kinds
        sought = f"{', '.join(others)} or {last}" if others else last
        message = f"there is no {sought} `{typed}`"
        if reason:
            message = f"this model has no `{typed}`: {reason}"
        elif _GLOB.search(typed):
            message = f"`{typed}` matches no {sought}"
        there = [n for n, named in self.known.items() if named.kind in kinds]
        close = near(plain, there, self.config)
        if not close:
            return UsageError(message, hint=otherwise)
        # keep the given blocks, such as `blocks.*.`
        one, blocks = _BLOCK.match(example), _BLOCK.match(typed)
        if one and blocks:
            close = tuple(name.replace(one[0], blocks[0], 1) for name in close)
        elif globs:
            close = tuple(dict.fromkeys(_IN_A_BLOCK.sub(r"\1.*.", name) for name in close))
        return UsageError(message, hint=did_you_mean(close))

    def _why_no_name_ends(self, tail: str) -> str:
        """The reason why no name has this suffix; empty if unknown."""
        tail = _NUMBER.sub("", tail)
        for name, meant in self._others.items():
            if name.endswith(f".{tail}") and (why := absence_reason(meant[0], self.config)):
                return why
        for part in ("attn", "mlp"):
            why = absence_reason(f"{part}.{tail}", self.config)
            if why and why != absence_reason(f"{part}.-", self.config):  # a specific reason
                return why
        return ""


def _expanded(item: str, config: ModelConfig) -> Iterator[str]:
    """Yield an item for every block of its range, with numbers from 0."""
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
            f"this model has no `{typed}`: {blocks_of(config, part)}",
            hint=f"the last is `{part}.-1`, all are `{part}.*`",
        )
    first, last = numbers[0] % layers, numbers[-1] % layers
    if first > last:
        raise UsageError(f"empty range `{item}`", hint=f"the range is `{last}-{first}`")
    for number in range(first, last + 1):
        yield f"{item[: found.start()]}{found['part']}.{number}{item[found.end() :]}"


def _refuse_unlike(name: str, config: ModelConfig) -> None:
    """Raise UsageError for an ambiguous name of other programs."""
    whole = f"blocks.{name}" if _BARE_NUMBER.match(name) else f"blocks.*.{name}"
    for pattern, words, ours, which in (*UNLIKE, *[UNLIKE_POST_NORM] * config.post_norm):
        ways = (re.fullmatch(pattern, one) for one in (name, whole, f"ln1.{name}"))
        if found := next(filter(None, ways), None):
            instead = [use.format(**found.groupdict()) for use in ours]
            raise UsageError(f"`{name}` {words}", hint=f"use {_either(instead)}, {which}")


def _a(kind: Kind) -> str:
    return f"{'an' if kind[0] == 'a' else 'a'} {kind}"


def near(name: str, known: Collection[str], config: ModelConfig) -> tuple[str, ...]:
    """At most three of `known` that may be meant: by another program's name, a typo, a suffix."""
    close = foreign_names(name, known, config)
    typed = re.match(r"blocks\.\d+\.", name)
    block = typed[0] if typed else ""
    inside = [n for n in known if n.startswith(block)]  # keep a given block
    if not close:
        parts = {n.removeprefix(block): n for n in inside}
        close = [parts[n] for n in get_close_matches(name.removeprefix(block), parts, 1, 0.8)]
    if not close:
        close = get_close_matches(name, inside, 3, 0.75)
    if not close:  # a short name such as `pattern`: add its block and part
        inner = near_ends(name, known)
        close = inner[:1] + inner[-1:] if len(inner) > 1 else inner
    return tuple(close)


def near_ends(name: str, known: Collection[str]) -> list[str]:
    """Names with this or a similar suffix: `pattern`, `attn.patern`, `wq`, `resid`."""
    inner = [n for n in known if n.endswith(f".{name}")]
    inner = inner or [n for n in known if n.rpartition(".")[2] == name.rpartition(".")[2]]
    return inner or _misspelled(name, known)


def _misspelled(name: str, known: Collection[str]) -> list[str]:
    ends: dict[str, list[str]] = {}
    for one in known:
        inside = _IN_A_BLOCK.sub("", one)
        for end in dict.fromkeys((inside, inside.rpartition(".")[2])):
            ends.setdefault(end, []).append(one)
    close = get_close_matches(name, ends, 1, 0.75)
    close = close or [end for end in ends if _letters(end) == _letters(name)]
    if not close and len(name) >= 3:
        close = [end for end in ends if end.startswith(name)]
    return [one for end in close for one in ends[end]]


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def _either(names: Sequence[str]) -> str:
    """`a`, `b` or `c`, each in backticks."""
    return either([f"`{name}`" for name in names])
