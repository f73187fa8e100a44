"""Engines whose speed is measured: their interface, a timed run, their work, and our own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from time import perf_counter_ns
from typing import Literal, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import llmcli
from llmcli import devices
from llmcli.config.model import ModelConfig
from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.graph.cost import (
    CostByPart,
    cost_by_part,
    decode_calls,
    prompt_calls,
    step_bytes,
    total,
)
from llmcli.graph.graph import graph
from llmcli.graph.memory import PlannedRun, memory_need, prefill_peak
from llmcli.graph.ops import Score
from llmcli.graph.precision import Precision
from llmcli.graph.spec import Call, Logits
from llmcli.measure.ceilings import Roofline
from llmcli.measure.peaks import PhaseMemory
from llmcli.measure.runs import gc_disabled
from llmcli.model import Model
from llmcli.records.engines import BACKENDS, CACHE_OF, EngineInfo, SpeedTest, TimedRun
from llmcli.records.machine import Ceilings
from llmcli.records.text import PhasePeak
from llmcli.records.work import Cost

# The logits of a prompt's last token, or of each call's last; in the latter case layers that keep
# nothing (`Graph.readers`) compute that token alone, as in the former, or the whole call.
Reads = Literal["prompt", "calls", "whole"]


def planned_run(
    config: ModelConfig,
    precision: Precision,
    device: torch.device,
    *,
    context: int,
    chunk: int | None = None,
) -> PlannedRun:
    """The run of one sequence on that device."""
    cuda, native = device.type == "cuda", devices.multiplies_bfloat16(device)
    return PlannedRun(
        config, precision, batch=1, context=context, chunk=chunk, cuda=cuda, native=native
    )


@dataclass(frozen=True, kw_only=True)
class WorkCounter:
    """Counts the work of an engine whose weights are those of a configuration.

    `reads`: the logits that it computes while it reads a prompt, and the tokens that its last
    layers compute.
    """

    config: ModelConfig
    precision: Precision
    reads: Reads = "prompt"

    def calls(
        self, tokens: int, batch: int, chunk: int, depth: int = 0
    ) -> Iterator[tuple[Call, Logits]]:
        """The forward calls that read a prompt after `depth` tokens, each of `chunk` at most.

        The prompt is read in batches of `batch` tokens, each of which ends with logits.
        """
        for start in range(0, tokens, batch):
            size = min(batch, tokens - start)
            calls = prompt_calls(batch=1, tokens=size, past=depth + start, chunk=chunk)
            for call, logits in calls:
                yield call, logits if self.reads == "prompt" else "last"

    def work(self, test: SpeedTest, batch: int, chunk: int) -> Cost:
        """Of one run, without reading its depth; `batch` and `chunk` as in `calls`."""
        return sum((total(works) for _, works in _phases(self, test, batch, chunk)), Cost())

    def working_set(self, test: SpeedTest) -> int:
        """Bytes that the last step of a run reads again: the weights, and the keys and values."""
        return step_bytes(self.config, test.capacity, precision=self.precision)

    def roofline_ns(
        self, test: SpeedTest, batch: int, chunk: int, ceilings: Ceilings
    ) -> float | None:
        """The lower bound of one run's time, each part waiting for its bytes or for its products.

        See `measure.ceilings`. None where the rate of such products was not measured.
        """
        precision, nbytes = self.precision, self.working_set(test)
        if None in (ceilings.matrix(precision.products), ceilings.matrix(precision.dtype)):
            return None
        roof = Roofline(ceilings=ceilings, precision=precision, working_set=nbytes)
        phases = _phases(self, test, batch, chunk)
        parts = (roof.of(work, calls) for calls, works in phases for work in works.values())
        return 1e9 * sum(seconds for seconds, _ in parts)

    def memory_bytes(self, test: SpeedTest, chunk: int) -> int:
        """Weights, cache and activations that such a run takes, as `info` counts them.

        On the device that `auto` is: needed for shapes alone.
        """
        device = devices.resolve_device("auto")
        run = planned_run(self.config, self.precision, device, context=test.capacity, chunk=chunk)
        return memory_need(run).needed_bytes


@lru_cache(maxsize=8)  # needed twice for a row, and takes half a millisecond a token
def _phases(
    counter: WorkCounter, test: SpeedTest, batch: int, chunk: int
) -> tuple[tuple[int, CostByPart], ...]:
    """Each call that reads the prompt, then all that write tokens: (how many calls, work)."""
    config, precision, whole = counter.config, counter.precision, counter.reads == "whole"
    found = [
        (1, cost_by_part(config, (call,), precision=precision, whole=whole))
        for call in counter.calls(test.n_prompt, batch, chunk, test.n_depth)
    ]
    if test.n_gen:
        past = test.n_depth + test.n_prompt
        calls = decode_calls(batch=1, tokens=test.n_gen, past=past)
        works = cost_by_part(config, calls, precision=precision)
        found.append((test.n_gen, works))
    return tuple(found)


class Engine(Protocol):
    """One model, loaded. Every call returns when the device has done the work.

    `info`: of the engine, its model, and how it computes. Ids go from 0 to `vocab` - 1. `bos`: the
    id that the model puts in front of a text, None where it does not. `counter`: of its work, None
    where the weights are not those of a configuration of ours. On the device `meta` there are only
    shapes.
    """

    info: EngineInfo
    vocab: int
    bos: int | None
    counter: WorkCounter | None

    def start(self, tokens: int, threads: int, chunk: int) -> None:
        """An empty memory with room for so many tokens; prompts are read `chunk` at a time.

        Raises OutOfMemory where it does not fit, UsageError where it is not supported.
        """

    def computing(self) -> AbstractContextManager[object]:
        """What the calls of a run are made in: entered once, since entering takes time too."""

    def read(self, ids: Sequence[int]) -> None:
        """Reads a prompt after the tokens in memory and computes the logits of its last token."""

    def step(self, id: int) -> None:
        """One more token; its logits are computed."""

    def rewind(self, tokens: int) -> None:
        """Forgets all but the first `tokens`.

        Going back to any length but 0 takes an earlier call with that length, made while the
        memory had it: that call keeps the state.
        """

    def close(self) -> None:
        """Gives the memory back; the engine is not used after it."""


def timed_run(
    engine: Engine, prompt: Sequence[Sequence[int]], written: Sequence[int], memory: PhaseMemory
) -> TimedRun:
    """The times of reading the batches of a prompt, then of each token that is written.

    Within `Engine.computing`. The peaks of the two phases are kept in `memory`, whose marks are
    read outside both times. Python's collector does not run meanwhile.
    """
    read, step = engine.read, engine.step
    first, marks = None, [0]
    with gc_disabled():
        if prompt:
            with memory.phase("prefill"):
                begin = perf_counter_ns()
                for batch in prompt:
                    read(batch)
                first = perf_counter_ns() - begin
        if written:
            with memory.phase("decode"):
                marks = [perf_counter_ns()]
                for id in written:
                    step(id)
                    marks.append(perf_counter_ns())
    return TimedRun(
        total=(first or 0) + marks[-1] - marks[0],
        first=first,
        tokens=tuple(after - before for before, after in pairwise(marks)),
    )


def random_ids(seed: int, what: str, tokens: int, vocab: int, bos: int | None) -> list[int]:
    """Random ids, the same for every engine: with BOS in front where there is one.

    `what` names the run, so that no two runs read the same text.
    """
    draw = random.Random(f"{seed} {what}")
    found = [draw.randrange(vocab) for _ in range(tokens)]
    if bos is not None and found:
        found[0] = bos
    return found


def attention(*, flash: bool) -> AbstractContextManager[None]:
    """Within it, without `flash`, the scores of all pairs are computed as in the formula."""
    return nullcontext() if flash else sdpa_kernel(SDPBackend.MATH)


_NARROW = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is such a kernel: on a CPU, and on newer CUDA devices for 16 bits."""
    if device.type == "cuda":
        available: bool = torch.backends.cuda.is_flash_attention_available()
        return (
            available and dtype in _NARROW and torch.cuda.get_device_capability(device) >= _AMPERE
        )
    return device.type != "mps"  # and so for shapes, where it makes no difference


