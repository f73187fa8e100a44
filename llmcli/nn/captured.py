"""Decode steps captured as CUDA graphs and replayed for every further token.

The GPU counterpart of `replay`. A graph consists of one step's launches with fixed shapes,
addresses and host values. Therefore token ids, positions and the cache stay at fixed addresses, and
a step reads all slots of its *bucket* under a mask. There is one graph per bucket of 256 · 2^k
slots, so at most twice the live keys are read. Without a GPU the same step runs eagerly, for tests.

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
    """The used interface of `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Launch the graph again."""


class Capture(Protocol):
    """Captures a step; `CudaCapture` on a GPU."""

    def __call__(
        self, step: Callable[[], Tensor], undo: Callable[[], None], pool: Any
    ) -> tuple[Replayable, Tensor, Any]:
        """The graph of `step`, the tensor with each replay's result, and its memory pool.

        `undo` reverts the changes of a step that ran (a captured step does not run). `pool`: the
        returned pool of another bucket, None at first. Raises RuntimeError if the step cannot be
        captured.
        """
        ...


def bucket(keys: int, capacity: int, first: int = FIRST_BUCKET) -> int:
    """Number of slots that a step reads for `keys` used ones of `capacity`."""
    slots = first
    while slots < keys:
        slots *= 2
    return min(slots, capacity)


class CudaCapture:
    """`Capture` on a CUDA device.

    Graphs of one pool share memory and must not run concurrently. All captures use one stream,
    since libraries keep a workspace per stream, cuBLAS up to 32 MiB.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    @property
    def busy(self) -> bool:
        """Whether the caller is capturing launches."""
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
    """The decode steps of one state of B sequences: one graph per bucket.

    Valid while the state's tensors are not moved. Without a `capture` steps run eagerly.
    """

    def __init__(self, batch: int, device: torch.device, capture: Capture | None) -> None:
        self._ids_B1 = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._capture = capture
        self._pool: Any = None
        self._graphs: dict[int, tuple[Replayable, Tensor]] = {}
        self.buckets: set[int] = set()  # already run

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def ready(self, slots: int) -> bool:
        """Whether the step for a bucket of `slots` slots is captured (or capture is off)."""
        return self._capture is None or slots in self._graphs

    def run(
        self,
        ids_B1: Tensor,
        slots: int,
        step: Callable[[Tensor], Tensor],
        undo: Callable[[], None],
    ) -> Tensor:
        """Logits `[B, 1, V]` of these tokens, in separate memory.

        `step(ids)` computes them over a bucket of `slots` slots; it is called with ids at a fixed
        address, instead of a replay, and several times during capture. `undo` and errors: see
        `Capture`; after an error nothing has changed.
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
