"""Recurrences with a matrix state: gated delta rule and Mamba-2's state space.

    S ← e^g S;  S ← S + β k (v − kᵀS);  z = Sᵀq        the gated delta rule (arXiv 2412.06464)
    S ← e^g S;  S ← S + β k vᵀ;         z = Sᵀq        `plain`: Mamba-2 (arXiv 2405.21060), where
                                                       q, k, v, β are C, B, x, dt

    by our kernel, or    recur(…)             a decode step and a prompt
    token by token       recur_steps(…)       reference, and a decode step
    chunk by chunk       recur_chunks(…)      a prompt
    rows of the map      Map(…).rows(…)       z = map · v, of an empty state

All give the same numbers. Sums and the state are in at least float32.

Axes: B batch, H heads, K heads of queries and keys, T tokens, C tokens of a chunk, N chunks, d size
of a query and key, e of a value. Head h reads the queries and keys of head ⌊h / (H/K)⌋, or h mod K
if `tiled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.kernels import native, program
from llmcli.kernels.program import bits, call
from llmcli.ops import compiled
from llmcli.ops.activations import softplus

_FEW = 8  # tokens up to which single steps are faster than a chunk
CHUNK = 64  # tokens: sums of log-decays over more of them lose digits in float32
_AT_ONCE = 1 << 22  # numbers of intermediate results of chunks, at a time


@dataclass(frozen=True)
class Inputs:
    """Inputs of a recurrence for T tokens, in at least float32.

    `q`, `k` `[B, K, T, d]`, `v` `[B, H, T, e]`, `beta` and `log_decay` `[B, H, T]`. Padding has β 0
    and log-decay 0, which does not change the state.
    """

    q_BKTd: Tensor
    k_BKTd: Tensor
    v_BHTe: Tensor
    beta_BHT: Tensor
    log_decay_BHT: Tensor
    plain: bool = False
    tiled: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.v_BHTe.shape[2]

    def of_heads(self, x_BKTd: Tensor) -> Tensor:
        """Queries or keys expanded to the H heads."""
        group = self.v_BHTe.shape[1] // x_BKTd.shape[1]
        if group == 1:
            return x_BKTd
        if self.tiled:
            return x_BKTd.repeat(1, group, *[1] * (x_BKTd.ndim - 2))
        return x_BKTd.repeat_interleave(group, 1)

    def each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The inputs with `change` applied to every tensor."""
        return replace(
            self,
            q_BKTd=change(self.q_BKTd),
            k_BKTd=change(self.k_BKTd),
            v_BHTe=change(self.v_BHTe),
            beta_BHT=change(self.beta_BHT),
            log_decay_BHT=change(self.log_decay_BHT),
        )

    def part(self, first: int, last: int) -> Inputs:
        """Tokens `first` … `last`-1."""
        return self.each(lambda tensor: tensor[:, :, first:last])

    def only(self, there_BT: Tensor) -> Inputs:
        """Replace tokens by padding where `there` is False."""
        return replace(
            self,
            beta_BHT=self.beta_BHT * there_BT[:, None],
            log_decay_BHT=self.log_decay_BHT.masked_fill(~there_BT[:, None], 0.0),
        )

    def of_some(self, heads: slice) -> Inputs:
        """Inputs of some heads, with expanded queries and keys."""
        if heads == slice(None):
            return self
        q_BHTd, k_BHTd = self.of_heads(self.q_BKTd), self.of_heads(self.k_BKTd)
        expanded = replace(self, q_BKTd=q_BHTd, k_BKTd=k_BHTd)
        return expanded.each(lambda tensor: tensor[:, heads])


def steps_and_decays(
    x_BTH: Tensor, bias_H: Tensor, rate_H: Tensor, least: float, most: float
) -> tuple[Tensor, Tensor]:
    """`dt = clip(softplus(x + bias), least, most)`, and its log-decay; x in at least float32."""
    if not compiled.takes(x_BTH):
        dt_BTH = softplus(x_BTH + bias_H).clamp(least, most)
        return dt_BTH, log_decays(dt_BTH, rate_H)
    rows = compiled.in_rows(x_BTH)
    dt_BTH, logs_BTH = torch.empty(x_BTH.shape), torch.empty(x_BTH.shape)
    tensors, bounds = (bias_H, rate_H, dt_BTH, logs_BTH), (bits(least), bits(most))
    both = *tensors, *rows.shape, *bounds
    call(program.DECAY, rows, rows.stride(0), *both, out=dt_BTH, writes=(logs_BTH,))
    return dt_BTH, logs_BTH


