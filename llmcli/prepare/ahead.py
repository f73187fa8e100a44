"""Reads and packs weights in blocks while PyTorch is imported.

No torch. The C library uses threads without Python, since the import keeps one processor busy.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection, Mapping, Sequence
from math import prod
from threading import Thread
from typing import Unpack

from llmcli.checkpoints import Checkpoint
from llmcli.checkpoints.files import shown
from llmcli.config.formats import PACKED, packed_bytes
from llmcli.errors import CheckpointError, LlmcliError
from llmcli.families.rules import Load, UnpairRows, shape_after
from llmcli.graph.precision import Precision
from llmcli.kernels import native
from llmcli.limits import processors
from llmcli.prepare.prepared import PrecisionOptions, Prepared

_AT_ONCE = 1 << 20  # bytes of a file per work item
_THREADS = 4  # at most, besides the importing one


def start(
    prepared: Prepared, *, bfloat16: bool, free: int | None, **options: Unpack[PrecisionOptions]
) -> Prefetcher | None:
    """Start packing matrices that a CPU keeps in blocks with these options; None without any.

    Also None if they need more than half of `free` bytes. `bfloat16`: whether the CPU has bfloat16
    multiplication. Invalid options and misfits are reported by the loading itself.
    """
    try:
        precision = prepared.precision("cpu", bfloat16=bfloat16, **options)
        if not precision.formats or free is None:
            return None
        if 2 * precision.weight_bytes(prepared.config) > free:
            return None
        return Prefetcher(prepared, precision)
    except (LlmcliError, OSError):  # also out of memory
        return None


class Prefetcher:
    """The packed matrices of a checkpoint, filled by threads.

    Includes matrices in block formats with kernels, in the parameter's shape, whose rows are at
    most unpaired: all matrices of a GGUF file in most families.
    """

    def __init__(self, prepared: Prepared, precision: Precision) -> None:
        self._spans: dict[str, tuple[str, int, int]] = {}
        self._taken: set[str] = set()
        self._threads: list[Thread] = []
        checkpoint = prepared.checkpoint
        specs = {spec.name: spec for spec in precision.parameters(prepared.config)}
        found: list[tuple[Load, list[int] | None]] = []
        total = 0
        for load in prepared.plan.loads:
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
        self._kept: list[object] = [checkpoint]  # keeps its files open
        self._start(checkpoint, found)

    def nbytes(self, formats: Mapping[str, str]) -> int:
        """Bytes already allocated for parameters in these formats."""
        return sum(
            size for name, (format, _, size) in self._spans.items() if formats.get(name) == format
        )

    @property
    def resident(self) -> int:
        """Resident bytes of the packed matrices; 0 if unknown."""
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
        """The memory of a packed parameter; None if it is not included or has another format."""
        own, offset, size = self._spans.get(name, ("", 0, 0))
        if (own, size) != (format, nbytes):
            return None
        self._taken.add(name)
        return memoryview(self._arena)[offset : offset + size]

    def finish(self, threads: int) -> Collection[str]:
        """Finish packing with `threads` threads; returns the parameters whose memory was taken.

        Raises CheckpointError if a file ends early or cannot be read.
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
        """Fill the queue (`struct queue` in packing.c) and start the threads."""
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
        """Process the queue until it is empty; the thread keeps this object alive."""
        self._call(ctypes.addressof(self._queue))

    def _run(self, count: int) -> None:
        for _ in range(count):
            thread = Thread(target=self._work, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # thread limit reached: `finish` does the rest
                return
            self._threads.append(thread)


def _places(ops: Sequence[UnpairRows], rows: int) -> list[int]:
    """The target row of each stored row."""
    places = list(range(rows))
    for op in ops:
        moved = [0] * rows
        for place, stored in enumerate(op.order(rows)):
            moved[stored] = place
        places = [moved[place] for place in places]
    return places
