"""What `llmcli weights` shows: norms, damage and outliers, spectra, heads' circuits, composition.

Letters: N rows (outputs) and K columns (inputs) of a matrix as stored, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from llmcli.records.document import APART, Checked, ViewCheck
from llmcli.records.text import Token

if TYPE_CHECKING:
    from numpy import ndarray

Numbers = Annotated["ndarray", tuple[float, ...]]
What = Literal["not finite", "zeros", "block", "number", "row", "column"]
NumberRows = Annotated["ndarray", tuple[tuple[float, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """A parameter: `kind` is its name without the block, `format` a dtype or a block format.

    `norm`: √Σw². `largest`: the largest |w|, at the index `at`. `stable_rank`: norm² / σ₁², σ₁ by
    power iteration; of experts their mean. `scales`: the 1 %, 50 % and 99 % quantiles of the scales
    of its blocks of 32 columns, the mean |w| without the largest; None for vectors.
    """

    name: str
    kind: str
    layer: int | None
    format: str
    shape: tuple[int, ...]
    rms: float
    norm: float
    largest: float
    at: tuple[int, ...]
    stable_rank: float | None
    scales: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What stands out in the parameter `name`: a `block` of a row, a `number`, a `row`, a `column`.

    `expert`, `row` and `columns` (first and last, of the whole row if None) say where. `value`: the
    block's scale, |w|, or the RMS of a row or column; `expected`: the same by the medians of its
    row and columns, and by the blocks beside it. `places`: how many such ones the parameter has.
    `scales` as in `TensorRow`, `neighbours`: the median scales of the same matrix in the layers
    before and after. `origin` of damage: the tensor in the file; its rows may be in another order.
    """

    name: str
    what: What
    expert: int | None
    row: int | None
    columns: tuple[int, int] | None
    value: float
    expected: float
    places: int = 1
    scales: tuple[float, ...] | None = None
    neighbours: tuple[float, ...] = ()
    origin: str = ""

    @property
    def ratio(self) -> float:
        """How far the value is from the expected one, upwards or downwards, as a factor."""
        least, most = sorted((self.value, self.expected))
        return most / max(least, 1e-38)


@dataclass(frozen=True, kw_only=True)
class WeightsReport(Checked):
    """Every parameter; `damaged`: what no training makes, `outliers`: the largest that it does."""

    tensors: tuple[TensorRow, ...]
    damaged: tuple[Finding, ...]
    outliers: tuple[Finding, ...]
    checks: tuple[ViewCheck, ...] = field(metadata=APART)


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """A matrix `[N, K]`, of an expert where `name` ends with its number, or a vector as one row.

    `singular_values`: σ, descending. `effective_rank`: exp(−Σ p ln p), p = σ / Σσ (Roy & Vetterli
    2007); `stable_rank`: Σσ² / σ₁²; `condition`: σ₁ over the smallest. `quantiles`: 0, 1, 25, 50,
    75, 99 and 100 % of its numbers; `counts`: of 64 equal bins from −max|w| to max|w|; `largest`:
    row, column and number.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    rms: float
    norm: float
    singular_values: Numbers
    effective_rank: float
    stable_rank: float
    condition: float
    quantiles: tuple[float, ...]
    counts: tuple[int, ...]
    largest: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, kw_only=True)
class SpectraReport(Checked):
    """What `NAME` shows."""

    matrices: tuple[Spectrum, ...]
    checks: tuple[ViewCheck, ...] = field(metadata=APART)


@dataclass(frozen=True, kw_only=True)
class HeadCircuit:
    """A head's circuits `W_QK = W_qᵀ W_k` and `W_OV = W_o W_v`, `[D, D]` (Elhage et al. 2021).

    `qk` and `ov`: their singular values other than 0, with effective ranks as of `Spectrum`.
    `copying`: Re Σλ / Σ|λ| of `W_U W_OV W_E`, 1 where all eigenvalues are positive. Of `token`:
    the tokens that OV `writes` most, with their logits, and those whose keys QK `seeks`.
    """

    layer: int
    head: int
    kv_head: int
    qk: Numbers
    ov: Numbers
    qk_rank: float
    ov_rank: float
    copying: float
    writes: tuple[tuple[Token, float], ...] = ()
    seeks: tuple[tuple[Token, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadsReport(Checked):
    """What `--head` shows; `notes`: what the circuits leave out."""

    token: Token | None
    heads: tuple[HeadCircuit, ...]
    notes: tuple[str, ...]
    checks: tuple[ViewCheck, ...] = field(metadata=APART)


@dataclass(frozen=True, kw_only=True)
class HeadPair:
    """The head of a later layer `into` reads by its queries, keys or values what `source` writes.

    `score`: ‖W W_OV‖ / (‖W‖ ‖W_OV‖) minus the baseline, W = W_QKᵀ, W_QK or W_OV of `into`.
    """

    kind: Literal["Q", "K", "V"]
    source: tuple[int, int]
    into: tuple[int, int]
    score: float


@dataclass(frozen=True, kw_only=True)
class CompositionReport(Checked):
    """`heads`: all (layer, head); `q`, `k`, `v`: `[into, source]` scores, NaN within a layer.

    `baseline`: 1/√D, which matrices with these singular values have at random directions.
    """

    heads: tuple[tuple[int, int], ...]
    baseline: float
    strongest: tuple[HeadPair, ...]
    q: NumberRows
    k: NumberRows
    v: NumberRows
    notes: tuple[str, ...]
    checks: tuple[ViewCheck, ...] = field(metadata=APART)
