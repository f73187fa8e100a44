"""The same of models whose matrices are kept in blocks: the formulas with what their products read.

Activations are rounded to 16 bits, keys and values to bfloat16, and all sums are float32: every
activation has to be what its node makes of those before it, rounded so, and nothing else.
"""

import pytest
import torch
from decoder_parameters import packed_model
from needs import needs_kernels
from small_models import ids
from test_graph import FAULTS, TOKENS, planted, run
from zoo import IN_BLOCKS

from llmcli.commands.explain.measure import Values
from llmcli.engine.session import Session
from llmcli.evaluate.rule import concatenated, settled
from llmcli.evaluate.rules import rules
from llmcli.graph.graph import Graph
from llmcli.graph.ops import Project
from llmcli.inspect.formulas import worst_number
from llmcli.inspect.kernel import Kernel
from llmcli.inspect.passes import filled
from llmcli.nn.step import Edit
from llmcli.weights.packed import Packed

pytestmark = needs_kernels

HALF_ULP = 2.0**-24
# What a number of a sum is rounded before it is added: the activation's step (twice: once in the
# kernel, once in `seen`), the scale and the step, their product; a minimum may be as large as the
# numbers of its run twice over.
PER_TERM = 4 * 3


def kernel_of(model, nodes, emitted=None, *, prompt_tokens=TOKENS):
    """With what a pass emits, or did."""
    prompt, found = run(model) if emitted is None else (tuple(ids(1, TOKENS)[0].tolist()), emitted)
    made = rules(nodes.values(), Graph(model.config).letter)
    return Kernel(
        model, made, prompt, [""] * TOKENS, emitted=found, positions=range(TOKENS),
        prompt_tokens=prompt_tokens, alone=[prompt_tokens == 1] * TOKENS,
    )  # fmt: skip


def wrong(model, nodes):
    """Activations that the nodes do not make of what was emitted, by how much of the bound."""
    kernel = kernel_of(model, nodes)
    found = {}
    for name, rule in kernel.rules.items():
        assert rule.tensor(kernel).shape == kernel.kernel(name).shape, name
        share = worst_number(kernel, name).share
        if not share <= 1:
            found[name] = share
    return found


def wrong_in_a_chain(model, nodes):
    """The same from the token ids on, each roundings' choice verified and then the kernel's.

    Of tokens for which no gated norm divides by what is left where two sums cancel.
    """
    prompt = tuple(ids(1, TOKENS, seed=1)[0].tolist())
    made = rules(nodes.values(), Graph(model.config).letter)
    with torch.inference_mode():
        values = Values(model, made, model.tokens(prompt), target="logits", depth=None)
        found = {}
        for name in made:
            if not values.graph.written(name):
                continue
            ours, theirs = values[name], values.kernel(name)
            terms = made[name].magnitudes(values)  # sums may cancel
            size = theirs.abs().maximum(terms).amax(-1, keepdim=True) + values.least
            share = float(((ours - theirs).abs() / values.allowed(name, size)).max())
            if not share <= 1:
                found[name] = share
    return found


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_what_a_packed_model_emits_is_what_the_nodes_make(name):
    """A product is off by no more than its float32 sums can be."""
    model = packed_model(name)
    graph = Graph(model.config)
    _, emitted = run(model)
    assert list(filter(graph.written, graph.nodes)) == list(emitted)
    for one, tensor in emitted.items():
        wanted = torch.bfloat16 if one in graph.cached else torch.float32
        assert tensor.dtype == (torch.int64 if graph[one].integer else wanted), one
    assert wrong(model, graph.nodes) == {}
    assert wrong_in_a_chain(model, graph.nodes) == {}
    kernel, seen = kernel_of(model, graph.nodes), 0
    for name, rule in kernel.rules.items():
        weight = isinstance(rule.op, Project) and model.decoder.weight(rule.op.weight)
        if not isinstance(weight, Packed):
            continue
        seen += 1
        ours, theirs = rule.tensor(kernel), kernel.kernel(name)
        bound = (weight.additions + PER_TERM) * HALF_ULP * rule.magnitudes(kernel)
        ours = kernel.as_kept(name, ours, theirs, bound)
        assert ((ours - theirs).abs() <= bound).all(), name
    assert seen


