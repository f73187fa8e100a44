"""Products of vectors and matrices, element-wise operations and reductions, loop by loop.

A vector is a list of n numbers, a matrix a list of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float

Vector = Sequence[float]
Matrix = Sequence[Vector]


def dot(a: Vector, b: Vector) -> float:
    """`Σ_i a[i] b[i]` of two vectors of n numbers: n multiply-adds, 2n numbers read."""
    result = 0.0
    for x, y in zip(a, b, strict=True):
        result += x * y
    return result


def gemv(w: Matrix, x: Vector) -> list[float]:
    """`y[i] = Σ_j W[i][j] x[j]`: `[n, k] × [k]` → `[n]`, one dot product per row.

    n·k multiply-adds for n·k weights, each read once and used once: memory is the limit.
    """
    return [dot(row, x) for row in w]


def dot_in_lanes(a: Vector, b: Vector) -> float:
    """The dot product of bfloat16 numbers, rounded and ordered as the kernels do, bit for bit.

    Of every 32 columns lane j of 16 adds column 2j, then 2j + 1; columns beyond the last are zeros.
    Then lane j + 8 is added to lane j, lane j + 4, j + 2, j + 1. Every sum is rounded to float32,
    no product is.
    """
    padding = [0.0] * (-len(a) % 32)
    lanes = [0.0] * 16
    for i, (x, y) in enumerate(zip([*a, *padding], [*b, *padding], strict=True)):
        lanes[i % 32 // 2] = c_float(lanes[i % 32 // 2] + x * y).value
    for half in (8, 4, 2, 1):
        lanes = [c_float(lanes[j] + lanes[j + half]).value for j in range(half)]
    return lanes[0]


def outer(a: Vector, b: Vector) -> list[list[float]]:
    """`A[i][j] = a[i] b[j]`: `[n]`, `[m]` → `[n, m]`.

    What plain linear attention adds to its state, `S += k ⊗ v`; the gated delta rule lets the
    state decay first and subtracts from v what the state already answers to k.
    """
    return [[x * y for y in b] for x in a]


def add(a: Vector, b: Vector) -> list[float]:
    """`a[i] + b[i]`: the residual connection, `x + f(x)`."""
    return [x + y for x, y in zip(a, b, strict=True)]


def mul(a: Vector, b: Vector) -> list[float]:
    """`a[i] · b[i]`: a gate, `data ∘ gate`."""
    return [x * y for x, y in zip(a, b, strict=True)]


def total(x: Vector) -> float:
    """`x[0] + x[1] + … + x[n-1]`, from left to right; 0 for no numbers."""
    result = 0.0
    for number in x:
        result += number
    return result


def mean(x: Vector) -> float:
    """`total(x) / n` of at least one number."""
    return total(x) / len(x)


def largest(x: Vector) -> float:
    """The maximum of at least one number."""
    best = x[0]
    for number in x[1:]:
        best = number if number > best else best
    return best


def tree(x: Vector, combine: Callable[[float, float], float]) -> list[list[float]]:
    """Every level of a parallel reduction, from the n numbers themselves to the one result.

    How the threads of a GPU's block reduce a row in shared memory: in every step, each of the
    first half takes the number half a row further on, all at the same time; of an odd number
    the middle one waits. ⌈log₂ n⌉ steps instead of n - 1, and a sum's rounding error grows with
    log n instead of n. `combine` must not care about order: `+`, `max`.
    """
    levels = [list(x)]
    while len(levels[-1]) > 1:
        row = levels[-1]
        half = (len(row) + 1) // 2
        taken = [combine(row[i], row[i + half]) for i in range(len(row) - half)]
        levels.append(taken + row[len(taken) : half])
    return levels
