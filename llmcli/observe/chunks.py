"""A prompt in chunks, as `generate` reads it: watched, and each held against the formulas.

`lens` shows what this pass gives. `attention` and `dump` read a prompt in one call, so that one
layer at a time is in memory: they read a longer one in chunks, too, and compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llmcli import devices
from llmcli.anatomy.arithmetic import stream_noise
from llmcli.anatomy.counts import PROMPT_CHUNK
from llmcli.anatomy.graph import graph
from llmcli.engine.session import Session
from llmcli.errors import OutOfMemory
from llmcli.graph.ops import Convolve, Mix, Opaque
from llmcli.model import Model
from llmcli.nn.state import State
from llmcli.observe.emitted import Emitted
from llmcli.observe.formulas import formula_checks, formula_inputs, row_checks, worst
from llmcli.observe.kernel import layer_of
from llmcli.observe.layer_map import LayerMap
from llmcli.observe.observe import Watch, shown_to
from llmcli.observe.recurrence import End, walk
from llmcli.reports.checks import ViewCheck
from llmcli.reports.progress import Progress

ROWS = 64  # queries of a layer that are compared, spread over all chunks
CHUNK_ROWS = 4  # … and of each chunk at least, its first and last among them

# How many roundings (eps) of its size a row of the residual stream may differ between two passes,
# and by the root of the number of layers more. No bound follows from the formulas, since a layer
# amplifies what those before it rounded. Measured on a CPU, SmolLM2 in chunks of 1 to 511 tokens:
# 3.2 in float32 and float64, 0.4 in 16 bits; small random models: 9.5 and 2.4.
APART, NARROW_APART = 64, 8
# Of a packed model: as a share of what its roundings to 8 bits move the stream (`stream_noise`).
# Its products are bit-equal whatever the chunks are, its attention is not: a last bit decides how a
# number is rounded, and after some layers two passes are as far apart as they are from exact
# products. Measured, SmolLM2 in chunks of 1 to 512 of 700 tokens: 0.64. It sees no small fault, and
# so every layer of the chunks is proven instead.
PACKED_APART = 1.5


class ChunkProof:
    """Watches a prompt of more than one chunk that is read into `state`.

    Every chunk's embeddings have to be those of its tokens and positions, its queries and keys to
    be rotated by their own positions, and its attention to be what the formula makes of its queries
    and of all keys and values that the cache holds by then; a recurrence has to go on from the
    state that the chunk before left, and to leave its own in the cache. `whole`: everything else
    in a layer has to follow from the formulas, too. A prompt of one chunk is not proven here: it is
    what the views themselves prove.
    """

    def __init__(
        self, model: Model, ids: Sequence[int], state: State, *, whole: bool = False
    ) -> None:
        self._model, self._ids, self._state, self._whole = model, ids, state, whole
        chunks = -(-len(ids) // PROMPT_CHUNK)
        self._rows = max(CHUNK_ROWS, ROWS // chunks) if chunks > 1 else 0
        layers = range(len(model.config.layers) if chunks > 1 else 0)
        maps = {layer: LayerMap(model, layer) for layer in layers
                if graph(model.config).mixing(layer) is not None}  # fmt: skip
        # maps of something else are not proven here: no cache has their rows
        self._maps = {layer: of for layer, of in maps.items()
                      if of.score is not None or of.signed}  # fmt: skip
        self._ends: dict[int, End] = {}  # of recurrences, after the last chunk
        self._now: dict[str, Tensor] = {}
        self._layer: dict[str, Tensor] = {}  # some rows, and the end of the layer before
        self._positions: list[int] = []
        self._now_in: int | None = None
        self._found: list[ViewCheck] = []

    def watch(self, first: int, name: str, tensor: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`. Raises NotFinite for a NaN."""
        if not self._rows or first >= len(self._ids):
            return
        end = first + tensor.shape[-2]
        layer = layer_of(name)
        if self._whole:
            self._watch_all(first, name, tensor)
        if name in ("embed", "pos_embed"):
            self._prove(end, {name: tensor}, [name])
        if layer not in self._maps or not name.startswith(self._maps[layer].prefix):
            return
        self._now[name] = tensor
        of = self._maps[layer]
        if name != of.mixed:
            return
        if of.signed:
            self._walk(of)
            self._now = {}
            return
        held = of.held(self._state.tensors(), end)
        self._prove(end, self._now, [one for one in of.sources if one.endswith("_rot")])
        self._prove(end, self._now | held, [name])
        self._now = {}

    def _walk(self, of: LayerMap) -> None:
        """That a chunk's results, and the state in the cache, follow from the state before it."""
        seen = {name: tensor[0] for name, tensor in self._now.items()}
        walked = walk(of.recurrence(seen), before=self._ends.get(of.number), results=True)
        self._ends[of.number] = walked.end
        eps = torch.finfo(torch.promote_types(self._model.dtype, torch.float32)).eps
        cached = self._state.tensors()[of.matrix.name][0]
        self._found += [
            walked.check_results(seen[of.mixed], eps, of.mixed),
            walked.check(cached, of.matrix.name),
        ]

    def _watch_all(self, first: int, name: str, tensor: Tensor) -> None:
        """Proves a layer when it is complete, but for what reads the tokens of other chunks.

        Some rows of a chunk, which are kept until then. What the model ends with is computed of the
        last token alone: the views prove that.
        """
        layer = layer_of(name)
        if layer != self._now_in and self._now_in is not None:
            end, names = next(reversed(self._layer)), self._alone(self._now_in)
            self._found.append(
                row_checks(self._model, self._ids, self._layer, names, self._positions)
            )
            kept = formula_inputs(self._model.config, [end])  # the next layer begins with the same
            self._layer = {one: self._layer[one] for one in kept}
        self._now_in = layer
        if name == "embed":
            self._layer, last = {}, tensor.shape[-2] - 1
            chosen = {last * row // (CHUNK_ROWS - 1) for row in range(CHUNK_ROWS)}
            self._positions = [first + at for at in sorted(chosen)]
        if layer is not None or name in ("embed", "pos_embed"):
            at_t = torch.tensor(self._positions, device=tensor.device) - first
            self._layer[name] = tensor[0].index_select(-2, at_t)

    def _alone(self, layer: int | None) -> Iterator[str]:
        """The activations of a layer that are computed of every token alone."""
        model = graph(self._model.config)
        for name in self._layer:
            node = model[name]
            if node.layer == layer and not isinstance(node.op, Mix | Convolve | Opaque):
                yield name

    def _prove(self, end: int, emitted: dict[str, Tensor], names: list[str]) -> None:
        if names:
            self._found.append(
                formula_checks(
                    self._model, self._ids[:end], emitted, names, rows=self._rows,
                    prompt_tokens=len(self._ids),
                )
            )  # fmt: skip

    def checks(self, *also: ViewCheck) -> tuple[ViewCheck, ...]:
        """One, of all chunks and of `also`; none for a prompt of one chunk."""
        if not self._found:
            return ()
        most = worst((*also, *self._found))
        words = "every chunk of the prompt, read as `generate` reads it, follows from the formulas"
        value = most.value if most.tolerance or most.ok else float("inf")
        return (
            ViewCheck(name="chunks", words=words, value=value, tolerance=1.0, where=most.where),
        )


class Edges:
    """The residual stream after one layer, of the first and the last token of every chunk."""

    def __init__(self, model: Model, tokens: int, layer: int | None = None) -> None:
        """`layer`: the last one that is run (None: all are)."""
        layers = len(model.config.layers)
        layer = layers - 1 if layer is None else layer
        self._model, self._tokens, self._layer = model, tokens, layer
        self._name = f"blocks.{layer}.resid_post"
        roundings = NARROW_APART if model.dtype.itemsize == 2 else APART
        self._tolerance = roundings * torch.finfo(model.dtype).eps * math.sqrt(layer + 1)
        if model.decoder.formats:
            noise = stream_noise(model.config, model.decoder.arithmetic, ())
            self._tolerance = PACKED_APART * noise * math.sqrt((layer + 1) / layers)
        begins = range(0, tokens, PROMPT_CHUNK)
        self._wanted = {*begins, *(begin - 1 for begin in begins[1:]), tokens - 1}
        self._rows_D: dict[int, Tensor] = {}

    def watch(self, first: int, name: str, x_1TD: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`."""
        if name == self._name:
            for at in self._wanted.intersection(range(first, first + x_1TD.shape[1])):
                self._rows_D[at] = x_1TD[0, at - first].clone()

    def empty(self) -> Edges:
        """For the same rows of another pass."""
        return Edges(self._model, self._tokens, self._layer)

    def check(self, other: Edges) -> ViewCheck:
        """How far the rows of two passes are apart at most, as a share of their size."""
        places = sorted(self._rows_D)
        rows_PD, others_PD = (
            torch.stack([one._rows_D[at] for at in places]) for one in (self, other)
        )
        apart_P = (rows_PD - others_PD).norm(dim=-1) / others_PD.norm(dim=-1)
        value, at = apart_P.max(0)
        return ViewCheck(
            name="chunks_stream",
            words="read so, the residual stream is the one shown, but for roundings, relative",
            value=float(value),
            tolerance=self._tolerance,
            where=f"{self._name}, position {places[int(at)]}",
        )


def read_in_chunks(
    session: Session, ids: Sequence[int], watch: Watch, progress: Progress | None
) -> None:
    """The prompt as `generate` reads it, in the empty `session`, shown to `watch`."""

    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress("reading the prompt", done, total)

    tell(0, len(ids))
    tap = shown_to(watch, session)
    session.prefill([ids], chunk=PROMPT_CHUNK, tap=tap, on_prefill=tell)


def chunk_checks(
    model: Model, ids: Sequence[int], shown: Edges, progress: Progress | None = None
) -> tuple[ViewCheck, ...]:
    """Reads a prompt of more than one chunk once more: `ChunkProof`, its cache, and `Edges`.

    `shown`: the edges of the pass that the view shows. No checks of a shorter prompt, nor where the
    cache does not fit, for `generate` cannot read the prompt then. Raises NotFinite for a NaN.
    """
    if len(ids) <= PROMPT_CHUNK:
        return ()
    try:
        devices.require_memory(model.decoder.state_bytes(1, len(ids)), model.device, "", "")
    except OutOfMemory:
        return ()
    session = Session(model.decoder, 1, len(ids))
    whole = bool(model.decoder.formats)
    proof = ChunkProof(model, ids, session.state, whole=whole)
    emitted, edges = Emitted(model.config), shown.empty()

    def watch(first: int, name: str, tensor: Tensor) -> None:
        for one in (proof, emitted, edges):
            one.watch(first, name, tensor)

    read_in_chunks(session, ids, watch, progress)
    return (*proof.checks(emitted.check(session.state)), edges.check(shown))
