"""Projections of named segments that share an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from llmcli.nn.parameters import Parameters
from llmcli.ops import on_card
from llmcli.weights.dense import Dense
from llmcli.weights.routes import ExpertAssignment

if TYPE_CHECKING:
    from llmcli.kernels.triton.products import Hidden, Norm, Onto


class Fused(NamedTuple):
    """What a card's kernels compute together with the products of a part.

    `norm`: of the input, which is the stream then. `onto`: the stream that the output is added to.
    """

    norm: Norm | None = None
    onto: Onto | None = None


class Segments:
    """Weights with a common input, whose outputs are concatenated: `q|k|v`, `gate|up`.

    `segments`: the weights by name, in order; `rows`: their numbers of outputs.
    """

    def __init__(self, parameters: Parameters, names: Sequence[str]) -> None:
        self.segments = tuple((name, parameters.weights[name]) for name in names)
        self.rows = [weight.shape[-2] for _, weight in self.segments]

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The columns of each segment, views of `y`."""
        return y.split_with_sizes(self.rows, -1)


class Linear(Segments):
    """`Y = X W + b`, where W is one or several concatenated weights.

    The weights are `<part>.W_<leaf>` for each of `leaves`; with `bias` their biases `<part>.b_…`.

    `weight`: all of them as one for the product. `exact`: inputs are not rounded, except to 8 bits.
    """

    def __init__(
        self, parameters: Parameters, part: str, *leaves: str, bias: bool = False,
        exact: bool = False,
    ) -> None:  # fmt: skip
        weights, biases = _names(part, leaves)
        self.weight = parameters.matrix(weights, exact=exact)
        self.bias = parameters.vector(biases) if bias else None
        self.dtype = parameters.dtype
        super().__init__(parameters, weights)

    def __call__(self, x_BTD: Tensor) -> Tensor:
        """All segments at once: `[B, T, D]` → `[B, T, rows]`."""
        return self.weight.matmul(x_BTD, self.bias)

    def wide(self, x_BTD: Tensor) -> Tensor:
        """All segments in at least float32, for results added to the stream or normalized."""
        return self.weight.matmul_fp32_out(x_BTD, self.bias)

    def fuses(self, x_BTD: Tensor) -> bool:
        """Whether `fused` supports rows such as these, in the model's dtype or wider."""
        weight = self.weight
        return isinstance(weight, Dense) and on_card.multiplies(x_BTD, weight.tensor, self.dtype)

    def fused(
        self, x_BTD: Tensor, *, norm: Norm | None = None, wide: bool = False,
        hidden: Hidden | None = None, onto: Onto | None = None, kept: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """All segments at once with what is around them, see `on_card.product`; needs `fuses`."""
        assert isinstance(self.weight, Dense)
        dtype = torch.float32 if wide else self.dtype
        return on_card.product(
            x_BTD, self.weight.tensor, self.bias, dtype, norm=norm, hidden=hidden, onto=onto,
            kept=kept,
        )  # fmt: skip


class RoutedLinear(Segments):
    """A `Linear` with experts' matrices: each (token, expert) pair has its own `X W + b`.

    `wholes`: weights with their biases; segments of one dtype are one weight.
    """

    def __init__(self, parameters: Parameters, part: str, *leaves: str, bias: bool = False) -> None:
        weights, biases = _names(part, leaves)
        wholes = parameters.experts(weights)
        each: Sequence[Tensor | None] = [None] * len(wholes)
        if bias:
            rows = [whole.shape[1] for whole in wholes]
            each = parameters.expert_vectors(biases).split_with_sizes(rows, 1)
        self.wholes = list(zip(wholes, each, strict=True))
        super().__init__(parameters, weights)

    def __call__(self, x_MD: Tensor, routes: ExpertAssignment, *, wide: bool = False) -> Tensor:
        """All segments at once: `[M, D]` → `[pairs, rows]`; `wide`: in at least float32."""
        found = [one.matmul_routed(x_MD, routes, bias, wide) for one, bias in self.wholes]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


def _names(part: str, leaves: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of matrices and biases."""
    return [f"{part}.W_{leaf}" for leaf in leaves], [f"{part}.b_{leaf}" for leaf in leaves]
