"""From a node to its rule, by the type of its op."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from llmcli.graph import ops
from llmcli.graph.evaluation import attention, convolve, linear, mlp, norms, rope
from llmcli.graph.evaluation.rule import Rule
from llmcli.graph.node import Node
from llmcli.graph.ops import Letter

RULES: dict[type[ops.Op], type[Rule[Any]]] = {
    ops.LookUp: linear.LookUp,
    ops.Add: linear.Add,
    ops.Project: linear.Project,
    ops.HeadShare: linear.HeadShare,
    ops.Scale: norms.Scale,
    ops.Normalize: norms.Normalize,
    ops.Rotate: rope.Rotate,
    ops.Score: attention.Score,
    ops.Softmax: attention.Softmax,
    ops.Mix: attention.Mix,
    ops.Activate: mlp.Activate,
    ops.Gate: mlp.Gate,
    ops.Convolve: convolve.Convolve,
}


def rules(nodes: Iterable[Node], letter_of: Letter) -> dict[str, Rule[Any]]:
    """Name → rule, in the order of `nodes`."""
    found: dict[str, Rule[Any]] = {}
    for node in nodes:
        found[node.name] = _rule(node.op)(node, letter_of, found)
    return found


def _rule(op: ops.Op) -> type[Rule[Any]]:
    if not op.rule:
        return RULES[type(op)]
    module, _, name = op.rule.partition(":")
    own: type[Rule[Any]] = vars(import_module(module))[name]
    return own
