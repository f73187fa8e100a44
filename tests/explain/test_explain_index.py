"""What is typed, and what it means."""

import pytest
from explain_models import TEXTS

from llmcli.anatomy.indexed import Wanted, parse
from llmcli.commands.explain.measure.index import find, place, shape_in_letters
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
    assert parse(text) == Wanted(name, items)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no name"),
        ("The capital of France is", "it comes first, then the text"),
        ("[1]", "has no name"),
        ("logits[1]x", r"does not end with its `\]`"),
        ("logits[1,]", "`nothing` in .* is neither a number nor a quoted token"),
        ("logits[1.5,2]", "`1.5` in .* is neither a number"),
        (r"logits['\q']", r"`\\q` is no escape that is known"),
        (r"logits['\x4']", r"`\\x` is no escape that is known"),
        (r"logits['\u12']", r"`\\u` is no escape that is known"),
        (r"logits['\U00110000']", r"`\\U00110000` is no escape that is known"),
        ("logits[*,1]", r"`\*` in .* is not one number"),
        ("logits[:,1]", "`:` in .* is not one number"),
        ("logits[1,0:3]", "`0:3` in .* is not one number"),
        ("logits[0-3,1]", "`0-3` in .* is not one number"),
        ("blocks.*.attn.q[0,0,0]", r"`blocks.\*.attn.q` names no one tensor"),
        ("logits[1,'Paris]", "`'Paris` in .* is neither a number"),
        ("logits[1 2]", "`1 2` in .* is neither a number"),
        ("logits[1][2]", r"`1\]\[2` in .* is neither a number"),
        ("logits[" + "9" * 400 + "]", "`9{40}…` is outside the axis"),
        ("logits[-" + "9" * 5000 + "]", "is outside the axis"),
    ],
)
def test_what_cannot(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse(text)
    escape = "escape" in message
    hint = r"\xNN \uNNNN" if escape else "blocks.0.attn.pattern[0,1,0]"
    assert hint in caught.value.hint
    if "one" in message:
        assert "explain takes one number, no globs or ranges" in caught.value.hint


OTHERWISE = [
    ("logits[1", "`logits[1` has no `]`: the shell split NAME[INDEX]",
     "quote all of it, with single quotes inside: \"logits[-1,' the']\""),
    ("logits[1,Paris]", "`Paris` in", "so does all of it for the shell: \"logits[1,'Paris']\""),
    ("logits[1, Paris]", "`Paris` in", "\"logits[1,' Paris']\""),
    ("'logits[-1,' the']'", "begins with a quote", "with single quotes inside: \"logits[-1,"),
    ("p[0,God,3]", "`God` in", "\"p[0,'God',3]\""),
    ("blocks[0].attn.q[0,1,2]", "has an index in its name", "mean `blocks.0.attn.q[0,1,2]`?"),
    ("model.layers[3].x", "has an index in its name", "did you mean `model.layers.3.x`?"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message", "hint"), OTHERWISE)
def test_what_was_probably_meant(text, message, hint):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert message in caught.value.message
    assert hint in caught.value.hint


class Bytes:
    """A tokenizer whose only tokens are bytes."""

    def encode(self, text, *, add_bos):
        return list(text.encode())

    def token_text(self, id):
        return bytes((id,)).decode(errors="replace")


def test_parts_of_characters_are_named_by_number(known):
    _, axes = known("gpt2")
    texts = ["a", "\ufffd", "\ufffd", "b", "c", "d", "e"]
    for typed, message in (
        ("logits[0,'\u4e2d']", "`\u4e2d` is 3 tokens, not one"),
        ("logits[0,'\ufffd']", "`\ufffd` has part of a character in it"),
        ("logits['\ufffd',0]", "`\ufffd` has part of a character in it"),
    ):
        with pytest.raises(UsageError) as caught:
            place(parse(typed), axes["logits"], texts, Bytes())
        assert message in caught.value.message
        assert "\ufffd" not in caught.value.hint
        assert "id, or its position" in caught.value.hint or "the position" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        place(parse("logits[0,' de']"), axes["logits"], texts, Bytes())
    assert "did you mean" not in caught.value.hint
    assert "begins with a space" not in caught.value.hint


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
    ("logits[-1,52]", (6, 52)),
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


WRONG = [
    (
        "blocks.0.attn.pattern",
        "which number of `blocks.0.attn.pattern[head: h = 2, query: n = 7, key: n = 7]`?",
        "for example `blocks.0.attn.pattern[0,6,6]`",
    ),
    ("logits[3]", "takes 2 indices, not 1", "for example `logits[6,52]`"),
    ("logits[3,1,2]", "`logits[token: n = 7, vocabulary: v = 53]` takes 2 indices", "for example"),
    ("logits[]", "takes 2 indices, not 0", "for example"),
    ("logits[7,0]", "`7` is outside the axis token of `logits`: n = 7", "use 0 to 6"),
    ("logits[0,-54]", "`-54` is outside the axis vocabulary of `logits`: v = 53", "0 to 52"),
    ("blocks.0.attn.pattern[2,0,0]", "outside the axis head of", "use 0 to 1"),
    ("blocks.0.attn.pattern[0,0,7]", "outside the axis key of", "use 0 to 6"),
    ("blocks.0.mlp.pre[0,64]", "outside the axis neuron of `blocks.0.mlp.pre`: F = 64", "0 to 63"),
    ("blocks.0.mlp.pre[0,'a']", "the axis neuron of `blocks.0.mlp.pre` takes a number", "for ex"),
    ("logits[0,'ab']", "`ab` is 2 tokens, not one: `a` (0), `b` (1)", "give one of them"),
    ("logits[0,'']", "an empty token", "put a token between the quotes"),
    ("logits[0,'de']", "`de` is 2 tokens", "did you mean `' de'`? a word in a text begins with"),
    ("logits[' t3 ',0]", "no token of the prompt is ` t3 `", "did you mean `'t3'`? its tokens"),
    ("logits['t33',0]", "no token of the prompt is `t33`", "did you mean `'t3'`? its tokens"),
    ("logits['x',0]", "no token of the prompt is `x`", "0 `t5`, 1 `t17`, 2 `t3`"),
    ("logits['t17',0]", "`t17` stands in the prompt 2 times, at 1, 3", "position of the token"),
    ("blocks.0.attn.pattern[0,0,'t17']", "2 times, at 1, 3", "position of the key"),
]


@pytest.mark.parametrize(("typed", "message", "hint"), WRONG)
def test_places_that_are_none(typed, message, hint, known):
    config, axes = known("gpt2")
    wanted = parse(typed)
    with pytest.raises(UsageError) as caught:
        place(wanted, find(wanted, axes, config), TEXTS, Letters())
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_tokens_need_a_tokenizer(known):
    _, axes = known("gpt2")
    with pytest.raises(UsageError, match="the model has no tokenizer"):
        place(parse("logits[0,'a']"), axes["logits"], [""] * 7, None)


def test_shapes_are_written_in_letters(known):
    _, axes = known("llama-grouped")

    def shape(name):
        return shape_in_letters(axes[name])

    assert shape("blocks.0.attn.q") == "h × n × d/h = 4 × 7 × 8"
    assert shape("blocks.0.attn.v") == "h_kv × n × d/h = 2 × 7 × 8"
    assert shape("blocks.0.attn.pattern") == "h × n × n = 4 × 7 × 7"
    assert shape("blocks.0.attn.W_o") == "h·d/h × d = 32 × 32"
    assert shape("logits") == "n × v = 7 × 97"
    _, axes = known("gpt2")
    assert shape("blocks.0.attn.k") == "h × n × d/h = 2 × 7 × 8"
    _, axes = known("odd")
    assert shape("blocks.0.attn.q") == "h × n × d_k = 4 × 7 × 8"
    assert shape("blocks.0.attn.v") == "h_kv × n × d_v = 2 × 7 × 6"
    assert shape("blocks.0.attn.W_q") == "d × h·d_k = 10 × 32"
    with pytest.raises(UsageError, match="q`: d_k = 8"):
        place(parse("blocks.0.attn.q[0,0,8]"), axes["blocks.0.attn.q"], TEXTS, None)
