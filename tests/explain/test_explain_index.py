"""What is typed, and what it means."""

import pytest
from explain_models import TEXTS, make
from zoo import BLOCKS

from llmcli.commands.explain.options import find, names, place
from llmcli.errors import UsageError
from llmcli.graph.indexed import NumberRef, parse


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
        return [26] if text == " de" else [ord(letter) - 97 for letter in text]

    def token_text(self, id):
        return chr(id + 97)


class Bytes(Letters):
    """A tokenizer whose only tokens are bytes."""

    def encode(self, text, *, add_bos):
        return list(text.encode())

    def token_text(self, id):
        return bytes((id,)).decode(errors="replace")


def placed(typed, model_name="gpt2", tokenizer=None):
    """The index that is meant in a prompt of `TEXTS`."""
    wanted, config = parse(typed), make(model_name).config
    spec = find(wanted, names(config, len(TEXTS)), config)
    return place(wanted, spec, TEXTS, tokenizer)


@pytest.mark.parametrize(
    ("typed", "index"),
    [
        ("blocks.0.attn.pattern[1,5,2]", (1, 5, 2)),
        ("blocks.0.attn.pattern[-1,-1,-7]", (2, 6, 0)),
        ("blocks.0.attn.pattern[0,'t8','t3']", (0, 5, 2)),
        ("logits[-1,42]", (6, 42)),
        ("logits['t42','c']", (4, 2)),
        ("blocks.0.ln1.scale[3]", (3, 0)),
        ("blocks.0.ln1.scale[3,0]", (3, 0)),
        ("embed.W['d',1]", (3, 1)),
    ],
)
def test_places(typed, index):
    assert placed(typed, tokenizer=Letters()) == index


# more of them, and what is unknown, are in transcripts/explain-names.txt
@pytest.mark.parametrize(
    ("model_name", "typed", "tokenizer", "reason", "hint"),
    [
        ("odd", "blocks.1.attn.k_rot", None, "this model has no .*: no rotation", "`"),
        ("odd", "cache.1.k", None, "needs no cache", "`blocks.1.attn.k_norm`"),
        ("gpt2", "blocks.1.attn.q", None, "its only block is `blocks.0`", "`"),
        (
            *("llama", "W_head[2,3]", None),
            *(r"`head.W\[dimension,vocabulary\]`", "`head.W[2,3]`"),
        ),
        ("gpt2", "logits[0,'a']", None, "the model has no tokenizer", "as a number"),
        ("gpt2", "logits[0,'\u4e2d']", Bytes(), "`\u4e2d` is 3 tokens", "id, or its position"),
    ],
)
def test_what_the_model_has_not_got_says_why(model_name, typed, tokenizer, reason, hint):
    with pytest.raises(UsageError, match=reason) as caught:
        placed(typed, model_name, tokenizer)
    assert hint in caught.value.hint
    assert "\ufffd" not in caught.value.hint


def test_a_state_is_what_was_put_there():
    config = BLOCKS["short convolutions"]
    layer = next(i for i, layer in enumerate(config.layers) if layer.attention is None)
    with pytest.raises(UsageError, match="needs no cache") as raised:
        find(parse(f"cache.{layer}.conv[0,1]"), names(config, 5), config)
    assert raised.value.hint == f"use `blocks.{layer}.conv.in`"
