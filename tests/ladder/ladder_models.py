"""The configurations that the ladder takes, and which of them its tests run on."""

from dataclasses import replace

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
# those of them that are run by default have every value of every part
USUAL = {name: DENSE[name] for name in covered(DENSE) if isinstance(name, str)}
REST = [name for name in DENSE if name not in USUAL]


def values(config):
    """The features of its parts: a family and a first token change nothing here."""
    return {one for one in features(config) if not one.startswith("ModelConfig.")}


# types of transformers that have together whatever value no usual model has
_SEEN = set().union(*map(values, USUAL.values()))
_ALL = [(one.model_type, one.config()) for one in reversed(ZOO)]  # the first variant wins
TYPES = {name: config for name, config in _ALL if refusal(config) is None}
NEW_TYPES = cover({name: values(config) - _SEEN for name, config in TYPES.items()})
# … and whatever two values of one part these and no dense model have
_MET = set().union(*(meeting(values(one)) for one in DENSE.values()),
                   *(meeting(values(TYPES[name])) for name in NEW_TYPES))  # fmt: skip
NEW_PAIRS = cover({name: meeting(values(config)) - _MET for name, config in TYPES.items()})


def each_with(others, *more):
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
