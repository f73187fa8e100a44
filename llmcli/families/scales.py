"""Scales of stored 8-bit numbers, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.checkpoints.files import shown

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# Formats whose numbers are meaningless without a scale, unlike floating-point ones.
INTEGERS = ("I8", "I16", "I32", "I64")
FLOAT8 = ("F8_E4M3", "F8_E5M2")
SCALE_FORMATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The blocks of `rows` × `columns` numbers of a stored matrix that share a scale.

    None: all rows or columns, in a stack those of each matrix. A weight is number × scale /
    `divisor`. `formats`: in which the matrix may be stored.
    """

    formats: tuple[str, ...]
    rows: int | None = None
    columns: int | None = None
    divisor: int = 1

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The (rows, columns) of scales for a matrix of `shape`; the last block may be smaller."""
        rows, columns = shape
        return (
            1 if self.rows is None else -(-rows // self.rows),
            1 if self.columns is None else -(-columns // self.columns),
        )

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes in which scales may be stored: axes of length 1 may be omitted."""
        size = self.size(shape)
        if self.columns is not None:
            return (size,)
        return (size, (1,), ()) if self.rows is None else (size, size[:1])

    def __str__(self) -> str:
        if self.rows is None:
            return "one for all"
        if self.columns is None:
            return "one per row" if self.rows == 1 else f"one per {self.rows} rows"
        return f"{self.rows} × {self.columns} blocks"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A scale tensor `source`, arranged by `grid`.

    `layout`: a one-byte tensor that is 0 if the scaled matrix is stored row-major.
    """

    source: str
    grid: Grid
    layout: str | None = None

    def __str__(self) -> str:
        over = "" if self.grid.divisor == 1 else f" / {self.grid.divisor}"
        return f"× {self.source.rpartition('.')[2]}{over}, {self.grid}"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors read in addition to the scaled matrix."""
        return (self.source,) if self.layout is None else (self.source, self.layout)

    def problem(self, weight: TensorInfo, tensors: Mapping[str, TensorInfo]) -> str | None:
        """Why formats or shapes do not allow scaling `weight`; None if they do."""
        scale = tensors[self.source]
        if weight.format not in self.grid.formats:
            known = " or ".join(self.grid.formats)
            return f"has a scale but is stored as {weight.format}, not as {known}"
        stack = len(weight.shape) == 3 and self.grid.rows is self.grid.columns is None
        if len(weight.shape) != 2 and not stack:
            return f"has a scale but is no matrix: its shape is {list(weight.shape)}"
        if scale.format not in SCALE_FORMATS:
            return f"has a scale that is stored as {scale.format}"
        allowed = (weight.shape[:1],) if stack else self.grid.shapes(weight.shape)
        if scale.shape not in allowed:
            found, wanted = list(scale.shape), list(allowed[0])
            return f"has a scale of shape {found}, which should be {wanted} ({self.grid})"
        if self.layout is not None:
            layout = tensors[self.layout]
            if layout.format != "U8" or layout.nbytes != 1:
                return f"has a `{shown(self.layout)}` that is not one byte"
        return None


def scale_problem(
    source: str, scale: Scale | None, tensors: Mapping[str, TensorInfo], called: str | None
) -> str | None:
    """Why the tensor `source` cannot become weights with this scale; None if it can.

    `called`: the suffix of scales in the checkpoint (`Plan.scales`), None if it is not quantized:
    then floating-point tensors are weights, and integer tensors are not.
    """
    info = tensors[source]
    if scale is not None:
        return scale.problem(info, tensors)
    if called is not None and info.format in (*FLOAT8, *INTEGERS):
        wanted = f"{source.rpartition('.')[0]}.{called}"
        return f"is stored as {info.format} but there is no `{shown(wanted)}`"
    if info.format in INTEGERS:
        return f"holds whole numbers ({info.format}), and nothing says what they stand for"
    return None
