"""Heads' circuits and their composition, from the weights alone (Elhage et al. 2021).

A circuit is linear: the weights (and centring) of norms are folded into the matrices around them,
as TransformerLens does, their divisors are left out, and there is no rotation (distance 0) and no
bias. How queries, keys and values follow from the stream is read from the graph: grouped queries,
latents and keys of other layers need no rule of their own.

Axes: V tokens, D width, H heads, d size of a head's query and key, e of its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from llmcli.commands.weights.measure.tensors import NAMED, distance, furthest
from llmcli.commands.weights.report import CompositionReport, HeadCircuit, HeadsReport, strongest
from llmcli.errors import NotFinite, UsageError
from llmcli.evaluate.rule import exact
from llmcli.graph.graph import graph
from llmcli.graph.ops import Add, HeadShare, Join, Mix, Normalize, Op, Project, Rotate, Score
from llmcli.inspect.statistics import AT_ONCE
from llmcli.model import Model
from llmcli.records.text import Token
from llmcli.records.work import Progress

Head = tuple[int, int]  # layer and number
Found = tuple[tuple[Token, float], ...]
Product = Callable[[str, Tensor], Tensor]  # of a matrix, by its name, and rows `[n, K]`
TOP = 10
# Relative differences of a head's output from the decoder's own products, by what these round to
EXACT, ROUNDED, COARSE = 1e-9, 2e-3, 0.1
COMPOSED = 1e-5  # scores, whose products are float32
MOST_FLOPS = 4e13  # of all pairs' compositions, minutes of a processor


class Circuits:
    """The factors of a model's heads, in float64."""

    def __init__(self, model: Model) -> None:
        self.model, self._graph = model, graph(model.config)
        self._whole = lru_cache(maxsize=3)(self._of_stream)  # of a layer, head by head

    def kv_head(self, layer: int, head: int) -> int:
        """The head of keys and values that a head reads."""
        return head // self._at(layer)[0].group

    def factors(self, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A head's query and key `[d, D]` and value `[e, D]` of the stream, and its output.

        That is what it adds to the stream for its values, `[D, e]`, with the norm after it. Raises
        NotFinite.
        """
        mix, score, share = self._at(layer)
        kv, o_eD, name = self.kv_head(layer, head), self._columns(layer, head).T, share.whole
        while (after := self._after(name)) is not None:
            name, o_eD = after, self._through(self._graph[after].op, o_eD, self._exact)
        q, k, v = self._whole(score.query), self._whole(score.key), self._whole(mix.value)
        found = q[:, head].T, k[:, kv].T, v[:, kv].T, o_eD.T
        for factor, what in zip(found, ("queries", "keys", "values", "output"), strict=True):
            self.require_finite(factor, f"the {what} of head {layer}.{head}")
        return found

    def require_finite(self, x: Tensor, what: str) -> None:
        """Raises NotFinite: a number of `what` is not."""
        if not x.isfinite().all():
            raise NotFinite(f"weights of {what} are not finite", hint=NAMED)

    def off(self, layer: int, head: int, v_eD: Tensor, x_D: Tensor) -> float:
        """How far the circuit with the value `v_eD` is from what the decoder's products make of x.

        Before the norm after the heads.
        """
        mix, _, share = self._at(layer)
        v_Ke = self._walk(mix.value, x_D[None], self._product).view(-1, len(v_eD))
        v_He = v_Ke.repeat_interleave(mix.group, 0)
        v_He = v_He * (torch.arange(len(v_He)) == head)[:, None]
        ours_D = self._columns(layer, head) @ (v_eD @ x_D)
        return distance(self._product(share.weight, v_He.view(1, -1))[0], ours_D)

    def embedded(self, ids: slice) -> Tensor:
        """`[V, D]`: rows of the embedding as they enter the stream, without positions."""
        decoder = self.model.decoder
        rows = exact(decoder.embed.dense(rows=ids)) * self.model.config.embedding.scale
        if decoder.embed_proj is not None:
            rows = self._exact("embed_proj.W", rows)
        if decoder.embed_norm is not None:
            rows = decoder.embed_norm(rows.to(decoder.device, self.model.stream_dtype))
        return exact(rows)

    def unembedded(self, ids: slice) -> Tensor:
        """`[V, D]`: the columns of the head, for what `read` gives."""
        return exact(self.model.decoder.head.dense(rows=ids))

    def read(self, x_nD: Tensor) -> Tensor:
        """Parts of the last stream as the head reads them, with the final norm's weights."""
        return self._walk(self._graph["logits_raw"].op.inputs[0], x_nD, self._exact)

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
        dense_DN = self.model.decoder.weight(self._at(layer)[2].weight).dense()
        return exact(dense_DN[:, head * size : (head + 1) * size])

    def _after(self, name: str) -> str | None:
        """The norm or factor of an activation that is not the stream yet."""
        nodes = (node for node in self._graph.nodes.values() if name in node.op.inputs)
        own = (n.name for n in nodes if isinstance(n.op, Normalize | Add))
        return next((name for name in own if ".resid_" not in name), None)

    def _of_stream(self, name: str) -> Tensor:
        """`[D, H, n]`: an activation of each of the stream's numbers."""
        eye_DD = torch.eye(self.model.config.width, dtype=torch.float64)
        found = self._walk(name, eye_DD, self._exact)
        return found if found.ndim == 3 else found[:, None]

    def _walk(self, name: str, x_nD: Tensor, product: Product) -> Tensor:
        """An activation `[n, …]`, heads apart, of the stream `x_nD`, by the given products."""
        op = self._graph[name].op
        if ".resid_" in name or not isinstance(op, Join | Rotate | Project | Normalize | Add):
            return x_nD
        x = self._walk(op.inputs[0], x_nD, product)
        if isinstance(op, Join):
            end = self._walk(op.end, x_nD, product)
            return torch.cat((x, end.view(len(x), -1, end.shape[-1]).expand(*x.shape[:2], -1)), 2)
        return self._through(op, x, product)

    def _through(self, op: Op, x: Tensor, product: Product) -> Tensor:
        """`x` through a linear op: rotations are none, norms without their divisors."""
        if isinstance(op, Add):
            return x * op.scale
        if isinstance(op, Project):
            x = product(op.weight, x.flatten(1))
            return x.view(len(x), op.heads, -1) if op.heads else x
        if not isinstance(op, Normalize):
            return x
        whole = x.flatten(1) if op.joined else x
        if op.norm.kind == "layer":
            whole = whole - whole.mean(-1, keepdim=True)
        if op.weight is not None:
            gain = exact(self.model.decoder.weight(op.weight).dense()) + op.norm.offset
            whole = whole * gain.view(-1, whole.shape[-1])
        return whole.view(x.shape)

    def _exact(self, name: str, x_nK: Tensor) -> Tensor:
        return x_nK @ exact(self.model.decoder.weight(name).dense()).T

    def _product(self, name: str, x_nK: Tensor) -> Tensor:
        weight = self.model.decoder.weight(name)
        x_nK = x_nK.to(weight.memory()[0].device, self.model.dtype)
        return exact(weight.matmul_fp32_out(x_nK))


def measure_heads(
    model: Model, heads: Sequence[Head], token: int | None, progress: Progress
) -> HeadsReport:
    """The circuits of `heads`; of a `token` also what they write and seek for it."""
    circuits, found = Circuits(model), list[HeadCircuit]()
    x_D = circuits.embedded(slice(token or 0, (token or 0) + 1))[0]
    x_D = x_D / (x_D.square().mean().sqrt() or 1.0)
    off, norms = dict[str, float](), dict[str, float]()
    both: tuple[Found, Found] = (), ()
    through_DD = _vocabulary(circuits, progress)
    for layer, head in heads:
        q_dD, k_dD, v_eD, o_De = circuits.factors(layer, head)
        eigen = torch.linalg.eigvals(v_eD @ through_DD @ circuits.read(o_De.T).T)
        qk, ov = product_values(q_dD.T, k_dD), product_values(o_De, v_eD)
        name = f"{layer}.{head}"
        off[name] = circuits.off(layer, head, v_eD, x_D)
        squares = float(((o_De.T @ o_De) * (v_eD @ v_eD.T)).sum())
        norms[name] = abs(float((ov**2).sum()) - squares) / (squares or 1.0)
        if token is not None:
            both = _preferences(circuits, o_De @ (v_eD @ x_D), k_dD.T @ (q_dD @ x_D))
        found.append(HeadCircuit(
            layer=layer, head=head, kv_head=circuits.kv_head(layer, head), qk=qk, ov=ov,
            copying=float(eigen.sum().real / (eigen.abs().sum() or 1.0)),
            writes=both[0], seeks=both[1],
        ))  # fmt: skip
    words = "OV times a token is what the decoder's own products make of it"
    coarse = model.dtype.itemsize == 2 or model.decoder.precision.activations == 8
    tolerance = COARSE if coarse else EXACT if model.dtype == torch.float64 else ROUNDED
    return HeadsReport(
        token=None if token is None else model.tokens([token])[0],
        heads=tuple(found),
        checks=(
            furthest("products", words, off, tolerance),
            furthest("spectrum", "Σσ² of OV is its squared norm", norms, EXACT),
        ),
    )


def product_values(left: Tensor, right: Tensor) -> np.ndarray:
    """Singular values other than 0 of `left @ right`, `[D, n] @ [n, D]`, without the product."""
    small = torch.linalg.qr(left).R @ torch.linalg.qr(right.T).R.T
    return np.asarray(torch.linalg.svdvals(small).numpy())


def _vocabulary(circuits: Circuits, progress: Progress) -> Tensor:
    """`W_E W_U` `[D, D]`, of which `V W_E W_U O` has the eigenvalues of `W_U O V W_E` but for 0."""
    total_DD = torch.zeros((), dtype=torch.float64)
    for part in circuits.parts():
        total_DD = total_DD + circuits.embedded(part).T @ circuits.unembedded(part)
        progress("reading the vocabulary", part.stop, circuits.model.config.vocab)
    circuits.require_finite(total_DD, "the embedding or the head")
    return total_DD


def _preferences(
    circuits: Circuits, written_D: Tensor, sought_D: Tensor
) -> tuple[Found, Found]:
    """The tokens of the largest logits and scores; keys of embeddings with an RMS of 1."""
    logits, scores = list[Tensor](), list[Tensor]()
    for part in circuits.parts():
        e_nD = circuits.embedded(part)
        logits.append(circuits.unembedded(part) @ circuits.read(written_D[None])[0])
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
    width, size = model.config.width, graph(model.config).sizes(heads[0][0])["dv"]
    if 3 * len(heads) ** 2 * size**2 * width > MOST_FLOPS:
        raise UsageError(
            f"the {len(heads)} heads have {len(heads) ** 2 // 2:,} pairs, which would take long",
            hint="choose fewer layers, as with `--layer 0-7`",
        )
    scores = np.full((3, len(heads), len(heads)), np.nan)
    written, sizes = torch.empty(width, 0), list[int]()  # of earlier layers, [D, e] with norm 1
    new = list[Tensor]()
    for at, (layer, head) in enumerate(heads):
        if at and layer != heads[at - 1][0]:
            sizes += (one.shape[1] for one in new)
            written, new = torch.cat((written, *new), 1), []
        q, k, v, o = circuits.factors(layer, head)
        for kind, (left, right) in enumerate(((k, q), (q, k), (o.T, v))):
            m_dD = torch.linalg.qr(left.T).R @ right
            product = (m_dD / (m_dD.norm() or 1.0)).float() @ written
            squares = product.square().sum(0).double().split(sizes)
            scores[kind, at, : len(sizes)] = [float(one.sum().sqrt()) for one in squares]
        own = o @ torch.linalg.qr(v.T).R.T
        new.append((own / (own.norm() or 1.0)).float())
        progress("composing", at + 1, len(heads))
    off = dict[str, float]()
    for kind, of_kind in enumerate(scores):
        for into, source in strongest(of_kind, 1):
            _, _, v, o = circuits.factors(*heads[source])
            ov, (q, k, v, o) = o @ v, circuits.factors(*heads[into])
            whole = (k.T @ q, q.T @ k, o @ v)[kind]
            score = float((whole @ ov).norm() / (whole.norm() * ov.norm() or 1.0))
            place = f"{'QKV'[kind]} of {heads[source]} in {heads[into]}"
            off[place] = abs(score - float(of_kind[into, source]))
    words = "the strongest compositions are those of the whole matrices"
    return CompositionReport(
        heads=tuple(heads), baseline=width**-0.5, q=scores[0], k=scores[1], v=scores[2],
        checks=(furthest("composition", words, off, COMPOSED),),
    )  # fmt: skip
