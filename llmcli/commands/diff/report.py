"""Two models A and B on one text: what they predict, and where they begin to compute otherwise.

Differences are B's value minus A's. Logarithms are natural. Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from llmcli.records.document import Checked, ViewCheck
from llmcli.records.text import TextScore, Token

if TYPE_CHECKING:
    from numpy import ndarray

Numbers = Annotated["ndarray", tuple[float, ...]]  # an array, and what it is in a document


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """KL(A ‖ B) in nats over `predictions` tokens: its mean and quantiles; KL(B ‖ A) `reverse`.

    `same_top`: the share of tokens for which both have the same likeliest one. `…_low` and
    `…_high`: 95 % intervals, of the mean by its standard error, of the share by Wilson (1927).
    """

    predictions: int
    mean: float
    mean_low: float
    mean_high: float
    median: float
    p90: float
    p99: float
    p999: float
    max: float
    reverse_mean: float
    reverse_max: float
    same_top: float
    same_top_low: float
    same_top_high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDiff:
    """The predictions for the token at `position` of A's text, of which both saw those before.

    `id` is None after the last token, and where the texts go on with different ones; `a` and `b`:
    its log-probabilities, with `rank_a` and `rank_b` (1: likeliest). `kl`: KL(A ‖ B), `reverse_kl`:
    KL(B ‖ A). `top_a` is A's likeliest token, with the rank `top_a_in_b`, and so is B's.
    """

    position: int
    id: int | None
    text: str
    a: float | None
    b: float | None
    rank_a: int | None
    rank_b: int | None
    kl: float
    reverse_kl: float
    top_a: Token
    top_b: Token
    top_a_in_b: int
    top_b_in_a: int


@dataclass(frozen=True, kw_only=True)
class StreamDiff:
    """The residual stream `name`: ‖B − A‖ / ‖A‖ of all tokens, and the mean cosine of the rows.

    `errors` `[T]`: of each token, whose prediction is that of `DiffReport.tokens`.
    """

    name: str
    layer: int
    error: float
    cosine: float
    errors: Numbers


@dataclass(frozen=True, kw_only=True)
class ParameterDiff:
    """A parameter: its formats, ‖B − A‖ / ‖A‖, and which of its rows (as stored) differ.

    `error` is None where it is not in both with the same shape.
    """

    name: str
    format_a: str | None
    format_b: str | None
    error: float | None
    rows: int
    differing_rows: int
    first_row: int | None


@dataclass(frozen=True, kw_only=True)
class NodeDiff:
    """B's activation `name` beside what A's formula and parameters make of B's own inputs.

    `error`: ‖B − A's‖ / ‖A's‖. `share`: the largest difference of a number as a share of what
    rounding explains, at `where`: more than 1 is a difference of this tensor itself; None where A
    and B have its parameters in formats that cannot be compared so. For these: the `parameters` of
    the formula that differ, and what else of it does (`formula`).
    """

    name: str
    error: float
    share: float | None
    where: str
    parameters: tuple[ParameterDiff, ...] = ()
    formula: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether rounding does not explain it."""
        return self.share is not None and not self.share <= 1


@dataclass(frozen=True, kw_only=True)
class DiffReport(Checked):
    """`b`: the second model, or engine, and what distinguishes it (`how`).

    `score_a`, `score_b`: how well they predict the text. With the `same_tokens` a token's two
    log-probabilities differ by at most `largest_difference`. `alignment`: the tokens of two prompts
    that are compared, of their beginning (all, of equally long ones) and end. `streams` and `nodes`
    are of the first `activations` tokens, in execution order; without any the two have other
    architectures, or B's activations are unknown. `parameters`: with `--weights`, in execution
    order.
    """

    b: Mapping[str, Any] = field(default_factory=dict)
    how: str = ""
    score_a: TextScore | None = None
    score_b: TextScore | None = None
    same_tokens: bool = False
    largest_difference: float | None = None
    divergence: Divergence | None = None
    alignment: tuple[int, int] | None = None
    tokens: tuple[TokenDiff, ...] = ()
    activations: int = 0
    streams: tuple[StreamDiff, ...] = ()
    nodes: tuple[NodeDiff, ...] = ()
    parameters: tuple[ParameterDiff, ...] = ()
    checks: tuple[ViewCheck, ...]
