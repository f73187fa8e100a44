"""The letters of the documents, with the names that others give them."""

import pytest

from llmcli.ui.letters import LETTERS, letter_line, letter_lines


@pytest.mark.parametrize(
    ("letter", "value", "line"),
    [
        ("n", 4, "n = 4 tokens (N)"), ("n", 1, "n = 1 token (N)"),
        ("d", 256, "d = 256 width (d_model, hidden_dim)"), ("h", 1, "h = 1 head (A, n_heads)"),
        ("h_kv", 1, "h_kv = 1 head of keys and values (n_kv_heads)"),
        ("d/h", 32, "d/h = 32 a head (d_k, d_v, head_dim)"), ("b", 1, "b = 1 sequence"),
        ("v", 2048, "v = 2048 in the vocabulary (vocab_size)"),
    ],
)  # fmt: skip
def test_a_letter_with_its_other_names(letter, value, line):
    assert letter_line(letter, value, True) == line
    assert letter_line(letter, value, False) == line.partition(" (")[0]


def test_a_letter_that_is_none():
    with pytest.raises(KeyError):
        letter_line("q", 3, True)


def test_the_letters_of_one_model():
    lines = list(letter_lines([("d", 256), ("d/h", 32), ("F", 1024)], aliases=True))
    assert lines[1:] == ["d/h = 32 a head (d_k, d_v, head_dim)", "F = 4d = 1024 neurons"]
    odd = list(letter_lines([("d", 576), ("d/h", 8), ("d_v", 6), ("F", 1536)], aliases=True))
    assert odd[1:] == ["d/h = 8 a head (d_k, head_dim)", "d_v = 6 a value", "F = 1536 neurons"]


def test_no_name_means_two_things():
    # d/h and d_k are the same thing, and a model has one of them
    names = [
        name
        for letter, (_, others) in LETTERS.items()
        if letter != "d_k"
        for name in (letter, *others)
    ]
    assert {name for name in names if names.count(name) > 1} == {"d_v"}, "left out beside d_v"
