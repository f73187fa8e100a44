"""A decode step that is recorded once and replayed for every further token.

As with CUDA graphs, the decoder runs while it is recorded. Every operation must be one of our
kernels, since PyTorch's operations are not recorded. Token ids and positions, which change between
steps, are read from memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from llmcli.kernels import program

if TYPE_CHECKING:
    from llmcli.nn.step import Clock


@runtime_checkable
class ReplayClock(Protocol):
    """A clock that receives the times of a step after it ran."""

    def __call__(self, name: str) -> None:
        """See `Clock`."""

    def replayed(self, names: Sequence[str], times: Sequence[int]) -> None:
        """Receive the time of each activation, in nanoseconds of `perf_counter_ns`."""


class Replay:
    """One decode step of `batch` sequences, recorded while `step(ids, starts)` runs.

    `step(ids, starts, clock)` takes ids `[B, 1]` and starts `[B]`, calls the clock for each
    activation, and returns logits `[B, 1, V]`; persistent tensors are `weights` (read) and `caches`
    (read and written). `complete`: whether everything was recorded. `logits`: of the recorded call.
    """

    def __init__(
        self,
        step: Callable[[Tensor, Tensor, Clock], Tensor],
        ids: Sequence[int],
        starts: Sequence[int],
        *,
        weights: Iterable[Tensor],
        caches: Sequence[Tensor],
    ) -> None:
        batch = len(ids)
        self._numbers = (ctypes.c_int64 * (2 * batch))(*ids, *starts)
        memory = torch.frombuffer(self._numbers, dtype=torch.int64)
        ids_B1, starts_B = memory[:batch].unsqueeze(1), memory[batch:]
        with program.recorded([memory, *weights, *caches]) as self._recording:
            self.logits = step(ids_B1, starts_B, self._recording.mark)
        written = self._recording.wrote([self.logits, *caches])
        self.complete = self._recording.complete and written

    @property
    def nbytes(self) -> int:
        """Bytes of intermediate results, which each run rewrites."""
        return self._recording.nbytes

    def run(
        self, ids: Sequence[int], starts: Sequence[int], clock: ReplayClock | None = None
    ) -> Tensor:
        """Logits `[B, 1, V]` of the next step, in separate memory."""
        self._numbers[:] = [*ids, *starts]
        threads = torch.get_num_threads()
        if clock is None:
            self._recording.run(threads)
        else:
            begin = perf_counter_ns()
            names, after = self._recording.run_timed(threads)
            clock.replayed(names, [begin + ns for ns in after])
        return self.logits.clone()
