"""The map of softmax attention from emitted tensors, some rows at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from llmcli.config.attention import AttentionConfig
from llmcli.config.latent import LatentConfig
from llmcli.nn.linear import Linear
from llmcli.nn.step import Emitted
from llmcli.ops.attention import visible_keys
from llmcli.ops.norm import at_least_float32


class SoftmaxMap(ABC):
    """A mixer with the map `softmax(scores)` and an output projection `out`.

    `entering`: the names of queries and keys that enter the scores; `mixed`: the name of the
    projection's input.

    Axes: B batch, t some tokens, S keys, H heads, K key/value heads, d size of a query and key.
    """

    name: str
    config: AttentionConfig | LatentConfig
    entering: tuple[str, str]
    mixed: str
    out: Linear

    @abstractmethod
    def scores(
        self, q_BHtd: Tensor, k_BKSd: Tensor, visible: Tensor, positions: Tensor,
        heads: slice | Sequence[int] = slice(None),
    ) -> Tensor:  # fmt: skip
        """Scores `[B, H, t, S]` of `heads` in at least float32, −∞ where `visible` is False.

        `positions` of the queries, `[t]` or `[B, t]`.
        """

    def score_rows(
        self, q_BHtd: Tensor, k_BKSd: Tensor, first: int,
        heads: slice | Sequence[int] = slice(None), *, before: int = 0,
    ) -> Tensor:  # fmt: skip
        """Scores `[B, H, t, S]` of `heads` and the queries at positions `first` … `first`+t-1.

        From emitted queries and all keys as they enter the product (`q_rot`, `k_rot`; without RoPE
        `q`, `k`). Scaled and masked (-∞), in at least float32. `before`: number of keys (and
        positions) before the first given one.
        """
        first += before
        positions = torch.arange(first, first + q_BHtd.shape[2], device=q_BHtd.device)
        window = self.config.scores.window
        visible = visible_keys(positions, k_BKSd.shape[2], window, before)
        return self.scores(q_BHtd, k_BKSd, visible, positions, heads)

    def weights(self, scores_BHtS: Tensor, heads: slice | Sequence[int] = slice(None)) -> Tensor:
        """The softmax of scores `[…, H, t, S]` of `heads`."""
        return scores_BHtS.softmax(-1)

    def attention_rows(
        self, q_BHtd: Tensor, k_BKSd: Tensor, first: int, heads: slice = slice(None)
    ) -> Tensor:
        """The attention pattern of these queries and `heads`: the weights of `score_rows`."""
        return self.weights(self.score_rows(q_BHtd, k_BKSd, first, heads), heads)

    def derive(
        self, name: str, emitted: Emitted, first: int, stop: int, *, heads: slice = slice(None)
    ) -> Tensor:
        """Rows `first` … `stop`-1 of `scores`, `pattern` `[B, H, t, S]` or `result` `[B, H, t, D]`.

        In at least float32, from `emitted` tensors of all tokens; of those `heads` alone.
        """
        numbers = range(self.config.heads)[heads]
        if name.endswith(".result"):
            z_BtHe = emitted[self.mixed][:, :, first:stop].transpose(1, 2)
            seen_BtHe = self.out.weight.quantized_input(z_BtHe.flatten(2)).view(z_BtHe.shape)
            sizes = (self.config.heads, self.config.value_dim)
            w_DHe = self.out.weight.dense().view(-1, *sizes)
            w_HeD = at_least_float32(w_DHe[:, heads]).permute(1, 2, 0)
            return at_least_float32(seen_BtHe[:, :, heads]).transpose(1, 2) @ w_HeD
        q_BHTd, k_BKSd = (emitted[one] for one in self.entering)
        if len(numbers) < self.config.heads:
            group = self.config.heads // self.config.kv_heads
            k_BKSd = k_BKSd[:, [head // group for head in numbers]]
        q_BHtd = q_BHTd[:, heads, first:stop]
        if name.endswith(".scores"):
            return self.score_rows(q_BHtd, k_BKSd, first, heads)
        return self.attention_rows(q_BHtd, k_BKSd, first, heads)
