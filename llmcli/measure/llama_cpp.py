"""llama.cpp on the same GGUF file, through its C interface as llama-bench calls it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from llmcli.errors import CheckpointError, OutOfMemory, UsageError
from llmcli.measure.engines import WorkCounter
from llmcli.measure.peers import silent, unusable
from llmcli.model import Model
from llmcli.records.engines import BACKENDS, CACHE_OF, CACHE_TYPES, FLASH, EngineInfo

_ERROR = 4  # GGML_LOG_LEVEL_ERROR


@cache  # one for this process: it is never taken back, and must stay alive
class Log:
    """Takes what llama.cpp writes, and keeps the last error of it."""

    def __init__(self, library: Any) -> None:
        self._last = ""
        library.llama_backend_init()

        @library.llama_log_callback  # type: ignore[untyped-decorator]
        def hear(level: int, text: bytes, _: Any) -> None:
            if level == _ERROR and text.strip():
                self._last = text.decode(errors="replace").strip().split("\n")[0]

        self._hear = hear  # llama.cpp keeps only the address
        library.llama_log_set(hear, ctypes.c_void_p(0))

    def reason(self) -> str:
        """`: its last words`, or nothing."""
        return f": {self._last}" if self._last else ""


def cache_type(requested: str) -> int:
    """The number of a cache's type in llama.cpp; `auto` is f16, its default."""
    name = "f16" if requested == "auto" else CACHE_OF.get(requested, requested)
    if name not in CACHE_TYPES:
        raise UsageError(
            f"llama.cpp has no cache of type `{requested}`", hint=f"one of {', '.join(CACHE_TYPES)}"
        )
    return CACHE_TYPES[name]


_LAYERS_ALL = 999  # as many as there are
# of 2025; what is older has other names for the same
_NEEDED = ("llama_model_load_from_file", "llama_get_memory", "llama_memory_clear")


