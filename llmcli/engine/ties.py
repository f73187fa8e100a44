"""Coin flips: greedy choices that another rounding would have made otherwise.

Axes: B sequences, D width, V vocabulary; 2 are the chosen token and the best other one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.anatomy.arithmetic import logits_dtype, rounding, stream_noise
from llmcli.model import Model


class NearTies:
    """How far rounding may move the difference of two logits of `model`, to first order.

    A logit is `n·(w_f ∘ w)` with the end of the residual stream normalized to n, whose numbers are
    1 in the root mean square, the final norm's weight w_f and the token's row w of the head. Noise
    of the stream that has no direction of its own and a relative length of σ (`stream_noise`)
    moves the difference of two logits by σ · ‖w_f ∘ (w_1 − w_2)‖; rounding the logits themselves
    adds their own.
    """

    def __init__(self, model: Model) -> None:
        decoder, numbers = model.decoder, model.decoder.arithmetic
        matrices = [entry.stored for entry in model.ledger.entries if len(entry.shape) > 1]
        self.noise = stream_noise(model.config, numbers, matrices)
        self._rounding = rounding(logits_dtype(model.config, numbers))
        self._norm_D = decoder.weight("ln_final.w").dense().cpu().double()
        self._head = decoder.weight("head.W")

    def bound(self, ids_B2: Tensor, logits_B2: Tensor, slopes_B2: Tensor) -> Tensor:
        """The bound on the difference of two scores, `[B]` float64 in nats, on the host.

        `logits` and `slopes` are there, too; `slopes`: how much each score grows with its logit (1
        where no penalty multiplies it).
        """
        rows_B2D = self._head.rows(ids_B2).cpu().double() * slopes_B2[..., None]
        apart_B = (self._norm_D * (rows_B2D[:, 0] - rows_B2D[:, 1])).norm(dim=-1)
        logits_B = (logits_B2.double() * slopes_B2).norm(dim=-1)
        return torch.hypot(self.noise * apart_B, self._rounding * logits_B)
