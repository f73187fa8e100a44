"""Edits: the pass continues with what they return, and with nothing else changed."""

import pytest
import torch
from covers import KINDS, layers_of, one_each
from small_models import random_model
from zoo import MODELS, keeping_keys

from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.graph.graph import graph
from llmcli.graph.plan import plan
from llmcli.graph.recurrence import Cut
from llmcli.graph.spec import Call
from llmcli.inspect.edits import along
from llmcli.inspect.formulas import formula_checks, formula_inputs
from llmcli.nn.step import Edit, Step
from llmcli.parts import attention

TOKENS = torch.tensor([[5, 17, 3, 17, 42, 8, 30]])


def small(name, dtype=torch.float64):
    return random_model(MODELS[name], dtype)


@pytest.fixture(params=KINDS, scope="module")
def model(request):
    return small(request.param)


def editable(model):
    """The names in execution order, scores and pattern among them."""
    nodes = graph(model.config).nodes
    leaves = ("scale", "result", "logits")
    return [
        name for name, node in nodes.items()
        if name.rpartition(".")[2] not in leaves and not node.tap_only
    ]  # fmt: skip


def values(model, layer):
    """What the layer mixes; another one may have made them."""
    return graph(model.config).mixers[layer].op.value


def run(model, *edits, ids=TOKENS, **options):
    seen = {}
    out = model.decoder(ids, tap=seen.__setitem__, edits=edits, **options)
    return out, seen


def only(rows, fn):
    """What `fn` makes of the tokens at these positions alone."""
    def edited(x, at):
        hit = torch.isin(at, torch.tensor(rows))
        return torch.where(along(hit, x, x.ndim - 2), fn(x.clone()), x)

    return edited


def double(name, rows=None):
    fn = only(rows, lambda x: x * 2) if rows else lambda x, at: x.mul_(2)  # it is given a copy
    return Edit(name=name, fn=fn)


def same(name, rows=None):
    return Edit(name=name, fn=only(rows, torch.clone) if rows else lambda x, at: x.clone())


def test_an_edit_that_changes_nothing_changes_no_bit(model):
    plain, seen = run(model)
    for number, name in enumerate(editable(model)):
        if not graph(model.config).written(name):  # another path: below
            continue
        out, edited = run(model, same(name, [0, 3] if number % 2 else None))
        assert torch.equal(out, plain), name
        assert edited.keys() == seen.keys()
        assert all(torch.equal(edited[one], seen[one]) for one in seen), name
    out, _ = run(model, *map(same, editable(model)))
    torch.testing.assert_close(out, plain, rtol=1e-9, atol=1e-9)


def test_scores_and_pattern_take_the_rows_in_their_layer_only(model, monkeypatch):
    plain, seen = run(model)
    calls = []
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *a, **b: calls.append(1) or attend(*a, **b))
    run(model)
    fused = len(calls)
    for i in keeping_keys(model.config):
        per_layer = fused // len(keeping_keys(model.config))
        name, outs = f"blocks.{i}.attn", []
        for leaves in (["scores"], ["pattern"], ["scores", "pattern"]):
            calls.clear()
            out, edited = run(model, *(same(f"{name}.{leaf}") for leaf in leaves))
            assert len(calls) == fused - per_layer
            assert edited.keys() - seen.keys() == {f"{name}.scores", f"{name}.pattern"}
            torch.testing.assert_close(out, plain, rtol=1e-9, atol=1e-9)
            outs.append(out)
        assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(
    "model", one_each(KINDS, lambda name: layers_of(MODELS[name])), indirect=True
)
def test_what_follows_from_a_doubled_activation_is_what_the_formulas_make_of_it(model):
    """The doubled one itself is twice what its formula says.

    Of the first all formulas are looked at; of others those that read it or something before it,
    whose memory it may lie in: what reads only what came after it does not depend on the edit.
    """
    ids = TOKENS[0].tolist()
    plain, before = run(model)
    nodes, order = graph(model.config).nodes, list(before)
    reads = {one: formula_inputs(model.config, [one]) - {one} for one in order}
    assert formula_checks(model, ids, before, before.keys()).ok
    for name in editable(model):
        if not graph(model.config).written(name) or nodes[name].integer:
            continue  # below
        out, seen = run(model, double(name))
        # a softmax of one score is 1, whatever the score
        layer, leaf = nodes[name].layer, name.rpartition(".")[2]
        alone = layer is not None and model.config.layers[layer].window == 1
        same = alone and leaf.startswith(("q", "k"))
        if leaf == "router_probs":  # of the same experts, weights that are divided by their sum
            part, weight = (nodes[f"blocks.{layer}.moe.expert_{one}"] for one in ("idx", "weight"))
            same = weight.op.renormalized and torch.equal(seen[part.name], before[part.name])
        assert torch.equal(out, plain) is same, name
        # formulas of what is the same memory start from the same inputs once more
        copies = {
            node.name for node in nodes.values()
            if node.shares == name and not isinstance(node.op, Cut)
        }  # fmt: skip
        assert all(torch.equal(seen[one], seen[name]) for one in copies)
        changed = {name, *copies}
        assert list(seen) == order
        for one in order[: order.index(name)]:  # so their formulas need no second look
            assert torch.equal(seen[one], before[one]), (name, one)
        later = {*order[order.index(name) :]} - changed
        if name != order[0]:
            there = changed.union(order[: order.index(name)])
            later = {one for one in later if reads[one] & there}
        if later:
            check = formula_checks(model, ids, seen, later)
            assert check.ok, (name, check.where, check.value)
        halved = seen | {name: seen[name] / 2}
        assert formula_checks(model, ids, halved, [name]).ok, name
        assert not formula_checks(model, ids, seen, [name]).ok, name


