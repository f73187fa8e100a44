"""A decode step that was recorded once and is run again for every further token.

As with CUDA graphs, the decoder itself runs while it is recorded. Every operation must be one of
our kernels': what PyTorch computes meanwhile would be missing from the recording. What changes from
step to step, token ids and positions, is read from memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from llmcli.kernels import program


class Replay:
    """One decode step of `batch` sequences, recorded while `step(ids, starts)` runs.

    `step` is given ids `[B, 1]` and starts `[B]` and returns logits `[B, 1, V]`; of tensors that
    are there before and after it reads `weights`, and reads and writes `caches`. `complete` says
    whether all of it was recorded. `logits` are those of the recorded call.
    """

    def __init__(
        self,
        step: Callable[[Tensor, Tensor], Tensor],
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
            self.logits = step(ids_B1, starts_B)
        written = self._recording.wrote([self.logits, *caches])
        self.complete = self._recording.complete and written

    def run(self, ids: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Logits `[B, 1, V]` of the next step, in memory of their own."""
        self._numbers[:] = [*ids, *starts]
        self._recording.run(torch.get_num_threads())
        return self.logits.clone()
