"""Heads' circuits and their composition, from the weights alone (Elhage et al. 2021).

A circuit is linear: the weights (and centring) of norms are folded into the matrices around them,
as TransformerLens does, their divisors are left out, and there is no rotation (distance 0) and no
bias. How queries, keys and values follow from the stream is read from the graph: grouped queries,
latents and keys of other layers need no rule of their own.

Axes: V tokens, D width, H heads, d size of a head's query and key, e of its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from llmcli.commands.weights.measure.tensors import AT_ONCE, Matrix, distance, furthest
from llmcli.commands.weights.report import CompositionReport, HeadCircuit, HeadsReport, strongest
from llmcli.errors import UsageError
from llmcli.evaluate.rule import exact
from llmcli.graph.graph import graph
from llmcli.graph.ops import Add, HeadShare, Join, Mix, Normalize, Project, Rotate, Score
from llmcli.model import Model
from llmcli.records.text import Token
from llmcli.records.work import Progress

Head = tuple[int, int]  # layer and number
Found = tuple[tuple[Token, float], ...]
TOP = 10
# Relative differences of a head's output from the decoder's own products, by what these round to
EXACT, ROUNDED, COARSE = 1e-9, 2e-3, 0.1
COMPOSED = 1e-5  # scores, whose products are float32
MOST_FLOPS = 4e13  # of all pairs' compositions, minutes of a processor


class Circuits:
    """The factors of a model's heads, in float64."""

    def __init__(self, model: Model) -> None:
        self.model, self._graph = model, graph(model.config)

    def kv_head(self, layer: int, head: int) -> int:
        """The head of keys and values that a head reads."""
        return head // self._at(layer)[0].group

    def factors(self, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A head's query and key `[d, D]` and value `[e, D]` of the stream, and its output.

        That is what it adds to the stream for its values, `[D, e]`, with the norm after it.
        """
        mix, score, share = self._at(layer)
        kv = self.kv_head(layer, head)
        o_eD, name = self._columns(layer, head).T, share.whole
        while (after := self._after(name)) is not None:
            name, op = after
            o_eD = self._normed(o_eD, op) if isinstance(op, Normalize) else o_eD * op.scale
        q, k, v = (
            self._of(name, at)
            for name, at in ((score.query, head), (score.key, kv), (mix.value, kv))
        )
        return q, k, v, o_eD.T

    def off(self, layer: int, head: int, v_eD: Tensor, x_D: Tensor) -> float:
        """How far the circuit with the value `v_eD` is from what the decoder's products make of x.

        Before the norm after the heads.
        """
        mix, _, share = self._at(layer)
        v_Ke = self._forward(mix.value, x_D).view(-1, len(v_eD))
        v_He = v_Ke.repeat_interleave(mix.group, 0)
        v_He = v_He * (torch.arange(len(v_He)) == head)[:, None]
        ours = self._columns(layer, head) @ (v_eD @ x_D)
        return distance(self._product(share.weight, v_He.flatten()), ours)

    def embedded(self, ids: slice) -> Tensor:
        """`[V, D]`: rows of the embedding as they enter the stream, without positions."""
        decoder = self.model.decoder
        rows = exact(decoder.embed.dense(rows=ids)) * self.model.config.embedding.scale
        if decoder.embed_proj is not None:
            rows = rows @ self._dense("embed_proj.W").T
        if decoder.embed_norm is not None:
            rows = decoder.embed_norm(rows.to(decoder.device, self.model.stream_dtype))
        return exact(rows)

    def unembedded(self, ids: slice) -> Tensor:
        """`[V, D]`: the logits' columns of the head, the final norm's weights folded in."""
        logits = self._graph["logits_raw"].op
        assert isinstance(logits, Project)
        return self._back(exact(self.model.decoder.head.dense(rows=ids)), logits.source)

    def parts(self) -> Iterator[slice]:
        """The vocabulary, some tokens at a time."""
        size, step = self.model.config.vocab, max(1, AT_ONCE // self.model.config.width)
        return (slice(first, min(first + step, size)) for first in range(0, size, step))

    def _at(self, layer: int) -> tuple[Mix, Score, HeadShare]:
        """The map, the scores and the product with W_o of a layer with queries and keys."""
        mix = self._graph.mixers[layer].op
        assert isinstance(mix, Mix)
        score, nodes = self._graph.score(mix), self._graph.nodes.values()
        assert score is not None
        ops = (node.op for node in nodes if node.layer == layer)
        return mix, score, next(op for op in ops if isinstance(op, HeadShare))

    def _columns(self, layer: int, head: int) -> Tensor:
        size = self._graph.sizes(layer)["dv"]
        return self._dense(self._at(layer)[2].weight)[:, head * size : (head + 1) * size]

    def _after(self, name: str) -> tuple[str, Normalize | Add] | None:
        """The norm or factor of an activation that is not the stream yet."""
        for node in self._graph.nodes.values():
            own = name in node.op.inputs and ".resid_" not in node.name
            if own and isinstance(node.op, Normalize | Add):
                return node.name, node.op
        return None

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

    def _forward(self, name: str, x_D: Tensor) -> Tensor:
        """An activation of a stream, by the decoder's own products, all heads in a row."""
        op = self._graph[name].op
        if isinstance(op, Project):
            return self._product(op.weight, self._forward(op.source, x_D))
        if isinstance(op, Normalize) and ".resid_" not in name:
            x = self._forward(op.source, x_D)
            return self._normed(x.view(-1, max(1, len(self._gain(op, len(x))))), op).flatten()
        if isinstance(op, Add) and ".resid_" not in name:
            return op.scale * self._forward(op.parts[0], x_D)
        return x_D

    def _product(self, name: str, x_K: Tensor) -> Tensor:
        weight = self.model.decoder.weight(name)
        x_1K = x_K[None].to(weight.memory()[0].device, self.model.dtype)
        return exact(weight.matmul_fp32_out(x_1K)[0])

    def _normed(
        self, m: Tensor, op: Normalize, head: int | None = None, *, back: bool = False
    ) -> Tensor:
        """Rows through a norm without its divisor; `back`: columns before it."""
        gain = self._gain(op, m.shape[-1])
        if head is not None and len(gain) > m.shape[1]:
            gain = gain.view(-1, m.shape[1])[head]
        m = m * gain if back else m
        if op.norm.kind == "layer" and not op.joined:
            m = m - m.mean(-1, keepdim=True)
        return m if back else m * gain

    def _gain(self, op: Normalize, size: int) -> Tensor:
        if op.weight is None:
            return torch.ones(size, dtype=torch.float64)
        return self._dense(op.weight).flatten() + op.norm.offset

    def _dense(self, name: str) -> Tensor:
        return exact(self.model.decoder.weight(name).dense())

    def notes(self, layers: Sequence[int]) -> tuple[str, ...]:
        """What the circuits of these layers leave out."""
        nodes = [node for node in self._graph.nodes.values() if node.layer in layers]
        rotated = any(isinstance(node.op, Rotate) for node in nodes)
        gated = any(node.name.endswith(".attn.gated") for node in nodes)
        words = ("rotation at distance 0",) * rotated + ("no gates",) * gated
        return ("norms without their divisors", "no biases", *words)


def measure_heads(
    model: Model, heads: Sequence[Head], token: int | None, progress: Progress
) -> HeadsReport:
    """The circuits of `heads`; of a `token` also what they write and seek for it."""
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
        name = f"{layer}.{head}"
        off[name] = circuits.off(layer, head, v_eD, x_D)
        squares = float(((o_De.T @ o_De) * (v_eD @ v_eD.T)).sum())
        norms[name] = abs(float((ov**2).sum()) - squares) / (squares or 1.0)
        writes, seeks = (), ()
        if token is not None:
            writes, seeks = _preferences(circuits, o_De @ (v_eD @ x_D), k_dD.T @ (q_dD @ x_D))
        found.append(HeadCircuit(
            layer=layer, head=head, kv_head=circuits.kv_head(layer, head), qk=qk, ov=ov,
            copying=float(eigen.sum().real / (eigen.abs().sum() or 1.0)),
            writes=writes, seeks=seeks,
        ))  # fmt: skip
    words = "OV times a token is what the decoder's own products make of it"
    coarse = model.dtype.itemsize == 2 or model.decoder.precision.activations == 8
    tolerance = COARSE if coarse else EXACT if model.dtype == torch.float64 else ROUNDED
    return HeadsReport(
        token=None if token is None else model.tokens([token])[0],
        heads=tuple(found),
        notes=circuits.notes([layer for layer, _ in heads]),
        checks=(
            furthest("products", words, off, tolerance),
            furthest("spectrum", "Σσ² of OV is its squared norm", norms, EXACT),
        ),
    )


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
    total = torch.zeros((), dtype=torch.float64)
    for part in circuits.parts():
        e_nD, u_nD = circuits.embedded(part), circuits.unembedded(part)
        if ends is not None:
            e_nD, u_nD = e_nD @ ends[0].T, u_nD @ ends[1]
        total = total + e_nD.T @ u_nD
        progress("reading the vocabulary", part.stop, circuits.model.config.vocab)
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
    model: Model, heads: Sequence[Head], progress: Progress
) -> CompositionReport:
    """All pairs of `heads`, one in a later layer. Raises UsageError for too many.

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
    written, new = list[Tensor](), list[Tensor]()  # of earlier layers, and of this, [D, e], norm 1
    for at, (layer, head) in enumerate(heads):
        if at and layer != heads[at - 1][0]:
            written, new = written + new, []
        q, k, v, o = circuits.factors(layer, head)
        sizes = [one.shape[1] for one in written]
        for kind, (left, right) in enumerate(((k, q), (q, k), (o.T, v))):
            m_dD = torch.linalg.qr(left.T).R @ right
            product = (m_dD / (m_dD.norm() or 1.0)).float() @ torch.cat(written or [o[:, :0].float()], 1)
            squares = product.square().sum(0).double().split(sizes)
            scores[kind, at, : len(sizes)] = [float(one.sum().sqrt()) for one in squares]
        own = o @ torch.linalg.qr(v.T).R.T
        new.append((own / (own.norm() or 1.0)).float())
        progress("composing", at + 1, len(heads))
    off = dict[str, float]()
    for kind, of_kind in enumerate(scores):
        for into, source in strongest(of_kind, 1):
            _, _, v, o = circuits.factors(*heads[source])
            whole, ov = _matrices(*circuits.factors(*heads[into]))[kind], o @ v
            score = float((whole @ ov).norm() / (whole.norm() * ov.norm() or 1.0))
            off[f"{'QKV'[kind]} of {heads[source]} in {heads[into]}"] = abs(
                score - float(of_kind[into, source])
            )
    words = "the strongest compositions are those of the whole matrices"
    return CompositionReport(
        heads=tuple(heads), baseline=width**-0.5, q=scores[0], k=scores[1], v=scores[2],
        notes=circuits.notes(layers), checks=(furthest("composition", words, off, COMPOSED),),
    )  # fmt: skip


def _matrices(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[D, D]`: what compositions by queries, keys and values multiply with."""
    return k.T @ q, q.T @ k, o @ v
