"""Rows of the attention maps of a layer's heads, block by block, each checked when it comes.

Every row has to be a distribution over the right keys, and its product with the values what the
fused kernel computed.

Axes: H heads, K key/value heads, t rows (queries), S keys of a block, N all tokens, d size of a
query and key, e of a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from llmcli.config.attention import most_keys, seen_keys
from llmcli.errors import NotFinite
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.recurrence import CHUNK, ROUNDINGS, Walk, share_of, walk
from llmcli.ops.norm import at_least_float32
from llmcli.records.document import ViewCheck

CELLS = 1 << 23  # of a block: half a dozen tensors of that many float32 at a time

# How many roundings (eps) the sum of a row of up to 1024 keys may be off, and longer ones more by
# the root of their length: softmax adds up as many. Measured: 6 with 400 keys, 34 with 32768.
SUM_ROUNDINGS = 32
SUM_KEYS = 1024

# How many roundings of float32 and float64 a mixed value may be off: of its size and of the scores.
# Measured, the worst of all rows of every family's small models: 1.6. Where a query sees more than
# 64 keys they grow with their number: values of equal tokens without positions are added up with
# the same rounding again and again, 8.7 with 300 keys, 34 with 1000, 134 with 4000.
VALUE_ROUNDINGS = 8
VALUE_KEYS = 64
# … and how many of 16 bits, where weights and results are rounded to these: half an eps each.
# Measured on a CPU: 0.37. What a GPU needs is not measured.
NARROW_ROUNDINGS, NARROW_ROUNDINGS_GPU = 1.0, 4.0


class Tokens:
    """All tokens so far, on the device where the matrices are."""

    def __init__(self, ids: list[int], device: torch.device) -> None:
        self.ids_N = torch.tensor(ids, device=device)
        self.before_N = torch.cat((self.ids_N.new_tensor([-1]), self.ids_N[:-1]))
        last: dict[int, int] = {}
        gaps = []
        for at, id in enumerate(ids):
            gaps.append(at - last[id] if id in last else len(ids) + 1)
            last[id] = at
        # how many tokens before it the last equal one stands; more than there are where none does
        self.gaps_N = torch.tensor(gaps, device=device)


@dataclass(frozen=True)
class Block:
    """Rows `first` … `first`+t-1, keys `low` … `low`+S-1; cells outside are masked.

    `a_HtS` are weights, 0 where masked. `seen_t`: how many keys each row sees. `taken_Ht`: what the
    heads' own sinks take of each row, None where there are none. `negative_Ht`: of shares of signed
    weights, how much of each row was negative. `at`: where its heads stand in the list of chosen
    heads. `scores_HtS`, -∞ where masked; a signed map has none.
    """

    a_HtS: Tensor
    first: int
    low: int
    seen_t: Tensor
    tokens: Tokens
    taken_Ht: Tensor | None = None
    negative_Ht: Tensor | None = None
    at: slice = field(default_factory=lambda: slice(None))
    scores_HtS: Tensor | None = None

    def shares(self) -> Block:
        """|A| / Σ_j |A| of signed weights, NaN in a row of zeros, which no metric counts."""
        sizes_HtS = self.a_HtS.abs()
        shares_HtS = sizes_HtS / sizes_HtS.sum(-1, keepdim=True)
        negative_Ht = shares_HtS.where(self.a_HtS < 0, 0.0).sum(-1)
        return replace(self, a_HtS=shares_HtS, negative_Ht=negative_Ht)

    def mixed(self, v_KSe: Tensor) -> Tensor:
        """The rows times the values of their keys, `[H, t, e]`."""
        a_KgS = self.a_HtS.reshape(len(v_KSe), -1, self.a_HtS.shape[2])
        return (a_KgS @ v_KSe).reshape(*self.a_HtS.shape[:2], -1)

    def masked(self, values_HtS: Tensor) -> Tensor:
        """The `values` of all cells, -∞ where masked."""
        hidden = self.after_tS if self.scores_HtS is None else self.scores_HtS == -math.inf
        return values_HtS.masked_fill(hidden, -math.inf)

    @cached_property
    def after_tS(self) -> Tensor:
        """Which keys come after the query."""
        return self.keys_S > self.positions_t[:, None]

    @cached_property
    def positions_t(self) -> Tensor:
        """Position of every query."""
        rows = self.a_HtS.shape[1]
        return torch.arange(self.first, self.first + rows, device=self.a_HtS.device)

    @cached_property
    def keys_S(self) -> Tensor:
        """Position of every key."""
        keys = self.a_HtS.shape[2]
        return torch.arange(self.low, self.low + keys, device=self.a_HtS.device)

    @cached_property
    def entropy_Ht(self) -> Tensor:
        """`-Σ_j A_ij ln A_ij` in nats; with sinks of `A_ij / Σ_j A_ij`."""
        entropy_Ht: Tensor = torch.special.entr(self.a_HtS).sum(-1)
        if self.taken_Ht is None:
            return entropy_Ht
        return entropy_Ht / self.left_Ht + self.left_Ht.log()

    @cached_property
    def left_Ht(self) -> Tensor:
        """The sum of every row: with sinks less than 1."""
        return self.a_HtS.sum(-1)

    def back_Ht(self, steps: int) -> Tensor:
        """The weight of the key `steps` tokens before the query; 0 where it is masked."""
        heads, _, keys = self.a_HtS.shape
        at_t = self.positions_t - steps - self.low
        at_Ht1 = at_t.clamp(0, keys - 1).expand(heads, -1)[..., None]
        inside_t = (at_t >= 0) & (at_t < keys)
        return self.a_HtS.gather(-1, at_Ht1)[..., 0].where(inside_t, 0.0)

    @property
    def first_key_Ht(self) -> Tensor:
        """The weight of key 0."""
        first_Ht = self.a_HtS[..., 0]
        return first_Ht if self.low == 0 else torch.zeros_like(first_Ht)

    def last_Ht(self, width: int) -> Tensor:
        """The weight of the last `width` keys, the query's own included."""
        rows = self.a_HtS.shape[1]
        begin = max(0, self.first - width + 1 - self.low)
        band = slice(begin, max(begin, self.first + rows - self.low))
        near_tS = self.keys_S[band] > self.positions_t[:, None] - width
        last_Ht: Tensor = (self.a_HtS[:, :, band] * near_tS).sum(-1)
        return last_Ht

    @cached_property
    def beyond_first(self) -> tuple[Tensor, Tensor]:
        """Without key 0: the weight of each row, and `Σ_j A_ij (i-j)`, both `[H, t]`.

        Distances are taken from the block's first row, so that long ones lose no digits.
        """
        dtype = self.a_HtS.dtype
        counts_S = (self.keys_S > 0).to(dtype)
        from_first_S = (self.keys_S - self.first).to(dtype) * counts_S
        mass_Ht, moment_Ht = (self.a_HtS @ torch.stack((counts_S, from_first_S), 1)).unbind(-1)
        offset_t = (self.positions_t - self.first).to(dtype)
        return mass_Ht, offset_t * mass_Ht - moment_Ht

    def equal_Ht(self, after: bool) -> Tensor:
        """The weight of keys whose token is the query's own (`after`: of those that follow such).

        Only earlier tokens count. Pairs of equal tokens are few: they are picked one by one.
        """
        ids_N = self.tokens.ids_N
        keys_N = self.tokens.before_N if after else ids_N
        keys_S = keys_N[self.low : self.low + self.a_HtS.shape[2]]
        rows = self.a_HtS.shape[1]
        same_tS = ids_N[self.first : self.first + rows, None] == keys_S
        earlier_tS = self.keys_S < self.positions_t[:, None] + (1 if after else 0)
        row_P, key_P = (same_tS & earlier_tS).nonzero().unbind(-1)
        found_Ht = self.a_HtS.new_zeros(self.a_HtS.shape[:2])
        return found_Ht.index_add_(1, row_P, self.a_HtS[:, row_P, key_P])

    @cached_property
    def gaps_t(self) -> Tensor:
        """How many tokens before the query the last equal one stands."""
        return self.tokens.gaps_N[self.first : self.first + self.a_HtS.shape[1]]


