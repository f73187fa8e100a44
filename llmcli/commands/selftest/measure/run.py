"""All of `selftest`, in order: arithmetic first, then what takes processes, memory and time.

Speed and memory are those of models of real sizes with random weights. Rates are measured in turns
with what they are compared with: the rate at which this machine reads memory, or multiplies
matrices, and transformers where it is installed.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from llmcli import devices
from llmcli.commands.selftest.measure.arithmetic import as_model, measure_groups
from llmcli.commands.selftest.report import GroupResult, MemoryResult, RateResult, SelftestReport
from llmcli.config.model import ModelConfig
from llmcli.decoder.decoder import Decoder
from llmcli.devices import available_bytes
from llmcli.errors import UsageError, WriteFailed
from llmcli.families import find
from llmcli.graph.memory import memory_need
from llmcli.graph.precision import Precision, matrices, resolve_precision
from llmcli.graph.spec import Phase
from llmcli.kernels import native
from llmcli.measure.ceilings import matrix_rate, measure_ceilings, read_rate
from llmcli.measure.engines import (
    Engine,
    LlmcliEngine,
    WorkCounter,
    engine_info,
    planned_run,
    timed_run,
)
from llmcli.measure.peaks import Peak, PhaseMemory, resident_bytes
from llmcli.measure.peers import Transformers, import_transformers, silent
from llmcli.measure.runs import in_turns
from llmcli.model import Model
from llmcli.records.document import ViewCheck, difference
from llmcli.records.engines import SpeedTest
from llmcli.records.work import Progress, no_progress
from llmcli.weights.dense import writable

# layers of each shape that are run, at most: five minutes are enough for all of it
_LAYERS = {"cpu": {"1B": 16, "8B": 3}, "cuda": {"1B": 16, "8B": 32}}
_DIGEST = "from llmcli.commands.selftest.measure.arithmetic import digest; print(digest())"
_HUGE = 1 << 40  # tokens of context: more memory than any machine has
_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": _HUGE, "rms_norm_eps": 1e-5,
}  # fmt: skip
_WAIT_S = 120
PROMPT, TOKENS, ROUNDS = 512, 8, 5
_BLOCK = 1 << 20  # random numbers, repeated: zeros are read faster
_READ = 1 << 28  # bytes that no cache holds
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0, "hidden_act": "silu", "vocab_size": 128_256,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1B": _LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8B": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The first `layers` of a model of `SHAPES`."""

    name: str
    layers: int

    @property
    def whole(self) -> ModelConfig:
        """All layers of it."""
        return find("llama", "safetensors").from_hf(SHAPES[self.name])

    @property
    def config(self) -> ModelConfig:
        """The layers that are run."""
        return replace(self.whole, layers=self.whole.layers[: self.layers])


def measure_selftest(
    device: torch.device, *, speed: bool = True, progress: Progress = no_progress
) -> SelftestReport:
    """Checks on small models, and, with `speed`, rates and memory of a 1B and an 8B shape."""
    begin, refused = perf_counter(), []
    groups = measure_groups(device, progress)
    if device.type == "cpu":
        levels = measure_levels()
        groups += [] if levels is None else [levels]
        refused += ["levels: no kernels were built"] if levels is None else []
    groups.append(measure_exhaustion(device))
    rates: list[RateResult] = []
    memory: list[MemoryResult] = []
    ceilings = None
    if speed:
        precision = precision_of(device, Shape("1B", 1).whole)
        ceilings = measure_ceilings(device, precision, progress=progress)
        for name, most in _LAYERS["cuda" if device.type == "cuda" else "cpu"].items():
            layers = fitting_layers(name, device, most)
            if not layers:
                refused.append(f"{name}: no memory for one layer of it")
                continue
            one = Shape(name, layers)
            found, taken = measure_shape(one, device, against=name == "1B", progress=progress)
            rates += found
            memory.append(taken)
            if layers < most:
                refused.append(f"{taken.shape}: no memory for more")
    return SelftestReport(
        device=str(device),
        groups=tuple(groups),
        rates=tuple(rates),
        memory=tuple(memory),
        ceilings=ceilings,
        refused=tuple(refused),
        seconds=perf_counter() - begin,
    )


