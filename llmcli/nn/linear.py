"""One projection, made of named segments that share an input."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from llmcli.nn.parameters import Parameters
from llmcli.ops.linear import linear, linear_wide


class Linear:
    """`Y = X W + b`, where W is several weights side by side: `q|k|v`, `gate|up`, or just one.

    Stored as `[rows, D]`, a row per output, the segments one after the other, so that one
    product computes them all and `split` gives each its own columns back as a view.
    """

    def __init__(
        self, parameters: Parameters, weights: Sequence[str], biases: Sequence[str] = ()
    ) -> None:
        self.weight = parameters.matrix(weights)
        self.bias = parameters.stacked(biases) if biases else None
        self.rows = [parameters.slots[name].shape[0] for name in weights]

    def __call__(self, x_BTD: Tensor) -> Tensor:
        """All segments at once: `[B, T, D]` → `[B, T, rows]`."""
        return linear(x_BTD, self.weight, self.bias)

    def wide(self, x_BTD: Tensor) -> Tensor:
        """The same in at least float32: what is added to the residual stream or normalized."""
        return linear_wide(x_BTD, self.weight, self.bias)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The columns of each segment, views of `y`."""
        return y.split_with_sizes(self.rows, -1)