def test_doubled_scores_and_patterns_reach_the_values(model):
    ids = TOKENS[0].tolist()
    call = Call(batch=1, tokens=len(ids), past=0, phase="prefill")
    for i in keeping_keys(model.config):
        layer, prefix = model.config.layers[i].attention, f"blocks.{i}.attn"
        scores, pattern, z = (f"{prefix}.{leaf}" for leaf in ("scores", "pattern", "z"))
        for name in (scores, pattern):
            _, seen = run(model, double(name))
            planned = plan(model.config, call, edited=[name])
            assert list(seen) == [spec.name for spec in planned.written]
            right = seen | {scores: seen[scores] / (2 if name == scores else 1)}
            assert formula_checks(model, ids, right, [scores]).ok
            weights = seen[scores].softmax(-1) * (2 if name == pattern else 1)
            if layer.scores.sinks:  # its share of what all scores have together
                sink_H11 = model.decoder.weight(f"{prefix}.sink").tensor[:, None, None]
                weights *= (seen[scores].logsumexp(-1, keepdim=True) - sink_H11).sigmoid()
            torch.testing.assert_close(seen[pattern], weights)
            mixed = weights @ seen[values(model, i)].repeat_interleave(
                layer.heads // layer.kv_heads, 1
            )
            torch.testing.assert_close(seen[z], mixed)
            # what reads it; what follows a doubled one is above
            after = {one for one in seen if z in formula_inputs(model.config, [one])} - {z}
            assert formula_checks(model, ids, seen, after).ok


def test_of_the_rows_named_and_no_others(model):
    _, before = run(model)
    names = [values(model, layer) for layer in keeping_keys(model.config)[-1:]]
    names += [name for name in reversed(list(before)) if name.endswith((".post", ".ssm.x"))][:1]
    for name in ("embed", *names):
        _, seen = run(model, double(name, rows=[1, 4]))
        factor = torch.ones(TOKENS.shape[1], 1, dtype=torch.float64)
        factor[[1, 4]] = 2
        assert torch.equal(seen[name], before[name] * factor)


@pytest.mark.parametrize(
    "leaves", [("attn.scores",), ("attn.v", "attn.q", "attn.z", "mlp_out", "ssm.x")], ids="-".join
)
def test_rows_are_positions_whatever_the_calls_and_the_batch(model, leaves):
    """Whole, in chunks, token by token, and beside a shorter sequence: the same logits."""
    named = [
        next((one for one in editable(model) if one.endswith(f".{leaf}")), None) for leaf in leaves
    ]
    edits = [double(one, rows=[2, 3, 6]) for one in named if one is not None]
    if not edits:
        pytest.skip("no part of that kind")
    whole, _ = run(model, *edits)
    assert not torch.equal(whole, run(model)[0])
    for sizes in ([4, 3], [1] * 7):
        session = Session(model.decoder, 1, 9)
        chunks = TOKENS.split(sizes, 1)
        parts = [session.extend(chunk, logits="all", edits=edits, totals=[7]) for chunk in chunks]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
    session = Session(model.decoder, 2, 9)
    row = TOKENS[0].tolist()
    session.extend([row[:3], row[:5]], edits=edits, totals=[7, 7])
    session.extend([row[3:], row[5:]], edits=edits)
    for logits_V in session.logits_BV:
        torch.testing.assert_close(logits_V, whole[0, -1], rtol=1e-9, atol=1e-9)


def test_the_last_logits_are_at_the_last_position(model):
    last, _ = run(model, double("ln_final.out", rows=[6]), logits="last")
    other, _ = run(model, double("ln_final.out", rows=[5]), logits="last")
    plain, _ = run(model, logits="last")
    assert torch.equal(other, plain)
    assert not torch.equal(last, plain)
    doubled, seen = run(model, double("logits_raw"), logits="last")
    _, before = run(model, logits="last")
    assert torch.equal(seen["logits_raw"], 2 * before["logits_raw"])
    cap, scale = model.config.head.cap, model.config.head.scale
    raw = seen["logits_raw"] * scale
    torch.testing.assert_close(doubled, raw if cap is None else (raw / cap).tanh() * cap)