def measure_levels() -> GroupResult | None:
    """Packed models at every level of this processor's kernels; None where there are no kernels."""
    begin, found = perf_counter(), {}
    for level in native.levels():
        done = _run(["-c", _DIGEST], {"LLMCLI_KERNELS": level})
        found[level] = done.stdout.strip() if done.returncode == 0 else f"exit {done.returncode}"
    if not found:
        return None
    best = next(reversed(found.values()))
    wrong = [level for level, bits in found.items() if bits != best or bits.startswith("exit")]
    check = ViewCheck(
        name="levels",
        words="all kernel levels compute the same bits",
        value=len(wrong),
        tolerance=0,
        where=", ".join(wrong or found),
    )
    return GroupResult(check=check, cases=len(found), seconds=perf_counter() - begin)


def measure_exhaustion(device: torch.device) -> GroupResult:
    """A context that no memory holds has to end with exit 5, a line and a hint."""
    begin = perf_counter()
    try:
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
            words = f"-m llmcli generate --ids 1,2 -n {_HUGE - 2} --context-length {_HUGE} "
            words += f"--offline --random-weights --device {device} -m"
            done = _run([*words.split(), folder], {})
    except OSError as error:
        raise WriteFailed(f"could not write a temporary file: {error.strerror}") from error
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    ok = done.returncode == 5 and len(lines) == 2
    wrong = [] if ok else [f"exit {done.returncode}"]
    words = "a context that does not fit: exit 5, a hint"
    check = difference("memory exhausted", words, wrong)
    return GroupResult(check=check, cases=1, seconds=perf_counter() - begin)


def _run(words: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python; exit code 124, as `timeout` gives, if it does not end in `_WAIT_S`.

    It imports what this process does: not the sources, should they lie in the working directory.
    """
    path = os.pathsep.join(filter(None, sys.path))
    try:
        return subprocess.run(
            [sys.executable, "-P", *words],
            env={**os.environ, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=_WAIT_S,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", "")


def precision_of(device: torch.device, config: ModelConfig) -> Precision:
    """The precision in which a bfloat16 checkpoint runs on a device."""
    return resolve_precision(
        config,
        dtype="auto",
        quantize="auto",
        device=device.type,
        stored={"BF16"},
        bfloat16=devices.multiplies_bfloat16(device),
        kernels=native.kernels_of(device.type),
        packable=dict.fromkeys(matrices(config), "bfloat16"),
    )


def _ids() -> list[int]:
    return [number % 1000 for number in range(PROMPT)]


def fill(tensors: list[Tensor]) -> None:
    """Small random numbers, the same block again and again."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(_BLOCK, generator=generator) * 0.02
    for tensor in tensors:
        flat, part = tensor.view(-1), block.to(tensor.device, tensor.dtype)
        for start in range(0, len(flat), _BLOCK):
            piece = flat[start : start + _BLOCK]
            piece.copy_(part[: len(piece)])


def measure_shape(
    one: Shape, device: torch.device, *, against: bool, progress: Progress = no_progress
) -> tuple[list[RateResult], MemoryResult]:
    """Decode and prefill of that model, and the memory that it took; `against` transformers, too.

    Raises OutOfMemory.
    """
    progress(f"{one.name}: building", 0, 3)
    cuda, config = device.type == "cuda", one.config
    precision, context = precision_of(device, config), PROMPT + TOKENS * (ROUNDS + 1)
    need = memory_need(planned_run(config, precision, device, context=context, chunk=PROMPT))
    devices.require_memory(
        need.needed_bytes, device, f"the {one.name} shape", "give fewer layers, or free some memory"
    )
    gc.collect()
    devices.release_freed_memory()
    base = torch.cuda.memory_allocated(device) if cuda else resident_bytes()
    with Peak(device) as peak:
        model = as_model(Decoder(config, precision, device=device))
        with torch.inference_mode():
            fill([writable(model.decoder.weight(name)) for name in model.decoder.weight_names])
        model.decoder.check_kernels()
        engine = LlmcliEngine(model, engine_info(model, None))
        engine.start(need.context, torch.get_num_threads(), PROMPT)
        engine.read(_ids())
    engines: list[Engine] = [engine]
    peer = random_peer(one, model) if against else None
    if peer is not None:
        peer.start(need.context, torch.get_num_threads(), PROMPT)
        engines.append(peer)
    progress(f"{one.name}: prefill", 1, 3)
    prefill = _rate(one, model, engines, "prefill")
    progress(f"{one.name}: decode", 2, 3)
    decode = _rate(one, model, engines, "decode")
    measured = None if peak.nbytes is None or base is None else peak.nbytes - base
    memory = MemoryResult(shape=decode.words, estimated=need.needed_bytes, measured=measured)
    while engines:
        engines.pop().close()
    del model, engine, peer
    devices.free_unreferenced()
    return [decode, prefill], memory


def random_peer(one: Shape, ours: Model) -> Transformers | None:
    """transformers' model of the same shape, with random weights in the same dtype, on its own.

    None where it is not installed or too old, or where there is no memory for its model.
    """
    free = available_bytes(ours.device)
    if free is not None and free < 1.5 * ours.precision.weight_bytes(one.config):
        return None
    try:
        transformers = import_transformers()
    except UsageError:
        return None
    from transformers.initialization import no_init_weights

    settings = SHAPES[one.name] | {"num_hidden_layers": one.layers}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with silent(), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=ours.dtype)
    model = model.to(ours.device).eval()
    with torch.inference_mode():
        fill(list(model.parameters()))
    return Transformers(model, ours, transformers.__version__, None, flash=True)


