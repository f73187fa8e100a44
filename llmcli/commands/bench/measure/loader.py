"""The engines of a sweep: our model, loaded as seldom as possible, and the peer beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from llmcli.checkpoints import Checkpoint, open_checkpoint
from llmcli.checkpoints.locate import find
from llmcli.commands.bench.report.plan import Plan
from llmcli.commands.bench.report.settings import Settings, Weights
from llmcli.devices import free_unreferenced, resolve_device
from llmcli.errors import LlmcliError, UsageError
from llmcli.graph.precision import Precision
from llmcli.loading.load import load_checkpoint, load_shapes, resolve_devices
from llmcli.measure import ceilings
from llmcli.measure.engines import LlmcliEngine, engine_info, has_flash
from llmcli.measure.peaks import Peak, phase_peak, resident_bytes
from llmcli.measure.peers import PeerEngine, open_peer, same_model
from llmcli.model import Model
from llmcli.prepare.prepared import PrecisionOptions, quantize_without_effect
from llmcli.records.document import ViewCheck
from llmcli.records.engines import CACHE_OF, EngineInfo
from llmcli.records.machine import Ceilings
from llmcli.records.work import Progress
from llmcli.shell.exits import SIGNALS
from llmcli.shell.options import ModelOptions
from llmcli.shell.output import Output
from llmcli.shell.running import opened_headers

_DTYPES = {kind: dtype for dtype, kind in CACHE_OF.items()}


def refuse(settings: Settings) -> None:
    """Raises UsageError for settings that no model can be run with."""
    for name, kind in (("type_k", settings.type_k), ("type_v", settings.type_v)):
        if kind not in ("auto", *_DTYPES):
            raise UsageError(
                f"a cache of `{kind}` ({name}) has no kernel in this version",
                hint=f"leave out `-ct{name[-1]}`: the cache is kept in the numbers of the model",
            )
    if settings.embeddings:
        raise UsageError(
            "embeddings instead of logits cannot be benchmarked", hint="leave out `-embd`"
        )


def refuse_for(settings: Settings, info: EngineInfo, *, flash: bool, rounds: bool) -> None:
    """Raises UsageError for settings that a loaded model cannot be run with.

    `flash`: it has a kernel of attention that keeps no scores. `rounds`: it has products for which
    activations are rounded to integers.
    """
    layers = info.gpu_layers or 0
    if settings.activations != "auto" and not rounds:
        raise UsageError(
            f"`--activations {settings.activations}` has no effect: no weights are multiplied in "
            "the blocks of their file",
            hint="leave it out",
        )
    if settings.flash_attn == "on" and not flash:
        raise UsageError(
            f"there is no flash attention in {info.type_k} on this device",
            hint="leave out `-fa`, or try `--dtype bfloat16`",
        )
    for name, kind in (("type_k", settings.type_k), ("type_v", settings.type_v)):
        if kind not in ("auto", info.type_k):
            raise UsageError(
                f"a cache of `{kind}` ({name}) in a model that keeps it in {info.type_k} has no "
                "kernel in this version",
                hint=f"leave out `-ct{name[-1]}`, or compute in it too: `--dtype {_DTYPES[kind]}`",
            )
    if layers and settings.no_kv_offload:
        raise UsageError(
            "a cache on the CPU for a model on a GPU is not supported", hint="leave out `-nkvo`"
        )
    if 0 <= settings.n_gpu_layers < layers:
        raise UsageError(
            f"{settings.n_gpu_layers} of {layers} layers on a GPU: it has all or none",
            hint="write `-ngl 0` for the CPU alone, or leave it out",
        )


class EngineLoader(ExitStack):
    """Loads engines for settings, measures ceilings, and reads headers. A context manager.

    A model stays for the next settings with the same device and arithmetic. `models` are those
    that were loaded, as documents describe them; headers that were fetched for shapes alone are
    removed at the end. `checks`, by model, device and weight format: whether the two engines
    compute the same. `on_ceilings` receives the machine's.
    """

    def __init__(
        self,
        plan: Plan,
        out: Output,
        progress: Progress,
        on_ceilings: Callable[[Ceilings], None],
    ) -> None:
        super().__init__()
        self.models: dict[tuple[str | None, ...], dict[str, Any]] = {}
        self.checks: dict[tuple[str, str, str], ViewCheck] = {}
        self._plan = plan
        self._out = out
        self._progress = progress
        self._on_ceilings = on_ceilings
        self._loaded: tuple[Weights, Model, EngineInfo] | None = None
        self._known: dict[Weights, EngineInfo | None] = {}

    def load(self, settings: Settings) -> LlmcliEngine:
        """This program's engine.

        Raises UsageError for what is not supported, and what opening and loading raise.
        """
        refuse(settings)
        if self._loaded is None or self._loaded[0] != settings.weights:
            if self._loaded is not None:  # its memory is given back: both may not fit
                self._loaded = None
                free_unreferenced()
            self._loaded = settings.weights, *self._load(settings)
        _, model, info = self._loaded
        flash, rounds = has_flash(model.device, model.dtype), model.precision.rounds_inputs
        refuse_for(settings, info, flash=flash, rounds=rounds)
        SIGNALS.check()  # a signal's exception may have got lost in a library
        described = (settings.model, info.device, info.weight_format, info.product_format)
        if described not in self.models:
            if not any(name == settings.model for name, *_ in self.models):
                longest, trained = self._plan.longest.capacity, model.config.context
                # beyond learned positions nothing runs
                if model.config.embedding.positions is None and longest > trained:
                    self._out.note(
                        f"tests of {longest:,} tokens go beyond the {trained:,} that "
                        f"`{settings.model}` was trained with"
                    )
                ours = self._plan.ours
                if not ours.random_weights and (
                    words := quantize_without_effect(model.checkpoint, ours.quantize)
                ):
                    self._out.note(words)
            self.models[described] = model.describe()
            if self._plan.runs.verbose:
                self._out.note(
                    f"loaded {settings.model} in {info.load_s or 0:.3g} s: "
                    f"{info.formats} on {info.device}"
                )
        return LlmcliEngine(model, info, flash=settings.flash_attn != "off")

    def known(self, settings: Settings) -> EngineInfo | None:
        """What the headers say of a model that was not loaded; None where they cannot be read."""
        key = settings.weights
        if self._loaded is not None and self._loaded[0] == key:
            return replace(self._loaded[2].without_memory(), load_s=None)
        if key not in self._known:
            self._known[key] = None
            with suppress(LlmcliError, OSError):
                checkpoint, _ = self._open(settings.model, fetch=False)
                meta = settings.placed == "meta"
                on = torch.device("meta") if meta else resolve_devices(settings.placed)[0]
                like = "auto" if meta else str(on)
                model = load_shapes(checkpoint, like=like, **self._precision_options(settings))
                self._known[key] = engine_info(model, None, on=on)
        return self._known[key]

    def peer(self, settings: Settings) -> PeerEngine:
        """The engine of `--against` with the same weights, compared with ours once."""
        name, loaded = self._plan.ours.against, self._loaded
        if name is None or loaded is None or loaded[0] != settings.weights:
            raise LlmcliError("the model could not be loaded")
        _, model, _ = loaded
        asked = ("flash_attn", "n_batch", "type_k", "type_v", "no_kv_offload")
        engine = open_peer(name, model, **{one: getattr(settings, one) for one in asked})
        weights = model.precision.weight_format(model.config)
        key = (settings.model, engine.info.device, weights)
        if key not in self.checks:
            same = same_model(model, engine, threads=settings.n_threads, seed=self._plan.ours.seed)
            # the names of a document's checks differ
            number = f"_{len(self.checks) + 1}" if self.checks else ""
            words = f"{', '.join(key)}: {same.words}"
            self.checks[key] = replace(same, name=same.name + number, words=words)
            if not same.ok:
                self._out.note(
                    f"{engine.info.engine} does not compute what llmcli does with "
                    f"`{settings.model}`: KL {same.value:.2g} nats, where rounding explains "
                    f"{same.tolerance:.2g}"
                )
        return engine

    def ceilings(self, device: str, precision: Precision, working_set: int) -> Ceilings | None:
        """What the machine can do at most with the current threads in this precision.

        Called once for every device, precision and number of threads. `working_set`: bytes that a
        step of the longest test reads again and again. Of shapes alone: what it could do on the
        device that `auto` is. None of several devices, whose ceilings differ.
        """
        if self._plan.ours.no_ceilings or "," in device:
            return None
        found = ceilings.measure_ceilings(
            resolve_device("auto" if device == "meta" else device),
            precision,
            working_set=working_set,
            progress=self._progress,
        )
        self._on_ceilings(found)
        return found

    def _precision_options(self, settings: Settings) -> PrecisionOptions:
        return {
            "dtype": settings.dtype,
            "quantize": self._plan.ours.quantize,
            "activations": settings.activations,
        }

    def _load(self, settings: Settings) -> tuple[Model, EngineInfo]:
        meta, how = settings.placed == "meta", self._precision_options(settings)
        on = None if meta else resolve_devices(settings.placed)[0]
        base = None if meta else resident_bytes()
        with Peak(on) as peak:
            checkpoint, open_s = self._open(settings.model)
            begin = perf_counter()
            if meta:
                model = load_shapes(checkpoint, **how)
            else:
                model = load_checkpoint(
                    checkpoint,
                    device=settings.placed,
                    text=False,
                    progress=self._progress,
                    random_weights=self._plan.ours.weights_seed,
                    **how,
                )
            load_s = open_s + perf_counter() - begin
        held = None if meta else phase_peak("load", [peak])
        return model, engine_info(model, load_s, base=base, peak=held)

    def _open(self, name: str, *, fetch: bool = True) -> tuple[Checkpoint, float]:
        """The checkpoint, and the seconds that its headers took once they were there.

        Without `fetch` weights that are not on this machine are ModelNotFound or NetworkError.
        """
        ours = self._plan.ours
        if all(settings.device == "meta" for settings in self._plan.configurations):
            options = ModelOptions(model=name, revision=ours.revision, offline=ours.offline)
            begin = perf_counter()
            checkpoint, _ = self.enter_context(opened_headers(options, self._out))
            return checkpoint, perf_counter() - begin
        name, path = find(
            name,
            revision=ours.revision,
            offline=ours.offline or not fetch,
            progress=self._progress,
            note=self._out.note if fetch else None,
        )
        begin = perf_counter()
        return open_checkpoint(path, name=name), perf_counter() - begin
