"""The configurations that the ladder takes, and which of them its tests run on."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from covers import cover, covered, features, meeting
from zoo import MODELS, ZOO

from llmcli.commands.ladder.measure.weights import require_supported
from llmcli.errors import UnsupportedModel


def refusal(config):
    """Why the ladder does not take a model, None where it does."""
    try:
        require_supported(config)
    except UnsupportedModel as error:
        return str(error)
    return None


# models of every kind that our configuration can express, as far as the ladder takes it
DENSE = {name: config for name, config in MODELS.items() if refusal(config) is None}
# … and that of gated attention without its layer that has the keys of another
_GATED = MODELS["gated attention"]
DENSE["gated attention"] = replace(_GATED, layers=_GATED.layers[:4])
# … and one of each `model_type` of transformers that is
TYPES = {
    one.model_type: one.config()
    for one in reversed(ZOO)  # the first variant of each
    if refusal(one.config()) is None
}
USUAL = {name: DENSE[name] for name in covered(DENSE) if isinstance(name, str)}


def values(config):
    """The features of its parts: a family and a first token change nothing here."""
    return {one for one in features(config) if not one.startswith("ModelConfig.")}


def beside(known, configs, kind):
    """As few of `configs` as have all that `kind` finds in any of them and in none of `known`."""
    seen = set().union(*map(kind, known))
    return cover({name: kind(config) - seen for name, config in configs.items()})


def pairs(config):
    """The pairs of values of one part."""
    return meeting(values(config))


# types with a value that no usual model has, and whatever has a pair of values that these have not
NEW_TYPES = beside(USUAL.values(), TYPES, values)
_KNOWN = [*USUAL.values(), *(TYPES[name] for name in NEW_TYPES)]
PAIRED = beside(_KNOWN, DENSE, pairs)
# … and those that a fault of the ladder is planted for
TEXTS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))["fault"]
PLANTED = {fault["model"]: None for fault in TEXTS if fault["model"] not in (*USUAL, *PAIRED)}
PAIRED_TYPES = beside([*_KNOWN, *(DENSE[name] for name in PAIRED)], TYPES, pairs)


def each_with(others, more=()):
    """The usual models, each with one of `others` in turn.

    Exhaustive are `more` models, and so many pairs that every value of an attention, but for its
    rotation, meets all of `others`.
    """
    own = ("AttentionConfig.", "ScoreConfig.", "kv heads")
    usual = [(name, others[at % len(others)]) for at, name in enumerate(USUAL)]
    met = {
        (name, other): {(value, other) for value in values(USUAL[name]) if value.startswith(own)}
        for name in USUAL for other in others
    }  # fmt: skip
    seen = set().union(*(met[one] for one in usual))
    rest = cover({one: found - seen for one, found in met.items()})
    rest += [(name, others[0]) for name in more]
    return usual + [pytest.param(*one, marks=pytest.mark.exhaustive) for one in rest]
