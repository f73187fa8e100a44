"""What of one run restores, in another one, the answer of the first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmcli.records.document import OPTIONAL, Checked, ViewCheck
from llmcli.records.text import Token

NOISE, LEAST = 2, 1 / 32  # of what a run without a patch is off; of what its check allows

By = Literal["position", "head"]


@dataclass(frozen=True, kw_only=True)
class PatchCell:
    """One run: where the activation `name` was patched, and the answer's number after it.

    At one `position` of the clean prompt, or in one `head` at all that are patched. `value`: the
    number as a share, 0 that of the corrupted run, 1 that of the clean one.
    """

    name: str
    layer: int
    position: int | None
    head: int | None
    number: float
    value: float


@dataclass(frozen=True, kw_only=True)
class PatchReport(Checked):
    """Runs of the corrupted prompt with clean activations; `noising`, the other way round.

    `number`: the logit of `answer`, less that of `versus`, after the last token; in both runs it is
    `clean_number` and `corrupted_number`. `aligned`: the positions of the clean and of the
    corrupted prompt that are the same place; nothing differs before position `first`. `positions`:
    those of the clean prompt that are patched. `to`: only what reaches this activation directly
    was passed on (path patching).
    """

    dtype: str
    what: str
    by: By
    noising: bool
    to: str | None = field(default=None, metadata=OPTIONAL)
    clean: tuple[Token, ...]
    corrupted: tuple[Token, ...]
    aligned: tuple[tuple[int, int], ...]
    first: int
    positions: tuple[int, ...]
    answer: Token
    versus: Token | None
    clean_number: float
    corrupted_number: float
    layers: int
    cells: tuple[PatchCell, ...]
    checks: tuple[ViewCheck, ...]

    @property
    def base(self) -> float:
        """The value without a patch."""
        return float(self.noising)

    def effect(self, cell: PatchCell) -> float:
        """What the patch changed of the value; 0 where rounding alone may have changed it so much.

        That is what a run without a patch is off, or a part of what its check allows.
        """
        (plain,) = (check for check in self.checks if check.name == "nothing")
        effect, whole = cell.value - self.base, abs(self.clean_number - self.corrupted_number)
        rounding = NOISE * max(plain.value, LEAST * plain.tolerance)
        return effect if abs(effect) * whole > rounding else 0.0
