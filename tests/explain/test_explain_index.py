"""What is typed, and what it means."""

import pytest
from explain_models import TEXTS

from llmcli.errors import UsageError
from llmcli.explain.index import Wanted, parse, place, shape_in_letters
from llmcli.explain.names import find, names


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
    ],
)
def test_what_can_be_read(text, name, items):
    assert parse(text) == Wanted(name, items)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no name"),
        ("[1]", "has no name"),
        ("logits[1", r"has no `\]` at its end"),
        ("logits[1]x", r"has no `\]` at its end"),
        ("logits[1,]", "`nothing` in .* is neither a number nor a quoted token"),
        ("logits[1.5,2]", "`1.5,2` in .* is neither a number"),
        ("logits[1, Paris]", "`Paris` in .* is neither a number"),
        ("logits[1,'Paris]", "`'Paris` in .* is neither a number"),
        ("logits[1 2]", "`1 2` in .* is neither a number"),
        ("logits[1][2]", r"`1\]\[2` in .* is neither a number"),
        ("logits[" + "9" * 400 + "]", "is neither a number"),
    ],
)
def test_what_cannot(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse(text)
    assert "blocks.0.attn.pattern[0,1,0]" in caught.value.hint


@pytest.fixture
def known(model):
    def known(name):
        config = model(name).config
        return config, names(config, len(TEXTS))

    return known


@pytest.mark.parametrize(
    ("model_name", "typed", "meant"),
    [
        ("gpt2", "blocks.0.attn.hook_pattern", "blocks.0.attn.pattern"),
        ("gpt2", "blocks.0.attn.hook_attn_scores", "blocks.0.attn.scores"),
        ("gpt2", "hook_embed", "embed"),
        ("gpt2", "blocks.0.hook_resid_pre", "blocks.0.resid_pre"),
        ("gpt2", "blocks.0.mlp.hook_pre", "blocks.0.mlp.pre"),
        ("llama-grouped", "blocks.1.attn.hook_rot_q", "blocks.1.attn.q_rot"),
        ("llama-grouped", "blocks.1.mlp.hook_pre", "blocks.1.mlp.gate"),
        ("llama-grouped", "blocks.1.mlp.hook_pre_linear", "blocks.1.mlp.up"),
        ("llama-grouped", "ln_final.hook_scale", "ln_final.scale"),
    ],
)
def test_transformerlens_names(model_name, typed, meant, known):
    config, axes = known(model_name)
    assert find(typed, axes, config).name == meant


ABSENT = [
    ("gpt2", "blocks.0.attn.q_rot", "no rotation, it has learned positions", None),
    ("odd", "blocks.1.attn.k_rot", "no rotation", None),
    ("llama-grouped", "pos_embed", "no learned positions, it rotates", None),
    ("llama-grouped", "pos_embed.W", "no learned positions", None),
    ("llama-grouped", "blocks.0.attn.q_norm", "does not normalize queries and keys", None),
    ("llama-grouped", "blocks.0.attn.q_norm.w", "does not normalize queries and keys", None),
    ("gpt2", "blocks.0.mlp.gate", "has no gate", None),
    ("gpt2", "blocks.0.mlp.W_gate", "has no gate", None),
    ("llama-grouped", "blocks.0.mlp.pre", "is gated", "blocks.0.mlp.gate"),
    ("llama-grouped", "blocks.0.attn.b_q", "it has no such bias", None),
    ("llama-grouped", "blocks.0.ln1.b", "it has no such bias", "blocks.0.ln1.w"),
    ("gpt2", "blocks.1.attn.q", "its 1 blocks are", None),
    ("llama-grouped", "blocks.2.attn.pattern", "`blocks.0` to `blocks.1`", None),
    ("llama-grouped", "blocks.-1.attn.pattern", "`blocks.0` to `blocks.1`", None),
    ("gpt2", "head.W", "tied, the transpose of `embed.W`", None),
    ("gpt2", "blocks.0.moe.router_logits", "no mixture of experts", None),
    ("gpt2", "blocks.0.linattn.q", "softmax attention", None),
    ("gpt2", "blocks.0.attn.sink", "neither sinks nor a gate", None),
    ("gpt2", "blocks.0.ln1_post.out", "no norm follows", None),
    ("gpt2", "cache.0.k", "needs no cache", None),
]


@pytest.mark.parametrize(("model_name", "typed", "reason", "close"), ABSENT)
def test_a_name_that_the_model_has_not_got_says_why(model_name, typed, reason, close, known):
    config, axes = known(model_name)
    with pytest.raises(UsageError, match="this model has no") as caught:
        find(typed, axes, config)
    assert reason in caught.value.message
    assert caught.value.hint
    if close:
        assert f"`{close}`" in caught.value.hint


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("blocks.0.atn.pattern", "did you mean `blocks.0.attn.pattern`"),
        ("pattern", "did you mean `blocks.0.attn.pattern` or `blocks.1.attn.pattern`?"),
        ("attn.v", "did you mean `blocks.0.attn.v` or `blocks.1.attn.v`?"),
        ("logit", "did you mean `logits`"),
        ("xyzzy", "for example `blocks.0.attn.pattern[0,1,0]`"),
    ],
)
def test_unknown_names_come_with_close_ones(typed, hint, known):
    config, axes = known("llama-grouped")
    with pytest.raises(UsageError, match=f"there is no activation or parameter `{typed}`") as error:
        find(typed, axes, config)
    assert error.value.hint.startswith(hint)


class Letters:
    """A tokenizer of letters: one id for each, 97 and more from `a`."""

    def encode(self, text, *, add_bos):
        assert add_bos is False
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
    assert place(wanted, find(wanted.name, axes, config), TEXTS, Letters()) == index


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
    ("logits['x',0]", "no token of the prompt is `x`", "0 `t5`, 1 `t17`, 2 `t3`"),
    ("logits['t17',0]", "`t17` stands in the prompt 2 times, at 1, 3", "position of the token"),
    ("blocks.0.attn.pattern[0,0,'t17']", "2 times, at 1, 3", "position of the key"),
]


@pytest.mark.parametrize(("typed", "message", "hint"), WRONG)
def test_places_that_are_none(typed, message, hint, known):
    config, axes = known("gpt2")
    wanted = parse(typed)
    with pytest.raises(UsageError) as caught:
        place(wanted, find(wanted.name, axes, config), TEXTS, Letters())
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_tokens_need_a_tokenizer(known):
    _, axes = known("gpt2")
    with pytest.raises(UsageError, match="the model has no tokenizer"):
        place(parse("logits[0,'a']"), axes["logits"], [""] * 7, None)


def test_shapes_are_written_in_letters(known):
    _, axes = known("llama-grouped")

    def shape(name):
        return shape_in_letters(axes[name], equal_sizes=True)

    assert shape("blocks.0.attn.q") == "h × n × d/h = 4 × 7 × 8"
    assert shape("blocks.0.attn.v") == "h_kv × n × d/h = 2 × 7 × 8"
    assert shape("blocks.0.attn.pattern") == "h × n × n = 4 × 7 × 7"
    assert shape("blocks.0.attn.W_o") == "h·d/h × d = 32 × 32"
    assert shape("logits") == "n × v = 7 × 97"
    _, axes = known("gpt2")
    assert shape("blocks.0.attn.k") == "h × n × d/h = 2 × 7 × 8"
