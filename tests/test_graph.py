"""The graph runs: what the decoder emits is what each node makes of the nodes before it.

Over every small model of the zoo, in float64: node by node from what was emitted, and chained
from the token ids. Faults in the graph are seen as those in the decoder are.
"""

from dataclasses import fields, replace

import pytest
import torch
from covers import covered
from small_models import ids, random_decoder, random_model
from zoo import ATTENTION, GATED, MODELS, RMS, block, branch, llama

from llmcli.commands.selftest.measure.arithmetic import deviations
from llmcli.config.attention import RopeConfig
from llmcli.config.embedding import HeadConfig
from llmcli.evaluate.rules import RULES
from llmcli.graph import ops
from llmcli.graph.graph import Graph
from llmcli.graph.ops import Add

TOKENS = 11


def run(model):
    """The prompt, and what a tap sees of it, without a batch axis."""
    prompt, emitted = ids(1, TOKENS), {}

    def tap(name, tensor):
        assert name not in emitted, "emitted twice"
        emitted[name] = tensor[0]

    model.decoder(prompt, tap=tap)
    return tuple(prompt[0].tolist()), emitted


def test_states_of_one_name_are_refused_with_what_they_hold():
    beside = block([branch(ATTENTION), branch(ATTENTION)], branch(GATED))
    with pytest.raises(ValueError, match=r"`blocks\.0\.attn2\.k_rot` are both `cache"):
        random_decoder(llama(beside))


def test_what_would_silently_be_built_otherwise_is_refused():
    """One size of a letter for another; logits that are scaled and capped, as nothing does both."""
    plain = replace(GATED, hidden=GATED.hidden + 2)
    with pytest.raises(ValueError, match="`F` is 30 and 32"):
        random_decoder(llama(block(branch(ATTENTION), branch(GATED), branch(plain))))
    with pytest.raises(ValueError, match="either scaled or capped"):
        HeadConfig(tied=True, scale=2.0, cap=30.0)


@pytest.mark.parametrize("name", covered(MODELS))
def test_groups_of_timing_are_in_the_order_of_execution(name):
    """Norms before the parts, what is added behind them, whatever the layers and their blocks."""
    attention, convolution = ["qkv", "rope", "attention", "out"], ["conv_in", "conv", "conv_out"]
    recurrence = ["linear_in", "conv", "scan", "linear_out"]
    mixers = [attention, convolution]
    if name == "short convolutions":  # its first layer is one
        mixers.reverse()
    if name in ("gated deltanet", "mamba-2", "mamba-2 alone"):
        mixers = [recurrence, attention]
    ffn = ["ffn_up", "ffn_act", "ffn_down", "router", "experts", "shared"]
    order = ["embed", "norm", *mixers[0], *mixers[1], *ffn, "ple", "residual", "head"]
    model = Graph(MODELS[name])
    assert set(model.groups) == {node.group for node in model.nodes.values()} - {"gaps"}
    assert [group for group in order if group in model.groups] == list(model.groups)


def wrong(model, nodes, *, chained):
    """Activations that the nodes do not make, by how many times the bound they are off."""
    prompt, emitted = run(model)
    found = deviations(model, prompt, emitted, nodes, chained=chained)
    return {name: off for name, off in found.items() if not off <= 1}


@pytest.mark.parametrize("name", covered(MODELS))
def test_what_the_decoder_emits_is_what_the_nodes_make(name):
    """Their operations read what comes before them, and every parameter."""
    model = random_model(MODELS[name])
    graph = Graph(model.config)
    emitted = run(model)[1]
    assert list(filter(graph.written, graph.nodes)) == list(emitted)
    assert wrong(model, graph.nodes, chained=False) == {}
    assert wrong(model, graph.nodes, chained=True) == {}
    before, used = set(), set()
    for node in graph.nodes.values():
        assert set(node.op.inputs) <= before, node.name
        before.add(node.name)
        if isinstance(node.op, Add) and node.op.plain and node.op.before:
            parts = sum(emitted[one] for one in node.op.before)
            torch.testing.assert_close(parts, emitted[node.name])
        values = {getattr(node.op, field.name) for field in fields(node.op)
                  if field.name in ("weight", "bias", "table", "correction", "sink",
                                    "factors", "rate")}  # fmt: skip
        used |= values - {None}
    tied = {"head.W"} if MODELS[name].head.tied else set()
    assert used - tied == set(graph.parameters)
    assert all(parameter.output in graph for parameter in graph.parameters.values())
    assert all(state.holds in graph for state in graph.states.values())