# what llama.cpp calls our dtypes in a file
_FILE_TYPES = {"float64": "all F64", "float32": "all F32", "float16": "F16", "bfloat16": "BF16"}


def engine_info(
    model: Model,
    load_s: float | None,
    *,
    precision: Precision | None = None,
    base: int | None = None,
    peak: PhasePeak | None = None,
    on: torch.device | None = None,
) -> EngineInfo:
    """The facts of a model that was loaded in `load_s` seconds.

    `precision`: if not its own. `base`, `peak`: bytes held before loading and in it.
    `on`: the device that a model of shapes alone was meant for.
    """
    layers = len(model.config.layers) + 1  # the head counts as one
    every = (*model.decoder.placed, model.device) if on is None else (on,) * layers
    count, precision = model.parameter_count, precision or model.precision
    weights = precision.weight_format(model.config)
    file = _FILE_TYPES.get(weights, weights.partition(" ")[0])
    size = f"{count / 1e6:.0f}M"  # `135M`, `1.5B`, `8B`: as models are called
    if count >= 1e9:
        size = f"{count / 1e9:.1f}".removesuffix(".0") + "B"
    return EngineInfo(
        engine="llmcli",
        engine_version=llmcli.__version__,
        model_type=f"{model.config.model_type} {size} {file}",
        model_size=model.weight_bytes,
        model_n_params=count,
        backends=BACKENDS[every[0].type],
        device=model.devices if on is None else str(on),
        dtype=precision.dtype,
        weight_format=weights,
        product_format=precision.products,
        type_k=CACHE_OF[precision.cache],
        gpu_layers=sum(one.type in ("cuda", "mps") for one in every),
        load_s=load_s,
        base_bytes=base,
        load_peak=peak,
    )


