"""This program's decoder as the engine of a benchmark, and what a row says of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import llmcli
from llmcli import devices
from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.counts import prefill_peak
from llmcli.anatomy.graph import graph
from llmcli.commands.bench.measure.engine import Reads
from llmcli.commands.bench.report.llama_names import CACHE_OF, FILE_OF
from llmcli.commands.bench.report.results import EngineInfo
from llmcli.config import ModelConfig
from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.graph.ops import Score
from llmcli.model import Model
from llmcli.ops.processor import has_bfloat16
from llmcli.records.text import PhasePeak

_NARROW = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)


def attention(*, flash: bool) -> AbstractContextManager[None]:
    """Within it, without `flash`, the scores of all pairs are computed as in the formula."""
    return nullcontext() if flash else sdpa_kernel(SDPBackend.MATH)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is such a kernel: on a CPU, and on newer CUDA devices for 16 bits."""
    if device.type == "cuda":
        available: bool = torch.backends.cuda.is_flash_attention_available()
        return (
            available and dtype in _NARROW and torch.cuda.get_device_capability(device) >= _AMPERE
        )
    return device.type != "mps"  # and so for shapes, where it makes no difference


_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "meta": "meta"}


def engine_info(
    model: Model,
    load_s: float | None,
    *,
    numbers: Arithmetic | None = None,
    base: int | None = None,
    peak: PhasePeak | None = None,
    on: torch.device | None = None,
) -> EngineInfo:
    """What is said of a model that was loaded in so many seconds.

    `numbers`: another arithmetic than its own. `base`, `peak`: bytes held before that and in it.
    `on`: where a model of which there are only shapes was to be loaded.
    """
    device = on or model.device
    count, kind = model.parameter_count, device.type
    numbers = numbers or model.arithmetic
    formats = numbers.describe(model.config)
    weights = formats["weight_format"]
    file = FILE_OF.get(weights, weights.partition(" ")[0])
    layers = len(model.config.layers)
    return EngineInfo(
        engine="llmcli",
        version=llmcli.__version__,
        model_type=f"{model.config.model_type} {_size(count)} {file}",
        model_size=model.weight_bytes,
        model_n_params=count,
        backend=_BACKENDS[kind],
        device=str(device),
        dtype=numbers.dtype,
        weight_format=weights,
        product_format=numbers.products,
        type_k=CACHE_OF[numbers.cache],
        n_gpu_layers=layers + 1 if kind in ("cuda", "mps") else 0,  # the head counts as one
        load_s=load_s,
        bits_per_weight=8 * model.weight_bytes / count,
        base_bytes=base,
        load_peak=peak,
    )


def bos_of(model: Model) -> int | None:
    """The id that its tokenizer puts in front of a text, None where it puts none."""
    tokenizer = model.tokenizer
    return tokenizer.bos_id if tokenizer is not None and tokenizer.add_bos else None


def _size(numbers: int) -> str:
    """`135M`, `1.5B`, `8B`: as models are called."""
    if numbers < 1e9:
        return f"{numbers / 1e6:.0f}M"
    return f"{numbers / 1e9:.1f}".removesuffix(".0") + "B"


class Ours:
    """The decoder with one sequence's cache. On a GPU every call waits until it is done."""

    def __init__(self, model: Model, info: EngineInfo, *, flash: bool = True) -> None:
        self._model = model
        self._flash = flash
        self._session: Session | None = None
        self._chunk = 0
        self.info = info

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self._model.config

    @property
    def numbers(self) -> Arithmetic:
        """What the model computes in."""
        return self._model.arithmetic

    @property
    def reads(self) -> Reads:
        """As a session does."""
        return "prompt"

    @property
    def vocab(self) -> int:
        """How many ids there are."""
        return self.config.vocab

    @property
    def bos(self) -> int | None:
        """See `bos_of`."""
        return bos_of(self._model)

    def start(self, tokens: int, threads: int, chunk: int) -> None:
        """An empty cache; the threads are PyTorch's and stay so.

        Raises UsageError for more tokens than the model has learned positions, OutOfMemory.
        """
        positions = self.config.embedding.positions
        self._session = None  # before the next one is there
        if positions is not None and tokens > positions:
            raise UsageError(
                f"a test of {tokens} tokens does not fit the {positions} positions that "
                "the model has learned",
                hint=f"`-d`, `-p` and `-n` of a test are {positions} tokens at most",
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
        """The cache goes; the model belongs to whoever loaded it."""
        self._session = None

    def _needed(self, tokens: int, chunk: int) -> int:
        """Bytes of the cache and of the activations: Linux would kill the process, not refuse."""
        peak = prefill_peak(
            self.config,
            self.numbers,
            1,
            tokens,
            cuda=self._model.device.type == "cuda",
            native=has_bfloat16(),
            chunk=chunk,
        )
        if not self._flash:  # scores and pattern of all heads of a layer
            model = graph(self.config)
            scored = (node for node in model.nodes.values() if isinstance(node.op, Score))
            heads = max((model.sizes(node.layer)["H"] for node in scored), default=0)
            peak += 2 * heads * min(chunk, tokens) * tokens * max(self._model.dtype.itemsize, 4)
        return self._model.decoder.state_bytes(1, tokens) + peak

    @property
    def _started(self) -> Session:
        if self._session is None:
            raise ValueError("the engine has not been started")
        return self._session
