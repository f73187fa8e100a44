"""The names of a model, what others call them, and why one is not there."""

import sys

import pytest
from anatomy_configs import models
from hypothesis import given, settings
from zoo import ZOO, attending, three_layers, variant

from llmcli import anatomy
from llmcli.anatomy.aliases import listed, modules
from llmcli.anatomy.names import Names, aliases, canonical, known, select
from llmcli.errors import UsageError
from llmcli.families.sources import sources
from llmcli.graph.spec import Call

ALL = [one.name for one in ZOO]
model = three_layers


@settings(max_examples=60, deadline=None)
@given(models())
def test_the_names_are_those_of_the_specs_each_once(config):
    run = anatomy.plan(config, Call(batch=2, tokens=3, past=1, phase="prefill")).tensors
    kept = anatomy.states(config, batch=2, capacity=4)
    every = [*anatomy.parameters(config), *run, *kept]
    named = known(config)
    assert sorted(named) == sorted(spec.name for spec in every)
    for spec in every:
        one = named[spec.name]
        assert (one.kind, one.layer, one.axes, one.formula) == (
            spec.kind, spec.layer, spec.axes, spec.formula,
        )  # fmt: skip
    order = [name for name, one in named.items() if one.kind == "activation"]
    assert order == [spec.name for spec in run]