def _rate(one: Shape, model: Model, engines: list[Engine], phase: Phase) -> RateResult:
    """Run the phase with each engine, ours first, in turns with its ceiling, after a warm-up round.

    The rate is extrapolated to all layers by the counted work: layers that were not run take as
    long as those that were, and embedding and head are run once in either case.
    """
    device, prefill = model.device, phase == "prefill"
    buffer = torch.rand(0 if prefill else _READ // 4).to(device)
    batches, written = ([_ids()], []) if prefill else ([], [0] * TOKENS)

    def seconds(engine: Engine) -> float:
        if prefill:
            engine.rewind(0)
        with engine.computing():
            return timed_run(engine, batches, written, PhaseMemory()).total / 1e9

    def ceiling() -> float:
        if prefill:
            return matrix_rate(device, model.precision.products, 0.3).flops_per_s
        return read_rate(buffer, _READ, 0.2, cached=False)

    test = SpeedTest(n_prompt=0, n_gen=TOKENS, n_depth=PROMPT)
    if prefill:
        test = SpeedTest(n_prompt=PROMPT, n_gen=0)
    some, every = (
        WorkCounter(config=config, precision=precision_of(device, config))
        .work(test, PROMPT, PROMPT)
        for config in (one.config, one.whole)
    )
    # a step streams weights and cache
    done = some.flops if prefill else some.weights + some.cache
    part = some.flops / every.flops if prefill else some.bytes / every.bytes
    sides: list[Callable[[], float]] = [ceiling]
    sides += [partial(seconds, engine) for engine in engines]
    turns = list(islice(in_turns(*sides), 1, 1 + (2 if prefill else ROUNDS)))
    versus = [theirs / ours for _, ours, *peers in turns for theirs in peers]
    return RateResult(
        shape=one.name,
        phase=phase,
        format=str(model.precision.describe(one.config)["weight_format"]),
        tokens_per_s=test.tokens / median(seconds for _, seconds, *_ in turns) * part,
        share=median(done / seconds / rate for rate, seconds, *_ in turns),
        layers=one.layers,
        all_layers=len(one.whole.layers),
        versus=median(versus) if versus else None,
    )


def fitting_layers(name: str, device: torch.device, most: int) -> int:
    """The layers, at most `most`, that fit into half of the free memory; 0 if none does."""
    free = available_bytes(device)
    for layers in range(most, 0, -1):
        config = Shape(name, layers).config
        if free is None or 2 * precision_of(device, config).weight_bytes(config) <= free:
            return layers
    return 0