def log_decays(dt_BTH: Tensor, rate_H: Tensor) -> Tensor:
    """`−e^rate · dt`: the exponent of the state's decay."""
    return -rate_H.exp() * dt_BTH


def with_skip(z_BHTe: Tensor, x_BHTe: Tensor, factor_H: Tensor) -> Tensor:
    """`z + f x`: add the skip connection with one factor per head."""
    if z_BHTe.shape[2] != 1 or not compiled.takes(z_BHTe, x_BHTe):
        return z_BHTe + factor_H[:, None, None] * x_BHTe
    batch, heads, _, size = z_BHTe.shape
    z, x, out = z_BHTe.contiguous(), _heads_together(x_BHTe), torch.empty(z_BHTe.shape)
    shape = batch, heads, size
    return call(program.ADD_SCALED, z, x, x.stride(0), factor_H, out, *shape, out=out)


def recur(x: Inputs, state_BHde: Tensor) -> Tensor:
    """`z` `[B, H, T, e]` by the fastest method; `state` is updated in place.

    Our kernel processes tokens one by one, bit-identical to single steps: with the state in the CPU
    cache this takes fewer operations than chunks.
    """
    if has_kernel(x, state_BHde):
        return by_kernel(x, state_BHde)
    return (recur_steps if x.tokens <= _FEW else recur_chunks)(x, state_BHde)


def has_kernel(x: Inputs, state_BHde: Tensor) -> bool:
    """Whether `by_kernel` supports it: inputs and state in float32.

    Many tokens only with a processor level: without, each fused multiply-add is a function call.
    """
    return (
        (x.tokens == 1 or native.level() != "portable")
        and compiled.takes(x.q_BKTd, x.k_BKTd, x.v_BHTe, x.beta_BHT, x.log_decay_BHT)
        and state_BHde.dtype == torch.float32
        and state_BHde[0].is_contiguous()
    )


def by_kernel(x: Inputs, state_BHde: Tensor) -> Tensor:
    """`recur_steps` by our kernel: `[B, H, T, e]`, with each token's heads contiguous.

    Bit-identical for any sequences, chunks, threads and processor level. If all sequences share the
    state's memory, they are B consecutive tokens of one sequence (lanes).
    """
    batch, heads, tokens, values = x.v_BHTe.shape
    out_BTHe = torch.empty(batch, tokens, heads, values)
    beta, log_decay = x.beta_BHT.mT.contiguous(), x.log_decay_BHT.mT.contiguous()
    q, k, v = (_heads_together(one) for one in (x.q_BKTd, x.k_BKTd, x.v_BHTe))
    if batch > 1 and state_BHde.stride(0) == 0:  # lanes
        q, k, v = (one.transpose(0, 2) for one in (q, k, v))
        batch, tokens = tokens, batch
    far = [(one, one.stride(0), one.stride(2)) for one in (q, k, v)]
    shape = state_BHde, batch, tokens, heads, q.shape[1], q.shape[3], values
    rest = beta, log_decay, out_BTHe, x.plain, x.tiled
    arguments = *far[0], *far[1], *far[2], *shape, *rest
    call(program.RECUR, *arguments, out=out_BTHe, writes=(state_BHde,))
    return out_BTHe.transpose(1, 2)


def _heads_together(x_BNTd: Tensor) -> Tensor:
    """`x` with each token's heads contiguous."""
    _, rows, _, size = x_BNTd.shape
    together = x_BNTd.stride(3) == 1 and (rows == 1 or x_BNTd.stride(1) == size)
    return x_BNTd if together else x_BNTd.transpose(1, 2).contiguous().transpose(1, 2)