def test_a_cache_stands_where_it_is_written():
    order = list(known(model("llama")))
    at = order.index("cache.1.k")
    assert order[at - 1 : at + 4] == [
        "blocks.1.attn.k_rot", "cache.1.k", "cache.1.v", "blocks.1.attn.scores",
        "blocks.1.attn.pattern",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_every_alias_means_exactly_one_name(name):
    config = variant(name).config()
    names = Names(config, sources(config))
    claimed: dict[str, str] = {}
    for ours in names.known:
        for theirs in names.aliases(ours):
            assert claimed.setdefault(theirs, ours) == ours
            assert names.canonical(theirs) == ours
            assert theirs not in names.known
    if not attending(config):
        assert {"out_proj", "mixer", "hook_attn_out"} <= {one.rpartition(".")[2] for one in claimed}
        return
    first = attending(config)[0]
    own = {"gpt2": "c_proj", "gpt_neox": "dense", "phi3": "o_proj"}
    attention = config.layers[first].attention
    fused = attention is None or attention.gated  # queries are in a tensor with others
    module = "o_proj" if fused else own.get(variant(name).model_type, "q_proj")
    assert {"hook_pattern", f"pattern{first}", module} <= {
        theirs.rpartition(".")[2] for theirs in claimed
    }


@pytest.mark.parametrize("name", ALL)
def test_no_name_of_others_is_listed_with_two_meanings(name):
    config = variant(name).config()
    filled = sources(config)
    meanings: dict[str, set] = {}
    for theirs, ours in listed(config):
        meanings.setdefault(theirs, set()).add((ours,))
    for table in (filled.items(), modules(config, filled)):
        for theirs, ours in table:
            meanings.setdefault(theirs, set()).add(ours)
    assert {theirs: ours for theirs, ours in meanings.items() if len(ours) > 1} == {}


EVERYWHERE = [
    ("blocks.2.hook_resid_pre", "blocks.2.resid_pre"),
    ("blocks.2.hook_in", "blocks.2.resid_pre"),
    ("resid_pre2", "blocks.2.resid_pre"),
    ("blocks.2.hook_resid_mid", "blocks.2.resid_mid"),
    ("blocks.2.hook_resid_post", "blocks.2.resid_post"),
    ("blocks.2.hook_out", "blocks.2.resid_post"),
    ("ln_final.hook_in", "blocks.2.resid_post"),
    ("blocks.1.ln1.hook_in", "blocks.1.resid_pre"),
    ("blocks.1.ln1.hook_out", "blocks.1.ln1.out"),
    ("blocks.1.ln2.hook_in", "blocks.1.resid_mid"),
    ("scale1ln2", "blocks.1.ln2.scale"),
    ("blocks.2.attn.hook_pattern", "blocks.2.attn.pattern"),
    ("pattern2", "blocks.2.attn.pattern"),
    ("attn2", "blocks.2.attn.pattern"),
    ("k2", "blocks.2.attn.k"),
    ("query0", "blocks.0.attn.q"),
    ("blocks.0.attn.hook_attn_scores", "blocks.0.attn.scores"),
    ("attn_scores0", "blocks.0.attn.scores"),
    ("blocks.0.attn.hook_z", "blocks.0.attn.z"),
    ("blocks.0.attn.o.hook_in", "blocks.0.attn.z"),
    ("blocks.0.attn.hook_result", "blocks.0.attn.result"),
    ("blocks.0.hook_attn_out", "blocks.0.attn_out"),
    ("mlp_out2", "blocks.2.mlp_out"),
    ("post1", "blocks.1.mlp.post"),
    ("hook_embed", "embed"),
    ("embed.hook_out", "embed"),
    ("unembed.hook_out", "logits_raw"),
    ("lm_head", "logits_raw"),
    ("ln_final.hook_scale", "ln_final.scale"),
    ("blocks.1.attn.W_Q", "blocks.1.attn.W_q"),
    ("blocks.1.mlp.W_in", "blocks.1.mlp.W_up"),
    ("embed.W_E", "embed.W"),
    ("token_embd.weight", "embed.W"),
    ("blk.1.attn_output.weight", "blocks.1.attn.W_o"),
    ("blk.1.ffn_up", "blocks.1.mlp.W_up"),
]
OF_A_FAMILY = [
    ("gpt2", "hook_pos_embed", "pos_embed"),
    ("gpt2", "blocks.1.mlp.hook_pre", "blocks.1.mlp.pre"),
    ("gpt2", "blocks.1.mlp.in.hook_out", "blocks.1.mlp.pre"),
    ("gpt2", "transformer.h.1", "blocks.1.resid_post"),
    ("gpt2", "transformer.h.1.attn", "blocks.1.attn_out"),
    ("gpt2", "transformer.h.1.mlp.act", "blocks.1.mlp.post"),
    ("gpt2", "h.1.mlp.c_fc.bias", "blocks.1.mlp.b_up"),
    ("gpt2", "transformer.ln_f", "ln_final.out"),
    ("llama", "blocks.1.mlp.hook_pre", "blocks.1.mlp.gate"),
    ("llama", "pre_linear1", "blocks.1.mlp.up"),
    ("llama", "rot_q1", "blocks.1.attn.q_rot"),
    ("llama", "model.layers.1.self_attn.q_proj", "blocks.1.attn.q"),
    ("llama", "model.layers.1.self_attn.q_proj.weight", "blocks.1.attn.W_q"),
    ("llama", "layers.1.mlp", "blocks.1.mlp_out"),
    ("llama", "model.layers.1.mlp.act_fn", "blocks.1.mlp.act"),
    ("llama", "model.layers.1.post_attention_layernorm", "blocks.1.ln2.out"),
    ("llama", "model.norm", "ln_final.out"),
    ("llama", "unembed.W_U", "head.W"),
    ("qwen2", "model.layers.1.self_attn.q_proj.bias", "blocks.1.attn.b_q"),
    ("qwen3", "model.layers.1.self_attn.q_norm", "blocks.1.attn.q_norm"),
    ("qwen3", "blocks.1.attn.k_norm.hook_out", "blocks.1.attn.k_norm"),
    ("qwen3", "blk.1.attn_q_norm.weight", "blocks.1.attn.q_norm.w"),
]


@pytest.mark.parametrize(
    ("family", "theirs", "ours"),
    [(family, *pair) for family in ("gpt2", "llama", "qwen3") for pair in EVERYWHERE] + OF_A_FAMILY,
)
def test_names_of_others(family, theirs, ours):
    config = model(family)
    assert canonical(theirs, config, sources(config)) == ours


def test_without_the_familys_names_the_others_are_known():
    config = model("llama")
    assert canonical("pattern1", config) == "blocks.1.attn.pattern"
    assert canonical("model.norm", config) is None
    assert aliases("blocks.1.attn.q_rot", config) == ("blocks.1.attn.hook_rot_q", "rot_q1")
    assert aliases("blocks.1.ln1.w", config) == ()


NONE = (
    *("", ".", "blocks", "blocks.0", "blocks.9.attn.q", "q_rot", "k"),
    "model.layers.0.self_attn.q_norm",  # in the family's rules, not in this model
)


@pytest.mark.parametrize("typed", NONE)
def test_what_is_no_name_is_none(typed):
    config = model("llama")
    assert canonical(typed, config, sources(config)) is None


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        (
            "transformer.h.1.attn.c_attn",
            "`blocks.1.attn.q`, `blocks.1.attn.k` or `blocks.1.attn.v`",
        ),
        ("h.1.attn.c_attn.bias", "`blocks.1.attn.b_q`, `blocks.1.attn.b_k` or `blocks.1.attn.b_v`"),
        ("blk.1.attn_qkv", "`blocks.1.attn.W_q`, `blocks.1.attn.W_k` or `blocks.1.attn.W_v`"),
    ],
)
def test_a_fused_tensor_is_refused_with_its_parts(fused, parts):
    config = model("gpt2")
    with pytest.raises(UsageError, match="several tensors in one") as caught:
        canonical(fused, config, sources(config))
    assert caught.value.hint == f"use {parts}"


