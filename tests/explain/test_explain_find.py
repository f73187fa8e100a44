"""Names that were typed, and which tensor they mean."""

import pytest
from zoo import BLOCKS

from llmcli.anatomy.indexed import parse
from llmcli.commands.explain.measure.index import find, names
from llmcli.errors import UsageError


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
        ("llama-grouped", "pattern1", "blocks.1.attn.pattern"),
        ("llama-grouped", "blocks.1.attn.q.hook_out", "blocks.1.attn.q"),
        ("llama-grouped", "lm_head", "logits_raw"),
        ("llama-grouped", "lm_head.weight", "head.W"),
        ("llama-grouped", "model.embed_tokens.weight", "embed.W"),
        ("llama-grouped", "model.layers.1.self_attn.k_proj.weight", "blocks.1.attn.W_k"),
        ("llama-grouped", "model.layers.1.mlp.up_proj", "blocks.1.mlp.up"),
        ("llama-grouped", "model.norm.weight", "ln_final.w"),
        ("llama-grouped", "blk.1.ffn_down.weight", "blocks.1.mlp.W_down"),
        ("gpt2", "transformer.h.0.ln_1", "blocks.0.ln1.out"),
        ("llama-grouped", "W_E", "embed.W"),
        ("llama-grouped", "1.attn.z", "blocks.1.attn.z"),
        ("llama-grouped", "1.pattern", "blocks.1.attn.pattern"),
        ("llama-grouped", "1.hook_resid_pre", "blocks.1.resid_pre"),
        ("llama-grouped", "layers.1.self_attn.q_proj.weight", "blocks.1.attn.W_q"),
        ("gpt2", "pattern", "blocks.0.attn.pattern"),
        ("gpt2", "hook_pre", "blocks.0.mlp.pre"),
        ("gpt2", "W_pos", "pos_embed.W"),
    ],
)
def test_names_of_others(model_name, typed, meant, known):
    config, axes = known(model_name)
    assert find(parse(typed), axes, config).name == meant


@pytest.mark.parametrize(
    ("typed", "count", "hint"),
    [
        ("pattern", 2, "name one of them: `blocks.0.attn.pattern` or `blocks.1.attn.pattern`"),
        ("hook_pattern", 2, "name one of them: `blocks.0.attn.pattern` or `blocks.1.attn.pattern`"),
        ("attn.v", 2, "name one of them: `blocks.0.attn.v` or `blocks.1.attn.v`"),
        ("1.out", 2, "name one of them: `blocks.1.ln1.out` or `blocks.1.ln2.out`"),
        ("out", 5, "name one of them: `blocks.0.ln1.out`, `blocks.0.ln2.out` or `ln_final.out`"),
    ],
)
def test_an_end_of_several_names_is_refused_with_them(typed, count, hint, known):
    config, axes = known("llama-grouped")
    with pytest.raises(UsageError, match=f"`{typed}` is the end of {count} names") as caught:
        find(parse(typed), axes, config)
    assert caught.value.hint == hint


def test_a_state_is_what_was_put_there():
    config = BLOCKS["short convolutions"]
    layer = next(i for i, layer in enumerate(config.layers) if layer.attention is None)
    with pytest.raises(UsageError, match="needs no cache") as raised:
        find(parse(f"cache.{layer}.conv[0,1]"), names(config, 5), config)
    assert raised.value.hint == f"use `blocks.{layer}.conv.in`"


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
    ("gpt2", "blocks.1.attn.q", "its only block is `blocks.0`", None),
    ("llama-grouped", "blocks.2.attn.pattern", "`blocks.0` to `blocks.1`", None),
    ("llama-grouped", "blocks.-1.attn.pattern", "`blocks.0` to `blocks.1`", None),
    ("gpt2", "head.W", "tied, the transpose of `embed.W`", None),
    ("gpt2", "blocks.0.moe.router_logits", "no mixture of experts", None),
    ("gpt2", "blocks.0.linattn.q", "softmax attention", None),
    ("gpt2", "blocks.0.attn.sink", "its attention has no sinks", None),
    ("gpt2", "blocks.0.attn.gate", "its attention has no gate", None),
    ("gpt2", "blocks.0.ln1_post.out", "no norm follows", None),
    ("gpt2", "lm_head.weight", "tied, the transpose of `embed.W`", "embed.W"),
    ("gpt2", "cache.0.k", "needs no cache", "blocks.0.attn.k"),
    ("llama-grouped", "cache.1.k", "needs no cache", "blocks.1.attn.k_rot"),
    ("llama-grouped", "cache.1.v", "needs no cache", "blocks.1.attn.v"),
    ("odd", "cache.1.k", "needs no cache", "blocks.1.attn.k_norm"),
    ("llama-grouped", "cache.1.state", "keys and values only", None),
    ("gpt2", "q_norm", "does not normalize queries and keys", None),
    ("gpt2", "hook_rot_q", "no rotation, it has learned positions", None),
    ("gpt2", "0.sink", "its attention has no sinks", None),
    ("llama-grouped", "hook_pos_embed", "no learned positions", None),
]


