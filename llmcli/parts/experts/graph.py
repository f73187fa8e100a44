"""The mixture of experts: router, choice, the chosen experts' products, and the shared expert.

Letters: T tokens, D width, E experts, K chosen ones, F neurons of one, Fs of the shared expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmcli.graph.node import Absent, Node, Parameter, PartGraph, Site
from llmcli.graph.ops import Activate, Gate, Op, Project
from llmcli.graph.routing import Choose, ExpertProject, Share, SumExperts, Weigh
from llmcli.parts.experts.config import ExpertsConfig, RoutingConfig, SharedConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.mlp.graph import Role, mlp_graph
from llmcli.parts.norm.config import NormConfig
from llmcli.parts.norm.graph import norm_graph
from llmcli.records.numbers import best_groups

_WEIGHTS = {  # words of the experts' matrices and of their biases
    "gate": ("projections to the gates of each expert's hidden layer",
             "biases of each expert's gates"),
    "up": ("projections to the neurons of each expert's hidden layer",
           "biases of each expert's neurons"),
    "down": ("projections of each expert's hidden layer back to the width",
             "biases of each expert's output"),
}  # fmt: skip
_SHARED = Role(
    axis="Fs", mark="ₛ", groups=("shared",) * 3, noun="the shared expert", kind="mlp", known=False,
)  # fmt: skip


def experts_graph(c: ExpertsConfig, site: Site) -> PartGraph:
    """`router_…` and `expert_…` `[B, T, E or K]`, hidden layers of each pair `[B, K, T, F]`."""
    p = site.name
    shared = None if c.shared is None else _shared(c.shared, c, site)
    words, theirs = site.output("the mixture of experts", "hook_mlp_out", "mlp.hook_out")
    also = None if shared is None else f"{p}.shared_out"
    out = Node(
        name=site.makes, letter=site.letter, axes=("T", "D"), words=words, group="experts",
        op=SumExperts(share=f"{p}.expert_weight", value=f"{p}.expert_out", also=also),
        layer=site.layer, wide=True, theirs=() if site.second else theirs,
    )  # fmt: skip
    own = PartGraph(nodes=()) if shared is None else shared
    norm, (axis, _) = _router_norm(c.routing.norm, site), _own_letters(site)
    return PartGraph(
        nodes=(*norm.nodes, *_routing(c.routing, site), *_experts(c, site), *own.nodes, out),
        parameters=(*norm.parameters, *_parameters(c, site), *own.parameters),
        sizes={"E": c.experts, "K": c.routing.chosen, axis: c.hidden, **own.sizes},
        documents={"E": "E", "K": "K", axis: axis.replace("e", "ₑ"), **own.documents},
        absent=tuple(_absent(c)),
        entering=() if site.second else ("mlp.hook_in",),
        similar=(
            (r"(gate|up)_proj", (rf"{p}.\1", rf"{p}.W_\1")),
            (r"down_proj", (f"{p}.expert_out", f"{p}.W_down")),
            (r"mlp\.gate|block_sparse_moe\.gate|ffn_gate_inp",
             (f"{p}.router_logits", f"{p}.W_router")),
        ),
    )  # fmt: skip


def _router_norm(norm: NormConfig | None, site: Site) -> PartGraph:
    """The router's norm, if its input differs from the experts'."""
    if norm is None:
        return PartGraph(nodes=())
    words = ("the router's norm", "the residual stream, normalized, as it enters the router", "")
    found = norm_graph(
        norm, f"{site.name}.router_norm", site.stream, "Tᵣ", words, layer=site.layer
    )
    wide = tuple(replace(one, wide=True) for one in found.parameters)
    return replace(found, parameters=wide)


def _routing(r: RoutingConfig, site: Site) -> Iterator[Node]:
    """Logits and scores of all experts, the indices of the chosen ones, and their weights."""
    p, after = site.name, r.scores == "softmax of the chosen"

    def node(leaf: str, letter: str, axis: str, op: Op, words: str) -> Node:
        return Node(
            name=f"{p}.{leaf}", letter=letter, axes=("T", axis), op=op, words=words,
            group="router", layer=site.layer, wide=True, integer=isinstance(op, Choose),
        )  # fmt: skip

    logits = Project(
        source=site.source if r.norm is None else f"{p}.router_norm.out",
        weight=f"{p}.W_router", bias=f"{p}.b_router" if r.bias else None, over="D", columns="E",
    )  # fmt: skip
    yield node("router_logits", "R", "E", logits, "the router's logits")
    scores = f"{p}.router_logits"
    if r.scores != "softmax of the chosen":
        share = Share(source=scores, function=r.scores)
        scores = f"{p}.router_probs"
        yield node("router_probs", "P", "E", share, "the scores of the experts")
    choose = Choose(
        source=scores, count=r.chosen, groups=r.groups, kept=r.kept_groups,
        best=r.group_best, correction=f"{p}.b_choice" if r.correction else None,
    )  # fmt: skip
    yield node("expert_idx", "e", "K", choose, "the indices of the chosen experts")
    weigh = Weigh(
        source=scores, chosen=f"{p}.expert_idx", renormalized=r.renormalized, softmax=after,
        scale=r.scale, least=r.least, factors=f"{p}.expert_factor" if r.factors else None,
    )  # fmt: skip
    yield node("expert_weight", "g", "K", weigh, "the weights of the chosen experts")


def _own_letters(site: Site) -> tuple[str, str]:
    """The axis of neurons, and the suffix of letters of hidden layers."""
    return ("Fe", "ₑ") if site.second else ("F", "")


def _experts(c: ExpertsConfig, site: Site) -> Iterator[Node]:
    """A feed-forward, gated or not, for each pair of a token and an expert."""
    p, (hidden, mark) = site.name, _own_letters(site)

    def node(leaf: str, letter: str, axis: str, op: Op, words: str, *, wide: bool = False) -> Node:
        return Node(
            name=f"{p}.{leaf}", letter=letter, axes=("K", "T", axis), op=op, words=words,
            group="experts", layer=site.layer, wide=wide,
        )  # fmt: skip

    def enter(leaf: str) -> ExpertProject:
        return ExpertProject(
            source=site.source, weight=f"{p}.W_{leaf}", chosen=f"{p}.expert_idx", over="D",
            columns=hidden, by_token=True, bias=f"{p}.b_{leaf}" if c.bias else None,
            fused=f"{p}.gate_up" if c.gated else "",
        )  # fmt: skip

    leave = ExpertProject(
        source=f"{p}.post", weight=f"{p}.W_down", chosen=f"{p}.expert_idx", over=hidden,
        columns="D", by_token=False, bias=f"{p}.b_down" if c.bias else None,
    )  # fmt: skip
    post = "the hidden layers as they enter the last projections"
    limit = None if c.clamp is None else c.clamp.limit
    act = Activate(
        source=f"{p}.gate" if c.gated else f"{p}.pre", function=c.activation, limit=limit
    )
    if c.gated:
        yield node("gate", f"G{mark}", hidden, enter("gate"),
                   "the gates before their activation function")  # fmt: skip
        yield node("up", f"U{mark}", hidden, enter("up"), "the neurons that the gates multiply")
        yield node("act", f"Activation(G{mark})", hidden, act,
                   "the gates after their activation function")  # fmt: skip
        gate = Gate(act=f"{p}.act", up=f"{p}.up", clamp=c.clamp)
        yield node("post", f"L{mark}", hidden, gate, post)
    else:
        yield node("pre", f"U{mark}", hidden, enter("up"),
                   "the neurons before their activation function")  # fmt: skip
        yield node("post", f"L{mark}", hidden, act, post)
    yield node("expert_out", "O", "D", leave, "the outputs of the chosen experts", wide=True)


def _shared(s: SharedConfig, c: ExpertsConfig, site: Site) -> PartGraph:
    """The shared expert, times `σ` of a logit if weighed."""
    p = site.name
    makes = f"{p}.shared.out" if s.weighed else f"{p}.shared_out"
    own = Site(
        name=f"{p}.shared", source=site.source, stream=site.stream, makes=makes,
        letter="Oₛ" if s.weighed else "Z", adds=False, layer=site.layer, width=site.width,
        learned_positions=False,
    )  # fmt: skip
    config = MlpConfig(hidden=s.hidden, activation=c.activation, gated=c.gated)
    mlp = mlp_graph(config, own, _SHARED)
    found = PartGraph(
        nodes=mlp.nodes, parameters=mlp.parameters, sizes=mlp.sizes, documents=mlp.documents
    )
    if not s.weighed:
        return found

    def node(leaf: str, letter: str, axis: str, op: Op, words: str) -> Node:
        return Node(
            name=f"{p}.{leaf}", letter=letter, axes=("T", axis), op=op, words=words,
            group="shared", layer=site.layer, wide=True,
        )  # fmt: skip

    logit = Project(source=site.source, weight=f"{p}.W_shared", over="D", columns="1")
    nodes = (
        node("shared_logit", "Rₛ", "1", logit, "the logit of the shared expert's weight"),
        node("shared_weight", "gₛ", "1", Share(source=f"{p}.shared_logit", function="sigmoid"),
             "the weight of the shared expert"),
        node("shared_out", "Z", "D", Gate(act=f"{p}.shared_weight", up=makes),
             "the weighted output of the shared expert"),
    )  # fmt: skip
    weight = Parameter(
        name=f"{p}.W_shared", axes=("D", "1"), makes=f"{p}.shared_logit", kind="mlp",
        words="projection to the shared expert's weight", letter="W_shared", layer=site.layer,
        turned=True,
    )  # fmt: skip
    return PartGraph(
        nodes=(*found.nodes, *nodes), parameters=(*found.parameters, weight), sizes=mlp.sizes,
        documents=mlp.documents,
    )  # fmt: skip


def _parameters(c: ExpertsConfig, site: Site) -> Iterator[Parameter]:
    """`W_router` `[D, E]`, biases `[E]`, `W_gate` and `W_up` `[E, D, F]`, `W_down` `[E, F, D]`.

    And the experts' biases, `[E, F]` and `[E, D]`. `W_gate` exists only with gates.
    """
    p, (hidden, mark) = site.name, _own_letters(site)
    yield Parameter(
        name=f"{p}.W_router", axes=("D", "E"), makes=f"{p}.router_logits", kind="mlp",
        words="projection to the router's logits", letter="W_router", layer=site.layer, turned=True,
    )  # fmt: skip
    vectors = (
        ("b_router", "b_router", "router_logits", "bias of the router", c.routing.bias),
        ("b_choice", "b_choice", "expert_idx", "correction of the choice", c.routing.correction),
        ("expert_factor", "c", "expert_weight", "the factors on the experts' weights",
         c.routing.factors),
    )  # fmt: skip
    for leaf, letter, makes, words, there in vectors:
        if there:
            yield Parameter(
                name=f"{p}.{leaf}", axes=("E",), makes=f"{p}.{makes}", words=words, kind="mlp",
                letter=letter, layer=site.layer, wide=leaf != "b_router",
            )  # fmt: skip
    up = f"{p}.up" if c.gated else f"{p}.pre"
    made = {"gate": f"{p}.gate", "up": up, "down": f"{p}.expert_out"}
    for leaf, (words, bias) in _WEIGHTS.items():
        if leaf == "gate" and not c.gated:
            continue
        fused = c.gated and leaf != "down"
        yield Parameter(
            name=f"{p}.W_{leaf}", axes=("E", hidden, "D") if leaf == "down" else ("E", "D", hidden),
            makes=made[leaf], words=words, kind="mlp", letter=f"W_{leaf}{mark}", layer=site.layer,
            turned=True, shares=f"{p}.W_gate_up" if fused else None,
        )  # fmt: skip
        if c.bias:
            yield Parameter(
                name=f"{p}.b_{leaf}", axes=("E", "D" if leaf == "down" else hidden),
                makes=made[leaf], words=bias, kind="mlp", letter=f"b_{leaf}{mark}",
                layer=site.layer, shares=f"{p}.b_gate_up" if fused else None, dense=True,
            )  # fmt: skip


def experts_facts(c: ExpertsConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    r = c.routing
    choice = f"{r.scores}{', renormalized' if r.renormalized else ''}"
    if r.groups > 1:
        choice += f", {best_groups(r.kept_groups, r.groups, r.group_best)}"
    if r.factors:
        choice += ", times a factor of each expert"
    details = [f"{r.chosen} of {c.experts} experts of {c.hidden} ({choice})"]
    if not c.gated:
        details.append(f"{c.activation} without gates")
    if r.norm is not None:
        details.append("a router with a separate norm")
    if c.clamp is not None:
        details.append(f"gates clamped at {c.clamp.limit:g}")
    if c.shared is not None:
        weighed = " with a learned weight" if c.shared.weighed else ""
        details.append(f"a shared expert of {c.shared.hidden}{weighed}")
    return {"activation": c.activation, "gated": c.gated, "details": tuple(details)}


def _absent(c: ExpertsConfig) -> Iterator[Absent]:
    if c.shared is None:
        yield Absent(names=r"moe\.(W_)?shared", why="it has no shared expert")
    elif not c.shared.weighed:
        why = "its shared expert has no weight of its own, all of it is added"
        yield Absent(names=r"moe\.(W_shared|shared_logit|shared_weight|shared\.out)$", why=why)
    if c.routing.scores == "softmax of the chosen":
        why = "logits choose, and only the chosen ones are normalized"
        yield Absent(names=r"moe\.router_probs$", why=why)
    if c.routing.norm is None:
        yield Absent(names=r"moe\.router_norm\b", why="its router reads what its experts read")
    if not c.routing.factors:
        yield Absent(names=r"moe\.expert_factor$", why="its experts have no factors")
    if c.gated:
        why = "its experts are gated, the neurons are `moe.gate`, `up`, `act` and `post`"
        yield Absent(names=r"moe\.(shared\.)?pre$", why=why)
    else:
        why = "its experts have no gates, the neurons are `moe.pre` and `moe.post`"
        yield Absent(names=r"moe\.(shared\.)?(gate|up|act|W_gate|b_gate)$", why=why)
    yield Absent(names=r"moe\.b_(gate|up|down)$", why="its experts have no biases")
    yield Absent(names=r"moe\.b_\w+$", why="its router has no such bias")
