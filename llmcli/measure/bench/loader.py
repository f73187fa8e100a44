"""From the settings of a sweep to an engine, with as few loads as there are models."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter

import torch

from llmcli.checkpoints import Checkpoint
from llmcli.loading import load_checkpoint, load_shapes
from llmcli.measure.bench.loaded import CACHE_TYPES
from llmcli.measure.bench.ours import Ours
from llmcli.measure.bench.refused import refuse, refuse_for
from llmcli.model import Model, dtype_name
from llmcli.reports.bench import Settings
from llmcli.weights import Progress


class Loader:
    """The `load` of a sweep: settings to an engine.

    The model stays for the next settings with the same one on the same device in the same
    dtype. `open(name)` gives its checkpoint and the seconds that reading the headers took.
    """

    def __init__(
        self,
        open: Callable[[str], tuple[Checkpoint, float]],
        *,
        random_weights: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._open = open
        self._random_weights = random_weights
        self._progress = progress
        self._key: tuple[str, str, str] | None = None
        self._model: Model | None = None
        self._load_s = 0.0

    @property
    def model(self) -> Model | None:
        """What is loaded now."""
        return self._model

    def model_for(self, settings: Settings) -> Model | None:
        """What is loaded, if those settings are about it."""
        return self._model if _key(settings) == self._key else None

    def __call__(self, settings: Settings) -> Ours:
        """Raises UsageError for what cannot be had, and what opening and loading raise."""
        refuse(settings)
        key = _key(settings)
        if self._model is None or key != self._key:
            self._load(*key)
        self._key = key
        model = self._model
        assert model is not None
        refuse_for(
            settings,
            cache_type=CACHE_TYPES[dtype_name(model.dtype)],
            gpu=model.device.type in ("cuda", "mps"),
            layers=len(model.config.layers),
        )
        return Ours(model, self._load_s, flash=settings.flash_attn != "off")

    def close(self) -> None:
        """Gives the model's memory back."""
        had, self._model = self._model is not None, None
        if had:
            gc.collect()
            torch.cuda.empty_cache()  # nothing where CUDA was never used

    def _load(self, name: str, device: str, dtype: str) -> None:
        self.close()
        checkpoint, open_s = self._open(name)
        begin = perf_counter()
        if device == "meta":
            self._model = load_shapes(checkpoint, dtype=dtype)
        else:
            self._model = load_checkpoint(
                checkpoint,
                device=device,
                dtype=dtype,
                random_weights=self._random_weights,
                text=False,
                progress=self._progress,
            )
        self._load_s = open_s + perf_counter() - begin


def _key(settings: Settings) -> tuple[str, str, str]:
    # llama-bench's `-ngl 0`: everything on the CPU
    on_cpu = settings.device == "auto" and settings.n_gpu_layers == 0
    return settings.model, "cpu" if on_cpu else settings.device, settings.dtype