@pytest.mark.parametrize("fault", [one for one, row in FAULTS.items() if row[0] in IN_BLOCKS])
def test_a_fault_in_the_graph_is_seen_where_it_is(fault):
    model = packed_model(FAULTS[fault][0])
    name, nodes = planted(fault, model.config)
    order = list(nodes)
    assert name in wrong(model, {one: nodes[one] for one in order[: order.index(name) + 1]})
    first = name
    if nodes[name].tap_only:  # nothing follows from it
        first = None
    elif not Graph(model.config).written(name):  # the map, of which z is made
        first = f"{name.rpartition('.')[0]}.z"
    assert next(iter(wrong_in_a_chain(model, nodes)), None) == first


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_a_tap_changes_no_bit_and_rows_of_a_batch_are_those_alone(name):
    model = packed_model(name)
    prompts = ids(3, TOKENS)
    torch.set_num_threads(1)  # attention sums in an order that depends on what others are given
    untapped = model.decoder(prompts)
    seen = {}
    assert torch.equal(model.decoder(prompts, tap=seen.__setitem__), untapped)
    if "latent" in name and "16 bits" in name:  # more rows of float32 are multiplied in another way
        return
    for row in range(3):
        alone = {}
        model.decoder(prompts[row : row + 1], tap=alone.__setitem__)
        assert all(torch.equal(seen[one][row], alone[one][0]) for one in alone)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_tokens_one_by_one_are_what_the_formulas_make_of_them(name):
    """The cache holds what was emitted, and each call is the formulas' of its own inputs.

    Numbers of two passes differ by more than roundings where one of float32 decided one of 16 bits:
    so much is said of their distance, and the rest is proven of each pass.
    """
    model = packed_model(name)
    graph, prompt = Graph(model.config), ids(1, TOKENS)
    whole, pieces = {}, {}
    logits = model.decoder(prompt, tap=whole.__setitem__)[0]
    session = Session(model.decoder, 1, TOKENS)
    for at in range(TOKENS):
        session.extend(
            prompt[:, at : at + 1].tolist(), tap=lambda n, x: pieces.setdefault(n, []).append(x)
        )
    emitted = {one: torch.cat(parts, -2)[0] for one, parts in pieces.items()}
    kernel = kernel_of(model, graph.nodes, emitted, prompt_tokens=1)
    for one in emitted:
        assert worst_number(kernel, one).share <= 1, one
    for state in graph.states.values():
        held = session.state.tensors()[state.name][0]
        if "S" in state.axes:
            assert torch.equal(filled(state, held, TOKENS), emitted[state.holds])
    apart = (emitted["logits"] - logits).norm(dim=-1) / logits.norm(dim=-1)
    assert apart.max() < 2.0**-8  # a rounding of the cache


@pytest.mark.parametrize("name", ["llama", "llama in K blocks", "gpt2"])
def test_an_edit_is_what_the_formulas_make_of_it(name):
    model = packed_model(name)
    graph, prompt = Graph(model.config), ids(1, TOKENS)
    plain = model.decoder(prompt)
    for leaf in ("resid_pre", "attn.q", "attn.v", "attn.z", "mlp.post", "attn_out"):
        one, tapped = f"blocks.1.{leaf}", {}
        same = Edit(name=one, fn=lambda x, at: x)
        assert torch.equal(model.decoder(prompt, edits=[same]), plain)
        double = Edit(name=one, fn=lambda x, at: 2 * x)
        model.decoder(prompt, edits=[double], tap=tapped.__setitem__)
        emitted = {name: tensor[0] for name, tensor in tapped.items()}
        kernel = kernel_of(model, graph.nodes, emitted)
        shared = {node.name for node in graph.nodes.values() if node.shares == one} | {one}
        off = {n for n in emitted if not worst_number(kernel, n).share <= 1}
        assert one in off <= shared, leaf


def test_a_rounding_is_the_others_where_it_is_as_good_and_only_there():
    weight = Packed("Q8_0", (1, 32), torch.device("cpu"), digits=1)
    x = torch.linspace(-1.27, 1.27, 32)
    x[:3] = torch.tensor([0.1049999, 0.1050001, 0.104])  # a step is 0.01
    other = x.clone()
    other[:3] = torch.tensor([0.1050001, 0.1049999, 0.106])
    found = settled(x, weight.quantized_input(x), weight.quantized_input(other), 1e-6)
    assert torch.allclose(found[:3], torch.tensor([0.11, 0.1, 0.1]))
    assert torch.equal(found[3:], weight.quantized_input(x)[3:])
    assert concatenated(x[None]).shape == (1, 32)
