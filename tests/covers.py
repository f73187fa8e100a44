"""The models that tests run on by default: few, and with every value of every feature.

A feature is a field of a part of a configuration, the kinds of parts in a layer, and which layers
follow each other. `covered` marks the other models `exhaustive`, `crossed` those alone in which two
values of a part meet that do not in any of the default ones, `typed` one of each model type.
`COVER` is worked out from the variants of the zoo, at the end; `test_covers.py` works `KINDS` and
`CROSSED` out again, so that a model with something new is added here. `python tests/covers.py`
prints them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, pairwise, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from zoo import MODELS, ZOO

# of `MODELS`: every value once, and 94 % of all pairs of values
KINDS = (
    "experts without gates, alone in their blocks", "mamba-2", "latent attention",
    "gated deltanet", "embeddings for each layer", "experts beside the feed-forward",
    "layers that differ", "experts beside dense layers", "yarn", "short convolutions", "longrope",
    "experts with biases and clamped gates", "llama 3", "keys and values of another layer",
    "gpt2, scale of its own", "experts by the best of a group", "mixers side by side",
    "growing queries", "frequency factors", "dynamic, within its length",
    "some pairs of whole heads rotated", "gated attention", "one and three sublayers", "caps",
    "clamped gates", "linear", "gpt2 with relu and a window", "window of one", "head with a bias",
    "multipliers", "offset norms", "sinks", "scaled ends", "values that are normalized keys",
    "qk norm over the width", "experts after the choice",
    "clipped projections", "scores lowered by distance", "chunks", "weighted inputs of experts",
    "post-norm, narrow embeddings",
)  # fmt: skip

# of `ZOO`, beside the cover: every pair of values of one part
CROSSED = (
    "olmo3-yarn", "deepseek_v2-greedy", "llama-relu", "gemma2", "gemma3-gguf", "ministral3-window",
    "llama4-plain", "olmoe-clipped",
)  # fmt: skip


def covered(names: Iterable[str]) -> list[Any]:
    """All names as parameters; those that are in neither list are exhaustive."""
    kept = {*COVER, *KINDS}
    return [
        name if name in kept else pytest.param(name, marks=pytest.mark.exhaustive) for name in names
    ]


def crossed(names: Iterable[str]) -> list[Any]:
    """Variants as parameters: of those that `covered` marks `CROSSED` alone.

    All others have no pair of values of one part that is not in these.
    """
    return [one for one in covered(names) if isinstance(one, str) or one.values[0] in CROSSED]


def typed(names: Iterable[str]) -> list[Any]:
    """Variants as parameters: of those that `covered` marks one of each model type alone."""
    kept = {one.name for one in ZOO if one.typical}
    return [one for one in covered(names) if isinstance(one, str) or one.values[0] in kept]


def one_each(names: Iterable[str], kind: Callable[[str], object]) -> list[Any]:
    """All names as parameters; all but the first covered one of each kind are exhaustive."""
    found, seen = covered(names), set[object]()
    for at, one in enumerate(found):
        if isinstance(one, str):
            if kind(one) in seen:
                found[at] = pytest.param(one, marks=pytest.mark.exhaustive)
            seen.add(kind(one))
    return found


def layers_of(config: Any) -> object:
    """The kinds of parts in the layers, one after another or not."""
    return frozenset(tuple(type(part).__name__ for part in layer.parts) for layer in config.layers)


def few(values: Sequence[Any], count: int) -> list[Any]:
    """All as parameters; those behind the first `count` are exhaustive."""
    rest = [pytest.param(*_parameter(one).values, marks=pytest.mark.exhaustive) for one in values]
    return [*values[:count], *rest[count:]]


def half(*lists: Sequence[Any]) -> list[Any]:
    """All combinations, every second one exhaustive: two values of two lists meet in the others."""
    found = []
    for places in product(*(range(len(one)) for one in lists)):
        values = [one[place] for one, place in zip(lists, places, strict=True)]
        marks = [pytest.mark.exhaustive] * (sum(places) % 2)
        found.append(pytest.param(*values, marks=marks, id="-".join(map(str, values))))
    return found


def in_turn(first: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """Each of the first list as parameters with one of every other, in turn.

    As many other combinations are exhaustive as have every pair of values of two lists; there are
    none of what is exhaustive in `first`, which has no value that a model of the covers has not.
    """
    firsts, sizes = [*map(_parameter, first)], [len(other) for other in others]
    default = _turns(firsts, sizes)
    rest = [
        places for at, one in enumerate(firsts) if not one.marks
        for places in product([at], *map(range, sizes))
    ]  # fmt: skip
    seen = set().union(*(pairs(enumerate(places)) for places in default))
    chosen = cover({places: pairs(enumerate(places)) - seen for places in rest})
    return [
        _together(firsts, others, places, places not in default)
        for places in sorted({*default, *chosen})
    ]


def once(first: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """What `in_turn` runs by default, and no more: for values that do not touch each other."""
    firsts = [*map(_parameter, first)]
    places = _turns(firsts, [len(other) for other in others])
    return [_together(firsts, others, one, False) for one in places]


def _turns(firsts: Sequence[ParameterSet], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Places in the first list and in each other one: in turn, what is marked apart."""
    found, turns = [], {True: 0, False: 0}
    for at, one in enumerate(firsts):
        turn = turns[bool(one.marks)]
        turns[bool(one.marks)] += 1
        found.append((at, *(turn % size for size in sizes)))
    return found


