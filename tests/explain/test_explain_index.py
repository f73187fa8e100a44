"""What is typed, and what it means."""

import pytest
from explain_models import TEXTS
from zoo import BLOCKS

from llmcli.anatomy.indexed import NumberRef, parse
from llmcli.commands.explain.options import find, names, place
from llmcli.errors import UsageError


@pytest.mark.parametrize(
    ("text", "name", "items"),
    [
        ("logits", "logits", None),
        ("logits[7,3]", "logits", (7, 3)),
        (" logits [ 7 , -3 ] ", "logits", (7, -3)),
        ("logits[7,' Paris']", "logits", (7, " Paris")),
        ('logits[-1," a, b]"]', "logits", (-1, " a, b]")),
        (r"logits['it\'s\n\t\\','x']", "logits", ("it's\n\t\\", "x")),
        ("a.scale[3]", "a.scale", (3,)),
        ("logits[]", "logits", ()),
        ("logits['']", "logits", ("",)),
        (r"logits['\x41\u4e2d\U0001F600\"']", "logits", ('A\u4e2d\U0001f600"',)),
    ],
)
def test_what_can_be_read(text, name, items):
    assert parse(text) == NumberRef(name, items)


# what cannot be read is in transcripts/explain-index.txt
@pytest.mark.parametrize(
    ("digits", "message"),
    [("9" * 400, "`9{40}…` is outside the axis"), ("-" + "9" * 5000, "is outside the axis")],
)
def test_no_number_is_too_long(digits, message):
    with pytest.raises(UsageError, match=message):
        parse(f"logits[{digits}]")


class Letters:
    """A tokenizer of letters: one id for each, 97 and more from `a`."""

    def encode(self, text, *, add_bos):
        assert add_bos is False
        if text == " de":
            return [26]
        return [ord(letter) - 97 for letter in text]

    def token_text(self, id):
        return chr(id + 97)


PLACES = [
    ("blocks.0.attn.pattern[1,5,2]", (1, 5, 2)),
    ("blocks.0.attn.pattern[-1,-1,-7]", (1, 6, 0)),
    ("blocks.0.attn.pattern[0,'t8','t3']", (0, 5, 2)),
    ("logits[-1,42]", (6, 42)),
    ("logits['t42','c']", (4, 2)),
    ("blocks.0.ln1.scale[3]", (3, 0)),
    ("blocks.0.ln1.scale[3,0]", (3, 0)),
    ("embed.W['d',1]", (3, 1)),
]


@pytest.mark.parametrize(("typed", "index"), PLACES)
def test_places(typed, index, known):
    config, axes = known("gpt2")
    wanted = parse(typed)
    assert place(wanted, find(wanted, axes, config), TEXTS, Letters()) == index


def test_tokens_need_a_tokenizer(known):
    _, axes = known("gpt2")
    with pytest.raises(UsageError, match="the model has no tokenizer"):
        place(parse("logits[0,'a']"), axes["logits"], [""] * 7, None)


def test_a_state_is_what_was_put_there():
    config = BLOCKS["short convolutions"]
    layer = next(i for i, layer in enumerate(config.layers) if layer.attention is None)
    with pytest.raises(UsageError, match="needs no cache") as raised:
        find(parse(f"cache.{layer}.conv[0,1]"), names(config, 5), config)
    assert raised.value.hint == f"use `blocks.{layer}.conv.in`"


# more of them, and what is unknown, are in transcripts/explain-names.txt
@pytest.mark.parametrize(
    ("model_name", "typed", "reason", "close"),
    [
        ("odd", "blocks.1.attn.k_rot", "this model has no .*: no rotation", "`"),
        ("odd", "cache.1.k", "needs no cache", "`blocks.1.attn.k_norm`"),
        ("gpt2", "blocks.1.attn.q", "its only block is `blocks.0`", "`"),
        ("llama-grouped", "W_head[2,3]", r"`head.W\[dimension,vocabulary\]`", "`head.W[2,3]`"),
    ],
)
def test_a_name_that_the_model_has_not_got_says_why(model_name, typed, reason, close, known):
    config, axes = known(model_name)
    with pytest.raises(UsageError, match=reason) as caught:
        find(parse(typed), axes, config)
    assert close in caught.value.hint


class Bytes(Letters):
    """A tokenizer whose only tokens are bytes."""

    def encode(self, text, *, add_bos):
        return list(text.encode())

    def token_text(self, id):
        return bytes((id,)).decode(errors="replace")


def test_a_character_of_several_tokens_is_named_by_number(known):
    _, axes = known("gpt2")
    with pytest.raises(UsageError, match="`\u4e2d` is 3 tokens, not one") as caught:
        place(parse("logits[0,'\u4e2d']"), axes["logits"], TEXTS, Bytes())
    assert "\ufffd" not in caught.value.hint
    assert "id, or its position" in caught.value.hint
