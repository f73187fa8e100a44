"""Runs operations of the library in order, and records them for replay.

An operation is its kind, then the arguments listed in the comment of its C function: numbers, and
tensors for their addresses (None: 0). A recording keeps the tensors alive, and detects by them
whether an operation is missing.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from llmcli.kernels import native

if TYPE_CHECKING:
    from torch import Tensor

# `enum kind` in program.h
(
    QUANTIZE, MULTIPLY, LOOK_UP, NORMALIZE, ROTATE, NARROW, STORE, ATTEND, COMBINE, ADD, SCALE,
    GATE, ACTIVATE, WIDEN, MULTIPLY_BFLOAT16, ATTEND_ROWS, SPLIT,
    MULTIPLY_SPLIT, MULTIPLY_ROWS, SOFT_CAP, MULTIPLY_EXPERTS,
    MULTIPLY_FLOAT, SHARE, CHOOSE, WEIGH, SUM_EXPERTS, SCALE_ROWS,
    MULTIPLY_EXPERTS_BFLOAT16, JOIN, MULTIPLY_HEADS,
    CONVOLVE, UNIT, DECAY, RECUR, ADD_SCALED, PAIR, MULTIPLY_PAIRS, GROW,
) = range(38)  # fmt: skip

NUMBERS = 26  # in `struct op`
_COUNTER_BYTES = 64  # `struct counter`
_AT_ONCE = 8  # maximum operations per call of `run`

Argument: TypeAlias = "Tensor | int | None"
Op: TypeAlias = Sequence[Argument]
# Of P pairs of a row and an expert: each one's expert, int64 `[P]`, and its row, int64 `[P]`; or
# without rows the number of consecutive pairs of a row.
Pairs: TypeAlias = "tuple[Tensor, Tensor | None, int]"


class Recording:
    """The operations that ran while it was active.

    `lasting`: persistent tensors: weights, caches, inputs of runs. `complete` is False once an
    operation reads another tensor that no earlier operation wrote, so it was computed by something
    not recorded.
    """

    def __init__(self, lasting: Iterable[Tensor]) -> None:
        self.complete = True
        self._ops: list[list[int]] = []
        self._kept: list[Tensor] = []
        self._lasting = frozenset(map(_storage, lasting))
        self._known = set(self._lasting)
        self._written: set[int] = set()
        self._memory: tuple[Any, Any] | None = None
        self._marks: list[tuple[str, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory kept alive, without persistent tensors."""
        kept = {_storage(one): one.untyped_storage().nbytes() for one in self._kept}
        return sum(size for place, size in kept.items() if place not in self._lasting)

    def mark(self, name: str) -> None:
        """Mark an activation as computed by the operations so far."""
        self._marks.append((name, len(self._ops)))

    def add(self, ops: Sequence[Op], reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Add operations that ran; see `run`."""
        self._ops += map(_numbers, ops)
        given = (one for op in ops for one in op if not (one is None or isinstance(one, int)))
        tensors = [one for one in given if all(one is not written for written in writes)]
        tensors += reads
        self._kept += [*tensors, *writes]
        if not self._known.issuperset(map(_storage, tensors)):
            self.complete = False
        self._known |= set(map(_storage, writes))
        self._written |= set(map(_storage, writes))

    def wrote(self, tensors: Iterable[Tensor]) -> bool:
        """Whether operations wrote to the memory of all these tensors."""
        return self._written.issuperset(map(_storage, tensors))

    def run(self, threads: int) -> None:
        """Run all operations again, in the same memory, with `threads` threads."""
        self._run(threads, None)

    def run_timed(self, threads: int) -> tuple[list[str], list[int]]:
        """Run all operations; returns the marked names and their times in nanoseconds."""
        times = (ctypes.c_int64 * len(self._ops))()
        self._run(threads, ctypes.addressof(times))
        return [name for name, _ in self._marks], [
            times[count - 1] if count else 0 for _, count in self._marks
        ]

    def _run(self, threads: int, times: int | None) -> None:
        if self._memory is None:
            numbers = (ctypes.c_int64 * (NUMBERS * len(self._ops)))()
            for place, op in enumerate(self._ops):
                _LAYOUTS[len(op)].pack_into(numbers, place * _OP_BYTES, *op)
            self._memory = numbers, _counters(len(self._ops))
        ops, counters = self._memory
        count = len(self._ops)
        _run(ctypes.addressof(ops), count, counters[0], native.team(threads), times)


_recording: Recording | None = None


@contextmanager
def recorded(lasting: Iterable[Tensor]) -> Iterator[Recording]:
    """Record the operations inside the context. Not nested."""
    global _recording
    _recording = found = Recording(lasting)
    try:
        yield found
    finally:
        _recording = None


def recording() -> bool:
    """Whether operations are recorded now."""
    return _recording is not None


def call(*op: Argument, out: Tensor, writes: Sequence[Tensor] = ()) -> Tensor:
    """Run one operation, which writes its arguments `out` and `writes`; returns `out`."""
    run(op, writes=(out, *writes))
    return out


def run(
    *ops: Op, writes: Sequence[Tensor], reads: Sequence[Tensor] = (), threads: int | None = None
) -> None:
    """Run at most 8 operations in order with `threads` threads, by default PyTorch's.

    `writes`: the arguments that operations write. `reads`: tensors whose addresses are behind
    numbers among the arguments.
    """
    for place, op in enumerate(ops):
        _LAYOUTS[len(op)].pack_into(_ROOM.numbers, place * _OP_BYTES, *_numbers(op))
    team = native.team(_threads()() if threads is None else threads)
    _run(_ROOM.address, len(ops), _ROOM.counters, team, None)
    if _recording is not None:
        _recording.add(ops, reads, writes)


def _run(ops: int, count: int, counters: int, team: int, times: int | None) -> None:
    native.function("llmcli_run", "pnppp")(ops, count, counters, team, times)


def _numbers(op: Op) -> list[int]:
    return [one if isinstance(one, int) else 0 if one is None else one.data_ptr() for one in op]


@lru_cache(maxsize=64)
def bits(number: float) -> int:
    """The bits of a number rounded to float32, as passed to operations; infinity beyond it."""
    return ctypes.c_int32.from_buffer(ctypes.c_float(number)).value


_OP_BYTES = 8 * NUMBERS
# By the number of arguments; the others are 0.
_LAYOUTS = [struct.Struct(f"={n}q{_OP_BYTES - 8 * n}x") for n in range(NUMBERS + 1)]


class _Room(threading.local):
    """Per-thread memory for the operations of one call."""

    def __init__(self) -> None:
        self.numbers = (ctypes.c_int64 * (NUMBERS * _AT_ONCE))()
        self.address = ctypes.addressof(self.numbers)
        self.counters, self._kept = _counters(_AT_ONCE)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _counters(count: int) -> tuple[int, Any]:
    """Memory for counters, aligned to their size."""
    memory = ctypes.create_string_buffer((count + 1) * _COUNTER_BYTES)
    address = ctypes.addressof(memory)
    return address + -address % _COUNTER_BYTES, memory


@cache
def _threads() -> Callable[[], int]:
    import torch

    return torch.get_num_threads


_ROOM = _Room()