@pytest.mark.parametrize(
    ("typed", "use"),
    [
        ("blocks.1.ln1.hook_normalized", "use `blocks.1.ln1.out`"),
        ("ln_final.hook_normalized", "use `ln_final.out`"),
        ("blocks.1.hook_mlp_in", "use `blocks.1.resid_mid` or `blocks.1.ln2.out`"),
        ("blocks.1.hook_q_input", "use `blocks.1.resid_pre` or `blocks.1.ln1.out`"),
        ("blocks.*.ln2.hook_normalized", "use `blocks.*.ln2.out`"),
        ("blocks.0-1.ln2.hook_normalized", "use `blocks.0-1.ln2.out`"),
    ],
)
def test_a_name_with_two_meanings_says_what_to_use(typed, use):
    with pytest.raises(UsageError, match="in one version of TransformerLens") as caught:
        select(typed, model("llama"))
    assert caught.value.hint.startswith(use)


ABSENT = [
    ("llama", "pos_embed", "it rotates queries and keys instead"),
    ("llama", "hook_pos_embed", "it rotates queries and keys instead"),
    ("gpt2", "blocks.1.attn.hook_rot_q", "no rotation, it has learned positions"),
    ("gpt2", "blocks.*.attn.q_rot", "no rotation"),
    ("gpt2", "blocks.0-1.attn.q_rot", "no rotation"),
    ("llama", "blocks.*.attn.q_norm", "it does not normalize queries and keys"),
    ("gpt2", "blocks.1.mlp.hook_pre_linear", "its feed-forward has no gate"),
    ("llama", "blocks.1.mlp.pre", "its feed-forward is gated"),
    ("gpt2", "lm_head.weight", "the transpose of `embed.W`"),
    ("gpt2", "unembed.W_U", "the transpose of `embed.W`"),
    ("llama", "blocks.1.moe.router_logits", "no mixture of experts"),
    ("llama", "blocks.1.ssm.state", "its mixer is softmax attention"),
    ("llama", "blocks.1.ln1_post.out", "no norm follows"),
    ("llama", "cache.1.conv", "its cache is of keys and values only"),
    ("llama", "blocks.3.attn.q", "its 3 blocks are `blocks.0` to `blocks.2`"),
    ("llama", "blocks.-4.attn.q", "its 3 blocks are `blocks.0` to `blocks.2`"),
    ("llama", "blocks.1-3.attn.q", "its 3 blocks are `blocks.0` to `blocks.2`"),
    ("llama", "cache.3.k", "its 3 blocks are `cache.0` to `cache.2`"),
    ("llama", "model.layers.7.mlp", "its 3 blocks are `blocks.0` to `blocks.2`"),
]


