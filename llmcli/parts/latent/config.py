"""What multi-head latent attention is (DeepSeek-V2, 2024, arXiv 2405.04434, section 2.1).

Letters: H heads, dn numbers of a head's query and key that hold content, dr that are rotated by
positions, dv of its value, dc of the latent of keys and values, dq of the latent of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.parts.attention.config import RopeConfig
from llmcli.parts.norm.config import NormConfig


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Softmax attention whose keys and values are projections of a latent of `rank` numbers.

    A query and a key are `content` numbers and `rope.dims` rotated ones; the rotated key is one for
    all heads. What is kept of a token are its latent, normalized by `norm`, and its rotated key.
    `query_rank`: queries are projections of a latent, too, with a norm of its own (None: of what
    the part reads). `scale` multiplies q·k. `bias`: of the projections to the latents and to the
    rotated key, and of the output.
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

    @property
    def head_dim(self) -> int:
        """Numbers of a head's query and key."""
        return self.content + self.rope.dims

    @property
    def kv_heads(self) -> int:
        """Each head has keys and values of its own."""
        return self.heads

    @property
    def window(self) -> int | None:
        """A query sees all keys before it."""
        return None

    @property
    def kept(self) -> int:
        """Numbers that a cache keeps of a token."""
        return self.rank + self.rope.dims

    def absorbs(self, tokens: int, keys: int) -> bool:
        """Whether `tokens` queries of a sequence are taken to the latents of its `keys` tokens.

        Scores are then `(q W_kᵀ) · latent`, and heads mix latents before `W_v`; else the latents of
        all `keys` are taken to keys and values. Of several tokens whichever multiplies less does.
        """
        absorbed = tokens * self._turned + tokens * keys * self._pair(absorbed=True)
        expanded = keys * self._turned + tokens * keys * self._pair(absorbed=False)
        return tokens == 1 or absorbed < expanded

    def flops(self, tokens: int, keys: int) -> tuple[int, int]:
        """FLOPs of a sequence, from queries and latents to the heads' results, as full rectangles.

        And how many of them each pair of a query and a key takes.
        """
        absorbed = self.absorbs(tokens, keys)
        pair = 2 * self.heads * self._pair(absorbed=absorbed)
        turned = 2 * self.heads * self._turned * (tokens if absorbed else keys)
        return turned + tokens * keys * pair, pair

    @property
    def _turned(self) -> int:
        """Multiplications that take a latent to a head's key and value."""
        return self.rank * (self.content + self.value_dim)

    def _pair(self, *, absorbed: bool) -> int:
        """Multiplications of a head for a query and a key."""
        return self.kept + self.rank if absorbed else self.head_dim + self.value_dim