class LlamaCpp:
    """Engine over a `llama_model` and a `llama_context` that each `start` makes anew.

    It reads the file that `ours` was loaded from. Options as in llama-bench; `n_batch` tokens are
    handed over at once. Raises UsageError where llama.cpp is not installed or too old, has no such
    cache, or the weights are not a GGUF file, CheckpointError where it does not load it.
    """

    counter: WorkCounter | None = None  # it computes in the formats of the file

    def __init__(
        self,
        ours: Model,
        *,
        n_batch: int = 2048,
        type_k: str = "auto",
        type_v: str = "auto",
        flash_attn: str = "auto",
        no_kv_offload: bool = False,
    ) -> None:
        if ours.checkpoint.kind != "gguf" or ours.random_seed is not None:
            what = "random weights" if ours.random_seed is not None else "safetensors"
            raise UsageError(
                f"llama.cpp reads GGUF files, and `{ours.name}` is {what}",
                hint="give a .gguf file with -m, or compare with `--against transformers`",
            )
        try:
            with silent():
                import llama_cpp as library
        except (ImportError, OSError, RuntimeError):  # the latter where its C library does not load
            raise unusable("llama-cpp-python") from None
        if not all(hasattr(library, name) for name in _NEEDED):
            raise unusable("llama-cpp-python", library.__version__)
        self._lib: Any = library
        self._params = {  # members of its `llama_context_params`
            "n_batch": n_batch,
            "type_k": cache_type(type_k),
            "type_v": cache_type(type_v),
            "offload_kqv": not no_kv_offload,
            "flash_attn_type": FLASH[flash_attn],
        }
        self._log = Log(library)
        on_gpu = ours.device.type in ("cuda", "mps") and bool(library.llama_supports_gpu_offload())
        params = library.llama_model_default_params()
        params.n_gpu_layers = _LAYERS_ALL if on_gpu else 0
        params.split_mode = 0  # LLAMA_SPLIT_MODE_NONE: on one GPU, ours
        params.main_gpu = ours.device.index or 0
        start, path = time.perf_counter(), str(ours.checkpoint.files[0]).encode()
        with silent():
            model: Any = library.llama_model_load_from_file(path, params)
        load_s = time.perf_counter() - start
        if not model:
            reason = self._log.reason()
            raise CheckpointError(
                f"llama.cpp cannot load `{ours.name}`{reason}", hint="leave out `--against`"
            )
        self._model, self._context = model, None
        self._tokens = 0
        self._kept: dict[int, Any] = {}
        vocabulary = library.llama_model_get_vocab(model)
        self.vocab = int(library.llama_vocab_n_tokens(vocabulary))
        self.bos: int | None = None
        if library.llama_vocab_get_add_bos(vocabulary):
            self.bos = int(library.llama_vocab_bos(vocabulary))
        text = ctypes.create_string_buffer(256)
        library.llama_model_desc(model, text, len(text))
        described = text.value.decode(errors="replace")
        format, names = described.rpartition(" ")[2], {n: name for name, n in CACHE_TYPES.items()}
        self.info = EngineInfo(  # `dtype` is the file's type, `Q4_K - Medium`
            engine="llama.cpp",
            engine_version=f"llama-cpp-python {library.__version__}",
            model_type=described,
            model_size=int(library.llama_model_size(model)),
            model_n_params=int(library.llama_model_n_params(model)),
            backends=BACKENDS[ours.device.type] if on_gpu else "CPU",
            device=str(ours.device) if on_gpu else "cpu",
            dtype=format,
            weight_format=format,
            product_format=format,
            type_k=names[self._params["type_k"]],
            gpu_layers=len(ours.config.layers) + 1 if on_gpu else 0,  # the head counts as one
            load_s=load_s,
        )

    def start(self, tokens: int, threads: int, chunk: int) -> None:
        """A new context: `n_ubatch` is `chunk`.

        Raises OutOfMemory with llama.cpp's message.
        """
        self._drop_context()
        params = self._lib.llama_context_default_params()
        params.n_ctx = tokens
        for name, value in self._params.items():
            setattr(params, name, value)
        params.n_batch = max(params.n_batch, chunk)
        params.n_ubatch = chunk
        params.n_threads = params.n_threads_batch = threads
        params.swa_full = False  # layers with a window keep it only, as in llama-bench
        with silent():
            self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise OutOfMemory(
                f"llama.cpp has no memory for {tokens} tokens{self._log.reason()}",
                hint="use a smaller depth or prompt",
            )
        self._tokens, self._kept = 0, {}

    def computing(self) -> AbstractContextManager[None]:
        """Nothing: its context has the kernel."""
        return nullcontext()

    def read(self, ids: Sequence[int]) -> None:
        """At most `n_batch` tokens a call."""
        most = int(self._lib.llama_n_batch(self._context))
        for start in range(0, len(ids), most):
            self._decode(ids[start : start + most])
        self._lib.llama_synchronize(self._context)

    def step(self, id: int) -> None:
        """One token."""
        self._decode((id,))
        self._lib.llama_synchronize(self._context)

    def _decode(self, ids: Sequence[int]) -> None:
        tokens = (self._lib.llama_token * len(ids))(*ids)
        batch = self._lib.llama_batch_get_one(tokens, len(ids))
        code = self._lib.llama_decode(self._context, batch)
        if code:
            raise OutOfMemory(
                f"llama.cpp could not compute {len(ids)} tokens (code {code}){self._log.reason()}"
            )
        self._tokens += len(ids)

    def rewind(self, tokens: int) -> None:
        """From a copy, as llama-bench does: a window and a recurrent state forget what was there.

        Raises UsageError for another length than the last that was kept, OutOfMemory where
        llama.cpp does not take its copy back.
        """
        context, library = self._context, self._lib
        if tokens == 0:
            self._kept = {}
        elif tokens == self._tokens:
            if tokens not in self._kept:
                size = int(library.llama_state_seq_get_size(context, 0))
                state = (ctypes.c_uint8 * size)()
                library.llama_state_seq_get_data(context, state, size, 0)
                self._kept = {tokens: state}
            return
        elif tokens not in self._kept:
            raise UsageError(f"llama.cpp cannot go back to the first {tokens} tokens")
        library.llama_memory_clear(library.llama_get_memory(context), False)
        self._tokens = tokens
        for state in self._kept.values():
            if not library.llama_state_seq_set_data(context, state, len(state), 0):
                raise OutOfMemory(
                    f"llama.cpp did not take back its first {tokens} tokens{self._log.reason()}",
                    hint="leave out `-d` or `--against`",
                )

    def logits(self) -> Tensor:
        """Of the last token, `[V]` float32."""
        values = self._lib.llama_get_logits_ith(self._context, -1)
        array = ctypes.cast(values, ctypes.POINTER(ctypes.c_float * self.vocab)).contents
        return torch.frombuffer(bytearray(bytes(array)), dtype=torch.float32)

    def close(self) -> None:
        """Frees context and model."""
        self._drop_context()
        if self._model:
            with silent():
                self._lib.llama_model_free(self._model)
        self._model = None

    def _drop_context(self) -> None:
        if self._context:
            with silent():
                self._lib.llama_free(self._context)
        self._context = None
