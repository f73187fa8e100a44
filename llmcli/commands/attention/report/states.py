"""What mixers with a matrix as their state remember, over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcli.records.checks import ViewCheck
from llmcli.records.text import Token

POINTS = 24  # positions at which states are measured


@dataclass(frozen=True, kw_only=True)
class HeadStates:
    """One head after the tokens at each of the report's positions.

    `norms`: √(Σ S²). `effective_ranks`: exp(−Σ_k p_k ln p_k), p_k = σ_k / Σσ of S, 0 where S is 0
    (Roy & Vetterli 2007).
    """

    head: int
    norms: tuple[float, ...]
    effective_ranks: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LayerStates:
    """One layer, whose `kind` is what its mixer is called.

    The state of each head has `rows` (numbers of a key) and `columns` (of a value); `bytes` is what
    a cache takes for all heads of one sequence, however long it is.
    """

    layer: int
    kind: str
    rows: int
    columns: int
    bytes: int
    heads: tuple[HeadStates, ...]


@dataclass(frozen=True, kw_only=True)
class StatesReport:
    """States after the tokens at some `positions`, evenly spread, the last token among them.

    The first `prompt_tokens` of `tokens` were given, the others generated.
    """

    what: Literal["state"] = "state"
    dtype: str
    tokens: tuple[Token, ...]
    prompt_tokens: int
    positions: tuple[int, ...]
    layers: tuple[LayerStates, ...]
    checks: tuple[ViewCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)
