"""Decode steps that are captured as CUDA graphs and replayed for every further token.

The sibling of `replay` for a card. A graph is the launches of one step: every shape, address and
number from the host stays what it was when the step was captured. So token ids, positions and the
cache lie in memory that never moves, and a step reads as many slots as its *bucket* has, under a
mask. There is one graph for each bucket, 256 · 2^k slots, so that at most twice the live keys are
read. Where there is no card the same step runs eagerly, which is how it is tested.

Axes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

FIRST_BUCKET = 256  # slots
_WARM_UPS = 2  # runs before a capture: libraries choose kernels and allocate in the first ones


class Replayable(Protocol):
    """What is used of `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Launches all of it again."""


class Capture(Protocol):
    """How a step is captured; `CudaCapture` on a card."""

    def __call__(
        self, step: Callable[[], Tensor], undo: Callable[[], None], pool: Any
    ) -> tuple[Replayable, Tensor, Any]:
        """The graph of `step`, where each replay writes its result, and the pool that it uses.

        `undo` takes back what a step that ran has changed; a captured step does not run. `pool` is
        what this returned for another bucket, None at first. Raises RuntimeError where the step
        cannot be captured.
        """
        ...


def bucket(keys: int, capacity: int, first: int = FIRST_BUCKET) -> int:
    """How many slots a step reads where `keys` are in use, of `capacity`."""
    slots = first
    while slots < keys:
        slots *= 2
    return min(slots, capacity)


class CudaCapture:
    """`Capture` on that card. Graphs of one pool share memory: they must not run at the same time.

    All captures have one stream: libraries keep a workspace for each, cuBLAS up to 32 MiB.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    @property
    def busy(self) -> bool:
        """Whether the caller captures what is launched."""
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def __call__(
        self, step: Callable[[], Tensor], undo: Callable[[], None], pool: Any
    ) -> tuple[Replayable, Tensor, Any]:
        """See `Capture`."""
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            pool = torch.cuda.graph_pool_handle() if pool is None else pool
            graph = torch.cuda.CUDAGraph()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    step()
                    undo()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    out = step()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph, out, pool


class CapturedSteps:
    """The decode steps of one state of B sequences: a graph for each bucket that was reached.

    Valid as long as the state's tensors are where they are. Without a `capture` steps run eagerly.
    """

    def __init__(self, batch: int, device: torch.device, capture: Capture | None) -> None:
        self._ids_B1 = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._capture = capture
        self._pool: Any = None
        self._graphs: dict[int, tuple[Replayable, Tensor]] = {}
        self.buckets: set[int] = set()  # that were run

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def ready(self, slots: int) -> bool:
        """Whether a step over a bucket of that many slots is captured, if any is."""
        return self._capture is None or slots in self._graphs

    def run(
        self,
        ids_B1: Tensor,
        slots: int,
        step: Callable[[Tensor], Tensor],
        undo: Callable[[], None],
    ) -> Tensor:
        """Logits `[B, 1, V]` of these tokens, in memory of their own.

        `step(ids)` computes them over a bucket of that many `slots`; it is called with ids that
        are always in the same memory, once in a replayed step's stead and more often while it is
        captured. `undo`: see `Capture`, which also says what is raised; then nothing has changed.
        """
        self._ids_B1.copy_(ids_B1)
        if self._capture is None:
            self.buckets.add(slots)
            return step(self._ids_B1)
        if slots not in self._graphs:
            graph, out, self._pool = self._capture(lambda: step(self._ids_B1), undo, self._pool)
            self._graphs[slots] = graph, out
        graph, out = self._graphs[slots]
        self.buckets.add(slots)
        graph.replay()
        return out.clone()
