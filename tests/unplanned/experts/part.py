"""`Y = Σ_e P[e] · SiLU(X W_in[e]) W_out[e]`, P = softmax(X W_router).

Letters: T tokens, D width, E experts, F hidden numbers of each.
"""

from dataclasses import dataclass

from llmcli.graph.node import Node, Parameter, PartGraph
from llmcli.graph.ops import Opaque, Project
from llmcli.parts.registry import Part

HERE = "unplanned.experts"


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """All experts see every token; the router says how much each counts."""

    hidden: int
    experts: int = 2


def graph(c, site):
    p = site.name
    words = site.output("the experts")
    nodes = (
        Node(name=f"{p}.router", letter="R", axes=("T", "E"), words="the router's logits",
             op=Project(source=site.source, weight=f"{p}.W_router", over="D", columns="E"),
             group="ffn_up", layer=site.layer),
        Node(name=f"{p}.share", letter="P", axes=("T", "E"), words="how much each expert counts",
             op=Opaque(sources=(f"{p}.router",), text="softmax(R)",
                       evaluate=f"{HERE}.evaluation:share"),
             group="ffn_act", layer=site.layer, wide=True),
        Node(name=f"{p}.hidden", letter="L", axes=("E", "T", "F"), words="the experts' neurons",
             op=Opaque(sources=(site.source,), parameters=(f"{p}.W_in",), text="SiLU(X W_in[e])",
                       evaluate=f"{HERE}.evaluation:hidden", multiplies="E·D·F"),
             group="ffn_act", layer=site.layer),
        Node(name=site.makes, letter=site.letter, axes=("T", "D"), words=words, group="ffn_down",
             op=Opaque(sources=(f"{p}.share", f"{p}.hidden"), parameters=(f"{p}.W_out",),
                       text="Σ_e P[e] · L[e] W_out[e]", evaluate=f"{HERE}.evaluation:mixed",
                       multiplies="E·D·F"),
             layer=site.layer, wide=True),
    )  # fmt: skip
    axes = (("router", ("D", "E"), f"{p}.router"), ("in", ("E", "D", "F"), f"{p}.hidden"),
            ("out", ("E", "F", "D"), site.makes))  # fmt: skip
    parameters = tuple(
        Parameter(name=f"{p}.W_{leaf}", axes=of, makes=makes, words="weights of the experts",
                  kind="mlp", letter=f"W_{leaf}", layer=site.layer, turned=True)
        for leaf, of, makes in axes
    )  # fmt: skip
    return PartGraph(nodes=nodes, parameters=parameters, sizes={"E": c.experts, "F": c.hidden})


PART = Part(
    prefix="experts", noun="the experts", mixes=False, graph=graph,
    facts=lambda c: {"details": (f"{c.experts} experts of {c.hidden}",)},
    forward=f"{HERE}.forward:Experts",
)  # fmt: skip
