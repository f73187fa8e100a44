"""Maps a node to its rule, by the type of its op; an opaque op is evaluated as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from torch import Tensor

from llmcli.evaluate import attention, dots, norms, pointwise, recurrence, rope, routing
from llmcli.evaluate.numbers import Number, leaf
from llmcli.evaluate.rule import Numbers, Reader, Rule
from llmcli.graph import ops
from llmcli.graph import recurrence as recurrent
from llmcli.graph import routing as mixture
from llmcli.graph.node import Node
from llmcli.graph.ops import Letter


class Opaque(Rule[ops.Opaque]):
    """An activation and its magnitudes; a derivation ends here."""

    def tensor(self, values: Numbers) -> Tensor:
        """The activation, from the part's function."""
        return self._made(values)[0]

    def magnitudes(self, values: Numbers) -> Tensor:
        """The magnitudes, from the part's function."""
        return self._made(values)[1]

    def _made(self, values: Numbers) -> tuple[Tensor, Tensor]:
        module, _, function = self.op.evaluate.partition(":")
        made: tuple[Tensor, Tensor] = vars(import_module(module))[function](self.op, values)
        return made

    def _compute(self, read: Reader) -> Number:
        read.note = "evaluated as a whole: how its single numbers follow cannot be derived yet"
        return leaf(float(self.tensor(read.values)[read.index]), "")


RULES: dict[type[ops.Op], type[Rule[Any]]] = {
    ops.LookUp: pointwise.LookUp,
    ops.Add: pointwise.Add,
    ops.SoftCap: pointwise.SoftCap,
    ops.Project: dots.Project,
    ops.HeadShare: dots.HeadShare,
    ops.Scale: norms.Scale,
    ops.Normalize: norms.Normalize,
    ops.Rotate: rope.Rotate,
    ops.Join: pointwise.Join,
    ops.Score: attention.Score,
    ops.Softmax: attention.Softmax,
    ops.Mix: attention.Mix,
    ops.Activate: pointwise.Activate,
    ops.Gate: pointwise.Gate,
    ops.Convolve: dots.Convolve,
    mixture.Share: routing.Share,
    mixture.Choose: routing.Choose,
    mixture.Weigh: routing.Weigh,
    mixture.WeighInput: routing.WeighInput,
    mixture.ExpertProject: dots.ExpertProject,
    mixture.SumExperts: dots.SumExperts,
    recurrent.Cut: pointwise.Cut,
    recurrent.UnitLength: norms.UnitLength,
    recurrent.StepSize: pointwise.StepSize,
    recurrent.LogDecay: pointwise.LogDecay,
    recurrent.LinearMap: recurrence.LinearMap,
    recurrent.StateAfter: recurrence.StateAfter,
    recurrent.Skip: pointwise.Skip,
    ops.Opaque: Opaque,
}


def rules(nodes: Iterable[Node], letter_of: Letter) -> dict[str, Rule[Any]]:
    """Name → rule, in the order of `nodes`."""
    found: dict[str, Rule[Any]] = {}
    for node in nodes:
        found[node.name] = RULES[type(node.op)](node, letter_of, found)
    return found