class AttentionChecks:
    """The checks that every row of every head goes through."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._eps = torch.finfo(dtype).eps
        self._wide_eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        roundings = NARROW_ROUNDINGS if device.type == "cpu" else NARROW_ROUNDINGS_GPU
        self._narrow_off = roundings * self._eps if dtype.itemsize == 2 else 0.0
        self._longest, self._sinks = SUM_KEYS, False
        self._worst: dict[str, tuple[float, str]] = {}  # by the check, the largest, and its place

    def _add(
        self, check: str, values_Ht: Tensor, of: LayerMap, heads: Sequence[int], first: int
    ) -> None:
        """Numbers ≥ 0 of rows from `first` on. Raises NotFinite for NaN and infinity."""
        largest, at = values_Ht.flatten().max(0)
        head, row = divmod(int(at), values_Ht.shape[1])
        value, where = float(largest), f"{of.pattern}[{heads[head]},{first + row}]"
        if not math.isfinite(value):
            raise NotFinite(
                f"`{where}` does not follow from finite numbers",
                hint="`llmcli dump --name 'blocks.*'` names the first one that is not",
            )
        if value > self._worst.setdefault(check, (0.0, ""))[0]:
            self._worst[check] = value, where

    def see(self, block: Block, scores_HtS: Tensor, of: LayerMap, heads: Sequence[int]) -> None:
        """That the rows add up to 1, with what a sink takes, and which keys have a weight."""
        self._longest = max(self._longest, block.a_HtS.shape[2])
        off_Ht = block.a_HtS.sum(-1) - 1
        if block.taken_Ht is not None:
            self._sinks, off_Ht = True, off_Ht + block.taken_Ht
        self._add("row_sums", off_Ht.abs(), of, heads, block.first)
        self._add("masks", wrong_cells(block, scores_HtS), of, heads, block.first)

    def compare(
        self,
        block: Block,
        of: LayerMap,
        heads: Sequence[int],
        *,
        v_KSe: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        z_Hte: Tensor,
    ) -> None:
        """That the pattern times the values is what the kernel computed as `z`.

        Off may be the result in the model's own dtype, and the scores, which the kernel never
        writes, in at least float32: a score is as wrong as ‖q‖ ‖k‖ is large (`norms` of scaled
        queries and of keys; None: as the score itself).
        """
        size_HtS = block.a_HtS.shape
        a_KgS, v_S = block.a_HtS.reshape(len(v_KSe), -1, size_HtS[2]), v_KSe.norm(dim=-1)
        if norms is None:
            q_Ht, k_S = torch.ones_like(z_Hte[..., 0]), torch.zeros_like(v_S)
        else:
            q_Ht, k_S = norms
        sizes_Kg3 = a_KgS @ torch.stack((v_S, k_S, k_S * v_S), -1)
        value_Ht, key_Ht, both_Ht = sizes_Kg3.reshape(*size_HtS[:2], 3).unbind(-1)
        if norms is None:
            own_KgS = torch.special.entr(a_KgS).abs()  # a · |log a|
            key_Ht = own_KgS.sum(-1).reshape(size_HtS[:2])
            both_Ht = (own_KgS @ v_S[..., None]).reshape(size_HtS[:2])
        mixed_Hte = block.mixed(v_KSe)
        scores_off_Ht = q_Ht * (both_Ht + key_Ht * value_Ht)
        roundings_t = VALUE_ROUNDINGS * (block.seen_t / VALUE_KEYS).clamp_min(1)
        allowed_Ht = roundings_t * self._wide_eps * (value_Ht + scores_off_Ht)
        allowed_Ht = allowed_Ht + self._narrow_off * value_Ht
        share_Ht = share_of((mixed_Hte - z_Hte).abs().amax(-1), allowed_Ht)
        self._add("values", share_Ht, of, heads, block.first)

    def compare_signed(
        self,
        block: Block,
        of: LayerMap,
        heads: Sequence[int],
        *,
        v_KSe: Tensor,
        z_Hte: Tensor,
        sizes_Ht: Tensor,
        narrow: bool,
    ) -> None:
        """Checks the map of a recurrence: it reads no later token, and its product with the values
        is what the kernel computed as `z`.

        Its rows are no distribution. Off may be `z` by its own rounding, where it has 16 bits
        (`narrow`), and both by what `sizes_Ht` says, see `walk`.
        """
        leaks_Ht = ((block.a_HtS != 0) & block.after_tS).sum(-1)
        self._add("causal", leaks_Ht, of, heads, block.first)
        mixed_Hte = block.mixed(v_KSe)
        allowed_Hte = (ROUNDINGS * self._wide_eps * sizes_Ht)[..., None].expand_as(mixed_Hte)
        if narrow:
            allowed_Hte = allowed_Hte + self._narrow_off / 2 * mixed_Hte.abs()
        share_Hte = share_of((mixed_Hte - z_Hte).abs(), allowed_Hte)
        self._add("values", share_Hte.amax(-1), of, heads, block.first)

    def checks(self) -> tuple[ViewCheck, ...]:
        """Of rows, masks and values, over all that was seen.

        Of maps that are no distributions `causal` stands in place of the first two.
        """
        sink = " and its head's sink" if self._sinks else ""
        sums = SUM_ROUNDINGS * self._wide_eps * math.sqrt(self._longest / SUM_KEYS)
        every = {
            "row_sums": f"in the pattern shown the weights of every query{sink} add up to 1",
            "masks": "in the pattern shown every query sees the keys that it may, others are 0",
            "causal": "in the signed maps shown weights of tokens after the query are 0",
            "values": "the pattern shown · values is the kernel's own z, but for roundings",
        }
        tolerances = {"row_sums": sums, "values": 1.0}  # else it has to be 0
        return tuple(
            ViewCheck(
                name=name,
                words=words,
                value=self._worst[name][0],
                tolerance=tolerances.get(name, 0.0),
                where=self._worst[name][1],
            )
            for name, words in every.items()
            if name in self._worst
        )


def wrong_cells(block: Block, scores_HtS: Tensor) -> Tensor:
    """How many cells of each row are masked and should not be, or the other way: `[H, t]`.

    A masked cell has the weight 0 and the score -∞. Which cells are is computed anew: row i sees
    its last `seen_t` keys. Keys that all rows or none see are compared as a whole.
    """
    last_t = block.positions_t
    begin_t = last_t - block.seen_t + 1
    end = int(last_t[0]) - block.low + 1  # all rows see the keys from `start` to here
    start = max(0, min(int(begin_t[-1]) - block.low, end))
    wrong_Ht = (scores_HtS[:, :, start:end] == -math.inf).any(-1).long()
    for band in (slice(0, start), slice(end, None)):
        keys_S = block.keys_S[band]
        seen_tS = (keys_S >= begin_t[:, None]) & (keys_S <= last_t[:, None])
        masked_HtS = scores_HtS[:, :, band] == -math.inf
        leaks_HtS = (block.a_HtS[:, :, band] != 0) & ~seen_tS
        wrong_Ht = wrong_Ht + ((masked_HtS == seen_tS) | leaks_HtS).sum(-1)
    return wrong_Ht


def checked_rows(
    proof: AttentionChecks,
    of: LayerMap,
    heads: Sequence[int],
    tokens: Tokens,
    seen: Mapping[str, Tensor],
    rows: int | None = None,
    walked: Walk | None = None,
) -> Iterator[Block]:
    """The rows of all queries, block by block.

    `heads` are the chosen heads, `seen` the activations `[H, T, d]` of all heads and tokens.
    `rows`: rows at a time (None: as memory allows). Each block has passed through `proof`,
    which compares it with the kernel's own result, when it comes.
    `walked`: through all tokens, where the map is signed (None: it is walked here). Raises
    NotFinite.
    """
    v_KSe, z_HTe = seen[of.value], seen[of.mixed]
    if of.signed and walked is None:
        walked = walk(of.recurrence(seen))
    count = z_HTe.shape[1]
    for at, kv in _shares(of, heads, count):
        ours = heads[at]
        v, z = at_least_float32(v_KSe[kv]), at_least_float32(z_HTe[ours])
        most = rows or _block_rows(most_keys(of.window), len(ours), count)
        if walked is not None and rows is None:
            most = max(most - most % CHUNK, min(most, CHUNK))
        map_rows = of.map(seen, ours) if of.signed else None
        for position in range(0, count, most):
            z_Hte = z[:, position : position + most]
            last = position + z_Hte.shape[1]
            # only the keys that some row sees, and one more at both ends: a mask off by one shows
            low = max(0, position - seen_keys(position, of.window))
            keys = slice(low, last + 1)
            seen_t = seen_keys(torch.arange(position, last, device=z.device), of.window)
            if map_rows is not None and walked is not None:
                a_HtS = map_rows(slice(position, last))[:, :, keys]
                block = Block(a_HtS, position, low, seen_t, tokens, at=at)
                if not of.edited:
                    proof.compare_signed(
                        block,
                        of,
                        ours,
                        v_KSe=v[:, keys],
                        z_Hte=z_Hte,
                        sizes_Ht=walked.sizes_HT[ours, position:last].to(z),
                        narrow=z_HTe.dtype.itemsize == 2,
                    )
                yield block
                continue
            found = of.rows(seen, ours, slice(position, last), keys)
            taken_Ht, scores_HtS = found.taken_Ht, found.scores_HtS
            block = Block(
                found.a_HtS, position, low, seen_t, tokens, taken_Ht, at=at, scores_HtS=scores_HtS
            )
            proof.see(block, scores_HtS, of, ours)
            if not of.edited:
                proof.compare(block, of, ours, v_KSe=v[:, keys], norms=found.norms, z_Hte=z_Hte)
            yield block


def _block_rows(window: int | None, heads: int, keys: int) -> int:
    """The most rows of a block; with a window few enough that most cells are not masked."""
    if window is None:
        return max(1, CELLS // (heads * keys))
    width = 2 * (window + 32)  # of the block: its rows, and a window before the first
    return max(1, min(width - window - 2, CELLS // (heads * min(keys, width))))


def _shares(of: LayerMap, heads: Sequence[int], tokens: int) -> Iterator[tuple[slice, slice]]:
    """Which of `heads` are computed together, and their key/value heads.

    Heads of one key/value head; of several where all heads are wanted and rows are short.
    """
    together = 1
    if len(heads) == of.heads:
        together = max(1, CELLS // (of.group * tokens**2))
    for kv in range(0, of.heads // of.group, together):
        those = range(kv * of.group, (kv + together) * of.group)
        ours = [i for i, head in enumerate(heads) if head in those]
        if ours:
            yield slice(ours[0], ours[-1] + 1), slice(kv, kv + together)
