"""Heads' circuits and their composition, from the weights alone (Elhage et al. 2021).

A circuit is linear: the weights (and centring) of norms are folded into the matrices around them,
as TransformerLens does, their divisors are left out, and there is no rotation (distance 0) and no
bias. How queries, keys and values follow from the stream is read from the graph: grouped queries,
latents and keys of other layers need no rule of their own.

Axes: V tokens, D width, H heads, d size of a head's query and key, e of its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmcli.commands.weights.measure.tensors import AT_ONCE, Matrix, effective_rank
from llmcli.commands.weights.report import (
    CompositionReport,
    HeadCircuit,
    HeadPair,
    HeadsReport,
)
from llmcli.errors import UsageError
from llmcli.graph.graph import graph
from llmcli.graph.ops import Add, HeadShare, Join, Mix, Normalize, Project, Rotate
from llmcli.model import Model
from llmcli.records.document import ViewCheck
from llmcli.records.text import Token
from llmcli.records.work import Progress

Found = tuple[tuple[Token, float], ...]
KINDS: tuple[Literal["Q", "K", "V"], ...] = ("Q", "K", "V")
TOP = 10
# Relative differences of a head's output from the decoder's own products, by what these round to
EXACT, ROUNDED, COARSE = 1e-9, 2e-3, 0.1
COMPOSED = 1e-5  # scores, whose products are float32
MOST_FLOPS = 4e13  # of all pairs' compositions, minutes of a processor


class Sites(NamedTuple):
    """A layer's activations by name, queries for each of its heads of keys and values, and W_o."""

    query: str
    key: str
    value: str
    group: int
    share: HeadShare


