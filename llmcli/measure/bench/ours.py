"""This program's decoder as the engine of a benchmark."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import llmcli
from llmcli import devices
from llmcli.anatomy.counts import prefill_peak
from llmcli.checkpoints import Checkpoint
from llmcli.config import ModelConfig
from llmcli.errors import UsageError
from llmcli.generation.prefill import prefill
from llmcli.loading import load_checkpoint, load_shapes
from llmcli.measure.bench.refused import refuse, refuse_for
from llmcli.model import Model, dtype_name
from llmcli.nn.state import State
from llmcli.ops.processor import has_bfloat16
from llmcli.reports.bench import Ran, Settings
from llmcli.weights import Progress

# llama.cpp's words: of a cache, of a file's weights, of a backend
CACHE_TYPES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_FILE_TYPES = {"float64": "all F64", "float32": "all F32", "float16": "F16", "bfloat16": "BF16"}
_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "meta": "meta"}


class Ours:
    """The decoder with one sequence's cache. On a GPU every call waits until it is done."""

    def __init__(self, model: Model, load_s: float, *, flash: bool = True) -> None:
        self._model = model
        self._flash = flash
        self._state: State | None = None
        self._chunk = 0
        self.ran = ran_of(model, load_s)

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self._model.config

    @property
    def vocab(self) -> int:
        """How many ids there are."""
        return self.config.vocab

    @property
    def bos(self) -> int | None:
        """The tokenizer's, where it puts one in front of a text."""
        tokenizer = self._model.tokenizer
        return tokenizer.bos_id if tokenizer is not None and tokenizer.add_bos else None

    def start(self, tokens: int, threads: int, chunk: int) -> None:
        """An empty cache; the threads are PyTorch's and stay so.

        Raises UsageError for more tokens than the model has learned positions, OutOfMemory.
        """
        positions = self.config.embedding.positions
        self._state = None  # before the next one is there
        if positions is not None and tokens > positions:
            raise UsageError(
                f"a test of {tokens} tokens does not fit the {positions} positions that "
                "the model has learned"
            )
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
        self._state = self._model.decoder.new_state(1, tokens)

    def read(self, ids: Sequence[int]) -> None:
        """Prompt tokens, `chunk` of them in a forward call."""
        with self._kernel():
            prefill(self._model.decoder, [ids], self._cache, chunk=self._chunk)
        self._wait()

    def step(self, id: int) -> None:
        """One token."""
        # made on the device: a copy from the host would wait for all that runs there
        id_BT = torch.full((1, 1), id, device=self._model.device)
        with self._kernel():
            self._model.decoder(id_BT, self._cache, logits="last")
        self._wait()

    def rewind(self, tokens: int) -> None:
        """Back to the first `tokens`."""
        self._cache.truncate([tokens])

    def close(self) -> None:
        """The cache goes; the model belongs to whoever loaded it."""
        self._state = None

    def _needed(self, tokens: int, chunk: int) -> int:
        """Bytes of the cache and of the activations: Linux would kill the process, not refuse."""
        size = self._model.dtype.itemsize
        peak = prefill_peak(
            self.config,
            1,
            tokens,
            size,
            cuda=self._model.device.type == "cuda",
            native=has_bfloat16(),
            chunk=chunk,
        )
        if not self._flash:  # scores and pattern of all heads of a layer
            heads = max(layer.mixer.heads for layer in self.config.layers)
            peak += 2 * heads * min(chunk, tokens) * tokens * max(size, 4)
        return self._model.decoder.state_bytes(1, tokens) + peak

    @property
    def _cache(self) -> State:
        if self._state is None:
            raise ValueError("the engine has not been started")
        return self._state

    def _kernel(self) -> AbstractContextManager[None]:
        """Without fused attention: scores of all pairs, as they stand in the formula."""
        return nullcontext() if self._flash else sdpa_kernel(SDPBackend.MATH)

    def _wait(self) -> None:
        device = self._model.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()


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


def ran_of(model: Model, load_s: float) -> Ran:
    """What is said of a model that was loaded in so many seconds."""
    numbers = sum(slot.numel() for slot in model.decoder.slots.values())
    dtype, kind = dtype_name(model.dtype), model.device.type
    layers = len(model.config.layers)
    return Ran(
        engine="llmcli",
        version=llmcli.__version__,
        model_type=f"{model.config.model_type} {_size(numbers)} {_FILE_TYPES[dtype]}",
        model_size=model.weight_bytes,
        model_n_params=numbers,
        backend=_BACKENDS[kind],
        device=str(model.device),
        dtype=dtype,
        type_k=CACHE_TYPES[dtype],
        n_gpu_layers=layers + 1 if kind in ("cuda", "mps") else 0,  # the head counts as one
        load_s=load_s,
        bits_per_weight=8 * model.weight_bytes / numbers,
    )


def _size(numbers: int) -> str:
    """`135M`, `1.5B`, `8B`: as models are called."""
    if numbers < 1e9:
        return f"{numbers / 1e6:.0f}M"
    return f"{numbers / 1e9:.1f}".removesuffix(".0") + "B"
