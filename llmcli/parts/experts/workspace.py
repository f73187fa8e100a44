"""Memory of a mixture of experts during prefill."""

from __future__ import annotations

from llmcli.graph.workspace import Reading, Workspace
from llmcli.parts.experts.config import ExpertsConfig


def experts_workspace(c: ExpertsConfig, of: Reading) -> Workspace:
    """Two streams, what attention added, the norm, the router's scores, and the pairs of a token
    and an expert: their hidden numbers twice over, what comes out of them, and the sum.

    The number of experts only affects the scores: logits, scores, and their order.
    """
    pairs = of.rows * c.routing.chosen
    held = of.rows * (of.width * (3 * of.wide + of.size) + c.experts * (3 * of.wide + 8))
    hidden = pairs * 4 * c.hidden * of.size
    out = pairs * of.width * of.both + 3 * of.rows * of.width * of.wide
    products = max(of.product(of.width, 2 * c.hidden), of.product(c.hidden, of.width))
    peak = held + hidden + out + products + of.widened(2 * c.hidden)
    if c.shared is not None:
        shared = of.rows * (4 * c.shared.hidden * of.size + of.width * of.both)
        peak += max(0, shared - hidden) + of.rows * of.width * of.wide
    return Workspace(peak=peak)