def test_every_op_is_evaluated():
    def leaves(op):
        below = op.__subclasses__()
        return {op} if not below else set().union(*map(leaves, below))

    own = {op for op in leaves(ops.Op) if op.__module__.startswith("llmcli.graph.")}
    assert own == set(RULES)


def recurrence(**values):
    """That of a map or of a state, changed."""
    return lambda op: {"of": replace(op.of, **values)}


def scored(**values):
    """Scores with another configuration."""
    return lambda op: {"config": replace(op.config, **values)}


ROPE = RopeConfig(theta=100.0, dims=8)  # of all of a head
# what somebody gets wrong in a graph: the model, the node, and what its op has instead
FAULTS = {
    "scale": ("llama", "attn.scores", scored(scale=8**-0.5 * 1.001)),
    "a window of one more": ("window", "attn.scores", scored(window=5)),
    "no window": ("window", "attn.scores", scored(window=None)),
    "keys mixed, not values": ("one key head", "attn.z", {"value": "blocks.0.attn.k_rot"}),
    "keys before their norm": ("qk norm", "attn.k_rot", {"source": "blocks.0.attn.k"}),
    "theta": ("llama", "attn.q_rot", {"rope": replace(ROPE, theta=101.0)}),
    "all of a head is rotated": ("partial rotation", "attn.k_rot", {"rope": ROPE}),
    "no bias": ("biases and relu", "attn.q", {"bias": None}),
    "a tanh for an erf": ("gpt2 with gelu and shared keys", "mlp.post", {"function": "gelu_tanh"}),
    "gate and up exchanged": (
        "llama", "mlp.post", {"act": "blocks.0.mlp.up", "up": "blocks.0.mlp.gate"}
    ),
    "no sink": ("sinks", "attn.pattern", {"sink": None}),
    "no bound of the gates": ("clamped gates", "mlp.act", {"limit": None}),
    "another bound of the neurons": (
        "clamped gates", "mlp.post", lambda op: {"clamp": replace(op.clamp, limit=0.8)}
    ),
    "no 1 added to the neurons": (
        "clamped gates", "mlp.post", lambda op: {"clamp": replace(op.clamp, offset=0.0)}
    ),
    "a tanh for a sigmoid": ("clamped gates", "mlp.act", {"function": "gelu_tanh"}),
    "eps": ("llama", "ln1.out", {"norm": replace(RMS, eps=1e-4)}),
    "a mean is taken off": ("llama", "ln2.out", {"norm": replace(RMS, kind="layer")}),
    "a convolution of one token less": (
        "short convolutions", "conv.conv", {"source": "blocks.0.conv.x"}
    ),
    "another rate of the decay": (
        "gated deltanet", "linattn.log_decay", {"rate": "blocks.0.linattn.dt_bias"}
    ),
    "no bias of the step size": (
        "gated deltanet", "linattn.dt", {"bias": "blocks.0.linattn.A_log"}
    ),
    "eps of another size": ("gated deltanet", "linattn.k", {"eps": 1e-3}),
    "queries that are not divided": ("gated deltanet", "linattn.q", {"scale": 1.0}),
    "keys where queries are": (
        "gated deltanet", "linattn.q", lambda op: {"cut": replace(op.cut, first=12)}
    ),
    "values of the wrong columns": ("gated deltanet", "linattn.v", {"first": 23}),
    "nothing is taken off": ("gated deltanet", "linattn.pattern", recurrence(plain=True)),
    "heads that are tiled": ("gated deltanet", "linattn.pattern", recurrence(tiled=True)),
    "a map of keys alone": (
        "gated deltanet", "linattn.pattern", recurrence(query="blocks.0.linattn.k")
    ),
    "a state that nothing is taken off": (
        "gated deltanet", "linattn.state", recurrence(plain=True)
    ),
    "a tanh for the gate of the output": (
        "gated deltanet", "linattn.gate_act", {"function": "gelu_tanh"}
    ),
    "not normalized before the gate": (
        "gated deltanet", "linattn.out", {"up": "blocks.0.linattn.z"}
    ),
    "no bound of the step size": ("mamba-2 alone", "ssm.dt", {"most": 9.0}),
    "B and C exchanged": (
        "mamba-2 alone", "ssm.pattern", recurrence(query="blocks.0.ssm.B", key="blocks.0.ssm.C")
    ),
    "heads of other groups": ("mamba-2 alone", "ssm.pattern", recurrence(tiled=True)),
    "no decay": ("mamba-2 alone", "ssm.pattern", recurrence(log_decay="blocks.0.ssm.dt")),
    "the step size is not written": (
        "mamba-2 alone", "ssm.state", recurrence(step="blocks.0.ssm.log_decay")
    ),
    "no skip": ("mamba-2 alone", "ssm.skip", {"weight": "blocks.0.ssm.A_log"}),
    "the gate behind the norm": ("mamba-2 alone", "ssm.out", {"source": "blocks.0.ssm.skip"}),
    "one norm for all groups": ("mamba-2 alone", "ssm.out", {"groups": 1}),
    "the gate before SiLU": ("mamba-2 alone", "ssm.gated", {"act": "blocks.0.ssm.gate"}),
    "no multiplier": ("multipliers", "attn_out", {"scale": 1.0}),
    "no output scale": ("multipliers", "resid_post", {"scale": 1.0}),
    "a branch without its norm": (
        "parallel with one norm", "mlp.up", {"source": "blocks.0.resid_pre"}
    ),
    "not normalized before it is added": (
        "norms after", "attn_out", {"source": "blocks.0.resid_pre"}
    ),
    "weights that are not renormalized": ("experts", "moe.expert_weight", {"renormalized": False}),
    "weights of logits": ("experts", "moe.expert_weight", {"source": "blocks.0.moe.router_logits"}),
    "a sigmoid for a softmax": ("experts", "moe.router_probs", {"function": "sigmoid"}),
    "no correction of the choice": ("experts by groups", "moe.expert_idx", {"correction": None}),
    "the two best of a group": ("experts by the best of a group", "moe.expert_idx", {"best": 2}),
    "all groups": ("experts by groups", "moe.expert_idx", {"groups": 1}),
    "no routed scale": ("experts by groups", "moe.expert_weight", {"scale": 1.0}),
    "no shared expert": ("experts by groups", "mlp_out", {"also": None}),
    "gates of the experts for neurons": ("experts", "moe.up", {"weight": "blocks.0.moe.W_gate"}),
    "experts that are not weighed": ("experts", "mlp_out", {"share": "blocks.0.moe.expert_idx"}),
    "no bias of the router": ("experts after the choice", "moe.router_logits", {"bias": None}),
    "a softmax of all": ("experts after the choice", "moe.expert_weight", {"softmax": False}),
    "values before their norm": (
        "values that are normalized keys", "attn.z", {"value": "blocks.0.attn.v"}
    ),
    "all pairs rotated": ("some pairs of whole heads rotated", "attn.q_rot", {"rope": ROPE}),
    "the embedding for another layer": ("embeddings for each layer", "ple.post", {"item": 1}),
    "no parameter on the output": ("blocks scaled by a parameter", "resid_post", {"weight": None}),
    "the stream without attention": ("llama", "resid_post", lambda op: {"parts": op.parts[:1]}),
}  # fmt: skip


def planted(fault, config):
    """The name of the node, and all nodes, that one with the fault."""
    _, leaf, values = FAULTS[fault]
    nodes, name = dict(Graph(config).nodes), f"blocks.0.{leaf}"
    op = nodes[name].op
    changed = replace(op, **(values(op) if callable(values) else values))
    return name, nodes | {name: replace(nodes[name], op=changed)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_graph_is_seen_where_it_is(fault):
    model = random_model(MODELS[FAULTS[fault][0]])
    name, nodes = planted(fault, model.config)
    order = list(nodes)
    before = {one: nodes[one] for one in order[: order.index(name) + 1]}
    assert list(wrong(model, before, chained=False)) == [name]
    assert list(wrong(model, before, chained=True)) == [name]
