"""What fused kernels do, computed in pieces and timed: a run of its own, beside the usual one.

Some projections are one product (`q|k|v`, `gate|up`: the graph says which), and attention is one
kernel. Here the same numbers are computed one piece after the other, from the tensors of the same
forward pass: W_q, W_k, W_v; the scores, the mask with the softmax, the mixing of the values;
W_gate, W_up. The weights are views of the fused ones.

Axes: B batch, T new tokens, t some of them, S keys, D width, H heads, K key/value heads, G = H/K
of them that share one, d size of a head's query and key, e of its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from llmcli.anatomy.graph import graph
from llmcli.commands.timing.measure.clock import RunClock, clock_for
from llmcli.commands.timing.measure.run import Job
from llmcli.commands.timing.report import PhaseName, PhaseTime, SplitTime
from llmcli.graph.node import Node
from llmcli.graph.ops import Mix, Project, Score, Softmax
from llmcli.model import Model
from llmcli.nn.state import State
from llmcli.observe.quiet import quiet
from llmcli.ops.activations import soft_cap
from llmcli.ops.attention import visible_keys, weights
from llmcli.ops.norm import at_least_float32
from llmcli.reports.checks import ViewCheck
from llmcli.reports.progress import Progress

_ROWS = 64  # queries at a time: scores of a long prompt are not kept
_RUNS = 3  # of which each piece's median is taken
_BETWEEN = "between"  # a mark before a piece: what came before it is none


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """The operations of one attention, and the names of its keys and values in the state."""

    group: str
    score: Score
    mix: Mix
    kept: tuple[str, str]
    sinks_H: Tensor | None


class Splitter:
    """A tap that computes each group again, in pieces, when its inputs are there.

    `worst` is the largest difference to what the fused kernel gave, of the largest number there.
    """

    def __init__(self, model: Model, state: State, clock: RunClock) -> None:
        self._decoder = model.decoder
        self._state = state
        self.clock = clock
        self._pending: dict[str, Tensor] = {}
        self._query: Tensor | None = None
        self._fused: dict[str, dict[str, Project]] = {}  # by what the product is of
        self._queries, self._mixed = set[str](), dict[str, _Attention]()
        self._graph = graph(model.config)
        for node in self._graph.nodes.values():
            if isinstance(node.op, Project) and node.op.fused and not node.shown:
                self._fused.setdefault(node.op.source, {})[node.name] = node.op
            elif isinstance(node.op, Mix):
                self._attention(node, node.op)
        self.worst, self.where = 0.0, ""

    def _attention(self, node: Node, mix: Mix) -> None:
        """Kept where the map is a softmax of scores, and keys and values are in the cache."""
        score = self._graph.score(mix)
        if score is None or node.layer is None:
            return
        holding = {state.holds: state.name for state in self._graph.states.values()}
        if score.key not in holding:  # latents are kept: which way they go is the kernel's choice
            return
        softmax = self._graph[mix.pattern].op
        sink = softmax.sink if isinstance(softmax, Softmax) else None
        self._queries.add(score.query)
        self._mixed[node.name] = _Attention(
            group=node.group, score=score, mix=mix, kept=(holding[score.key], holding[mix.value]),
            sinks_H=None if sink is None else self._decoder.weight(sink).dense(),
        )  # fmt: skip

    def tap(self, name: str, tensor: Tensor) -> None:
        """What the decoder shows."""
        if name in self._fused:
            self._products(self._fused[name], tensor)
        if name in self._queries:
            self._query = tensor
        elif name in self._mixed:
            self._compare(name, self._attend(self._mixed[name], tensor.shape[-1]), tensor)
        if name in self._pending:
            made = self._pending.pop(name).to(tensor.dtype)  # as a cache keeps it
            self._compare(name, made, _flat(tensor) if tensor.ndim > made.ndim else tensor)

    def _products(self, pieces: Mapping[str, Project], x_BTD: Tensor) -> None:
        """One product a piece, kept until the fused one is there to be compared with."""
        self.clock(_BETWEEN)
        for name, op in pieces.items():
            bias_N = None if op.bias is None else self._decoder.weight(op.bias).dense()
            weight = self._decoder.weight(op.weight)
            self._pending[name] = weight.matmul(x_BTD.to(self._decoder.dtype), bias_N)
            self.clock(_piece(self._graph[name].group, name.rpartition(".")[2]))

    def _attend(self, of: _Attention, value_size: int) -> Tensor:
        """`[B, H, T, e]`: softmax(scale · Q Kᵀ + M) V, some queries at a time."""
        assert self._query is not None
        cache, window = self._state.tensors(), of.score.window
        q_BHTd, past = self._query, self._state.lengths[0]
        batch, heads, tokens, size = q_BHTd.shape
        shared = (batch, heads // of.mix.group, -1)  # heads of a group are rows of one product
        out = torch.empty(*q_BHTd.shape[:3], value_size, dtype=q_BHTd.dtype, device=q_BHTd.device)
        for start in range(0, tokens, _ROWS):
            q_BHtd = q_BHTd[:, :, start : start + _ROWS]
            rows = q_BHtd.shape[2]
            at, last = past + start, past + start + rows
            first = 0 if window is None else max(0, at - window + 1)
            positions = torch.arange(at, last, device=q_BHTd.device) - first
            keys, values = (cache[part][:, :, first:last].to(q_BHtd.dtype) for part in of.kept)
            self.clock(_BETWEEN)
            scores = q_BHtd.reshape(*shared, size) @ keys.transpose(-1, -2)
            self.clock(_piece(of.group, "scores"))
            visible = visible_keys(positions, last - first, window)
            wide = at_least_float32(scores).view(*shared, rows, last - first)
            factors = [of.score.factor(position) for position in range(at, last)]
            wide = wide * torch.tensor(factors, dtype=wide.dtype, device=wide.device)[:, None]
            if of.score.cap is not None:
                wide = soft_cap(wide, of.score.cap)
            wide = wide.masked_fill(~visible, -torch.inf).view(batch, heads, rows, -1)
            pattern = weights(wide, of.sinks_H).to(scores.dtype).view(scores.shape)
            self.clock(_piece(of.group, "softmax"))
            z = pattern @ values
            self.clock(_piece(of.group, "mix"))
            out[:, :, start : start + _ROWS] = z.view(batch, -1, rows, value_size)
        return out

    def _compare(self, name: str, pieces: Tensor, fused: Tensor) -> None:
        most = float(fused.abs().max())
        off = float((pieces - fused).abs().max()) / (most or 1.0)
        self.worst, self.where = _worse((self.worst, self.where), (off, name))


def measure_splits(
    job: Job, phases: Sequence[PhaseTime], progress: Progress | None
) -> tuple[tuple[SplitTime, ...], tuple[ViewCheck, ...]]:
    """Each fused group of each phase with the seconds of its pieces, and whether they are right."""
    found: list[SplitTime] = []
    worst = 0.0, ""
    for number, phase in enumerate(phases):
        if progress is not None:
            progress("timing the pieces", number, len(phases))
        splitter = Splitter(job.model, job.session.state, clock_for(job.model.device))
        runs = [_seconds(job, phase.name, splitter) for _ in range(_RUNS)]
        found += _splits(phase, {piece: median(run[piece] for run in runs) for piece in runs[0]})
        worst = _worse(worst, (splitter.worst, f"{splitter.where} ({phase.name})"))
    check = ViewCheck(
        name="pieces",
        words="the pieces compute what the fused kernels do, up to rounding",
        value=worst[0],
        tolerance=_allowed(job.model.dtype),
        where=worst[1],
    )
    return tuple(found), (check,)


def _seconds(job: Job, phase: PhaseName, splitter: Splitter) -> dict[str, float]:
    """Of each mark, over all layers and calls of one run."""
    job.ready(phase)
    with quiet():
        splitter.clock.start()
        job.run(phase, None, tap=splitter.tap)
        splitter.clock.stop()
    marks, seconds = splitter.clock.marks(), dict[str, float]()
    for name, spent in zip(marks.names, marks.seconds, strict=True):
        seconds[name] = seconds.get(name, 0.0) + spent
    return seconds


def _piece(group: str, piece: str) -> str:
    """The mark after a piece."""
    return f"{group}/{piece}"


def _splits(phase: PhaseTime, seconds: Mapping[str, float]) -> Iterator[SplitTime]:
    for part in phase.totals:
        own = [mark for mark in seconds if mark.startswith(_piece(part.part, ""))]
        pieces = tuple((mark.removeprefix(_piece(part.part, "")), seconds[mark]) for mark in own)
        if pieces:
            yield SplitTime(phase=phase.name, part=part.part, group_s=part.seconds, pieces=pieces)


def _worse(found: tuple[float, str], other: tuple[float, str]) -> tuple[float, str]:
    """The larger difference with its place: the first of equals, and a NaN before all."""
    return other if found[0] == found[0] and not other[0] <= found[0] else found


def _flat(x_BNTd: Tensor) -> Tensor:
    """`[B, T, N·d]` of heads, as a product gives them."""
    return x_BNTd.transpose(1, 2).flatten(2)


def _allowed(dtype: torch.dtype) -> float:
    """Roundings of the largest number: many in a sum of wide numbers, few in narrow ones, whose
    products are summed in float32.
    """
    return torch.finfo(dtype).eps * (8 if dtype.itemsize < 4 else 256)
