"""What a test computes, the least time that could take on a machine, and the memory it needs."""

from __future__ import annotations

from functools import lru_cache

from llmcli.anatomy.counts import memory_need
from llmcli.anatomy.spec import Call
from llmcli.anatomy.work import Works, added, decode_work, part_work
from llmcli.config import ModelConfig
from llmcli.devices import resolve_device
from llmcli.measure.bench import plan
from llmcli.ops.processor import has_bfloat16
from llmcli.reports.bench import Settings, Test
from llmcli.reports.ceilings import Ceilings
from llmcli.reports.work import PartWork


def work(config: ModelConfig, dtype: str, test: Test, settings: Settings) -> PartWork:
    """Of one run: what comes before it (`depth`) is there already."""
    return sum((added(works) for _, works in _phases(config, dtype, test, settings)), PartWork())


def roofline_ns(
    config: ModelConfig, dtype: str, test: Test, settings: Settings, ceilings: Ceilings
) -> float | None:
    """The least time of one run: each part waits for its weights and keys or for its products.

    What waits longer counts, part by part; activations are left out, as if they never left a
    cache. The rate of reading is that for all that one call reads. None where the rate of
    products in that dtype was not measured.
    """
    matrix = ceilings.matrix(dtype)
    if matrix is None:
        return None
    seconds = 0.0
    for calls, works in _phases(config, dtype, test, settings):
        one_call = sum(part.weights + part.cache for *_, part in works) // calls
        rate = ceilings.read(one_call).bytes_per_s
        for *_, part in works:
            reading = (part.weights + part.cache) / rate
            seconds += max(reading, part.flops / matrix.flops_per_s)
    return 1e9 * seconds


def memory_bytes(config: ModelConfig, dtype: str, test: Test, settings: Settings) -> int:
    """Weights, cache and activations that such a run takes, as `info` counts them.

    On the device that `auto` is: only shapes are asked that.
    """
    need = memory_need(
        config,
        dtype=dtype,
        batch=1,
        context=plan.needed(test),
        chunk=plan.chunk(settings),
        cuda=resolve_device("auto").type == "cuda",
        native=has_bfloat16(),
    )
    return need.total


def _phases(
    config: ModelConfig, dtype: str, test: Test, settings: Settings
) -> tuple[tuple[int, Works], ...]:
    """Each call that reads the prompt, then all that write tokens: (how many calls, work)."""
    reading = tuple(plan.calls(test.n_prompt, settings))
    return _counted(config, dtype, test, reading)


@lru_cache(maxsize=8)  # asked for twice for a row, and takes half a millisecond a token
def _counted(
    config: ModelConfig, dtype: str, test: Test, reading: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, Works], ...]:
    found = []
    for past, tokens in reading:
        call = Call(batch=1, tokens=tokens, past=test.depth + past, phase="prefill")
        found.append((1, part_work(config, call, dtype=dtype)))
    if test.n_gen:
        past = test.depth + test.n_prompt
        works = decode_work(config, batch=1, tokens=test.n_gen, past=past, dtype=dtype)
        found.append((test.n_gen, works))
    return tuple(found)
