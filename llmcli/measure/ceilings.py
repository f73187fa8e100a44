"""What this machine can do at most: how fast bytes are read, how fast matrices are multiplied.

Measured with PyTorch's own fastest readers and products and the threads of the run, since a
datasheet says nothing of a virtual machine. Rates are the best of many repetitions: what comes in
between makes a machine slower, never faster. Reading alone is measured: a copy would count every
byte twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from llmcli import devices
from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.limits import processor_numbers
from llmcli.measure.rates import CACHE, matrix_rate, most_bytes, read_rate, start_seconds
from llmcli.records.ceilings import MEMORY, Ceilings, ReadRate
from llmcli.records.progress import Progress

_MEMORY_SETS = 4  # times the last cache: less of it is left from the round before
_LEAST_SET = {"cuda": 1 << 30}  # of memory: a kernel takes some µs to start
_BLOCK = 1 << 20  # of random bytes, repeated: GPUs are faster with zeros


def measure_ceilings(
    device: torch.device,
    numbers: Arithmetic,
    *,
    threads: int,
    working_set: int | None = None,
    seconds: float = 1.0,
    progress: Progress | None = None,
) -> Ceilings:
    """Read rates by working set, and the rates of matrix products, in `seconds`.

    Of products as in `numbers`, in its dtype, and in bfloat16. And what starting an operation in
    its dtype takes.

    Sets of half and all of each cache that the `threads` have together, of `working_set` bytes
    (what a run reads again and again), and of so much that no cache holds it. No larger set reads
    faster than a smaller one: the rate of a set is the best of it and all larger ones.
    """
    begin = perf_counter()
    caches = device_caches(device, threads)
    report = progress or (lambda what, done, total: None)
    with _threads(device, threads):
        sizes = _working_sets(device, caches, working_set)
        dtypes = list(dict.fromkeys((numbers.products, numbers.dtype, "bfloat16")))
        what, steps = "measuring what this machine can do", len(sizes) + len(dtypes)
        buffer = _filled(max(sizes), device)
        rates: list[float] = []
        for done, nbytes in enumerate(sizes):
            report(what, done, steps)
            cached = _level(nbytes, caches) != MEMORY
            rates.append(read_rate(buffer, nbytes, 0.6 * seconds / len(sizes), cached=cached))
        del buffer
        products = []
        for done, one in enumerate(dtypes, len(sizes)):
            report(what, done, steps)
            products.append(matrix_rate(device, one, 0.4 * seconds / len(dtypes)))
        start_s = start_seconds(device, devices.DTYPES[numbers.dtype])
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
        start_s=start_s,
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
    last = caches[-1][1] if caches else CACHE
    most = most_bytes(device)
    wanted = [part for _, size in caches for part in (size // 2, size)]
    wanted += [max(_MEMORY_SETS * last, _LEAST_SET.get(device.type, 0))]
    wanted += [working_set] if working_set else []
    blocks = {max(1, min(-(-nbytes // _BLOCK), most // _BLOCK)) for nbytes in wanted}
    return [count * _BLOCK for count in sorted(blocks)]


def _level(nbytes: int, caches: tuple[tuple[str, int], ...]) -> str:
    return next((name for name, size in caches if nbytes <= size), MEMORY)


def _filled(nbytes: int, device: torch.device) -> Tensor:
    """float32 numbers of so many bytes, every page of them written."""
    block = torch.randn(_BLOCK // 4, generator=torch.Generator().manual_seed(0)).to(device)
    return block.repeat(nbytes // _BLOCK)


@contextmanager
def _threads(device: torch.device, threads: int) -> Iterator[None]:
    """With that many threads on a CPU, and on that device; as it was afterwards."""
    with devices.threads(threads), torch.inference_mode():
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def cpu_caches(threads: int, root: Path = Path("/")) -> tuple[tuple[str, int], ...]:
    """(`L2`, bytes), (`L3`, bytes) …: what so many threads have together, smallest first.

    Of the processors that this process may run on; a cache that several of them share counts
    once, and one of their own once for each thread. Empty where the system does not say (outside
    Linux, in some sandboxes). `root` is for tests.
    """
    found: dict[int, dict[str, int]] = {}  # level → which processors share it → bytes
    for processor in processor_numbers():
        cache = root / f"sys/devices/system/cpu/cpu{processor}/cache"
        for index in sorted(cache.glob("index*")):
            level, size = _read(index / "level"), _bytes(_read(index / "size"))
            if not level.isdigit() or size is None or _read(index / "type") == "Instruction":
                continue
            shared = _read(index / "shared_cpu_map") or str(processor)
            found.setdefault(int(level), {})[shared] = size
    return tuple(
        (f"L{level}", sum(sorted(sizes.values(), reverse=True)[:threads]))
        for level, sizes in sorted(found.items())
        if level > 1
    )


def _bytes(text: str) -> int | None:
    """Bytes of `32768K`; None for anything else."""
    number, unit = text[:-1], text[-1:]
    return int(number) * _UNITS[unit] if number.isdigit() and unit in _UNITS else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
