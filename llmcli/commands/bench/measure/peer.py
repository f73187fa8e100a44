"""Other engines beside ours: opened, silenced, and held against our predictions."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Protocol

import torch
from torch import Tensor

from llmcli.commands.bench.measure.engine import Engine, random_ids
from llmcli.commands.bench.report.plan import EngineName
from llmcli.commands.bench.report.settings import Settings
from llmcli.errors import UsageError
from llmcli.model import Model
from llmcli.records.document import ViewCheck


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
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)


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


def open_peer(name: EngineName, ours: Model, settings: Settings) -> PeerEngine:
    """The peer with the weights of `ours`, on the same device.

    transformers computes in our dtype, llama.cpp in the formats of the file. Raises UsageError
    where it is not installed or cannot run this model, OutOfMemory where it does not fit.
    """
    if ours.device.type == "meta":
        raise UsageError(
            "on the meta device nothing is computed that could be compared",
            hint="leave out `--against` or the device",
        )
    if name == "transformers":
        from llmcli.commands.bench.measure.transformers import open_transformers

        return open_transformers(ours, settings)
    from llmcli.commands.bench.measure.llama_cpp import open_llama_cpp

    return open_llama_cpp(ours, settings)


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
    alike = peer.info.engine == "transformers" and not ours.arithmetic.formats
    exact = alike and peer.info.dtype in _EXACT_DTYPES
    return ViewCheck(
        name="same_model",
        words=f"{peer.info.engine} predicts the same after {_TEXTS} × {tokens} random tokens, "
        "KL in nats",
        value=kl if math.isnan(kl) else max(kl, 0.0),  # rounding may leave -1e-17 of equal ones
        tolerance=_EXACT if exact else _ROUNDED,
    )