def recur_steps(x: Inputs, state_BHde: Tensor) -> Tensor:
    """`z` `[B, H, T, e]`, token by token; `state` is updated in place."""
    q_BHTd, k_BHTd = x.of_heads(x.q_BKTd), x.of_heads(x.k_BKTd)
    decay_BHT11 = x.log_decay_BHT.exp()[..., None, None]
    beta_BHT1 = x.beta_BHT.unsqueeze(-1)
    out = []
    for t in range(x.tokens):
        q_BHd1, k_BHd1 = q_BHTd[:, :, t, :, None], k_BHTd[:, :, t, :, None]
        state_BHde.mul_(decay_BHT11[:, :, t])
        written_BHe = x.v_BHTe[:, :, t]
        if not x.plain:
            written_BHe = written_BHe - (k_BHd1 * state_BHde).sum(2)
        state_BHde.add_(k_BHd1 * (beta_BHT1[:, :, t] * written_BHe).unsqueeze(2))
        out.append((q_BHd1 * state_BHde).sum(2))
    return torch.stack(out, 2)


def recur_chunks(x: Inputs, state_BHde: Tensor, chunk: int = CHUNK) -> Tensor:
    """`z` `[B, H, T, e]` by matrix products, `chunk` tokens at a time; updates `state`.

    In a chunk, with c the cumulative sums of log-decays, G_ij = e^(c_i − c_j), and the tokens'
    writes as rows of U:

        (I + tril₋₁(diag β (G ∘ K Kᵀ))) U = diag β (V − e^c ∘ K S)        `plain`: U = diag β V
        z = e^c ∘ Q S + tril(G ∘ Q Kᵀ) U,     S ← e^(c_C) S + (e^(c_C − c) ∘ K)ᵀ U
    """
    out_BHTe = torch.empty_like(x.v_BHTe)
    for at, one in enumerate(_chunks(x, chunk)):
        written_BHCe = one.written(state_BHde)
        into_BHCe = out_BHTe[:, :, at * chunk : (at + 1) * chunk]
        into_BHCe.copy_(one.z(written_BHCe, state_BHde)[:, :, : into_BHCe.shape[2]])
        one.advance(written_BHCe, state_BHde)
    return out_BHTe


def states(x: Inputs, state_BHde: Tensor, after: Sequence[int]) -> Iterator[Tensor]:
    """Yield the state `[B, H, d, e]` after each number of tokens in `after` (ascending).

    `state`, initially before the first token, is updated in place and yielded: copy to keep it.
    """
    at = 0
    for last in after:
        if last > at:
            for one in _chunks(x.part(at, last), CHUNK):
                one.advance(one.written(state_BHde), state_BHde)
        at = last
        yield state_BHde


class Map:
    """The map `[B, H, T, S]` with `z = map · v` for an empty initial state, by rows.

        tril(G ∘ Q Kᵀ) (I + tril₋₁(diag β (G ∘ K Kᵀ)))⁻¹ diag β        `plain`: without the inverse

    In chunks: `R_i Φ_{i−1} … Φ_{j+1} E_j` off the diagonal, so that memory is linear in T.
    """

    def __init__(self, x: Inputs) -> None:
        self._tokens = x.tokens
        self._chunks: list[_Blocks] = []
        self._made = _chunks(x, CHUNK, maps=True)

    def rows(self, first: int, stop: int) -> Tensor:
        """Rows `first` … `stop`-1, `[B, H, stop − first, T]`."""
        begin, end = first // CHUNK, -(-stop // CHUNK)
        while len(self._chunks) < end:
            self._chunks.append(_Blocks.of(next(self._made)))
        parts = [self._row(at) for at in range(begin, end)]
        rows_BHtS = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return rows_BHtS[:, :, first - begin * CHUNK : stop - begin * CHUNK]

    def _row(self, at: int) -> Tensor:
        """The rows of one chunk."""
        own = self._chunks[at]
        found, reads_BHCd = [own.diagonal_BHCC], own.reads_BHCd
        for one in reversed(self._chunks[:at]):
            found.append(reads_BHCd @ one.enters_BHdC)
            reads_BHCd = one.through(reads_BHCd)
        row_BHCS = torch.cat(found[::-1], -1)
        behind = self._tokens - row_BHCS.shape[-1]
        return F.pad(row_BHCS, (0, behind)) if behind > 0 else row_BHCS[..., : self._tokens]


