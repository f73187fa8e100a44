"""From the settings of a sweep to an engine, with as few loads as there are models."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from llmcli.checkpoints import Checkpoint
from llmcli.commands.bench.measure.ours import Ours, engine_info, has_flash
from llmcli.commands.bench.report.llama_names import CACHE_OF, FLASH
from llmcli.commands.bench.report.results import EngineInfo, Settings
from llmcli.devices import resolve_device
from llmcli.errors import LlmcliError, UsageError
from llmcli.loading.load import load_checkpoint, load_shapes
from llmcli.measure.held import phase_peak
from llmcli.measure.peaks import Peak, resident_bytes
from llmcli.model import Model
from llmcli.records.progress import Progress

Key = tuple[str, str, str, str]  # model, device, dtype, activations
_DTYPES = {kind: dtype for dtype, kind in CACHE_OF.items()}
_PLAIN = ("auto", *CACHE_OF.values())  # formats that a cache is kept in


def refuse(settings: Settings) -> None:
    """Raises UsageError for settings that no model can be run with."""
    for name, kind in (("type_k", settings.type_k), ("type_v", settings.type_v)):
        if kind not in _PLAIN:
            raise UsageError(
                f"a cache of `{kind}` ({name}) has no kernel in this version",
                hint=f"leave out `-ct{name[-1]}`: the cache is kept in the numbers of the model",
            )
    if settings.flash_attn not in FLASH:
        raise UsageError(f"`{settings.flash_attn}` is not a way of flash attention")
    if settings.embeddings:
        raise UsageError(
            "embeddings instead of logits cannot be benchmarked", hint="leave out `-embd`"
        )
    for name, number in (("n_batch", settings.n_batch), ("n_ubatch", settings.n_ubatch)):
        if number < 1:
            raise UsageError(f"{name} is `{number}`, it must be 1 or more")


def refuse_for(
    settings: Settings, *, cache_type: str, gpu: bool, layers: int, flash: bool, rounds: bool
) -> None:
    """The same of a model that is loaded: its cache has one type, it lies on one device.

    `flash`: there is a kernel of attention for it that keeps no scores. `rounds`: there are
    products for which activations are rounded to integers.
    """
    if settings.activations != "auto" and not rounds:
        raise UsageError(
            f"`--activations {settings.activations}` has no effect: no weights are multiplied in "
            "the blocks of their file",
            hint="leave it out",
        )
    if settings.flash_attn == "on" and not flash:
        raise UsageError(
            f"there is no flash attention in {cache_type} on this device",
            hint="leave out `-fa`, or try `--dtype bfloat16`",
        )
    for name, kind in (("type_k", settings.type_k), ("type_v", settings.type_v)):
        if kind not in ("auto", cache_type):
            raise UsageError(
                f"a cache of `{kind}` ({name}) in a model that keeps it in {cache_type} has no "
                "kernel in this version",
                hint=f"leave out `-ct{name[-1]}`, or compute in it too: `--dtype {_DTYPES[kind]}`",
            )
    if gpu and settings.no_kv_offload:
        raise UsageError(
            "a cache on the CPU for a model on a GPU is not supported", hint="leave out `-nkvo`"
        )
    if gpu and 0 <= settings.n_gpu_layers <= layers:
        raise UsageError(
            f"{settings.n_gpu_layers} of {layers + 1} layers on a GPU: it has all or none",
            hint="write `-ngl 0` for the CPU alone, or leave it out",
        )


class Loader:
    """The `load` of a sweep: settings to an engine.

    The model stays for the next settings with the same one on the same device in the same
    arithmetic. `open(name)` gives its checkpoint and the seconds that reading the headers took;
    `headers(name)` the checkpoint of a model that is not to be loaded, without fetching it.
    """

    def __init__(
        self,
        open: Callable[[str], tuple[Checkpoint, float]],
        *,
        headers: Callable[[str], Checkpoint] | None = None,
        quantize: str = "auto",
        random_weights: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._open = open
        self._headers = headers or (lambda name: open(name)[0])
        self._quantize = quantize
        self._random_weights = random_weights
        self._progress = progress
        self._key: Key | None = None
        self._model: Model | None = None
        self._info: EngineInfo | None = None
        self._known: dict[Key, EngineInfo | None] = {}

    @property
    def model(self) -> Model | None:
        """What is loaded now."""
        return self._model

    def model_for(self, settings: Settings) -> Model | None:
        """What is loaded, if those settings are about it."""
        return self._model if _key(settings) == self._key else None

    def known(self, settings: Settings) -> EngineInfo | None:
        """What the headers say of a model that was not loaded; None where they cannot be read."""
        key = _key(settings)
        if self._info is not None and key == self._key:
            return replace(self._info, load_s=None, base_bytes=None, load_peak=None)
        if key not in self._known:
            self._known[key] = self._from_headers(*key)
        return self._known[key]

    def _from_headers(
        self, name: str, device: str, dtype: str, activations: str
    ) -> EngineInfo | None:
        try:
            checkpoint = self._headers(name)
            on = torch.device("meta") if device == "meta" else resolve_device(device)
            like = "auto" if device == "meta" else str(on)
            model = load_shapes(
                checkpoint, dtype=dtype, quantize=self._quantize, activations=activations,
                like=like,
            )  # fmt: skip
            return engine_info(model, None, on=on)
        except (LlmcliError, OSError):
            return None

    def __call__(self, settings: Settings) -> Ours:
        """Raises UsageError for what is not supported, and what opening and loading raise."""
        refuse(settings)
        key = _key(settings)
        if self._model is None or key != self._key:
            self._load(*key)
        self._key = key
        model, info = self._model, self._info
        assert model is not None
        assert info is not None
        refuse_for(
            settings,
            cache_type=info.type_k,
            gpu=model.device.type in ("cuda", "mps"),
            layers=len(model.config.layers),
            flash=has_flash(model.device, model.dtype),
            rounds=model.arithmetic.rounds_inputs,
        )
        return Ours(model, info, flash=settings.flash_attn != "off")

    def close(self) -> None:
        """Gives the model's memory back."""
        had, self._model, self._info = self._model is not None, None, None
        if had:
            gc.collect()
            torch.cuda.empty_cache()  # nothing where CUDA was never used

    def _load(self, name: str, device: str, dtype: str, activations: str) -> None:
        self.close()
        if device == "meta":
            checkpoint, open_s = self._open(name)
            begin = perf_counter()
            self._model = load_shapes(
                checkpoint, dtype=dtype, quantize=self._quantize, activations=activations
            )
            self._info = engine_info(self._model, open_s + perf_counter() - begin)
            return
        on, base = resolve_device(device), resident_bytes()
        with Peak(on) as peak:
            checkpoint, open_s = self._open(name)
            begin = perf_counter()
            self._model = load_checkpoint(
                checkpoint,
                device=device,
                dtype=dtype,
                quantize=self._quantize,
                activations=activations,
                random_weights=self._random_weights,
                text=False,
                progress=self._progress,
            )
            load_s = open_s + perf_counter() - begin
        held = phase_peak("load", [peak])
        self._info = engine_info(self._model, load_s, base=base, peak=held)


def _key(settings: Settings) -> Key:
    # llama-bench's `-ngl 0`: everything on the CPU
    on_cpu = settings.device == "auto" and settings.n_gpu_layers == 0
    device = "cpu" if on_cpu else settings.device
    return settings.model, device, settings.dtype, settings.activations
