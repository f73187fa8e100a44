"""Configuration of multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434, section 2.1).

Letters: H heads, dn content dimensions of a head's query and key, dr with RoPE, dv of its value, dc
of the latent of keys and values, dq of the latent of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.config.attention import RopeConfig, ScoreConfig
from llmcli.config.norm import NormConfig


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Softmax attention whose keys and values are projections of a latent of size `rank`.

    Queries and keys have `content` dimensions plus `rope.dims` rotated ones; the rotated key is
    shared by all heads. The cache keeps a token's latent, normalized by `norm`, and its rotated
    key. `query_rank`: size of a normalized latent of queries (None: queries are projections of the
    input). `scale` multiplies q·k. `bias`: of the projections to the latents and to the rotated
    key, and of the output.
    """

    heads: int
    content: int
    value_dim: int
    rank: int
    query_rank: int | None
    scale: float
    rope: RopeConfig
    norm: NormConfig
    bias: bool = False

    AXES = "H heads, dh head_dim, dn content, dr rope.dims, dv value_dim, dc rank, dq query_rank"

    @property
    def head_dim(self) -> int:
        """Size of a head's query and key."""
        return self.content + self.rope.dims

    @property
    def kv_heads(self) -> int:
        """Equal to `heads`: each head has its own keys and values."""
        return self.heads

    @property
    def scores(self) -> ScoreConfig:
        """Plain ones, without a window."""
        return ScoreConfig(scale=self.scale)

    @property
    def kept(self) -> int:
        """Numbers cached per token."""
        return self.rank + self.rope.dims

    def absorbs(self, tokens: int, keys: int) -> bool:
        """Whether to project `tokens` queries to the latents of `keys` tokens (absorbed form).

        Scores are then `(q W_kᵀ) · latent`, and heads mix latents before `W_v`; otherwise latents
        are expanded to keys and values. Single tokens always, several if it needs fewer
        multiplications.
        """
        absorbed = tokens * self._turned + tokens * keys * self._pair(absorbed=True)
        expanded = keys * self._turned + tokens * keys * self._pair(absorbed=False)
        return tokens == 1 or absorbed < expanded

    def flops(self, tokens: int, keys: int) -> tuple[int, int]:
        """FLOPs of a sequence, from queries and latents to the heads' results, without a mask.

        Returns (total, FLOPs per query-key pair).
        """
        absorbed = self.absorbs(tokens, keys)
        pair = 2 * self.heads * self._pair(absorbed=absorbed)
        turned = 2 * self.heads * self._turned * (tokens if absorbed else keys)
        return turned + tokens * keys * pair, pair

    @property
    def _turned(self) -> int:
        """Multiplications to expand a latent to a head's key and value."""
        return self.rank * (self.content + self.value_dim)

    def _pair(self, *, absorbed: bool) -> int:
        """Multiplications of a head per query-key pair."""
        return self.kept + self.rank if absorbed else self.head_dim + self.value_dim
