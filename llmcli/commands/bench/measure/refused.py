"""What llama-bench can be asked for and this program cannot do: said, never passed over."""

from __future__ import annotations

from llmcli.commands.bench.report.llama_words import CACHE_OF, FLASH
from llmcli.commands.bench.report.results import Settings
from llmcli.errors import UsageError

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


def refuse_for(settings: Settings, *, cache_type: str, gpu: bool, layers: int, flash: bool) -> None:
    """The same of a model that is loaded: its cache has one type, it lies on one device.

    `flash`: there is a kernel of attention for it that keeps no scores.
    """
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
            "a cache on the CPU of a model on a GPU cannot be had", hint="leave out `-nkvo`"
        )
    if gpu and 0 <= settings.n_gpu_layers <= layers:
        raise UsageError(
            f"{settings.n_gpu_layers} of {layers + 1} layers on a GPU cannot be had: all or none",
            hint="write `-ngl 0` for the CPU alone, or leave it out",
        )