def bos_of(model: Model) -> int | None:
    """The id that its tokenizer puts in front of a text, None where it puts none."""
    tokenizer = model.tokenizer
    return tokenizer.bos_id if tokenizer is not None and tokenizer.add_bos else None


def require_positions(config: ModelConfig, tokens: int) -> None:
    """Raises UsageError for more tokens than the model has learned positions."""
    positions = config.embedding.positions
    if positions is not None and tokens > positions:
        raise UsageError(
            f"a test of {tokens} tokens does not fit the {positions} positions that "
            "the model has learned",
            hint=f"`-d`, `-p` and `-n` of a test are {positions} tokens at most",
        )


class LlmcliEngine:
    """Our decoder with one sequence's cache. On a GPU every call waits until it is done."""

    def __init__(self, model: Model, info: EngineInfo, *, flash: bool = True) -> None:
        self.info = info
        precision = model.precision
        self.counter: WorkCounter | None = WorkCounter(config=model.config, precision=precision)
        self.vocab, self.bos = model.config.vocab, bos_of(model)
        self._model = model
        self._flash = flash
        self._session: Session | None = None
        self._chunk = 0

    def start(self, tokens: int, threads: int, chunk: int) -> None:
        """An empty cache; the threads are PyTorch's and stay so.

        Raises UsageError for more tokens than the model has learned positions, OutOfMemory.
        """
        self._session = None  # its cache is freed before the next one is made
        require_positions(self._model.config, tokens)
        if self._model.device.type != "meta":
            devices.require_memory(
                self._needed(tokens, chunk),
                self._model.device,
                f"the cache of {tokens} tokens and reading {min(chunk, tokens)} of them at a time",
                "use shorter tests or a lower -ub",
            )
        if threads > 0:
            torch.set_num_threads(threads)
        self._chunk = chunk
        self._session = Session(self._model.decoder, 1, tokens)

    def computing(self) -> AbstractContextManager[None]:
        """With the requested kernel of attention."""
        return attention(flash=self._flash)

    def read(self, ids: Sequence[int]) -> None:
        """Prompt tokens, `chunk` of them in a forward call."""
        self._started.prefill([ids], chunk=self._chunk)
        self._started.keep()
        devices.wait_for(self._model.device)

    def step(self, id: int) -> None:
        """One token."""
        # made on the device: a copy from the host would wait for all that runs there
        id_BT = torch.full((1, 1), id, device=self._model.device)
        self._started.extend(id_BT)
        devices.wait_for(self._model.device)

    def rewind(self, tokens: int) -> None:
        """Back to the first `tokens`."""
        self._started.rewind(tokens)

    def close(self) -> None:
        """Free the cache; the model stays with its owner."""
        self._session = None

    def _needed(self, tokens: int, chunk: int) -> int:
        """Bytes of the cache and of the activations: Linux would kill the process, not refuse."""
        config, precision = self._model.config, self._model.precision
        peak = prefill_peak(
            planned_run(config, precision, self._model.device, context=tokens, chunk=chunk)
        )
        if not self._flash:  # scores and pattern of all heads of a layer
            model = graph(config)
            scored = (node for node in model.nodes.values() if isinstance(node.op, Score))
            heads = max((model.sizes(node.layer)["H"] for node in scored), default=0)
            peak += 2 * heads * min(chunk, tokens) * tokens * max(self._model.dtype.itemsize, 4)
        return self._model.decoder.state_bytes(1, tokens) + peak

    @property
    def _started(self) -> Session:
        if self._session is None:
            raise ValueError("the engine has not been started")
        return self._session
