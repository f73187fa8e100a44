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


def test_a_state_is_what_was_put_there():
    config = BLOCKS["short convolutions"]
    layer = next(i for i, layer in enumerate(config.layers) if layer.attention is None)
    with pytest.raises(UsageError, match="needs no cache") as raised:
        find(parse(f"cache.{layer}.conv[0,1]"), names(config, 5), config)
    assert raised.value.hint == f"use `blocks.{layer}.conv.in`"