@pytest.mark.parametrize(("family", "typed", "why"), ABSENT)
def test_what_a_model_has_not_got_by_design_says_why(family, typed, why):
    config = model(family)
    with pytest.raises(UsageError) as caught:
        select(typed, config, sources=sources(config))
    assert caught.value.message.startswith(f"this model has no `{typed}`: ")
    assert why in caught.value.message
    assert caught.value.hint


UNKNOWN = [
    ("blocks.1.atn.pattern", "there is no activation or state", "`blocks.1.attn.pattern`"),
    ("blocks.*.atn.pattern", "matches no activation or state", "`blocks.*.attn.pattern`"),
    ("blocks.0-1.attn.patern", "there is no activation or state", "`blocks.0-1.attn.pattern`"),
    ("blocks.1.attn.weights", "there is no activation or state", "`blocks.1.attn.pattern`"),
    ("logit", "there is no activation or state", "`logits`"),
    ("xyzzy", "there is no activation or state", "llmcli shapes --names"),
    ("x*y*z", "matches no activation or state", "llmcli shapes --names"),
    ("resid", "there is no activation or state",
     "did you mean `blocks.*.resid_pre` or `blocks.*.resid_post`?"),
    ("blocks.1.resid", "there is no", "`blocks.1.resid_post`"),
    ("attn.resultt", "there is no activation or state", "did you mean `blocks.*.attn.result`?"),
    ("MLP_out", "there is no activation or state", "did you mean `blocks.*.mlp_out`?"),
    ("resid_pos", "there is no activation or state", "did you mean `blocks.*.resid_post`?"),
    ("attn.patern", "there is no activation or state", "did you mean `blocks.*.attn.pattern`?"),
    ("cache.k", "there is no activation or state", "did you mean `cache.*.k`?"),
    ("blocks.1.resid_pos", "there is no", "did you mean `blocks.1.resid_post`?"),
    ("nonsense", "there is no", "`llmcli shapes --names` has them all"),
    ("blocks.1.attn", "is a part of the model, no tensor", "use `blocks.1.attn.*`"),
    ("blocks.0-1", "is a part of the model", "use `blocks.0-1.*`"),
    ("blocks.1.attn.W_q", "is a parameter, not an activation or a state", "for example"),
    ("blocks.*.attn.W_q", "is a parameter, not an activation or a state", "for example"),
    ("embed,,logits", "has an empty name", "for example"),
    ("", "has an empty name", "for example"),
    ("blocks.2-1.attn.q", "begins after its end", "the range is `1-2`"),
    pytest.param("blocks." + "9" * 5000 + ".attn.q", "there is no", "`", id="many-digits"),
]


@pytest.mark.parametrize(("typed", "message", "hint"), UNKNOWN)
def test_an_unknown_name_comes_with_what_is_near(typed, message, hint):
    with pytest.raises(UsageError) as caught:
        select(typed, model("llama"))
    assert f"`{typed}`" in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_names_of_twice_as_many_layers_take_twice_as_many_calls():
    def calls(layers):
        config = variant("llama-gqa3").config(num_hidden_layers=layers)
        count = 0

        def called(frame, event, arg):
            nonlocal count
            count += event == "call"

        sys.setprofile(called)
        try:
            names = Names(config, sources(config))
            assert len(names.select("model.layers.*.self_attn.q_proj")) == layers
            assert names.aliases(f"blocks.{layers - 1}.attn.q")
        finally:
            sys.setprofile(None)
        return count

    assert calls(80) < 2.2 * calls(40)


def test_three_kinds_are_listed_as_people_list_them():
    with pytest.raises(UsageError, match="there is no parameter, activation or state `nope`"):
        select("nope", model("llama"), kinds=("parameter", "activation", "state"))
