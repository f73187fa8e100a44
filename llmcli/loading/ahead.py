"""Weights in blocks, read and packed while PyTorch is imported. No torch.

The library does it on threads of its own, which need no Python: importing keeps one processor busy.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection, Mapping, Sequence
from math import prod
from threading import Thread

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.checkpoints import Checkpoint
from llmcli.checkpoints.files import shown
from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, LlmcliError
from llmcli.families import Load, Plan, UnpairRows, plan, shape_after, translate
from llmcli.graph.blocks import PACKED, packed_bytes
from llmcli.kernels import native
from llmcli.limits import processors
from llmcli.loading.arithmetic import arithmetic_of

_AT_ONCE = 1 << 20  # bytes of a file that a thread takes at a time
_THREADS = 4  # at most, beside the one that imports


def start(
    checkpoint: Checkpoint, *, dtype: str, quantize: str, bfloat16: bool, free: int | None
) -> Ahead | None:
    """What a CPU keeps in blocks with these options, None where nothing is.

    Nor where it would take more than half of `free` bytes. `bfloat16`: whether the CPU multiplies
    that itself. What cannot be had with the options, or does not fit the model, is for the loading
    to refuse.
    """
    try:
        config, rules = translate(checkpoint)
        todo = plan(checkpoint.tensors, rules, config)
        numbers = arithmetic_of(
            checkpoint, config, todo, dtype=dtype, quantize=quantize, device="cpu",
            bfloat16=bfloat16,
        )  # fmt: skip
        if not numbers.formats or free is None or 2 * numbers.weight_bytes(config) > free:
            return None
        return Ahead(checkpoint, config, todo, numbers)
    except (LlmcliError, OSError):  # no memory for it, too
        return None


class Ahead:
    """The packed matrices of a checkpoint, of which threads fill as many as they can.

    Those that are stored in blocks for which there are kernels, in the shape of the parameter, and
    whose rows are at most unpaired: all of them in a GGUF file of most families.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, todo: Plan, numbers: Arithmetic
    ) -> None:
        self._spans: dict[str, tuple[str, int, int]] = {}
        self._taken: set[str] = set()
        self._threads: list[Thread] = []
        specs = {spec.name: spec for spec in numbers.parameters(config)}
        found: list[tuple[Load, list[int] | None]] = []
        total = 0
        for load in todo.loads:
            spec, info = specs.get(load.target), checkpoint.tensors[load.source]
            if spec is None or spec.dtype not in PACKED or load.target in self._spans:
                continue
            shape = spec.stored_shape or spec.shape
            ops = [op for op in load.ops if isinstance(op, UnpairRows)]
            alone = load.index is None and load.scale is None and len(ops) == len(load.ops)
            alone = alone and info.scales is None
            if not alone or (info.format, info.shape) != (spec.dtype, shape):
                continue
            if shape_after(shape, ops) != shape:
                continue
            size = packed_bytes(info.format, prod(shape[:-1]), shape[-1])
            self._spans[load.target] = info.format, total, size
            found.append((load, _places(ops, shape[0]) if ops else None))
            total += size
        self._arena = mmap.mmap(-1, total or 1)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._arena.madvise(mmap.MADV_HUGEPAGE)
        self._sources: list[str] = []
        self._kept: list[object] = [checkpoint]  # whose files stay open
        self._start(checkpoint, found)

    def nbytes(self, formats: Mapping[str, str]) -> int:
        """Bytes of those that are in these formats: memory that they have already."""
        return sum(
            size for name, (format, _, size) in self._spans.items() if formats.get(name) == format
        )

    @property
    def resident(self) -> int:
        """Bytes of the packed matrices that are in memory by now; 0 where no system says so."""
        mincore = getattr(ctypes.CDLL(None), "mincore", None)
        if mincore is None:
            return 0
        size = len(self._arena)
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
        if mincore(ctypes.addressof(ctypes.c_char.from_buffer(self._arena)), size, pages):
            return 0
        return sum(byte & 1 for byte in pages.raw) * mmap.PAGESIZE

    def memory(self, name: str, format: str, nbytes: int) -> memoryview | None:
        """Where that parameter lies, None where it is none of these, or in another format."""
        own, offset, size = self._spans.get(name, ("", 0, 0))
        if (own, size) != (format, nbytes):
            return None
        self._taken.add(name)
        return memoryview(self._arena)[offset : offset + size]

    def finish(self, threads: int) -> Collection[str]:
        """The parameters whose memory was taken, when all are filled, by so many threads.

        Raises CheckpointError where a file ends early or cannot be read.
        """
        self._run(threads - len(self._threads) - 1)
        self._work()
        for thread in self._threads:
            thread.join()
        if self._queue[3]:
            source = self._sources[self._queue[3] - 1]
            raise CheckpointError(
                f"`{shown(source)}` cannot be read: its file was truncated or the disk failed"
            )
        return self._taken

    def _start(
        self, checkpoint: Checkpoint, found: Sequence[tuple[Load, list[int] | None]]
    ) -> None:
        """Fills the queue (`struct queue` in packing.c), and starts with it."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        numbers: list[int] = []
        for load, places in found:
            info = checkpoint.tensors[load.source]
            rows, columns = prod(info.shape[:-1]), info.shape[-1]
            stride, ids = info.nbytes // rows, 0
            if places is not None:
                memory = (ctypes.c_int64 * rows)(*places)
                self._kept.append(memory)
                ids = ctypes.addressof(memory)
            file, step = checkpoint.descriptor(load.source), max(1, _AT_ONCE // stride)
            packed = base + self._spans[load.target][1]
            for first in range(0, rows, step):
                numbers += (
                    file, info.offset + first * stride, stride, min(step, rows - first),
                    PACKED[info.format].number, columns, packed, ids and ids + 8 * first, first,
                )  # fmt: skip
                self._sources.append(load.source)
        readings = (ctypes.c_int64 * len(numbers))(*numbers)
        self._kept.append(readings)
        self._queue = (ctypes.c_int64 * 4)(ctypes.addressof(readings), len(self._sources), 0, 0)
        self._call = native.function("llmcli_read_and_pack", "p")
        self._run(min(_THREADS, processors() - 1) if found else 0)

    def _work(self) -> None:
        """Takes of the queue until it is empty. A thread that does so keeps all of this alive."""
        self._call(ctypes.addressof(self._queue))

    def _run(self, count: int) -> None:
        for _ in range(count):
            thread = Thread(target=self._work, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads may be started: `finish` does what is left
                return
            self._threads.append(thread)


def _places(ops: Sequence[UnpairRows], rows: int) -> list[int]:
    """To which row each stored row goes."""
    places = list(range(rows))
    for op in ops:
        moved = [0] * rows
        for place, stored in enumerate(op.order(rows)):
            moved[stored] = place
        places = [moved[place] for place in places]
    return places
