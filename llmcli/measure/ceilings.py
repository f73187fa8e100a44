"""What this machine can do at most: how fast bytes are read, how fast matrices are multiplied.

Measured with PyTorch's own fastest readers and products and the threads of the run, since a
datasheet says nothing of a virtual machine. Everything is the best of many repetitions: what
comes in between makes a machine slower, never faster. Reading alone is measured: a copy would
count every byte twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from llmcli import devices
from llmcli.measure.caches import cpu_caches
from llmcli.model import dtype_name
from llmcli.reports.ceilings import Ceilings, MatrixRate, ReadRate
from llmcli.weights import Progress

MEMORY = "memory"
_MEMORY_SETS = 4  # times the last cache: less of it is left from the round before
_FALLBACK = 64 << 20  # taken for the last cache where the system names none
_SHARE = 8  # at most 1/8 of the free memory is taken
_LEAST_READ = {"cpu": 8 << 20, "cuda": 1 << 30}  # bytes a call: starting it is in the time
_BLOCK = 1 << 20  # of random bytes, repeated: GPUs are faster with zeros
_MATRIX_S = 0.02  # what one product should take
_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # rows and columns of the matrices
_MATRICES = 3 * 8 + 4  # bytes a place: the one in float32, and three of up to eight

Call = Callable[[], object]


def measure_ceilings(
    device: torch.device,
    dtype: torch.dtype,
    *,
    threads: int,
    working_set: int | None = None,
    seconds: float = 1.0,
    progress: Progress | None = None,
) -> Ceilings:
    """Read rates by working set, and the matrix rates of `dtype` and bfloat16, in `seconds`.

    Sets of half and all of each cache that the `threads` have together, of `working_set` bytes
    (what a run reads again and again), and of so much that no cache holds it. No larger set reads
    faster than a smaller one: the rate of a set is the best of it and all larger ones.
    """
    begin = perf_counter()
    caches = device_caches(device, threads)
    report = progress or (lambda what, done, total: None)
    with _threads(device, threads):
        sizes = _working_sets(device, caches, working_set)
        dtypes = list(dict.fromkeys((dtype, torch.bfloat16)))
        what, steps = "measuring what this machine can do", len(sizes) + len(dtypes)
        buffer = _filled(max(sizes), device)
        rates: list[float] = []
        for done, nbytes in enumerate(sizes):
            report(what, done, steps)
            rates.append(_read_rate(buffer, nbytes, 0.6 * seconds / len(sizes)))
        del buffer
        products = []
        for done, one in enumerate(dtypes, len(sizes)):
            report(what, done, steps)
            products.append(_matrix_rate(device, one, 0.4 * seconds / len(dtypes)))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the run that is looked at finds the memory as it was
    return Ceilings(
        device=str(device),
        threads=threads,
        reads=tuple(
            ReadRate(nbytes=nbytes, bytes_per_s=max(rates[at:]), level=_level(nbytes, caches))
            for at, nbytes in enumerate(sizes)
        ),
        matrices=tuple(products),
        caches=caches,
        seconds=perf_counter() - begin,
    )


def device_caches(device: torch.device, threads: int) -> tuple[tuple[str, int], ...]:
    """(level, bytes) of the caches that the threads have together, smallest first.

    Of a CUDA device its L2; the first level of a processor is left out, since starting an
    operation takes longer than reading it.
    """
    if device.type == "cuda":
        return (("L2", int(torch.cuda.get_device_properties(device).L2_cache_size)),)
    return cpu_caches(threads) if device.type == "cpu" else ()


def _working_sets(
    device: torch.device, caches: tuple[tuple[str, int], ...], working_set: int | None
) -> list[int]:
    """Bytes of each set, smallest first, within what may be taken; whole blocks."""
    last = caches[-1][1] if caches else _FALLBACK
    most = _most(device)
    wanted = [part for _, size in caches for part in (size // 2, size)]
    wanted += [_MEMORY_SETS * last, *([working_set] if working_set else [])]
    blocks = {max(1, min(-(-nbytes // _BLOCK), most // _BLOCK)) for nbytes in wanted}
    return [count * _BLOCK for count in sorted(blocks)]


def _most(device: torch.device) -> int:
    """Bytes that measuring may take; where nobody knows what is free, what is enough for most."""
    free = devices.available_bytes(device)
    return _MEMORY_SETS * _FALLBACK if free is None else free // _SHARE


def _level(nbytes: int, caches: tuple[tuple[str, int], ...]) -> str:
    return next((name for name, size in caches if nbytes <= size), MEMORY)


def _filled(nbytes: int, device: torch.device) -> Tensor:
    """float32 numbers of so many bytes, every page of them written."""
    block = torch.randn(_BLOCK // 4, generator=torch.Generator().manual_seed(0)).to(device)
    return block.repeat(nbytes // _BLOCK)


def _read_rate(buffer: Tensor, nbytes: int, seconds: float) -> float:
    """Bytes per second of the fastest reader over the first `nbytes` of the buffer.

    Which one it is depends on the threads and the size: on two cores 1 MiB is read at 230 GB/s
    by sums and at 80 by a product of a matrix with a vector, 128 MiB at 50 and 25.
    """
    numbers = buffer[: nbytes // 4]
    times = -(-_LEAST_READ.get(buffer.device.type, nbytes) // nbytes)
    again = numbers.expand(times, -1)  # the same bytes, over and over in one call
    whole = numbers.view(torch.int32).expand(times, -1)
    half = numbers.numel() // 2
    readers: list[tuple[Call, int]] = [
        (lambda: again.sum(1), times),
        (lambda: whole.amax(1), times),
        (lambda: torch.dot(numbers[:half], numbers[half:]), 1),
    ]
    if times == 1:
        readers[:2] = [(numbers.sum, 1), (numbers.view(torch.int32).amax, 1)]
    best = 0.0
    for call, rounds in readers:
        best = max(best, rounds * nbytes / _best_seconds(call, buffer.device, seconds / 3))
    return best


def _matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> MatrixRate:
    """FLOPs per second of a product of two square matrices, directly or through float32."""
    ways = [("direct", _product(dtype, None))]
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        # processors without such instructions are many times slower than in float32
        ways.append(("through float32", _product(dtype, torch.float32)))
    best, name = 0.0, ""
    for way, product in ways:
        rate = _fastest_product(product, device, seconds / len(ways))
        if rate > best:
            best, name = rate, way
    return MatrixRate(dtype=dtype_name(dtype), flops_per_s=best, way=name)


def _product(dtype: torch.dtype, through: torch.dtype | None) -> Callable[[Tensor], Call]:
    """For a float32 matrix: what multiplies it with itself in `dtype`."""

    def prepared(square: Tensor) -> Call:
        narrow = square.to(dtype)
        if through is None:
            return lambda: torch.nn.functional.linear(narrow, narrow)
        return lambda: torch.nn.functional.linear(narrow.to(through), narrow.to(through)).to(dtype)

    return prepared


def _fastest_product(
    product: Callable[[Tensor], Call], device: torch.device, seconds: float
) -> float:
    """FLOPs per second: larger matrices as long as one product stays a fraction of the time."""
    best, end, most = 0.0, perf_counter() + seconds, _most(device)
    for size in _SIZES:
        if best and _MATRICES * size**2 > most:
            break
        call = product(torch.randn(size, size, device=device))
        took = _best_seconds(call, device, seconds / 4)
        best = max(best, 2 * size**3 / took)
        if 8 * took > min(_MATRIX_S, seconds / 2) or perf_counter() > end:
            break
    return best


def _best_seconds(call: Call, device: torch.device, seconds: float) -> float:
    """The shortest of the repetitions that fit into `seconds`: one at least, after a warm-up.

    On a GPU the device's own time, of several calls in a row: it waits for the first one.
    """
    call()
    best, end = float("inf"), perf_counter() + seconds
    while True:
        best = min(best, _cuda_seconds(call) if device.type == "cuda" else _seconds(call, device))
        if perf_counter() > end:
            return best


def _seconds(call: Call, device: torch.device) -> float:
    begin = perf_counter()
    call()
    if device.type == "mps":
        torch.mps.synchronize()
    return perf_counter() - begin


def _cuda_seconds(call: Call, calls: int = 5) -> float:
    """Seconds of one of `calls` calls in a row, between two events on the current stream."""
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / calls


@contextmanager
def _threads(device: torch.device, threads: int) -> Iterator[None]:
    """With that many threads on a CPU, and on that device; as it was afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            if device.type == "cuda":
                with torch.cuda.device(device):
                    yield
            else:
                yield
    finally:
        torch.set_num_threads(before)
