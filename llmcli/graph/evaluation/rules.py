"""Maps a node to its rule, by the type of its op."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmcli.graph import ops
from llmcli.graph import recurrence as recurrent
from llmcli.graph import routing as mixture
from llmcli.graph.evaluation import (
    attention,
    dots,
    join,
    linear,
    mlp,
    norms,
    opaque,
    recurrence,
    rope,
    routing,
)
from llmcli.graph.evaluation.rule import Rule
from llmcli.graph.node import Node
from llmcli.graph.ops import Letter

RULES: dict[type[ops.Op], type[Rule[Any]]] = {
    ops.LookUp: linear.LookUp,
    ops.Add: linear.Add,
    ops.SoftCap: linear.SoftCap,
    ops.Project: dots.Project,
    ops.HeadShare: dots.HeadShare,
    ops.Scale: norms.Scale,
    ops.Normalize: norms.Normalize,
    ops.Rotate: rope.Rotate,
    ops.Join: join.Join,
    ops.Score: attention.Score,
    ops.Softmax: attention.Softmax,
    ops.Mix: attention.Mix,
    ops.Activate: mlp.Activate,
    ops.Gate: mlp.Gate,
    ops.Convolve: dots.Convolve,
    mixture.Share: routing.Share,
    mixture.Choose: routing.Choose,
    mixture.Weigh: routing.Weigh,
    mixture.ExpertProject: dots.ExpertProject,
    mixture.SumExperts: dots.SumExperts,
    recurrent.Cut: recurrence.Cut,
    recurrent.UnitLength: recurrence.UnitLength,
    recurrent.StepSize: recurrence.StepSize,
    recurrent.LogDecay: recurrence.LogDecay,
    recurrent.LinearMap: recurrence.LinearMap,
    recurrent.StateAfter: recurrence.StateAfter,
    recurrent.Skip: recurrence.Skip,
    ops.Opaque: opaque.Opaque,
}


def rules(nodes: Iterable[Node], letter_of: Letter) -> dict[str, Rule[Any]]:
    """Name → rule, in the order of `nodes`."""
    found: dict[str, Rule[Any]] = {}
    for node in nodes:
        found[node.name] = RULES[type(node.op)](node, letter_of, found)
    return found
