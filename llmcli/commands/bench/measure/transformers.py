"""transformers on the same weights, called as `generate` calls it, without the rest of that."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmcli import devices
from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.graph import graph
from llmcli.commands.bench.measure.engine import (
    WorkCounter,
    attention,
    bos_of,
    engine_info,
    require_positions,
)
from llmcli.commands.bench.measure.peer import silent, unusable
from llmcli.commands.bench.report.settings import Settings
from llmcli.errors import OutOfMemory, UsageError
from llmcli.model import Model, dtype_name

_OLDEST = 5
_NARROWS = "_maybe_slice_kv_shared_inputs"  # a method of models that do


class Transformers:
    """Engine over a causal language model of transformers and its growing cache.

    Attention is transformers' default, PyTorch's (`sdpa`) but for Gemma 2, and so is the cache:
    layers with a sliding window keep its keys only, every other layer grows with each token.
    """

    def __init__(
        self, model: Any, ours: Model, version: str, load_s: float, *, flash: bool
    ) -> None:
        # each call has logits; newer versions leave out what Gemma 4 needs for no other token
        narrows = any(hasattr(part, _NARROWS) for part in model.modules())
        # its work is counted by our formulas; packed weights of ours are dequantized
        self.counter: WorkCounter | None = WorkCounter(
            config=ours.config,
            numbers=Arithmetic.of(dtype_name(ours.dtype)),
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
            engine_info(ours, load_s, numbers=self.counter.numbers),
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
        self._new_cache()

    def _new_cache(self) -> None:
        from transformers import DynamicCache

        # of a window of one token transformers' cache drops nothing where its mask counts on it
        narrow = any(layer.window == 1 for layer in self._ours.layers)
        self._cache = DynamicCache(config=None if narrow else self._model.config)
        self._tokens, self._kept = 0, {}

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
            self._new_cache()
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
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


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


def open_transformers(ours: Model, settings: Settings) -> Transformers:
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
    try:
        with silent():
            import transformers
            from transformers.utils import logging
        warnings.filterwarnings("ignore", category=FutureWarning)  # of names that will change
    except ImportError:
        raise unusable("transformers") from None
    if int(transformers.__version__.partition(".")[0]) < _OLDEST:  # its names were others
        raise unusable("transformers", transformers.__version__)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with silent():
            model, load_s = read_model(ours)
    except (MemoryError, torch.OutOfMemoryError):
        raise OutOfMemory(
            "the weights do not fit a second time, for transformers",
            hint="use a smaller model or leave out `--against`",
        ) from None
    except Exception as error:  # what it cannot do it says in errors of every kind
        words = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(
            f"transformers cannot load `{ours.name}`: {words}", hint="leave out `--against`"
        ) from None
    flash = settings.flash_attn != "off"
    return Transformers(model, ours, transformers.__version__, load_s, flash=flash)
