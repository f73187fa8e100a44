"""What this machine can do at most: how fast bytes are read, how fast matrices are multiplied.

Measured with PyTorch's own fastest readers and products and the threads of the run, since a
datasheet says nothing of a virtual machine. Rates are the best of many repetitions: what comes in
between makes a machine slower, never faster. Reading alone is measured: a copy would count every
byte twice.

From them follow lower bounds of the time in which the machine can do some work, part by part: a
roofline (Williams, Waterman & Patterson 2009). What a step streams (weights and cached keys and
values) comes from where all of it fits: from memory, or from the cache that holds the whole working
set. Activations are made by one part and read by the next, and come from the cache that holds those
of one part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from llmcli import devices
from llmcli.graph.precision import Precision
from llmcli.kernels import native
from llmcli.limits import processor_numbers, system_text
from llmcli.measure.runs import current
from llmcli.ops.quant import quantize
from llmcli.records.machine import MEMORY, Cache, Ceilings, MatrixRate, ReadRate, level_of
from llmcli.records.work import Cost, Progress, no_progress
from llmcli.weights.packed import Packed

_MEMORY_SETS = 4  # times the last cache: less of it is left from the round before
_LEAST_SET = {"cuda": 1 << 30}  # of memory: a kernel takes some µs to start
_BLOCK = 1 << 20  # of random bytes, repeated: GPUs are faster with zeros
CACHE = 64 << 20  # taken for the last cache where the system names none
_SHARE = 8  # at most 1/8 of the free memory is taken
_LEAST_READ = {"cpu": 8 << 20, "cuda": 1 << 30}  # bytes a call: starting it is in the time
_PIECE = 16 << 20  # read at a time: some 0.5 ms
_LARGEST_PIECE = 8 << 30  # of CUDA: a dot product takes at most 2³¹ - 1 numbers there
_LEAST_TIMES = 5  # a call is repeated
_IN_A_ROW = 5  # calls between two events
_MATRIX_S = 0.02  # what one product should take
_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # rows and columns of the matrices
_STARTED = 20  # operations of a kind in a row, so that a GPU works while more are started
_STARTINGS = 51  # repetitions; their median counts
_BETWEEN = 4 << 20  # bytes that are read before: the weights of a product
_MATRICES = 3 * 8 + 4  # bytes a place: the one in float32, and three of up to eight

COMPUTE = "compute"
Call = Callable[[], object]


def measure_ceilings(
    device: torch.device,
    precision: Precision,
    *,
    working_set: int | None = None,
    seconds: float = 1.0,
    progress: Progress = no_progress,
) -> Ceilings:
    """Read rates by working set, and the rates of matrix products, in `seconds`.

    Of products as in `precision`, in its dtype, and in bfloat16. And what starting an operation in
    its dtype takes.

    Sets of half and all of each cache that PyTorch's threads have together, of `working_set` bytes
    (what a run reads again and again), and of so much that no cache holds it. No larger set reads
    faster than a smaller one: the rate of a set is the best of it and all larger ones.
    """
    begin, threads = perf_counter(), torch.get_num_threads()
    caches = device_caches(device, threads)
    with torch.inference_mode(), current(device):
        sizes = _working_sets(device, caches, working_set)
        dtypes = list(dict.fromkeys((precision.products, precision.dtype, "bfloat16")))
        what, steps = "measuring what this machine can do", len(sizes) + len(dtypes)
        generator = torch.Generator().manual_seed(0)
        block = torch.randn(_BLOCK // 4, generator=generator).to(device)
        buffer = block.repeat(max(sizes) // _BLOCK)  # every page of it is written
        rates: list[float] = []
        for done, nbytes in enumerate(sizes):
            progress(what, done, steps)
            cached = level_of(nbytes, caches) != MEMORY
            rates.append(read_rate(buffer, nbytes, 0.6 * seconds / len(sizes), cached=cached))
        del buffer
        products = []
        for done, one in enumerate(dtypes, len(sizes)):
            progress(what, done, steps)
            products.append(matrix_rate(device, one, 0.4 * seconds / len(dtypes)))
        start_s = start_seconds(device, devices.DTYPES[precision.dtype])
        if device.type == "cuda":
            torch.cuda.empty_cache()  # leave the memory as it was for the run
    return Ceilings(
        device=str(device),
        dtype=precision.dtype,
        threads=threads,
        reads=tuple(
            ReadRate(nbytes=nbytes, bytes_per_s=max(rates[at:]), level=level_of(nbytes, caches))
            for at, nbytes in enumerate(sizes)
        ),
        matrices=tuple(products),
        caches=caches,
        seconds=perf_counter() - begin,
        start_s=start_s,
    )


def device_caches(device: torch.device, threads: int) -> tuple[Cache, ...]:
    """The caches of the device, smallest first.

    Of a CUDA device its L2; the first level of a processor is left out, since starting an
    operation takes longer than reading it.
    """
    if device.type == "cuda":
        held = int(torch.cuda.get_device_properties(device).L2_cache_size)
        return (Cache(level="L2", bytes=held),)
    return cpu_caches(threads) if device.type == "cpu" else ()


def _working_sets(
    device: torch.device, caches: tuple[Cache, ...], working_set: int | None
) -> list[int]:
    """Bytes of each set, smallest first, within what may be taken; whole blocks."""
    last = caches[-1].bytes if caches else CACHE
    most = most_bytes(device)
    wanted = [part for cache in caches for part in (cache.bytes // 2, cache.bytes)]
    wanted += [max(_MEMORY_SETS * last, _LEAST_SET.get(device.type, 0))]
    wanted += [working_set] if working_set else []
    blocks = {max(1, min(-(-nbytes // _BLOCK), most // _BLOCK)) for nbytes in wanted}
    return [count * _BLOCK for count in sorted(blocks)]


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def cpu_caches(threads: int, root: Path = Path("/")) -> tuple[Cache, ...]:
    """L2, L3 …: what so many threads have together, smallest first.

    Of the processors that this process may run on; a cache that several of them share counts
    once, and one of their own once for each thread. Empty where the system does not say (outside
    Linux, in some sandboxes). `root` is for tests.
    """
    found: dict[int, dict[str, int]] = {}  # level → which processors share it → bytes
    for processor in processor_numbers():
        cache = root / f"sys/devices/system/cpu/cpu{processor}/cache"
        for index in sorted(cache.glob("index*")):
            level, size, kind, shared = (
                system_text(index, name).strip()
                for name in ("level", "size", "type", "shared_cpu_map")
            )
            number, unit = size[:-1], size[-1:]  # `32768K`
            if level.isdigit() and number.isdigit() and unit in _UNITS and kind != "Instruction":
                nbytes = int(number) * _UNITS[unit]
                found.setdefault(int(level), {})[shared or str(processor)] = nbytes
    return tuple(
        Cache(level=f"L{level}", bytes=sum(sorted(sizes.values(), reverse=True)[:threads]))
        for level, sizes in sorted(found.items())
        if level > 1
    )


def most_bytes(device: torch.device) -> int:
    """Bytes that measuring may take; where the free memory is unknown, enough for most caches."""
    free = devices.available_bytes(device)
    return 4 * CACHE if free is None else free // _SHARE


def read_rate(buffer: Tensor, nbytes: int, seconds: float, *, cached: bool) -> float:
    """Bytes per second of the fastest reader over the first `nbytes` of the buffer.

    `cached`: they are in a cache, so that one call can read them several times. From memory it
    would not: two threads at the same place are served by one reading.

    Which one it is depends on the threads and the size: on two cores 1 MiB is read at 230 GB/s
    by sums and at 80 by a product of a matrix with a vector, 128 MiB at 50 and 25.
    """
    kind = buffer.device.type
    numbers = buffer[: nbytes // 4]
    times = -(-_LEAST_READ.get(kind, nbytes) // nbytes) if cached else 1
    # on a busy processor only short reads are undisturbed: all pieces are read in turns
    piece = _PIECE if kind == "cpu" and not cached else _LARGEST_PIECE
    pieces = torch.split(numbers, piece // 4)
    best = 0.0
    by_reader = zip(*(_readers(piece, times) for piece in pieces), strict=True)
    for calls, rounds in zip(by_reader, (times, times, 1), strict=True):
        took = best_seconds(calls, buffer.device, seconds / 3)
        best = max(best, rounds * nbytes / took)
    return best


def _readers(numbers: Tensor, times: int) -> tuple[Call, Call, Call]:
    """Calls that read them: sums and maxima, each `times` over, and a dot product, once."""
    again = numbers.expand(times, -1)
    integers = numbers.view(torch.int32).expand(times, -1)
    left, right = numbers.view(2, -1)
    return lambda: again.sum(1), lambda: integers.amax(1), lambda: torch.dot(left, right)


def matrix_rate(device: torch.device, name: str, seconds: float) -> MatrixRate:
    """FLOPs per second of a product of two square matrices, directly or through float32.

    `name` is a dtype's; `int16` and `int8` are those of activations of packed weights: by our
    kernel, or in 8 bits by PyTorch's product.
    """
    ways: dict[str, Callable[[Tensor], Call]]
    if name in ("int16", "int8"):
        ways = {f"llmcli {native.level()}": partial(_packed, digits=1 if name == "int8" else 2)}
        if name == "int8":
            ways["PyTorch"] = _whole
    else:
        dtype = devices.DTYPES[name]
        ways = {"direct": partial(_product, dtype=dtype)}
        if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
            # processors without such instructions are many times slower than in float32
            ways["through float32"] = partial(_product, dtype=dtype, through=torch.float32)
    rates = {way: _fastest_product(ways[way], device, seconds / len(ways)) for way in ways}
    fastest = max(rates, key=lambda way: rates[way])
    return MatrixRate(dtype=name, flops_per_s=rates[fastest], way=fastest)


def _packed(square: Tensor, *, digits: int) -> Call:
    """The product of a float32 matrix with itself in blocks of 8 bits."""
    weight = Packed("Q8_0", tuple(square.shape), square.device, digits=digits)
    weight.write(torch.arange(len(square)), quantize(square, "Q8_0"))
    return lambda: weight.matmul(square)


def _whole(square: Tensor) -> Call:
    """The product of a float32 matrix with itself in 8-bit integers, without scales."""
    narrow = (square * 32).clamp(-127, 127).to(torch.int8)
    return lambda: torch._int_mm(narrow, narrow.t())


def _product(square: Tensor, *, dtype: torch.dtype, through: torch.dtype | None = None) -> Call:
    """The product of a float32 matrix with itself in `dtype`."""
    narrow = square.to(dtype)
    if through is None:
        return lambda: torch.nn.functional.linear(narrow, narrow)
    return lambda: torch.nn.functional.linear(narrow.to(through), narrow.to(through)).to(dtype)


def _fastest_product(
    product: Callable[[Tensor], Call], device: torch.device, seconds: float
) -> float:
    """FLOPs per second: larger matrices as long as one product stays a fraction of the time."""
    best, end, most = 0.0, perf_counter() + seconds, most_bytes(device)
    for size in _SIZES:
        if best and _MATRICES * size**2 > most:
            break
        # a failed capture leaves CUDA's default generator unusable (PyTorch 2.11)
        own = torch.Generator(device)
        call = product(torch.randn(size, size, generator=own, device=device))
        took = best_seconds([call], device, seconds / 4)
        best = max(best, 2 * size**3 / took)
        if 8 * took > min(_MATRIX_S, seconds / 2) or perf_counter() > end:
            break
    return best


def start_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of an operation with next to nothing to do: a product with a row of eight, a sum.

    On a CPU with caches full of something else, as they are when weights have passed through
    them. The median, since it stands for what usually is the least, not for what may be reached.
    """
    row = torch.zeros(1, 8, dtype=dtype, device=device)
    square = torch.zeros(8, 8, dtype=dtype, device=device)
    other = torch.zeros(_BETWEEN // 4 if device.type == "cpu" else 1, device=device)
    pairs = 1 if device.type == "cpu" else _STARTED

    def several() -> None:
        for _ in range(pairs):
            torch.nn.functional.linear(row, square)
            torch.add(row, row)

    found = []
    several()
    for _ in range(_STARTINGS):
        other.sum()
        found.append(_seconds(several, device.type) / (2 * pairs))
    return median(found)


def best_seconds(calls: Sequence[Call], device: torch.device, seconds: float) -> float:
    """Seconds of the calls one after the other: the shortest time of each, added up.

    After a warm-up they are repeated as long as that fits into `seconds`, and a few times in any
    case: on a busy machine one of them may run undisturbed. On a GPU it is the device's own time,
    of several calls in a row: it waits for the first one.
    """
    for call in calls:
        call()
    best, end, done = [float("inf")] * len(calls), perf_counter() + seconds, 0
    while done < _LEAST_TIMES or perf_counter() < end:
        done += 1
        with current(device):
            taken = [_seconds(call, device.type) for call in calls]
        best = list(map(min, best, taken))
    return sum(best)


def _seconds(call: Call, kind: str) -> float:
    """Seconds of a call on that kind of device; on CUDA of one of several in a row.

    Those are between two events on the current stream. Without what `timed` does around a call:
    that is a tenth of starting an operation.
    """
    if kind == "cuda":
        first, last = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        first.record()
        for _ in range(_IN_A_ROW):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000 / _IN_A_ROW
    begin = perf_counter()
    call()
    if kind == "mps":
        torch.mps.synchronize()
    return perf_counter() - begin


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Ceilings of a run in `precision`, whose steps stream `working_set` bytes (weights, cache)."""

    ceilings: Ceilings
    precision: Precision
    working_set: int

    def of(self, work: Cost, calls: int) -> tuple[float, str]:
        """The least seconds of one part that is computed `calls` times, and what ceiling that is.

        Bytes arrive while others are computed with: it is the longer of both. Of computing the
        ceiling is `compute`, of the bytes where most of their time is spent: `memory`, or a cache.
        Products with weights may have another rate than those of attention; where it was not
        measured, computing takes no time.
        """
        streamed = self.ceilings.read(self.working_set)
        own = self.ceilings.read(work.activations // max(1, calls))
        weighted = work.gemv or work.gemm
        matrix = self.ceilings.matrix(self.precision.products if weighted else self.precision.dtype)
        streaming = (work.weights + work.cache) / streamed.bytes_per_s
        passing = work.activations / own.bytes_per_s
        moving = streaming + passing
        computing = 0.0 if matrix is None else work.flops / matrix.flops_per_s
        level = streamed.level if streaming >= passing else own.level
        return max(moving, computing), level if moving >= computing else COMPUTE