class Circuits:
    """The factors of a model's heads, in float64."""

    def __init__(self, model: Model) -> None:
        self.model, self._graph = model, graph(model.config)

    def kv_head(self, layer: int, head: int) -> int:
        """The head of keys and values that a head reads."""
        return head // self._at(layer).group

    def query(self, layer: int, head: int) -> Tensor:
        """`[d, D]`: a head's query of the stream."""
        return self._of(self._at(layer).query, head)

    def key(self, layer: int, head: int) -> Tensor:
        """`[d, D]`: the key that a head of queries reads."""
        return self._of(self._at(layer).key, self.kv_head(layer, head))

    def value(self, layer: int, head: int) -> Tensor:
        """`[e, D]`: the value that a head of queries reads."""
        return self._of(self._at(layer).value, self.kv_head(layer, head))

    def output(self, layer: int, head: int) -> Tensor:
        """`[D, e]`: what a head adds to the stream for its values, with the norm after it."""
        m_eD, name = self._columns(layer, head).T, self._at(layer).share.whole
        while (after := self._after(name)) is not None:
            name, op = after
            m_eD = self._normed(m_eD, op) if isinstance(op, Normalize) else m_eD * op.scale
        return m_eD.T

    def factors(self, *at: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and output of the head `at`, (layer, head)."""
        return self.query(*at), self.key(*at), self.value(*at), self.output(*at)

    def _columns(self, layer: int, head: int) -> Tensor:
        size = self._graph.sizes(layer)["dv"]
        return self._dense(self._at(layer).share.weight)[:, head * size : (head + 1) * size]

    def _after(self, name: str) -> tuple[str, Normalize | Add] | None:
        """The norm or factor of an activation that is not the stream yet."""
        for node in self._graph.nodes.values():
            own = name in node.op.inputs and ".resid_" not in node.name
            if own and isinstance(node.op, Normalize | Add):
                return node.name, node.op
        return None

    def embedded(self, ids: slice) -> Tensor:
        """`[V, D]`: rows of the embedding as they enter the stream, without positions."""
        decoder = self.model.decoder
        rows = Matrix(decoder.embed).rows(ids.start, ids.stop)
        rows = rows * self.model.config.embedding.scale
        if decoder.embed_proj is not None:
            rows = rows @ self._dense("embed_proj.W").T
        if decoder.embed_norm is not None:
            rows = decoder.embed_norm(rows.to(decoder.device, self.model.stream_dtype)).cpu()
        return rows.double()

    def unembedded(self, ids: slice) -> Tensor:
        """`[V, D]`: the logits' columns of the head, the final norm's weights folded in."""
        logits = self._graph["logits_raw"].op
        assert isinstance(logits, Project)
        return self._back(Matrix(self.model.decoder.head).rows(ids.start, ids.stop), logits.source)

    def parts(self) -> Iterator[slice]:
        """The vocabulary, some tokens at a time."""
        size, step = self.model.config.vocab, max(1, AT_ONCE // self.model.config.width)
        return (slice(first, min(first + step, size)) for first in range(0, size, step))

    def own_output(self, layer: int, head: int, x_D: Tensor) -> Tensor:
        """`[D]`: what the decoder's own products with these weights make of `x_D`, by one head."""
        at = self._at(layer)
        v_Ke = self._forward(at.value, x_D).view(-1, self._graph.sizes(layer)["dv"])
        v_He = v_Ke.repeat_interleave(at.group, 0)
        one_H1 = torch.arange(len(v_He)).unsqueeze(1) == head
        return self._product(at.share.weight, (v_He * one_H1).flatten())

    def plain_output(self, layer: int, head: int, x_D: Tensor) -> Tensor:
        """`[D]`: the same by the circuit, before the norm after the heads."""
        return self._columns(layer, head) @ (self.value(layer, head) @ x_D)

    def _forward(self, name: str, x_D: Tensor) -> Tensor:
        op = self._graph[name].op
        if isinstance(op, Project):
            return self._product(op.weight, self._forward(op.source, x_D))
        if isinstance(op, Normalize):
            x = self._forward(op.source, x_D)
            each = len(self._gain(op)) if op.weight is not None else len(x)
            return self._normed(x.view(-1, each), op).flatten()
        if isinstance(op, Add) and ".resid_" not in name:
            return op.scale * self._forward(op.parts[0], x_D)
        return x_D

    def _product(self, name: str, x_K: Tensor) -> Tensor:
        weight = self.model.decoder.weight(name)
        x_1K = x_K[None].to(weight.memory()[0].device, self.model.dtype)
        return weight.matmul_fp32_out(x_1K)[0].cpu().double()

    def _of(self, name: str, head: int) -> Tensor:
        """`[n, D]`: an activation of one head, linear in the stream."""
        op = self._graph[name].op
        if isinstance(op, Project):
            w_NK = self._dense(op.weight)
            own = w_NK.view(op.heads, -1, w_NK.shape[1])[head] if op.heads else w_NK
            return self._back(own, op.source)
        if isinstance(op, Join):
            return torch.cat((self._of(op.start, head), self._of(op.end, head)))
        if isinstance(op, Normalize):
            return self._normed(self._of(op.source, head).T, op, head).T
        if isinstance(op, Add):
            return op.scale * self._of(op.parts[0], head)
        assert isinstance(op, Rotate)
        return self._of(op.source, head)

    def _back(self, m: Tensor, name: str) -> Tensor:
        """`m` `[n, …]` of an activation as a matrix `[n, D]` of the stream that it is made of."""
        op = self._graph[name].op
        if isinstance(op, Project):
            return self._back(m @ self._dense(op.weight), op.source)
        if isinstance(op, Normalize) and ".resid_" not in name:
            return self._back(self._normed(m, op, back=True), op.source)
        if isinstance(op, Add) and len(op.parts) == 1 and ".resid_" not in name:
            return self._back(m * op.scale, op.parts[0])
        return m

    def _normed(
        self, m: Tensor, op: Normalize, head: int | None = None, *, back: bool = False
    ) -> Tensor:
        """Rows through a norm without its divisor; `back`: columns before it."""
        gain = self._gain(op)
        if head is not None and op.weight is not None and len(gain) > m.shape[1]:
            gain = gain.view(-1, m.shape[1])[head]
        m = m * gain if back else m
        if op.norm.kind == "layer" and not op.joined:
            m = m - m.mean(-1, keepdim=True)
        return m if back else m * gain

    def _gain(self, op: Normalize) -> Tensor:
        if op.weight is None:
            return torch.ones(1, dtype=torch.float64)
        return self._dense(op.weight).flatten() + op.norm.offset

    def _dense(self, name: str) -> Tensor:
        (matrix,) = Matrix.each(self.model.decoder.weight(name))
        return matrix.rows(0, matrix.shape[0])

    def _at(self, layer: int) -> Sites:
        """Raises KeyError for a layer without heads of queries and keys."""
        mix = self._graph.mixers[layer].op
        assert isinstance(mix, Mix)
        score, nodes = self._graph.score(mix), self._graph.nodes.values()
        assert score is not None
        ops = (node.op for node in nodes if node.layer == layer)
        share = next(op for op in ops if isinstance(op, HeadShare))
        return Sites(score.query, score.key, mix.value, mix.group, share)


def notes_of(model: Model, layers: Sequence[int]) -> tuple[str, ...]:
    """What the circuits of these layers leave out."""
    nodes = [node for node in graph(model.config).nodes.values() if node.layer in layers]
    kinds = {type(node.op) for node in nodes if ".attn." in node.name}
    notes = ["norms without their divisors", "no biases"]
    notes += ["rotation at distance 0"] * (Rotate in kinds)
    gated = any(node.name.endswith(".attn.gated") for node in nodes)
    return (*notes, "no gates") if gated else tuple(notes)


def measure_heads(
    model: Model, heads: Sequence[tuple[int, int]], token: int | None, progress: Progress
) -> HeadsReport:
    """The circuits of heads (layer, head); of a `token` also what they write and seek for it."""
    circuits, found = Circuits(model), list[HeadCircuit]()
    x_D = circuits.embedded(slice(token or 0, (token or 0) + 1))[0]
    x_D = x_D / (x_D.square().mean().sqrt() or 1.0)
    off, norms = dict[str, float](), dict[str, float]()
    single = circuits.factors(*heads[0])[2:] if len(heads) == 1 else None
    through = _through(circuits, single, progress)
    for layer, head in heads:
        q_dD, k_dD, v_eD, o_De = circuits.factors(layer, head)
        eigen = torch.linalg.eigvals(through if single else v_eD @ through @ o_De)
        qk, ov = product_values(q_dD.T, k_dD), product_values(o_De, v_eD)
        own = circuits.own_output(layer, head, x_D)
        ours = circuits.plain_output(layer, head, x_D)
        name = f"{layer}.{head}"
        off[name] = float((own - ours).norm() / (own.norm() + 1e-30))
        squares = float(((o_De.T @ o_De) * (v_eD @ v_eD.T)).sum())
        norms[name] = abs(float((ov**2).sum()) - squares) / (squares or 1.0)
        both: tuple[Found, Found] = (), ()
        if token is not None:
            both = _preferences(circuits, o_De @ (v_eD @ x_D), k_dD.T @ (q_dD @ x_D))
        found.append(HeadCircuit(
            layer=layer, head=head, kv_head=circuits.kv_head(layer, head), qk=qk, ov=ov,
            qk_rank=effective_rank(qk), ov_rank=effective_rank(ov),
            copying=float(eigen.sum().real / (eigen.abs().sum() or 1.0)),
            writes=both[0], seeks=both[1],
        ))  # fmt: skip
    return HeadsReport(
        token=None if token is None else model.tokens([token])[0],
        heads=tuple(found),
        notes=notes_of(model, [layer for layer, _ in heads]),
        checks=(
            _worst("products", "OV times a token is what the decoder's own products make of it",
                   off, _tolerance(model)),
            _worst("spectrum", "Σσ² of OV is its squared norm", norms, EXACT),
        ),
    )  # fmt: skip


def _worst(name: str, words: str, off: dict[str, float], tolerance: float) -> ViewCheck:
    where = max(off, key=off.__getitem__)
    return ViewCheck(name=name, words=words, value=off[where], tolerance=tolerance, where=where)


def _tolerance(model: Model) -> float:
    if model.dtype.itemsize == 2 or model.decoder.precision.activations == 8:
        return COARSE
    return EXACT if model.dtype == torch.float64 else ROUNDED


def product_values(left: Tensor, right: Tensor) -> np.ndarray:
    """Singular values other than 0 of `left @ right`, `[D, n] @ [n, D]`, without the product."""
    small = torch.linalg.qr(left).R @ torch.linalg.qr(right.T).R.T
    return np.asarray(torch.linalg.svdvals(small).numpy())


def _through(
    circuits: Circuits, ends: tuple[Tensor, Tensor] | None, progress: Progress
) -> Tensor:
    """`W_E W_U` `[D, D]`, or `V W_E W_U O` `[e, e]` of the `ends` V and O of a head.

    That has the eigenvalues of `W_U O V W_E` other than 0.
    """
    vocab, total = circuits.model.config.vocab, torch.zeros((), dtype=torch.float64)
    for part in circuits.parts():
        e_nD, u_nD = circuits.embedded(part), circuits.unembedded(part)
        if ends is not None:
            e_nD, u_nD = e_nD @ ends[0].T, u_nD @ ends[1]
        total = total + e_nD.T @ u_nD
        progress("reading the vocabulary", part.stop, vocab)
    return total


def _preferences(
    circuits: Circuits, written_D: Tensor, sought_D: Tensor
) -> tuple[Found, Found]:
    """The tokens of the largest logits and scores; keys of embeddings with an RMS of 1."""
    logits, scores = list[Tensor](), list[Tensor]()
    for part in circuits.parts():
        e_nD = circuits.embedded(part)
        logits.append(circuits.unembedded(part) @ written_D)
        scores.append(e_nD @ sought_D / e_nD.square().mean(-1).sqrt().clamp_min(1e-30))
    found = []
    for values in (torch.cat(logits), torch.cat(scores)):
        top = values.topk(min(TOP, len(values)))
        tokens = circuits.model.tokens(top.indices.tolist())
        found.append(tuple(zip(tokens, top.values.tolist(), strict=True)))
    return found[0], found[1]


def measure_composition(
    model: Model, heads: Sequence[tuple[int, int]], progress: Progress
) -> CompositionReport:
    """All pairs of heads (layer, head), one in a later layer. Raises UsageError for too many.

    Of each product only what its norm depends on is computed: `[d, D] @ [D, e]`.
    """
    circuits = Circuits(model)
    layers = sorted({layer for layer, _ in heads})
    width, size = model.config.width, graph(model.config).sizes(layers[0])["dv"]
    if 3 * len(heads) ** 2 * size**2 * width > MOST_FLOPS:
        raise UsageError(
            f"the {len(heads)} heads have {len(heads) ** 2 // 2:,} pairs, which would take long",
            hint="choose fewer layers, as with `--layer 0-7`",
        )
    scores = np.full((3, len(heads), len(heads)), np.nan)
    written: list[Tensor] = []  # of earlier layers, [D, e] with norm 1
    for layer in layers:
        own = [at for at, head in enumerate(heads) if head[0] == layer]
        outputs, sizes = list[Tensor](), [one.shape[1] for one in written]
        joined = torch.cat(written, 1) if written else None
        for at in own:
            q, k, v, o = circuits.factors(*heads[at])
            r = {name: torch.linalg.qr(m).R for name, m in {"q": q.T, "k": k.T, "o": o}.items()}
            for kind, m_dD in enumerate((r["k"] @ q, r["q"] @ k, r["o"] @ v)):
                if joined is not None:
                    product = (m_dD / (m_dD.norm() or 1.0)).float() @ joined
                    squares = product.square().sum(0).double().split(sizes)
                    scores[kind, at, : len(sizes)] = [float(one.sum().sqrt()) for one in squares]
            outputs.append(o @ torch.linalg.qr(v.T).R.T)
        written += [(one / (one.norm() or 1.0)).float() for one in outputs]
        progress("composing", own[-1] + 1, len(heads))
    baseline = width**-0.5
    strongest = [
        HeadPair(kind=kind, source=heads[source], into=heads[into], score=float(score) - baseline)
        for kind, of_kind in zip(KINDS, scores, strict=True)
        for into, source in zip(*_largest(of_kind), strict=True)
        for score in [of_kind[into, source]]
    ]
    return CompositionReport(
        heads=tuple(heads), baseline=baseline, strongest=tuple(strongest),
        q=scores[0], k=scores[1], v=scores[2],
        notes=notes_of(model, layers),
        checks=(_composed(circuits, strongest, baseline),),
    )  # fmt: skip


def _largest(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of the ten largest."""
    flat = np.nan_to_num(scores, nan=-1.0).ravel()
    order = np.argsort(-flat, kind="stable")[:TOP]
    rows, columns = np.unravel_index(order[flat[order] >= 0], scores.shape)
    return rows, columns


def _composed(circuits: Circuits, pairs: Sequence[HeadPair], baseline: float) -> ViewCheck:
    """The strongest of each kind by whole matrices `[D, D]`."""
    off = {"": 0.0}
    for kind in KINDS:
        pair = next((one for one in pairs if one.kind == kind), None)
        if pair is None:
            continue
        ov = circuits.output(*pair.source) @ circuits.value(*pair.source)
        q, k, v, o = circuits.factors(*pair.into)
        whole = {"Q": k.T @ q, "K": q.T @ k, "V": o @ v}[kind]
        score = float((whole @ ov).norm() / (whole.norm() * ov.norm() or 1.0))
        name = f"{kind} of {pair.source} in {pair.into}"
        off[name] = abs(score - baseline - pair.score)
    words = "the strongest compositions are those of the whole matrices"
    return _worst("composition", words, off, COMPOSED)
