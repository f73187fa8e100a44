"""`Y = Σ_e P[e] · SiLU(X W_in[e]) W_out[e]`, P = softmax(X W_router).

Letters: T tokens, D width, E experts, F hidden numbers of each.
"""

from dataclasses import dataclass

from llmcli.graph.ops import Opaque
from llmcli.graph.parts.registry import Part
from llmcli.graph.rows import Rows

HERE = "unplanned.experts"


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """All experts see every token; the router says how much each counts."""

    hidden: int
    experts: int = 2


_ROWS = """
    router    R  T E    ffn_up        the router's logits
    share     P  T E    ffn_act wide  how much each expert counts
    hidden    L  E T F  ffn_act       the experts' neurons
    out       T  T D    ffn_down wide
    W_router  weights of the experts
    W_in      weights of the experts
    W_out     weights of the experts
"""


def graph(c, site):
    r = Rows(site.name, _ROWS, "mlp", {"E": c.experts, "F": c.hidden}, layer=site.layer)
    router = r.project("router", site.source)
    share = r.node("share", Opaque(
        sources=(router,), text="softmax(R)", evaluate=f"{HERE}.evaluation:share"
    ))  # fmt: skip
    enter = r.parameter("W_in", "E D F", "hidden", transposed=True)
    hidden = r.node("hidden", Opaque(
        sources=(site.source,), parameters=(enter,), text="SiLU(X W_in[e])",
        evaluate=f"{HERE}.evaluation:hidden", multiplies="E·D·F",
    ))  # fmt: skip
    leave = r.parameter("W_out", "E F D", site.output, transposed=True)
    mixed = Opaque(
        sources=(share, hidden), parameters=(leave,), text="Σ_e P[e] · L[e] W_out[e]",
        evaluate=f"{HERE}.evaluation:mixed", multiplies="E·D·F",
    )  # fmt: skip
    words = site.words("the experts")
    r.node("out", mixed, name=site.output, letter=site.letter, words=words)
    return r.graph()


PART = Part(
    prefix="experts", noun="the experts", mixes=False, graph=graph,
    facts=lambda c: {"details": (f"{c.experts} experts of {c.hidden}",)},
)  # fmt: skip
