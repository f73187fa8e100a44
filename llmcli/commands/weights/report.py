"""What `llmcli weights` shows: norms, damage and outliers, spectra, heads' circuits, composition.

Letters: N rows (outputs) and K columns (inputs) of a matrix as stored, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from llmcli.records.document import APART, Checked, ViewCheck
from llmcli.records.text import Token

if TYPE_CHECKING:
    from numpy import ndarray

Numbers = Annotated["ndarray", tuple[float, ...]]
NumberRows = Annotated["ndarray", tuple[tuple[float, ...], ...]]
What = Literal["not finite", "zeros", "block", "number", "row", "column"]


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """A parameter: `kind` is its name without the block, `format` a dtype or a block format.

    `norm`: √Σw², and `largest`: the largest |w|, both of what is finite.
    """

    name: str
    kind: str
    layer: int | None
    format: str
    shape: tuple[int, ...]
    rms: float
    norm: float
    largest: float


@dataclass(frozen=True)
class Finding:
    """What stands out in the parameter `name`: a `block` of a row, a `number`, a `row`, a `column`.

    The name of one of several experts' matrices ends with the expert, `[3]`. `columns`: the first
    and the last. `value`: the block's scale (its mean |w − mean|), |w|, or the RMS of a row or
    column; `expected`: the same by the medians of its row and columns, and by the blocks beside it.
    `places`: how many such ones the matrix has. `origin` of damage: the tensor in the file; its
    rows may be in another order.
    """

    name: str
    what: What
    row: int | None = None
    columns: tuple[int, int] | None = None
    value: float = 0.0
    expected: float = 0.0
    places: int = 1
    origin: str = ""

    @property
    def place(self) -> str:
        """`blocks.3.attn.W_q row 17 columns 64–95`."""
        words = self.name if self.row is None else f"{self.name} row {self.row}"
        if self.columns is None:
            return words
        first, last = self.columns
        return words + (f" column {first}" if first == last else f" columns {first}–{last}")

    @property
    def ratio(self) -> float:
        """How far the value is from the expected one, upwards or downwards, as a factor."""
        least, most = sorted((self.value, self.expected))
        return most / least if least else 0.0


@dataclass(frozen=True, kw_only=True)
class WeightsReport(Checked):
    """Every parameter; `damaged`: what no training makes, `outliers`: the largest that it does."""

    tensors: tuple[TensorRow, ...]
    damaged: tuple[Finding, ...]
    outliers: tuple[Finding, ...]
    checks: tuple[ViewCheck, ...] = field(metadata=APART)


def effective_rank(sigma: ndarray) -> float:
    """exp(−Σ p ln p), p = σ / Σσ (Roy & Vetterli 2007); 0 for a matrix of zeros."""
    shares = (sigma[sigma > 0] / (sigma.sum() or 1.0)).tolist()
    return math.exp(-sum(p * math.log(p) for p in shares)) if shares else 0.0


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """A matrix `[N, K]`, of an expert where `name` ends with its number, or a vector as a column.

    `singular_values`: σ, descending. `stable_rank`: Σσ² / σ₁², 0 for a matrix of zeros.
    """

    name: str
    format: str
    shape: tuple[int, int]
    rms: float
    norm: float
    singular_values: Numbers
    effective_rank: float
    stable_rank: float


@dataclass(frozen=True, kw_only=True)
class SpectraReport(Checked):
    """What `NAME` shows; `effective_rank` as of the function of that name."""

    matrices: tuple[Spectrum, ...]
    checks: tuple[ViewCheck, ...] = field(metadata=APART)


@dataclass(frozen=True, kw_only=True)
class HeadCircuit:
    """A head's circuits `W_QK = W_qᵀ W_k` and `W_OV = W_o W_v`, `[D, D]` (Elhage et al. 2021).

    `qk` and `ov`: their singular values other than 0. `copying`: Re Σλ / Σ|λ| of `W_U W_OV W_E`, 1
    where all eigenvalues are positive. Of `token`: the tokens that OV `writes` most, with their
    logits, and those whose keys QK `seeks`.
    """

    layer: int
    head: int
    kv_head: int
    qk: Numbers
    ov: Numbers
    copying: float
    writes: tuple[tuple[Token, float], ...] = ()
    seeks: tuple[tuple[Token, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadsReport(Checked):
    """What `--head` shows."""

    token: Token | None
    heads: tuple[HeadCircuit, ...]
    checks: tuple[ViewCheck, ...] = field(metadata=APART)


@dataclass(frozen=True, kw_only=True)
class CompositionReport(Checked):
    """Which `heads` (layer, head) read by queries, keys or values what earlier ones write.

    `q`, `k`, `v`: `[into, source]` scores ‖W W_OV‖ / (‖W‖ ‖W_OV‖), W = W_QKᵀ, W_QK or W_OV of
    `into`; NaN where `source` is in no earlier layer. `baseline`: 1/√D, which matrices with these
    singular values have at random directions.
    """

    heads: tuple[tuple[int, int], ...]
    baseline: float
    q: NumberRows
    k: NumberRows
    v: NumberRows
    checks: tuple[ViewCheck, ...] = field(metadata=APART)


def strongest(scores: ndarray, most: int) -> list[tuple[int, int]]:
    """The places (into, source) of the largest scores, descending."""
    order = (-scores).argsort(axis=None, kind="stable")[:most]  # NaN comes last
    found = (divmod(int(at), scores.shape[1]) for at in order)
    return [at for at in found if not math.isnan(scores[at])]