def _together(
    firsts: Sequence[ParameterSet], others: Sequence[Any], places: Sequence[int], rest: bool
) -> ParameterSet:
    at, *behind = places
    turned = (other[place] for other, place in zip(others, behind, strict=True))
    parts = [firsts[at], *map(_parameter, turned)]
    marks = [mark for part in parts for mark in part.marks] + [pytest.mark.exhaustive] * rest
    return pytest.param(*[value for one in parts for value in one.values], marks=marks)


def _parameter(value: Any) -> ParameterSet:
    return value if isinstance(value, ParameterSet) else pytest.param(value)


def features(config: Any) -> set[str]:
    """What a configuration has: `AttentionConfig.window=None`, `MLP after ATTENTION` …"""
    found: set[str] = set()

    def visit(part: Any) -> None:
        kind = type(part).__name__
        for field in dataclasses.fields(part):
            value, name = getattr(part, field.name), f"{kind}.{field.name}"
            if isinstance(value, tuple):
                found.add(f"{name}={'some' if value else 'none'}")
            for one in _flat(value):
                if dataclasses.is_dataclass(one):
                    found.add(f"{name}={type(one).__name__}")
                    visit(one)
            if isinstance(value, tuple) or dataclasses.is_dataclass(value):
                continue
            if isinstance(value, bool | str) or value in (None, 0, 1):
                found.add(f"{name}={value}")
            else:
                found.add(f"{name}=another number")
        if kind == "AttentionConfig":
            many = part.kv_heads not in (1, part.heads)
            found.add(f"kv heads: {'some' if many else 'one' if part.kv_heads == 1 else 'all'}")

    visit(config)
    kinds = [tuple(sorted(type(part).__name__ for part in layer.parts)) for layer in config.layers]
    found.update(f"a layer of {kind}" for kind in kinds)
    found.update(f"{after} after {before}" for before, after in pairwise(kinds))
    return found


def _flat(value: Any) -> list[Any]:
    """What is in a tuple, and in the tuples in it."""
    return [one for part in value for one in _flat(part)] if isinstance(value, tuple) else [value]


def pairs(values: Iterable[Any]) -> set[tuple[Any, Any]]:
    """All pairs of values."""
    return set(combinations(sorted(values), 2))


def meeting(values: Iterable[str]) -> set[tuple[str, str]]:
    """All pairs of values of the same part: `AttentionConfig.window=None` with `….cap=None`."""
    return {(a, b) for a, b in pairs(values) if a.partition(".")[0] == b.partition(".")[0]}


def cover(sets: Mapping[Any, set[Any]], share: float = 1.0) -> list[Any]:
    """Names whose sets have together that share of everything; next is who has most that is new."""
    left = set().union(*sets.values())
    enough, chosen = len(left) * (1 - share), list[str]()
    while len(left) > enough:
        chosen.append(max(sets, key=lambda name: len(sets[name] & left)))
        left -= sets[chosen[-1]]
    return chosen


def main() -> None:
    """Prints the kinds as they are worked out."""
    models = {name: features(config) for name, config in MODELS.items()}
    kinds = cover({name: pairs(values) for name, values in models.items()}, 0.94)
    rest = set().union(*models.values()).difference(*(models[name] for name in kinds))
    kinds += cover({name: values & rest for name, values in models.items()})
    print("KINDS =", tuple(kinds), len(MODELS))
    variants = {one.name: meeting(features(one.config())) for one in ZOO}
    rest = set().union(*variants.values()).difference(*(variants[name] for name in COVER))
    print("CROSSED =", tuple(cover({name: twos & rest for name, twos in variants.items()})))


# variants of `ZOO`: every value once
COVER = tuple(cover({one.name: features(one.config()) for one in ZOO}))


if __name__ == "__main__":
    main()
