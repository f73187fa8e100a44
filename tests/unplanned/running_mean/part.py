"""What it is, its rows, and what it is to others.

Letters: T tokens, S keys, D width, H heads, dv numbers of a head.
"""

from dataclasses import dataclass

from llmcli.graph.node import Kernel, Node, Parameter, PartGraph, State
from llmcli.graph.ops import Mix, Opaque, Project
from llmcli.parts.registry import Part

HERE = "unplanned.running_mean"


@dataclass(frozen=True, kw_only=True)
class RunningMeanConfig:
    """`A[t,s] = λ^(t−s) / Σ λ^(t−s)` over the tokens so far; a λ for each head, `sigmoid(a)`."""

    heads: int
    size: int


def graph(c, site):
    p = site.name
    words = site.output("the running mean")
    at = {"group": "scan", "layer": site.layer}
    project = Project(
        source=site.source, weight=f"{p}.W_v", over="D", columns="H·dv", heads=c.heads
    )
    recurrence = {"sources": (f"{p}.v",), "parameters": (f"{p}.a",)}
    nodes = (
        Node(name=f"{p}.v", letter="V", axes=("H", "T", "dv"), op=project, words="values",
             group="qkv", layer=site.layer),
        Node(name=f"{p}.pattern", letter="A", axes=("H", "T", "S"), wide=True,
             words="how much every token counts in the mean", **at,
             op=Opaque(text="λ^(t−s) / Σ λ^(t−s)", evaluate=f"{HERE}.evaluation:pattern",
                       **recurrence)),
        Node(name=f"{p}.sum", letter="N", axes=("H", "T", "dv"), wide=True, words="the decayed sum",
             op=Opaque(text="λ N[t−1] + V", evaluate=f"{HERE}.evaluation:summed", **recurrence),
             **at),
        Node(name=f"{p}.count", letter="n", axes=("H", "T", "1"), wide=True,
             words="the decayed count", **at,
             op=Opaque(text="λ n[t−1] + 1", evaluate=f"{HERE}.evaluation:counted", **recurrence)),
        Node(name=f"{p}.z", letter="C", axes=("H", "T", "dv"), words="the mean", **at,
             op=Mix(pattern=f"{p}.pattern", value=f"{p}.v", query=f"{p}.v", group=1, window=None)),
        Node(name=site.makes, letter=site.letter, axes=("T", "D"), words=words, group="out",
             op=Project(source=f"{p}.z", weight=f"{p}.W_o", over="H·dv", columns="D"),
             layer=site.layer, wide=True),
    )  # fmt: skip
    matrices = (("v", ("D", "H·dv"), f"{p}.v"), ("o", ("H·dv", "D"), site.makes))
    parameters = (
        *(
            Parameter(name=f"{p}.W_{leaf}", axes=axes, makes=makes, words="a projection",
                      kind="mixers", letter=f"W_{leaf}", layer=site.layer, turned=True)
            for leaf, axes, makes in matrices
        ),
        Parameter(name=f"{p}.a", axes=("H",), makes=f"{p}.sum", words="the decays", kind="mixers",
                  letter="a", layer=site.layer, wide=True),
    )  # fmt: skip
    states = tuple(
        State(name=f"cache.{site.layer}.{leaf}", axes=axes, holds=f"{p}.{leaf}", before=f"{p}.z",
              formula=f"the last row of {leaf}", words=f"the {leaf} so far", layer=site.layer,
              wide=True)
        for leaf, axes in (("sum", ("H", "dv")), ("count", ("H", "1")))
    )  # fmt: skip
    return PartGraph(
        nodes=nodes, parameters=parameters, states=states, sizes={"H": c.heads, "dv": c.size},
        kernels=(Kernel(covers=(f"{p}.pattern",)),),
    )


PART = Part(
    prefix="mean", noun="the running mean", mixes=True, graph=graph,
    foreign="values_proj  mean.v mean.W_v",
    facts=lambda c: {"kind": "running mean", "details": (f"{c.heads} decays",)},
    forward=f"{HERE}.forward:RunningMean",
)  # fmt: skip
