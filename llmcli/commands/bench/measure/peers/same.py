"""Whether a peer computes the same model: both read one text, and what they predict is compared."""

from __future__ import annotations

import math

import torch

from llmcli.commands.bench.measure import plan
from llmcli.commands.bench.measure.peers.open import PeerEngine
from llmcli.model import Model
from llmcli.reports.checks import ViewCheck

_TEXTS, _TOKENS = 8, 32
# In nats, the mean of the texts. Rounding to bfloat16 or to 8-bit activations costs 1e-4 to 1e-2,
# another file of the same model (Q4 for Q8, say) 0.05 and more, other weights several.
_ROUNDED, _EXACT = 0.03, 1e-6
_EXACT_DTYPES = ("float32", "float64")


def compare(ours: Model, peer: PeerEngine, *, threads: int, seed: int = 0) -> ViewCheck:
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
        ids = plan.ids(seed, f"same model {text}", tokens, ours.config.vocab, peer.bos)
        peer.read(ids)
        given = torch.tensor([ids], device=ours.device)
        mine = ours.decoder(given, logits="last")[0, -1, :rows].double().cpu().log_softmax(-1)
        theirs = peer.logits()[:rows].double().log_softmax(-1)
        peer.rewind(0)
        kl += float((mine.exp() * (mine - theirs)).sum()) / _TEXTS
    alike = peer.ran.engine == "transformers" and not ours.arithmetic.formats
    exact = alike and peer.ran.dtype in _EXACT_DTYPES
    return ViewCheck(
        name="same_model",
        words=f"{peer.ran.engine} predicts the same after {_TEXTS} × {tokens} random tokens, "
        "KL in nats",
        value=kl if math.isnan(kl) else max(kl, 0.0),  # rounding may leave -1e-17 of equal ones
        tolerance=_EXACT if exact else _ROUNDED,
    )