@pytest.mark.parametrize(("model_name", "typed", "reason", "close"), ABSENT)
def test_a_name_that_the_model_has_not_got_says_why(model_name, typed, reason, close, known):
    config, axes = known(model_name)
    with pytest.raises(UsageError, match="this model has no") as caught:
        find(parse(typed), axes, config)
    assert reason in caught.value.message
    assert caught.value.hint
    if close:
        assert f"`{close}`" in caught.value.hint


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("blocks.0.atn.pattern", "did you mean `blocks.0.attn.pattern`?"),
        ("blocks.1.attn.patern", "did you mean `blocks.1.attn.pattern`?"),
        ("block.1.attn.pattern", "did you mean `blocks.1.attn.pattern`"),
        ("embed.weight", "did you mean `embed` or `embed.W`?"),
        ("mlp.hidden", "did you mean `blocks.0.mlp.post`?"),
        ("blocks.1.mlp.hidden", "did you mean `blocks.1.mlp.post`?"),
        ("blocks.1.attn.weights", "did you mean `blocks.1.attn.pattern`?"),
        ("final_norm", "did you mean `ln_final.out` or `ln_final.w`?"),
        ("my.layers.1.self_attn.k_proj", "did you mean `blocks.1.attn.k` or `blocks.1.attn.W_k`?"),
        ("my.layers.1.self_attn.k_proj.weight", "did you mean `blocks.1.attn.W_k`?"),
        ("my.layers.1.mlp.down_proj", "did you mean `blocks.1.mlp_out` or `blocks.1.mlp.W_down`?"),
        ("logit", "did you mean `logits`"),
        ("xyzzy", "for example `blocks.0.attn.pattern[0,1,0]`"),
    ],
)
def test_unknown_names_come_with_close_ones(typed, hint, known):
    config, axes = known("llama-grouped")
    with pytest.raises(UsageError, match=f"there is no activation or parameter `{typed}`") as error:
        find(parse(typed), axes, config)
    assert error.value.hint.startswith(hint)


LETTERS = [
    ("A[0,3,1]", "`blocks.N.attn.pattern[head,query,key]`", "blocks.0.attn.pattern[0,3,1]"),
    ("A", "`blocks.N.attn.pattern[head,query,key]`", "blocks.0.attn.pattern[0,6,6]"),
    ("S[9,9,9]", "`blocks.N.attn.scores[head,query,key]`", "blocks.0.attn.scores[0,6,6]"),
    ("M[1,2]", "the mask in `blocks.N.attn.scores[head,query,key]`", "blocks.0.attn.scores[0,6,6]"),
    ("K[1,2,3]", "`blocks.N.attn.k[kv_head,token,number]`", "blocks.0.attn.k[1,2,3]"),
    ("C[1,2,3]", "`blocks.N.attn.z[head,token,number]`", "blocks.0.attn.z[1,2,3]"),
    ("T1[2,3]", "`blocks.N.ln1.out[token,dimension]`", "blocks.0.ln1.out[2,3]"),
    ("T⁵[2,'a']", "`blocks.N.mlp_out[token,dimension]`", "blocks.0.mlp_out[6,31]"),
    ("L[2,3]", "`blocks.N.mlp.post[token,neuron]`", "blocks.0.mlp.post[2,3]"),
    ("H[2,3]", "`blocks.N.resid_post[token,dimension]`", "blocks.0.resid_post[2,3]"),
    ("H'[2,3]", "`ln_final.out[token,dimension]`", "ln_final.out[2,3]"),
    ("W_head[2,3]", "`head.W[dimension,vocabulary]`", "head.W[2,3]"),
]


@pytest.mark.parametrize(("typed", "meant", "example"), LETTERS)
def test_a_letter_of_the_formulas_says_which_name_it_has(typed, meant, example, known):
    config, axes = known("llama-grouped")
    wanted = parse(typed)
    with pytest.raises(UsageError) as caught:
        find(wanted, axes, config)
    letter = f"`{wanted.name}` is a letter of the formulas, {meant}"
    assert caught.value.message == letter
    assert caught.value.hint == f"for example `{example}`"


def test_a_tied_head_is_the_embedding(known):
    config, axes = known("gpt2")
    with pytest.raises(UsageError) as caught:
        find(parse("W_head[1,2]"), axes, config)
    assert "`embed.W[vocabulary,dimension]`" in caught.value.message


def test_a_fused_tensor_names_what_is_in_it(known):
    config, axes = known("gpt2")
    with pytest.raises(UsageError, match="holds several tensors in one") as caught:
        find(parse("transformer.h.0.attn.c_attn[0,0]"), axes, config)
    assert caught.value.hint == "use `blocks.0.attn.q`, `blocks.0.attn.k` or `blocks.0.attn.v`"


def test_a_name_that_is_not_one_thing_says_what_to_use(known):
    config, axes = known("gpt2")
    with pytest.raises(UsageError, match="is after the norm's weight in one version") as caught:
        find(parse("blocks.0.ln1.hook_normalized[0,0]"), axes, config)
    assert "`blocks.0.ln1.out`" in caught.value.hint