@dataclass(frozen=True)
class _Blocks:
    """A chunk's factors of the map: `diagonal`, R, E, and Φ as a matrix or, `plain`, a number."""

    diagonal_BHCC: Tensor
    reads_BHCd: Tensor
    enters_BHdC: Tensor
    keeps_BH11: Tensor
    passes_BHdd: Tensor | None

    @classmethod
    def of(cls, chunk: _Chunk) -> _Blocks:
        """From a chunk whose U was solved for identity values."""
        diagonal_BHCC = chunk.mixes_BHCC @ chunk.own_BHCe
        enters_BHdC = chunk.writes_BHCd.mT @ chunk.own_BHCe
        if chunk.taken_BHCd is None:
            return cls(diagonal_BHCC, chunk.reads_BHCd, enters_BHdC, chunk.keeps_BH11, None)
        reads_BHCd = chunk.reads_BHCd - chunk.mixes_BHCC @ chunk.taken_BHCd
        passes_BHdd = -(chunk.writes_BHCd.mT @ chunk.taken_BHCd)
        passes_BHdd.diagonal(dim1=-2, dim2=-1).add_(chunk.keeps_BH11[..., 0])
        return cls(diagonal_BHCC, reads_BHCd, enters_BHdC, chunk.keeps_BH11, passes_BHdd)

    def through(self, reads_BHCd: Tensor) -> Tensor:
        """The reads of later tokens, carried back before this chunk."""
        if self.passes_BHdd is None:
            return reads_BHCd * self.keeps_BH11
        return reads_BHCd @ self.passes_BHdd


@dataclass(frozen=True)
class _Chunk:
    """A chunk's transformation of any initial state.

    `reads`: `e^c ∘ Q`; `mixes`: `tril(G ∘ Q Kᵀ)`; `own`: U of an empty state; `taken`: its
    reduction per unit of state; `writes`: `e^(c_C − c) ∘ K`; `keeps`: `e^(c_C)`.
    """

    reads_BHCd: Tensor
    mixes_BHCC: Tensor
    own_BHCe: Tensor
    taken_BHCd: Tensor | None
    writes_BHCd: Tensor
    keeps_BH11: Tensor

    def written(self, state_BHde: Tensor) -> Tensor:
        """U: the tokens' writes at their keys."""
        if self.taken_BHCd is None:
            return self.own_BHCe
        return self.own_BHCe - self.taken_BHCd @ state_BHde

    def z(self, written_BHCe: Tensor, state_BHde: Tensor) -> Tensor:
        """The tokens' reads."""
        return self.reads_BHCd @ state_BHde + self.mixes_BHCC @ written_BHCe

    def advance(self, written_BHCe: Tensor, state_BHde: Tensor) -> None:
        """Update the state to after the chunk."""
        state_BHde.mul_(self.keeps_BH11).add_(self.writes_BHCd.mT @ written_BHCe)


