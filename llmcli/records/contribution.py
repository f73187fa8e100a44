"""One term of a number of the model: what a head, a layer or a bias adds to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmcli.records.document import OPTIONAL


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What `name`, an activation or a parameter, adds to the number.

    `kind`: head, expert, mlp, shared expert, mixer (one of no heads), layer embedding, embedding,
    bias, edit (what `--edit` put there), or rounding (of a product's input by its kernel); of
    gradients the leaf of its name.
    `index`: which head, or which expert. `position`: of the token whose activation it is, where it
    is not the one that the number is of. `patched`: of some gradients, how much the number changes
    in a run with this activation of the other prompt.
    """

    kind: str
    name: str
    layer: int | None
    index: int | None = None
    position: int | None = None
    value: float
    patched: float | None = field(default=None, metadata=OPTIONAL)
