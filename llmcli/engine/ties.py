"""Near ties: greedy choices that different rounding could change.

Axes: B sequences, D width, V vocabulary; 2 are the chosen token and the best other one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.graph.precision import logits_dtype, rounding, stream_noise
from llmcli.model import Model


class NearTies:
    """First-order bound of rounding errors in the difference of two logits of `model`.

    A logit is `n·(w_f ∘ w)` with the normalized final stream n (RMS 1), the final norm's weight w_f
    and the token's row w of the head, or of `head_proj.W` times the head. Isotropic noise of the
    stream with relative norm σ (`stream_noise`) changes the difference of two logits by σ · ‖w_f ∘
    (w_1 − w_2)‖; rounding of the logits adds to that.
    """

    def __init__(self, model: Model) -> None:
        decoder, precision = model.decoder, model.decoder.precision
        matrices = [entry.stored for entry in model.ledger.entries if len(entry.filled) > 1]
        self.noise = stream_noise(model.config, precision, matrices)
        self._rounding = rounding(logits_dtype(model.config, precision))
        self._norm_D = torch.ones(model.config.width, dtype=torch.float64)
        if model.config.final_norm.weights:
            self._norm_D = decoder.weight("ln_final.w").dense().cpu().double()
        self._head, project = decoder.weight("head.W"), decoder.head_proj
        self._project = None if project is None else project.dense().cpu().double()

    def bound(self, ids_B2: Tensor, logits_B2: Tensor, slopes_B2: Tensor) -> Tensor:
        """The bound on the difference of two scores, `[B]` float64 in nats, on the host.

        `logits` and `slopes` are on the host too; `slopes`: derivative of each score by its logit
        (1 unless a penalty multiplies it).
        """
        rows_B2D = self._head.rows(ids_B2).cpu().double() * slopes_B2[..., None]
        if self._project is not None:  # [De, D]
            rows_B2D = rows_B2D @ self._project
        apart_B = (self._norm_D * (rows_B2D[:, 0] - rows_B2D[:, 1])).norm(dim=-1)
        logits_B = (logits_B2.double() * slopes_B2).norm(dim=-1)
        return torch.hypot(self.noise * apart_B, self._rounding * logits_B)
