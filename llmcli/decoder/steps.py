"""Decode steps that are recorded once and replayed for every further token.

The decoder runs while a step is recorded. Shapes, addresses and numbers of the host stay those of
the recording, so token ids, positions and the state are read from memory at fixed addresses. A CPU
records the operations of our kernels, a GPU captures launches as a CUDA graph.

Axes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter_ns
from typing import Any, TypeAlias

import torch
from torch import Tensor

from llmcli.devices import free_unreferenced
from llmcli.errors import as_out_of_memory, first_line
from llmcli.kernels import program
from llmcli.nn.state import RecordedStep, State
from llmcli.nn.step import Clock, ReplayClock, RopeTables
from llmcli.weights.weight import Weight

FIRST_BUCKET = 256  # slots
_WARM_UPS = 2  # runs before the first capture: libraries choose kernels and allocate in them

# Logits `[B, 1, V]` of ids `[B, 1]`, a state, its lengths on the host, `Step.fixed`, and a clock
Run: TypeAlias = Callable[[Tensor, State, Sequence[int], tuple[Tensor, int], Clock | None], Tensor]
# those of ids, lengths on the device, and a clock
RunAt: TypeAlias = Callable[[Tensor, Tensor, Clock | None], Tensor]


class NotRecordable(Exception):
    """A step cannot be recorded; the message says why."""


class NoMemory(NotRecordable):
    """A step cannot be recorded for want of memory."""


class Steps:
    """The decode steps of a decoder, recorded for each state, number of tokens and of slots.

    Without a `recorder` all steps are computed; `off` says why, if known.
    """

    def __init__(
        self, recorder: KernelRecorder | GraphRecorder | None, off: str | None = None
    ) -> None:
        self.recorder, self.off = recorder, off

    def __call__(
        self, ids_BT: Tensor, state: State, slots: int, run: Run, clock: ReplayClock | None
    ) -> Tensor | None:
        """Logits `[B, T, V]` in separate memory; None if they must be computed.

        `run` computes a step of one token per sequence that reads `slots` slots. Several tokens
        belong to one sequence (lanes). The first step of a state is not recorded, since it may be
        the only one. A failed recording is not tried again, and leaves the state as it was; if it
        lacked memory, even after freeing some, it is tried for another state or number of slots.
        """
        tokens = ids_BT.shape[1]
        if self.recorder is None or torch.compiler.is_compiling():
            return None
        if slots == state.unrecorded or not self.recorder.accepts(state, tokens, clock):
            return None
        if tokens > 1 and not state.rewinds and not state.recorded:
            # a single step shows whether our kernels compute everything: only they can write to
            # memory shared by lanes
            saved = state.snapshot(slots=False)
            if self(ids_BT[:, :1], state, slots, run, None) is None:
                return None
            state.restore(saved)
        if tokens == 1 and not state.stepped:
            state.stepped = True
            return None
        starts = state.lengths if tokens == 1 else [state.lengths[0] + i for i in range(tokens)]
        step = state.recorded.get((tokens, slots))
        if step is not None:
            step.run(ids_BT, starts, clock)
        else:
            step = self._recorded(ids_BT, state, starts, slots, run, clock)
            if step is None:
                return None
        state.advance([tokens] * state.batch)
        return step.logits.clone().view(*ids_BT.shape, -1)

    def _recorded(
        self, ids_BT: Tensor, state: State, starts: Sequence[int], slots: int, run: Run,
        clock: ReplayClock | None,
    ) -> RecordedStep | None:  # fmt: skip
        """Record the step, which runs it; None if that fails."""
        assert self.recorder is not None
        tokens = ids_BT.shape[1]
        lanes = state if tokens == 1 else state.lanes(tokens)
        before = None if state.rewinds else state.snapshot(slots=False)

        def step_at(ids_B1: Tensor, starts_B: Tensor, clock: Clock | None) -> Tensor:
            return run(ids_B1, lanes, starts, (starts_B, slots), clock)

        def undo() -> None:
            if before is not None:
                state.restore(before)

        for _ in range(2):
            try:
                step = self.recorder.record(step_at, undo, ids_BT, starts, state, clock)
                state.recorded[tokens, slots], state.unrecorded = step, None
                return step
            except NoMemory:
                state.unrecorded = slots
            except NotRecordable as why:
                self.recorder, self.off = None, str(why)
            state.recorded.clear()  # no longer used, but their memory may be scarce
            undo()
            if self.recorder is None:
                break
            free_unreferenced()  # what PyTorch keeps is not given to a capture
        return None


class KernelRecorder:
    """Records a step of which every operation is one of our kernels, on a CPU.

    A step reads `weights` and tables of the rotations `ropes`.
    """

    def __init__(self, weights: Collection[Weight], ropes: Collection[RopeTables]) -> None:
        self._weights, self._ropes = weights, ropes

    def accepts(self, state: State, tokens: int, clock: ReplayClock | None) -> bool:
        """Whether it records steps of such a state."""
        return state.lengths_B is None

    def record(
        self, run: RunAt, undo: Callable[[], None], ids_BT: Tensor, starts: Sequence[int],
        state: State, clock: ReplayClock | None,
    ) -> KernelStep:  # fmt: skip
        """Run the step and record it. Raises NotRecordable."""
        tables = [one for rope in self._ropes for one in rope.upto(state.capacity)]
        weights = [one for weight in self._weights for one in weight.memory()]
        caches = list(state.tensors().values())
        step = KernelStep(run, ids_BT, starts, [*weights, *tables], caches)
        if clock is not None:  # not for a step that is computed again
            clock.replayed(step.names, step.times)
        return step


class KernelStep:
    """The operations of a step, recorded while `run` computes it.

    `names`, `times`: when each activation was computed in the recorded run, as in `ReplayClock`.
    """

    def __init__(
        self, run: RunAt, ids_BT: Tensor, starts: Sequence[int], weights: Sequence[Tensor],
        caches: Sequence[Tensor],
    ) -> None:  # fmt: skip
        batch = len(starts)
        self._numbers = (ctypes.c_int64 * (2 * batch))(*ids_BT.flatten().tolist(), *starts)
        memory = torch.frombuffer(self._numbers, dtype=torch.int64)
        self.names, self.times = list[str](), list[int]()
        with program.recorded([memory, *weights, *caches]) as self._recording:
            self.logits = run(memory[:batch].unsqueeze(1), memory[batch:], self._mark)
        if not (self._recording.complete and self._recording.wrote([self.logits, *caches])):
            raise NotRecordable("not every operation is one of our kernels")
        self.nbytes = self._recording.nbytes

    def _mark(self, name: str) -> None:
        self._recording.mark(name)
        self.names.append(name)
        self.times.append(perf_counter_ns())

    def run(self, ids_BT: Tensor, starts: Sequence[int], clock: ReplayClock | None) -> None:
        """See `RecordedStep`."""
        self._numbers[:] = [*ids_BT.flatten().tolist(), *starts]
        threads = torch.get_num_threads()
        if clock is None:
            self._recording.run(threads)
        else:
            begin = perf_counter_ns()
            names, after = self._recording.run_timed(threads)
            clock.replayed(names, [begin + ns for ns in after])


def bucket(keys: int, capacity: int, first: int = FIRST_BUCKET) -> int:
    """Number of slots that a step of fixed shapes reads for `keys` used ones of `capacity`.

    There is one graph per bucket of 256 · 2^k slots, so at most twice the live keys are read.
    """
    slots = first
    while slots < keys:
        slots *= 2
    return min(slots, capacity)


class GraphRecorder:
    """Captures a step as a CUDA graph, which reads all slots of its bucket under a mask.

    Graphs of one state share memory and must not run concurrently. All captures use one stream,
    since libraries keep a workspace per stream, cuBLAS up to 32 MiB.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def accepts(self, state: State, tokens: int, clock: ReplayClock | None) -> bool:
        """Whether it captures steps of such a state; not while the caller is capturing."""
        return state.lengths_B is not None and tokens == 1 and clock is None and not self.busy()

    def busy(self) -> bool:
        """Whether the caller is capturing launches."""
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def record(
        self, run: RunAt, undo: Callable[[], None], ids_BT: Tensor, starts: Sequence[int],
        state: State, clock: ReplayClock | None,
    ) -> GraphStep:  # fmt: skip
        """Capture the step and run it. Raises NotRecordable, and NoMemory."""
        positions_B, others = state.lengths_B, list(state.recorded.values())
        assert positions_B is not None
        ids_B1, pool = ids_BT.new_zeros(ids_BT.shape), None
        if others and isinstance(others[0], GraphStep):
            ids_B1, pool = others[0].ids_B1, others[0].pool
        ids_B1.copy_(ids_BT)
        try:
            graph, logits, pool = self.capture(lambda: run(ids_B1, positions_B, None), undo, pool)
            graph.replay()
        except RuntimeError as error:
            kind = NotRecordable if as_out_of_memory(error) is None else NoMemory
            raise kind(f"the capture failed: {first_line(error)}") from error
        return GraphStep(graph, logits, ids_B1, pool)

    def capture(
        self, step: Callable[[], Tensor], undo: Callable[[], None], pool: Any
    ) -> tuple[Any, Tensor, Any]:
        """The graph of `step`, the tensor with each replay's result, and its memory pool.

        `undo` reverts the changes of a step that ran (a captured step does not run). `pool`: the
        returned pool of another graph, None at first. Raises the step's RuntimeError, or CUDA's.
        """
        with torch.cuda.device(self._device):
            first = self._stream is None
            if first:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            pool = torch.cuda.graph_pool_handle() if pool is None else pool
            graph = torch.cuda.CUDAGraph()
            self._stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(self._stream):
                    for _ in range(_WARM_UPS if first else 1):  # other sizes, other kernels
                        step()
                        undo()
                    with _capturing(graph, pool):
                        out = step()
            finally:
                torch.cuda.current_stream().wait_stream(self._stream)
        return graph, out, pool


@contextmanager
def _capturing(graph: Any, pool: Any) -> Iterator[None]:
    """Capture launches on the current stream; the first error ends the capture and is raised.

    If CUDA cannot end it, `capture_end` raises before PyTorch's allocator leaves the pool (2.11 to
    2.13, `CUDAGraph.cpp`). Then `empty_cache` and the next capture would fail.
    """
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        yield
        graph.capture_end()
    except BaseException:
        with suppress(RuntimeError):
            if torch.cuda.is_current_stream_capturing():  # not if only the graph was not made
                graph.capture_end()
        with suppress(RuntimeError):  # raised if the allocator has left it: the graph releases it
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise


class GraphStep:
    """A captured step; its intermediate results are in the `pool`."""

    nbytes = 0

    def __init__(self, graph: Any, logits: Tensor, ids_B1: Tensor, pool: Any) -> None:
        self._graph, self.logits, self.ids_B1, self.pool = graph, logits, ids_B1, pool

    def run(self, ids_BT: Tensor, starts: Sequence[int], clock: ReplayClock | None) -> None:
        """See `RecordedStep`; positions are in the state."""
        self.ids_B1.copy_(ids_BT)
        self._graph.replay()
