"""The models that tests run on by default have all that any model of the tests has."""

from itertools import product

from covers import COVER, KINDS, crossed, features, few, in_turn, meeting, one_each, pairs, typed
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


def test_every_pair_of_values_of_a_part_is_in_a_crossed_variant_and_every_type_in_a_typed_one():
    sets = {one.name: meeting(features(one.config())) for one in ZOO}
    assert missing(sets, [getattr(one, "values", (one,))[0] for one in crossed(sets)]) == {}
    types = {variant(getattr(one, "values", (one,))[0]).model_type for one in typed(sets)}
    assert types == {one.model_type for one in ZOO}


def test_every_pair_of_two_lists_is_in_turn():
    names, kinds, ways = ["a", "b", few(["c"], 0)[0]], [1, 2, 3, 4], ["x", "y", "z"]
    found = in_turn(names, kinds, ways)
    default = [one.values for one in found if not one.marks]
    assert default == [("a", 1, "x"), ("b", 2, "y")]
    assert [one.values for one in found if one.values[0] == "c"] == [("c", 1, "x")]
    rest = [one.values for one in found if one.values[0] != "c"]
    for some, others in ((names[:2], kinds), (names[:2], ways), (kinds, ways)):
        assert all(any({*both} <= {*one} for one in rest) for both in product(some, others))
    assert len(rest) < 24
    assert len(in_turn(names[:2], kinds)) == 8


def test_one_of_each_kind_runs_by_default():
    first, second = COVER[:2]
    other = next(one.name for one in ZOO if one.name not in COVER)
    found = one_each([other, first, second], lambda name: "one kind")
    assert [getattr(one, "values", (one,))[0] for one in found] == [other, first, second]
    assert [bool(getattr(one, "marks", ())) for one in found] == [True, False, True]
