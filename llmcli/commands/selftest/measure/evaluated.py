"""What a decoder emits, held against the graph's own slow evaluation in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmcli.anatomy.graph import Graph
from llmcli.graph.evaluation.rules import rules
from llmcli.graph.node import Node
from llmcli.inspect.kernel import Kernel
from llmcli.model import Model

BOUND = 1e-9  # of the magnitudes that an op adds up; float64 has 2e-16


class _Chained(Kernel):
    """Every input is what the nodes before it made, from the token ids on."""

    made: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.made[name]

    def every(self, name: str, rows: slice = slice(None)) -> Tensor:
        """All rows of a tensor that was made."""
        return self[name][..., rows, :]


def deviations(
    model: Model,
    prompt: tuple[int, ...],
    emitted: Mapping[str, Tensor],
    nodes: Mapping[str, Node],
    *,
    chained: bool,
) -> dict[str, float]:
    """Of every activation how far it is from what its node makes, as a share of the bound.

    More than 1 is wrong. `emitted`: float64, without a batch axis. The inputs of a node are what
    was emitted before it, or, `chained`, what the nodes themselves made from the token ids.
    """
    made = rules(nodes.values(), Graph(model.config).letter)
    count = len(prompt)
    kernel = (_Chained if chained else Kernel)(
        model, made, prompt, [""] * count, emitted=emitted, positions=range(count),
        prompt_tokens=count, alone=[False] * count,
    )  # fmt: skip
    outputs: dict[str, Tensor] = {}
    if isinstance(kernel, _Chained):
        kernel.made = outputs
    found = {}
    for name, rule in made.items():
        outputs[name] = ours = rule.tensor(kernel)
        theirs = kernel.kernel(name)
        assert ours.shape == theirs.shape, name
        allowed = BOUND * rule.magnitudes(kernel)
        if chained:  # a number may be small because large ones cancel
            size = theirs.abs()
            allowed = allowed + BOUND * size.where(size.isfinite(), torch.tensor(0.0)).max()
        off = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / allowed)
        found[name] = float(off.nan_to_num(torch.inf).max())
    return found
