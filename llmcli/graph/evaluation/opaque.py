"""The rule of activations that a function of their part evaluates as a whole."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from llmcli.graph import ops
from llmcli.graph.evaluation.rule import Numbers, Rule
from llmcli.records.explanation import Element


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

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """One number, without a derivation."""
        return Element(
            value=float(self.tensor(values)[index]),
            note="evaluated as a whole: how its single numbers follow cannot be derived yet",
        )
