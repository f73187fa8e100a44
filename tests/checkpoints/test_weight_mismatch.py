"""What a person reads about weights that do not fit."""

from llmcli.errors import WeightMismatch


def test_a_wrong_shape_names_both_and_says_what_to_do():
    error = WeightMismatch(misshapen=[("head.W", "lm_head.weight", (9, 4), (8, 4))])
    assert "`head.W` from `lm_head.weight` should be [9, 4] but is [8, 4]" in error.message
    assert "are of different models" in error.hint
    assert "are of different models" in WeightMismatch(unexpected=["lm_head.weight"]).hint
    assert "a file of the weights may not be here" in WeightMismatch(missing=["head.W"]).hint