def test_edited_keys_values_and_latents_enter_the_cache(model):
    kept = {one.holds: one for one in graph(model.config).states.values() if one.cached}
    if not kept:
        pytest.skip("nothing is cached")
    session, seen = Session(model.decoder, 1, 9), {}
    session.extend(TOKENS, tap=seen.__setitem__, edits=[*map(double, kept)])
    for name, state in kept.items():
        cache, axis = session.state.tensors()[state.name], state.axes.index("S") + 1
        assert torch.equal(cache.narrow(axis, 0, 7), seen[name]), name
    first = next(name for name in seen if name in kept)
    assert torch.equal(seen[first], 2 * run(model)[1][first])
    # the step after it, not edited itself, reads them
    apart = Session(model.decoder, 1, 9)
    apart.extend(TOKENS)
    assert not torch.allclose(session.extend([[3]]), apart.extend([[3]]))


def test_several_edits_of_one_name_in_their_order():
    model, add = small("llama"), Edit(name="embed", fn=lambda x, at: x + 1)
    plain = run(model)[1]["embed"]
    assert torch.equal(run(model, add, double("embed"))[1]["embed"], 2 * (plain + 1))
    assert torch.equal(run(model, double("embed"), add)[1]["embed"], 2 * plain + 1)


@pytest.mark.parametrize("tap", [None, lambda *named: None])
def test_an_activation_that_nobody_edits_is_emitted_as_itself(tap):
    x = torch.ones(1, 1, 2)
    assert Step([0], 1, [1], {}, device=torch.device("cpu"), tap=tap).emit("embed", x) is x


@pytest.mark.parametrize(("name", "message", "hint"), [
    ("blocks.0.ln1.scale", "`{}` is only shown", "edit `blocks.0.resid_pre`"),
    ("ln_final.scale", "`{}` is only shown", "edit `blocks.1.resid_post`"),
    ("blocks.1.attn.result", "`{}` is only shown", "`blocks.1.attn.z`"),
    ("logits", "`{}` is only shown", "edit `logits_raw`"),
    ("blocks.2.attn.q", "no activation `{}`", "llmcli shapes"),
    ("blocks.0.attn.W_q", "no activation `{}`", "llmcli shapes"),
])  # fmt: skip
def test_what_the_pass_does_not_continue_with_is_refused(name, message, hint):
    session = Session(small("llama").decoder, 1, 9)
    with pytest.raises(UsageError, match=message.format(name)) as caught:
        session.extend(TOKENS, edits=[double(name)])
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
    assert session.lengths == [0]


def test_every_other_activation_is_refused(model):
    for name in graph(model.config).nodes.keys() - set(editable(model)):
        with pytest.raises(UsageError, match="cannot be edited"):
            run(model, same(name))


@pytest.mark.parametrize(("fn", "message"), [
    (lambda x, at: x[:, :3], r"turned \[1, 7, 16\] torch.float64 on cpu into \[1, 3, 16\]"),
    (lambda x, at: x.float(), "into .* torch.float32 on cpu"),
])  # fmt: skip
def test_an_edit_returns_a_tensor_like_its_input(fn, message):
    with pytest.raises(ValueError, match=message):
        run(small("llama"), Edit(name="embed", fn=fn))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_edits_at_other_dtypes(dtype):
    model = small("llama", getattr(torch, dtype))
    plain, _ = run(model)
    out, _ = run(model, *(same(name) for name in editable(model) if "attn.scores" not in name
                          and "attn.pattern" not in name))  # fmt: skip
    assert torch.equal(out, plain)
    out, seen = run(model, same("blocks.0.attn.scores"))
    assert seen["blocks.0.attn.z"].dtype == model.dtype
    assert seen["blocks.0.attn.scores"].dtype == torch.float32
    torch.testing.assert_close(out, plain, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("name", ["mamba-2", "gated deltanet"])
def test_in_float32_what_follows_a_convolution_is_made_of_the_edited_one(name):
    """The kernel gives the convolution and its SiLU together."""
    model = small(name, torch.float32)
    _, plain = run(model)
    conv = next(one for one in plain if one.endswith(".conv"))
    _, seen = run(model, double(conv))
    right = torch.nn.functional.silu(2 * plain[conv])
    torch.testing.assert_close(seen[conv.replace(".conv", ".act")], right)


def test_tokens_pass_the_experts_that_an_edit_chooses():
    model = small("experts")
    name, ids = "blocks.0.moe.expert_idx", TOKENS[0].tolist()
    _, before = run(model)

    def others(chosen):
        return torch.tensor([4, 1]).expand_as(chosen).clone()

    _, seen = run(model, Edit(name=name, fn=only([2], others)))
    right = before[name].clone()
    right[0, 2] = torch.tensor([4, 1])
    assert torch.equal(seen[name], right)
    check = formula_checks(model, ids, seen, seen.keys() - {name})
    assert check.ok, (check.where, check.value)
    assert not formula_checks(model, ids, seen, [name]).ok
    assert not torch.equal(seen["blocks.0.mlp_out"][0, 2], before["blocks.0.mlp_out"][0, 2])
    assert torch.equal(seen["blocks.0.mlp_out"][0, :2], before["blocks.0.mlp_out"][0, :2])
