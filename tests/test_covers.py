"""The models that tests run on by default have all that any model of the tests has."""

from covers import COVER, KINDS, crossed, features, meeting, one_each, pairs
from zoo import MODELS, ZOO, variant


def missing(sets, chosen):
    """Values that no chosen one has, each with one that has it."""
    has = {value: name for name, values in sets.items() for value in values}
    for name in chosen:
        for value in sets[name]:
            has.pop(value, None)
    return has


def test_every_value_of_every_feature_is_in_a_variant_of_the_cover():
    assert missing({one.name: features(one.config()) for one in ZOO}, COVER) == {}


def test_every_value_and_nearly_every_pair_is_in_a_model_of_the_kinds():
    sets = {name: features(config) for name, config in MODELS.items()}
    assert missing(sets, KINDS) == {}
    twos = {name: pairs(values) for name, values in sets.items()}
    every = set().union(*twos.values())
    assert len(set().union(*(twos[name] for name in KINDS))) >= 0.94 * len(every)


def test_every_pair_of_values_of_a_part_and_every_model_type_is_in_a_crossed_variant():
    sets = {one.name: meeting(features(one.config())) for one in ZOO}
    chosen = [getattr(one, "values", (one,))[0] for one in crossed(sets)]
    assert missing(sets, chosen) == {}
    assert {variant(name).model_type for name in chosen} == {one.model_type for one in ZOO}


def test_one_of_each_kind_runs_by_default():
    first, second = COVER[:2]
    other = next(one.name for one in ZOO if one.name not in COVER)
    found = one_each([other, first, second], lambda name: "one kind")
    assert [getattr(one, "values", (one,))[0] for one in found] == [other, first, second]
    assert [bool(getattr(one, "marks", ())) for one in found] == [True, False, True]
