"""The mixture of experts: router, choice, the chosen experts' products, and the shared expert.

Letters: T tokens, D width, E experts, K chosen ones, F neurons of one, Fs of the shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcli.config.experts import ExpertsConfig, SharedConfig
from llmcli.config.mlp import MlpConfig
from llmcli.graph.node import PartGraph, Site
from llmcli.graph.ops import Gate
from llmcli.graph.parts.mlp import hidden_rows, mlp_graph
from llmcli.graph.parts.norm import norm_graph
from llmcli.graph.routing import Choose, ExpertProject, Share, SumExperts, Weigh, WeighInput
from llmcli.graph.rows import Rows
from llmcli.records.numbers import best_groups

_ROWS = """
    router_logits  R   T E  router wide  the router's logits
    router_probs   P   T E  router wide  the scores of the experts
    expert_idx     e   T K  router wide integer  the indices of the chosen experts
    expert_weight  g   T K  router wide  the weights of the chosen experts
    expert_in      Xₑ  K T D  experts  the inputs of the chosen experts, times their weights
    gate           G{mark}  K T {F}  experts  the gates before their activation function
    up             U{mark}  K T {F}  experts  the neurons that the gates multiply
    act            Activation(G{mark})  K T {F}  experts  the gates after their activation function
    pre            U{mark}  K T {F}  experts  the neurons before their activation function
    post           L{mark}  K T {F}  experts  the hidden layers as they enter the last projections
    expert_out     O   K T D  experts wide  the outputs of the chosen experts
    shared_logit   Rₛ  T 1  shared wide  the logit of the shared expert's weight
    shared_weight  gₛ  T 1  shared wide  the weight of the shared expert
    shared_out     Z   T D  shared wide  the weighted output of the shared expert
    out            T   T D  experts wide
    b_router       bias of the router
    b_choice       correction of the choice
    expert_factor  the factors on the experts' weights
    W_gate         projections to the gates of each expert's hidden layer
    b_gate         biases of each expert's gates
    W_up           projections to the neurons of each expert's hidden layer
    b_up           biases of each expert's neurons
    W_down         projections of each expert's hidden layer back to the width
    b_down         biases of each expert's output
    W_shared       projection to the shared expert's weight
"""


def experts_graph(c: ExpertsConfig, site: Site) -> PartGraph:
    """`router_…` and `expert_…` `[B, T, E or K]`, hidden layers of each pair `[B, K, T, F]`.

    Parameters: `W_router` `[D, E]`, biases `[E]`, `W_gate` (if gated) and `W_up` `[E, D, F]`,
    `W_down` `[E, F, D]`, the experts' biases `[E, F]` and `[E, D]`.
    """
    p = site.name
    axis, mark = ("Fe", "ₑ") if site.second else ("F", "")
    sizes = {"E": c.experts, "K": c.routing.chosen, axis: c.hidden}
    r = Rows(p, _ROWS.format(F=axis, mark=mark), "mlp", sizes, layer=site.layer)
    documents = {"E": "E", "K": "K", axis: axis.replace("e", "ₑ")}
    share: str | None = _routing(r, c, site)
    source = site.source
    if share is not None and c.routing.weighs_input:
        source, share = r.node("expert_in", WeighInput(share=share, source=source)), None
    value = _experts(r, c, source, site, axis, mark)
    also = None
    if c.shared is not None:
        also = f"{p}.shared_out"
        own = _shared(r, c.shared, c, site)
        documents |= own.documents
    total, words = SumExperts(share=share, value=value, also=also), "the mixture of experts"
    r.node("out", total, name=site.output, letter=site.letter, words=site.words(words))
    return r.graph(documents=documents)


def _routing(rows: Rows, c: ExpertsConfig, site: Site) -> str:
    """Logits and scores of all experts, the indices of the chosen ones, and their weights.

    With the router's norm, if its input differs from the experts'.
    """
    r, source = c.routing, site.source
    if r.norm is not None:
        name, enters = rows.named("router_norm"), "normalized, as it enters the router"
        words = ("the router's norm", f"the residual stream, {enters}")
        norm = norm_graph(r.norm, name, "Tᵣ", site.stream, words, layer=site.layer)
        rows.nodes += norm.nodes
        rows.parameters += (replace(one, wide=True) for one in norm.parameters)
        source = norm.nodes[-1].name
    scores = rows.project("router_logits", source, symbol="router", bias=r.bias)
    if r.scores != "softmax of the chosen":
        scores = rows.node("router_probs", Share(source=scores, function=r.scores))
    correction = factors = None
    if r.correction:
        correction = rows.parameter("b_choice", "E", "expert_idx", wide=True)
    if r.factors:
        factors = rows.parameter("expert_factor", "E", "expert_weight", letter="c", wide=True)
    groups = {"groups": r.groups, "kept": r.kept_groups, "best": r.group_best}
    choice = Choose(source=scores, count=r.chosen, correction=correction, **groups)
    chosen = rows.node("expert_idx", choice)
    weigh = Weigh(
        source=scores,
        chosen=chosen,
        renormalized=r.renormalized,
        softmax=r.scores == "softmax of the chosen",
        scale=r.scale,
        least=r.least,
        factors=factors,
    )
    return rows.node("expert_weight", weigh)


def _experts(r: Rows, c: ExpertsConfig, enters: str, site: Site, hidden: str, mark: str) -> str:
    """A feed-forward, gated or not, for each pair of a token and an expert."""

    def project(
        leaf: str, source: str, symbol: str, over: str, columns: str, fused: str = ""
    ) -> str:
        shapes = (f"E {over} {columns}", f"E {columns}")
        found = r.weights(symbol, leaf, shapes, "", bias=c.bias, fused=fused, mark=mark)
        found |= {"chosen": r.named("expert_idx"), "by_token": source == site.source}
        return r.node(leaf, ExpertProject(source=source, over=over, columns=columns, **found))

    def enter(leaf: str, symbol: str, fused: str) -> str:
        return project(leaf, enters, symbol, "D", hidden, fused)

    return project("expert_out", hidden_rows(r, c, enter), "down", hidden, "D")


def _shared(r: Rows, s: SharedConfig, c: ExpertsConfig, site: Site) -> PartGraph:
    """The shared expert, times `σ` of a logit if weighed."""
    leaf, letter = ("shared.out", "Oₛ") if s.weighed else ("shared_out", "Z")
    own = replace(site, name=r.named("shared"), output=r.named(leaf), letter=letter, adds=False)
    config = MlpConfig(hidden=s.hidden, activation=c.activation, gated=c.gated)
    mlp = mlp_graph(config, own, shared=True)
    r.nodes += mlp.nodes
    r.parameters += mlp.parameters
    r.sizes |= mlp.sizes
    if s.weighed:
        logit = r.project("shared_logit", site.source, symbol="shared")
        weight = r.node("shared_weight", Share(source=logit, function="sigmoid"))
        r.node("shared_out", Gate(act=weight, up=own.output))
    return mlp


def experts_facts(c: ExpertsConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    r = c.routing
    choice = f"{r.scores}{', renormalized' if r.renormalized else ''}"
    if r.groups > 1:
        choice += f", {best_groups(r.kept_groups, r.groups, r.group_best)}"
    if r.factors:
        choice += ", times a factor of each expert"
    if r.weighs_input:
        choice += ", on the experts' inputs"
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
