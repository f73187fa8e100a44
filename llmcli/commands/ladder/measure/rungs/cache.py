"""Rungs 6 and 7: keys and values are kept; a batch of sequences.

In the formulas an index n marks what has one row only: `softmax(Q_n Kᵀ / √(d/h)) V`; in names that
row is axis n, of size 1, beside the m tokens so far.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.rungs.heads import CombinedQKV
from llmcli.commands.ladder.measure.weights import AttentionWeights, Weights
from llmcli.parts.attention.config import AttentionConfig

KEPT = """
[window: A block with a window of W = {window} keeps all keys, reads the last W.]
[rotates: Keys are kept rotated: a key's position does not change. (Where a model changes the
rotation itself with the length, as dynamic NTK and LongRoPE do past the trained length, the kept
ones are those of a shorter sequence and the numbers differ a little.)]"""


class Cache:
    """Keys (rotated) and values of one block, `[…, h_kv, C, …]`: C slots, at least one per token.

    Slots are allocated ahead, twice as many each time they run out: concatenating a row to K, as
    the documents draw it, copies all rows before it at every token.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def write(self, K: Tensor, V: Tensor, start: int) -> None:
        """Rows of K and V, `[…, h_kv, rows, …]`, into the slots from `start` on."""
        slots, stop = self.keys.shape[-2], start + K.shape[-2]
        if stop > slots:
            more = (0, 0, 0, max(stop, 2 * slots, 32) - slots)
            self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)
        self.keys[..., start:stop, :] = K
        self.values[..., start:stop, :] = V


class KeyValueCache(CombinedQKV):
    """The forward pass of a prompt, then of one row for every token after it."""

    title = "KV cache: a new token computes its own row only"
    before = "for a new token n rows again: softmax(Q Kᵀ / √(d/h) + M) V"
    here = """\
for a new token its own row only: Q_n, K_n, V_n = split(T_n W_qkv)
K and V: the kept rows and the new one[rotates: (rotated)]
Attention(Q_n, K, V) = softmax(Q_n Kᵀ / √(d/h)) V"""
    idea = """
The next token depends on the last row of the output only, and that row on Q's last row and on all
rows of K and V, which under a causal mask never change once computed: they are kept, and n rows of
work become one, every product a GEMV. Queries are not kept. The last row sees all keys and needs no
mask: true for one whole sequence, not for a prompt in chunks or a batch padded to one length. What
comes out is one row of v logits.""" + KEPT

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.caches: dict[int, Cache] = {}  # by their block
        self.new = False  # whether a single new row is computed

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[n, v]`, the cache filled; with `until=i` the rows `[n, d]` after block i."""
        self.new, self.caches = False, self.new_caches(ids)
        rows = super().forward(ids, until)
        if until is not None:
            self.caches = {}  # not filled by all blocks: nothing to extend
        return rows

    @torch.inference_mode()
    @shown
    def extend(self, id: Tensor) -> Tensor:
        """Reads one more token, `[]`: its logits `[v]`, from its own row and the cache.

        Raises ValueError where no prompt was read before.
        """
        if not self.caches:
            raise ValueError("nothing to extend: no prompt was read to its end")
        self.new = True
        logits_nv = self.read(id.unsqueeze(-1))  # n = 1
        return logits_nv[..., -1, :]

    def new_caches(self, ids: Tensor) -> dict[int, Cache]:
        """An empty one for every block."""
        found = {}
        for layer in self.weights.attentions:
            mixer, W = layer.config, layer.k.W
            shape = *ids.shape[:-1], mixer.kv_heads, 0
            keys = W.new_zeros(*shape, mixer.head_dim)
            found[layer.block] = Cache(keys, W.new_zeros(*shape, mixer.value_dim))
        return found

    @shown
    def kept(
        self, k_gnk: Tensor, v_gne: Tensor, layer: AttentionWeights
    ) -> tuple[Tensor, Tensor]:
        """The slots of K and V that the new rows read, as views: of one row, its window only.

        The new rows are written behind those of the tokens before.
        """
        window, cache = layer.config.window, self.caches[layer.block]
        cache.write(k_gnk, v_gne, self.first)
        last = self.first + self.count
        first = 0 if window is None or not self.new else max(0, last - window)
        k_gmk, v_gme = cache.keys[..., first:last, :], cache.values[..., first:last, :]
        return k_gmk, v_gme

    def mask(self, mixer: AttentionConfig) -> Tensor | None:
        """None for a single row, which sees all that is kept."""
        return None if self.new else super().mask(mixer)


class Batch(KeyValueCache):
    """The forward pass of several sequences at once, `[b, n]` ids, prompt and cached rows alike.

    No line of arithmetic changes: every operation of rung 6 counts its axes from the last one on,
    and there is one more before them. Its caches have the axes that the ids have.
    """

    title = "a batch: several sequences at once, one rank higher"
    before = "activations of one sequence: n × d, heads h × n × d/h; logits n × v"
    here = """\
activations of b sequences: b × n × d, heads b × h × n × d/h
logits b × n × v; the weights as before: they have no b"""
    idea = """
Sequences do not see each other, so b of them are one more leading dimension that the library loops
over, like the heads; the weights have none. Each number is computed as before. What is saved is
reading: a weight fetched from memory serves b rows, so the GEMVs of a new token become products of
b rows. Only the cache grows with b, b × [shared:h_kv][apart:h] × n × d/h for keys. Here the
sequences have equal lengths; shorter ones would be padded, and then the last row needs its mask
back.""" + KEPT
    batched: ClassVar[bool] = True
