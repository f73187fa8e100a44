"""What a test computes, a lower bound of its time on a machine, and the memory it needs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.counts import memory_need
from llmcli.anatomy.work import (
    Works,
    added,
    calls_work,
    decode_work,
    prompt_calls,
    step_bytes,
)
from llmcli.commands.bench.measure.engine import Reads
from llmcli.commands.bench.report.plan import Test
from llmcli.commands.bench.report.settings import Settings
from llmcli.config import ModelConfig
from llmcli.devices import resolve_device
from llmcli.graph.spec import Call, Logits
from llmcli.measure.roofline import lower_bound_seconds
from llmcli.ops.processor import has_bfloat16
from llmcli.records.ceilings import Ceilings
from llmcli.records.work import PartWork


def calls(
    tokens: int, settings: Settings, depth: int = 0, reads: Reads = "prompt"
) -> Iterator[tuple[Call, Logits]]:
    """The forward calls that read a prompt after `depth` tokens; each piece ends with logits."""
    past = depth
    for piece in settings.pieces(tokens):
        for call, logits in prompt_calls(batch=1, tokens=piece, past=past, chunk=settings.chunk):
            yield call, logits if reads == "prompt" else "last"
        past += piece


def work(
    config: ModelConfig,
    numbers: Arithmetic,
    test: Test,
    settings: Settings,
    reads: Reads = "prompt",
) -> PartWork:
    """Of one run: what comes before it (`n_depth`) is there already."""
    phases = _phases(config, numbers, test, settings, reads)
    return sum((added(works) for _, works in phases), PartWork())


def working_set(config: ModelConfig, numbers: Arithmetic, test: Test) -> int:
    """Bytes that the last step of a run reads again: the weights, and the keys and values."""
    return step_bytes(config, test.capacity, numbers=numbers)


def roofline_ns(
    config: ModelConfig,
    numbers: Arithmetic,
    test: Test,
    settings: Settings,
    ceilings: Ceilings,
    reads: Reads = "prompt",
) -> float | None:
    """The lower bound of one run's time, each part waiting for its bytes or for its products.

    See `measure.roofline`. None where the rate of such products was not measured.
    """
    nbytes = working_set(config, numbers, test)
    seconds = [
        lower_bound_seconds(works, calls, ceilings, numbers=numbers, working_set=nbytes)
        for calls, works in _phases(config, numbers, test, settings, reads)
    ]
    known = [one for one in seconds if one is not None]
    return 1e9 * sum(known) if len(known) == len(seconds) else None


def memory_bytes(config: ModelConfig, numbers: Arithmetic, test: Test, settings: Settings) -> int:
    """Weights, cache and activations that such a run takes, as `info` counts them.

    On the device that `auto` is: needed for shapes alone.
    """
    need = memory_need(
        config,
        numbers,
        batch=1,
        context=test.capacity,
        chunk=settings.chunk,
        cuda=resolve_device("auto").type == "cuda",
        native=has_bfloat16(),
    )
    return need.needed_bytes


@lru_cache(maxsize=8)  # needed twice for a row, and takes half a millisecond a token
def _phases(
    config: ModelConfig, numbers: Arithmetic, test: Test, settings: Settings, reads: Reads
) -> tuple[tuple[int, Works], ...]:
    """Each call that reads the prompt, then all that write tokens: (how many calls, work)."""
    found = [
        (1, calls_work(config, (call,), numbers=numbers, whole=reads == "whole"))
        for call in calls(test.n_prompt, settings, test.n_depth, reads)
    ]
    if test.n_gen:
        past = test.n_depth + test.n_prompt
        works = decode_work(config, batch=1, tokens=test.n_gen, past=past, numbers=numbers)
        found.append((test.n_gen, works))
    return tuple(found)
