"""Other engines on our weights: transformers, what all of them share, and whether they predict
what we do. llama.cpp has a module of its own.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from llmcli import devices
from llmcli.errors import OutOfMemory, UsageError
from llmcli.graph.graph import graph
from llmcli.graph.precision import Precision
from llmcli.measure.engines import (
    Engine,
    WorkCounter,
    attention,
    bos_of,
    engine_info,
    random_ids,
    require_positions,
)
from llmcli.model import Model, dtype_name
from llmcli.records.document import ViewCheck
from llmcli.records.engines import EngineName


@contextmanager
def silent() -> Iterator[None]:
    """What is written to stdout or stderr inside goes nowhere, even where C code writes it.

    What this program had written before is flushed first, so that nothing of it is lost.
    """
    _flush()
    saved = []
    for number in (1, 2):
        with suppress(OSError):  # closed by whoever started us
            saved.append((number, os.dup(number)))
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            for number, _ in saved:
                os.dup2(nowhere.fileno(), number)
            # Python's streams as well: they need not be those of the process
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
            _flush()  # what came through a stream that the library had kept
    finally:
        for number, before in saved:
            os.dup2(before, number)
            os.close(before)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or not there at all
            stream.flush()


def unusable(package: str, old: str = "") -> UsageError:
    """The error for a package that is not installed, or of a version that is too old."""
    if old:
        return UsageError(
            f"{package} {old} is too old to be compared with",
            hint=f"run `pip install --upgrade {package}`",
        )
    return UsageError(
        f"{package} is not installed, so that nothing can be compared with it",
        hint=f"run `pip install {package}`",
    )


class PeerEngine(Engine, Protocol):
    """An engine that also shows what it computed, so that other weights are noticed."""

    def logits(self) -> Tensor:
        """Of the last token, `[V]` float32 on the host."""


def open_peer(
    name: EngineName, ours: Model, *, flash_attn: str = "auto", **llama_cpp: Any
) -> PeerEngine:
    """The peer with the weights of `ours`, on the same device.

    transformers computes in our dtype, llama.cpp in the formats of the file; `llama_cpp`: what
    only that one takes, see `LlamaCpp`. Raises UsageError where it is not installed or
    cannot run this model, OutOfMemory where it does not fit.
    """
    if ours.device.type == "meta":
        raise UsageError(
            "on the meta device nothing is computed that could be compared",
            hint="leave out `--against` or the device",
        )
    if len(ours.decoder.devices) > 1:
        raise UsageError(
            f"only llmcli runs the layers of a model on `{ours.devices}`",
            hint="leave out `--against`, or name one device",
        )
    if name == "transformers":
        return open_transformers(ours, flash=flash_attn != "off")
    from llmcli.measure.llama_cpp import LlamaCpp

    return LlamaCpp(ours, flash_attn=flash_attn, **llama_cpp)


def read_by(peer: PeerEngine) -> Callable[[int], Callable[..., Tensor]]:
    """Reads texts of so many tokens one by one, for a peer has the logits of the last one."""

    def begin(tokens: int) -> Callable[..., Tensor]:
        peer.start(tokens, torch.get_num_threads(), 1)

        def read(ids: Sequence[int], *, logits: bool = True) -> Tensor:
            rows = []
            for id in ids:
                peer.step(id)
                rows.append(peer.logits() if logits else torch.empty(0))
            return torch.stack(rows)

        return read

    return begin


_TEXTS, _TOKENS = 8, 32
# In nats, the mean of the texts. Rounding to bfloat16 or to 8-bit activations costs 1e-4 to 1e-2,
# another file of the same model (Q4 for Q8, say) 0.05 and more, other weights several.
_ROUNDED, _EXACT = 0.03, 1e-6
_EXACT_DTYPES = ("float32", "float64")


def same_model(ours: Model, peer: PeerEngine, *, threads: int, seed: int = 0) -> ViewCheck:
    """Lets both read the same texts of random ids, BOS in front where the model has one.

    The check's value is KL(ours ‖ theirs) of the token after them, in nats, the mean of the texts;
    NaN where one of them computes NaN. The peer's memory is empty afterwards. Raises what
    `PeerEngine.start` does.
    """
    tokens = min(_TOKENS, ours.config.context)
    rows = min(ours.config.vocab, peer.vocab)  # an embedding may be padded beyond the vocabulary
    peer.start(tokens, threads, tokens)
    kl = 0.0
    for text in range(_TEXTS):
        ids = random_ids(seed, f"same model {text}", tokens, ours.config.vocab, peer.bos)
        peer.read(ids)
        given = torch.tensor([ids], device=ours.device)
        mine = ours.decoder(given, logits="last")[0, -1, :rows].double().cpu().log_softmax(-1)
        theirs = peer.logits()[:rows].double().log_softmax(-1)
        peer.rewind(0)
        kl += float((mine.exp() * (mine - theirs)).sum()) / _TEXTS
    alike = peer.info.engine == "transformers" and not ours.precision.formats
    exact = alike and peer.info.dtype in _EXACT_DTYPES
    return ViewCheck(
        name="same_model",
        words=f"{peer.info.engine} predicts the same after {_TEXTS} × {tokens} random tokens, "
        "KL in nats",
        value=kl if math.isnan(kl) else max(kl, 0.0),  # rounding may leave -1e-17 of equal ones
        tolerance=_EXACT if exact else _ROUNDED,
    )


_OLDEST = 5
_NARROWS = "_maybe_slice_kv_shared_inputs"  # a method of models that do


class Transformers:
    """Engine over a causal language model of transformers and its growing cache.

    Attention is transformers' default, PyTorch's (`sdpa`) but for Gemma 2, and so is the cache:
    layers with a sliding window keep its keys only, every other layer grows with each token.
    """

    def __init__(
        self, model: Any, ours: Model, version: str, load_s: float | None, *, flash: bool
    ) -> None:
        # each call has logits; newer versions leave out what Gemma 4 needs for no other token
        narrows = any(hasattr(part, _NARROWS) for part in model.modules())
        # its work is counted by our formulas; packed weights of ours are dequantized
        self.counter: WorkCounter | None = WorkCounter(
            config=ours.config,
            precision=Precision.of(dtype_name(ours.dtype)),
            reads="calls" if narrows else "whole",
        )
        self.vocab, self.bos = ours.config.vocab, bos_of(ours)
        self._model = model
        self._ours = ours.config
        self._device = ours.device
        self._flash = flash
        self._chunk = 1
        self._tokens = 0
        self._cache: Any = None
        self._kept: dict[int, list[Any]] = {}
        self._logits: Tensor | None = None
        parameters = list(model.parameters())
        self.info = replace(
            engine_info(ours, load_s, precision=self.counter.precision),
            engine="transformers",
            engine_version=version,
            model_size=sum(value.nbytes for value in parameters),
            model_n_params=sum(value.numel() for value in parameters),
        )

    def start(self, tokens: int, threads: int, chunk: int) -> None:
        """An empty cache, which grows by itself: `tokens` only have to fit learned positions."""
        require_positions(self._ours, tokens)
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
        self._chunk = chunk
        self.rewind(0)

    def computing(self) -> AbstractContextManager[None]:
        """With the kernel of attention that ours has, too."""
        return attention(flash=self._flash)

    def read(self, ids: Sequence[int]) -> None:
        """Some tokens at a time; the head computes the last token's row only."""
        for start in range(0, len(ids), self._chunk):
            part = list(ids[start : start + self._chunk])
            self._forward(torch.tensor([part]).to(self._device))
        devices.wait_for(self._device)

    def step(self, id: int) -> None:
        """One token."""
        self._forward(torch.full((1, 1), id, device=self._device))  # as ours makes it
        devices.wait_for(self._device)

    @torch.inference_mode()
    def _forward(self, ids_BT: Tensor) -> None:
        out = self._model(ids_BT, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._logits = out.logits
        self._tokens += ids_BT.shape[1]

    def rewind(self, tokens: int) -> None:
        """From a copy: a window forgets what was there. The layers' tensors need no copy, for they
        never write into them. Raises UsageError for another length than the last that was kept.
        """
        if tokens == 0:
            from transformers import DynamicCache

            # of a window of one token transformers' cache drops nothing where its mask counts on it
            narrow = any(layer.window == 1 for layer in self._ours.layers)
            self._cache = DynamicCache(config=None if narrow else self._model.config)
            self._tokens, self._kept = 0, {}
        elif tokens == self._tokens:
            self._kept = {tokens: [copy(layer) for layer in self._cache.layers]}
        elif tokens in self._kept:
            self._cache.layers = [copy(layer) for layer in self._kept[tokens]]
            self._tokens = tokens
        else:
            raise UsageError(f"transformers cannot go back to the first {tokens} tokens")

    def logits(self) -> Tensor:
        """Of the last token, `[V]` float32 on the host."""
        assert self._logits is not None, "nothing was read"
        return self._logits[0, -1].float().cpu()

    def close(self) -> None:
        """Lets go of model and cache."""
        self._model = self._cache = self._logits = None
        devices.free_unreferenced()


def read_model(ours: Model) -> tuple[Any, float]:
    """The weights of `ours` as transformers reads its directory or GGUF file, and the seconds.

    Importing the model's own code is not in the time. The reader of GGUF files is called here,
    for `from_pretrained` needs one more package for them. Remote code and pickles are never used.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    gguf = ours.checkpoint.files[0] if ours.checkpoint.kind == "gguf" else None
    path = str(ours.checkpoint.path if gguf is None else gguf.parent)
    local = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(path, gguf_file=gguf and gguf.name, **local)
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config, dtype=ours.dtype)
    start = time.perf_counter()
    if gguf is None:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=ours.dtype, use_safetensors=True, **local
        )
    else:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        state = load_gguf_checkpoint(
            str(gguf), return_tensors=True, model_to_load=bare, torch_dtype=ours.dtype
        )["tensors"]
        model = type(bare).from_pretrained(None, config=config, state_dict=state, dtype=ours.dtype)
    return model.to(ours.device).eval(), time.perf_counter() - start


def import_transformers() -> Any:
    """transformers without its messages. Raises UsageError where it is not installed or too old."""
    try:
        with silent():
            import transformers
            from transformers.utils import logging
    except ImportError:
        raise unusable("transformers") from None
    warnings.filterwarnings("ignore", category=FutureWarning)  # of names that will change
    if int(transformers.__version__.partition(".")[0]) < _OLDEST:  # its names were others
        raise unusable("transformers", transformers.__version__)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def open_transformers(ours: Model, *, flash: bool) -> Transformers:
    """transformers' model in our dtype on our device, its attention by the requested kernel.

    Raises UsageError where it is not installed, has no such model or cannot read its weights,
    OutOfMemory.
    """
    kind = ours.checkpoint.kind
    readable = kind == "gguf" or (kind == "safetensors" and ours.checkpoint.path.is_dir())
    if ours.random_seed is not None or not readable:
        what = "random weights" if ours.random_seed is not None else "a single file"
        raise UsageError(
            f"transformers reads directories and GGUF files, and `{ours.name}` is {what}",
            hint="give a directory or a .gguf file with -m, or leave out `--against`",
        )
    if any("S" not in state.axes for state in graph(ours.config).states.values()):
        raise UsageError(
            "transformers is measured with a cache of keys and values, and layers of this model "
            "keep something else",
            hint="leave out `--against`",
        )
    version = import_transformers().__version__
    try:
        with silent():
            model, load_s = read_model(ours)
    except (MemoryError, torch.OutOfMemoryError):
        raise OutOfMemory(
            "the weights do not fit a second time, for transformers",
            hint="use a smaller model or leave out `--against`",
        ) from None
    except Exception as error:  # for unsupported models it raises errors of many types
        words = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(
            f"transformers cannot load `{ours.name}`: {words}", hint="leave out `--against`"
        ) from None
    return Transformers(model, ours, version, load_s, flash=flash)
