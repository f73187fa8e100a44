"""Whether a peer computes the same model: both read one text, and what they predict is compared."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from llmcli.measure.bench.peers.open import PeerEngine
from llmcli.model import Model
from llmcli.reports.bench import EngineName

_TOKENS = 32
# In nats. Rounding to bfloat16 or to 8-bit activations costs 1e-4 to 1e-2 a token, another file of
# the same model (Q4 for Q8, say) 0.05 and more, other weights several.
_ROUNDED, _EXACT = 0.05, 1e-6
_EXACT_DTYPES = ("float32", "float64")


@dataclass(frozen=True, kw_only=True)
class SameWeights:
    """KL(ours ‖ theirs) in nats of the token after `tokens` random ones, and what is allowed.

    `tolerance` is what the two arithmetics may differ by; `top` whether both would write the
    same token.
    """

    peer: EngineName
    tokens: int
    kl: float
    tolerance: float
    top: bool

    @property
    def ok(self) -> bool:
        """NaN is not."""
        return self.kl <= self.tolerance

    @property
    def words(self) -> str:
        """One line."""
        difference = f"KL {self.kl:.1e} nats after {self.tokens} random tokens"
        if self.ok:
            return f"{self.peer} computes the same model: {difference}"
        return (
            f"{self.peer} does not compute the same model: {difference}, where rounding explains"
            f" {self.tolerance:.0e} at most"
        )


def compare(ours: Model, peer: PeerEngine, *, threads: int, seed: int = 0) -> SameWeights:
    """Lets both read the same random ids, BOS in front where the model has one.

    The peer's memory is empty afterwards. Raises what `PeerEngine.start` does.
    """
    draw = random.Random(seed)
    room = min(_TOKENS, ours.config.context)
    ids = [draw.randrange(ours.config.vocab) for _ in range(room)]
    if peer.bos is not None:
        ids[0] = peer.bos
    peer.start(room, threads, room)
    peer.read(ids)
    given = torch.tensor([ids], device=ours.device)
    rows = min(ours.config.vocab, peer.vocab)  # an embedding may be padded beyond the vocabulary
    mine = ours.decoder(given, logits="last")[0, -1, :rows].double().cpu().log_softmax(-1)
    theirs = peer.logits()[:rows].double().log_softmax(-1)
    peer.rewind(0)
    kl = float((mine.exp() * (mine - theirs)).sum())
    exact = peer.ran.engine == "transformers" and peer.ran.dtype in _EXACT_DTYPES
    return SameWeights(
        peer=peer.ran.engine,
        tokens=room,
        kl=kl if math.isnan(kl) else max(kl, 0.0),  # rounding may leave -1e-17 of equal ones
        tolerance=_EXACT if exact else _ROUNDED,
        top=int(mine.argmax()) == int(theirs.argmax()),
    )