def _chunks(x: Inputs, chunk: int, *, maps: bool = False) -> Iterator[_Chunk]:
    """Yield chunks in order; the last one is padded. `maps`: use identity values."""
    batch, heads, tokens, size = x.v_BHTe.shape
    wide = chunk if maps else size + (0 if x.plain else x.k_BKTd.shape[-1])
    many = max(1, _AT_ONCE // (batch * heads * chunk * (3 * chunk + wide)))
    for first in range(0, tokens, many * chunk):
        yield from _prepared(x.part(first, min(tokens, first + many * chunk)), chunk, maps)


def _prepared(x: Inputs, chunk: int, maps: bool) -> Iterator[_Chunk]:
    count = -(-x.tokens // chunk)
    missing = count * chunk - x.tokens

    def cut(of: Tensor, axis: int) -> Tensor:
        """`[…, T, …]` → `[…, N, C, …]`."""
        if missing:
            of = F.pad(of, (*[0, 0] * (of.ndim - 1 - axis), 0, missing))
        return of.reshape(*of.shape[:axis], count, chunk, *of.shape[axis + 1 :])

    q_BKNCd, k_BKNCd = cut(x.q_BKTd, 2), cut(x.k_BKTd, 2)
    beta_BHNC1 = cut(x.beta_BHT, 2).unsqueeze(-1)
    sums_BHNC, decays_BHNCC = _decays(cut(x.log_decay_BHT, 2))
    k_BHNCd = x.of_heads(k_BKNCd)
    reads_BHNCd = x.of_heads(q_BKNCd) * sums_BHNC.exp().unsqueeze(-1)
    mixes_BHNCC = x.of_heads(q_BKNCd @ k_BKNCd.mT) * decays_BHNCC
    writes_BHNCd = k_BHNCd * decays_BHNCC[..., -1, :, None]
    keeps_BHN11 = sums_BHNC[..., -1, None, None].exp()
    if maps:
        eye_CC = torch.eye(chunk, dtype=k_BHNCd.dtype, device=k_BHNCd.device)
        values_BHNCe = beta_BHNC1 * eye_CC
    else:
        values_BHNCe = beta_BHNC1 * cut(x.v_BHTe, 2)
    taken_BHNCd = None
    if not x.plain:
        within_BHNCC = (x.of_heads(k_BKNCd @ k_BKNCd.mT) * decays_BHNCC * beta_BHNC1).tril(-1)
        keys_BHNCd = k_BHNCd * (beta_BHNC1 * sums_BHNC.exp().unsqueeze(-1))
        right = torch.cat((values_BHNCe, keys_BHNCd), -1)
        values_BHNCe, taken_BHNCd = solve_unit_lower(within_BHNCC, right).split_with_sizes(
            [values_BHNCe.shape[-1], keys_BHNCd.shape[-1]], -1
        )
    read = reads_BHNCd.unbind(2), mixes_BHNCC.unbind(2), values_BHNCe.unbind(2)
    taken = [None] * count if taken_BHNCd is None else taken_BHNCd.unbind(2)
    yield from map(_Chunk, *read, taken, writes_BHNCd.unbind(2), keeps_BHN11.unbind(2))


def solve_unit_lower(lower: Tensor, right: Tensor) -> Tensor:
    """X of `(I + L) X = R`, L `[…, C, C]` below the diagonal, forward, in blocks of rows.

    A diagonal block is inverted by halves: the inverse of `[[A, 0], [C, B]]` is `[[A⁻¹, 0], [−B⁻¹ C
    A⁻¹, B⁻¹]]`. For similar keys and β near 1 inverses are at most 1 but powers of L are larger:
    `(I − L)(I + L²)(I + L⁴) …` would lose three digits. PyTorch's solver takes matrices one by one
    on one thread, and 1.4 times as long even then (512 of 64 × 64 with 256 columns); it is used for
    chunks that are not whole blocks.
    """
    size, step = lower.shape[-1], 16
    if size % step:
        found: Tensor = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        return found
    blocks = lower.reshape(-1, size // step, step, size // step, step)
    diagonal = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    inverse = torch.eye(step, dtype=lower.dtype, device=lower.device) - _halves(diagonal, 1)
    for half in (2, 4, 8):
        inverse = inverse - inverse @ _halves(diagonal, half) @ inverse
    lower, out = lower.reshape(-1, size, size), right.reshape(-1, *right.shape[-2:]).clone()
    for at in range(size // step):
        rows = slice(at * step, (at + 1) * step)
        if at:
            out[:, rows].baddbmm_(lower[:, rows, : rows.start], out[:, : rows.start], alpha=-1)
        out[:, rows] = inverse[:, at] @ out[:, rows]
    return out.view(right.shape)


def _halves(lower: Tensor, half: int) -> Tensor:
    """The lower left quarters C of diagonal blocks `[[A, 0], [C, B]]` of size `2 · half`."""
    at = torch.arange(lower.shape[-1], device=lower.device)
    below, left = at[:, None] // half, at // half
    return lower * ((below % 2 == 1) & (left == below - 1))


def _decays(log_BHNC: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative log-decays of a chunk, and `e^(c_i − c_j)` `[…, C, C]`, i ≥ j.

    Differences of float32 sums would have large errors if a token forgets nearly everything: they
    are computed in float64 if the device has it, and masked before the exponential.
    """
    wide = log_BHNC.double() if log_BHNC.device.type in ("cpu", "cuda") else log_BHNC
    sums_BHNC = wide.cumsum(-1)
    chunk = log_BHNC.shape[-1]
    later_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=log_BHNC.device).triu(1)
    apart_BHNCC = sums_BHNC.unsqueeze(-1) - sums_BHNC.unsqueeze(-2)
    apart_BHNCC = apart_BHNCC.to(log_BHNC.dtype).masked_fill_(later_CC, -torch.inf)
    return sums_BHNC.to(log_BHNC.dtype), apart_BHNCC.exp_()
