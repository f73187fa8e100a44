"""What it is, its rows, and what it is to others.

Letters: T tokens, S keys, D width, H heads, dv numbers of a head.
"""

from dataclasses import dataclass

from llmcli.graph.node import Kernel
from llmcli.graph.ops import Mix, Opaque
from llmcli.graph.parts.registry import Part
from llmcli.graph.rows import Rows

HERE = "unplanned.running_mean"


@dataclass(frozen=True, kw_only=True)
class RunningMeanConfig:
    """`A[t,s] = λ^(t−s) / Σ λ^(t−s)` over the tokens so far; a λ for each head, `sigmoid(a)`."""

    heads: int
    size: int


_ROWS = """
    v        V  H T dv  qkv        values
    pattern  A  H T S   scan wide  how much every token counts in the mean
    sum      N  H T dv  scan wide  the decayed sum
    count    n  H T 1   scan wide  the decayed count
    z        C  H T dv  scan       the mean
    o        T  T D     out
    W_v      a projection
    W_o      a projection
    a        the decays
"""


def graph(c, site):
    r = Rows(site.name, _ROWS, "mixers", {"H": c.heads, "dv": c.size}, layer=site.layer)
    v = r.project("v", site.source)
    decays = r.parameter("a", "H", "sum", wide=True)

    def recurrence(leaf, text, function):
        return r.node(leaf, Opaque(
            text=text, evaluate=f"{HERE}.evaluation:{function}", sources=(v,), parameters=(decays,)
        ))  # fmt: skip

    pattern = recurrence("pattern", "λ^(t−s) / Σ λ^(t−s)", "pattern")
    recurrence("sum", "λ N[t−1] + V", "summed")
    recurrence("count", "λ n[t−1] + 1", "counted")
    z = r.node("z", Mix(pattern=pattern, value=v, query=v, group=1, window=None))
    r.output(site, "the running mean", "o", z, over="H·dv")
    for leaf, axes in (("sum", "H dv"), ("count", "H 1")):
        formula, words = f"the last row of {leaf}", f"the {leaf} so far"
        r.state(leaf, axes, leaf, "z", formula, words, wide=True)
    return r.graph(Kernel(fuses=(pattern,)))


PART = Part(
    prefix="mean", noun="the running mean", mixes=True, graph=graph,
    foreign="values_proj  mean.v mean.W_v",
    facts=lambda c: {"kind": "running mean", "details": (f"{c.heads} decays",)},
)  # fmt: skip
