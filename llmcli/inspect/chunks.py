"""A prompt in chunks, as `generate` reads it: watched, and each held against the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmcli.anatomy.counts import PROMPT_CHUNK
from llmcli.anatomy.graph import graph
from llmcli.inspect.formulas import formula_checks, worst
from llmcli.inspect.kernel import layer_of
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.recurrence import End, walk
from llmcli.model import Model
from llmcli.nn.state import State
from llmcli.records.checks import ViewCheck

ROWS = 64  # queries of a layer that are compared, spread over all chunks
CHUNK_ROWS = 4  # … and of each chunk at least, its first and last among them


class ChunkProof:
    """Watches a prompt of more than one chunk that is read into `state`.

    Every chunk's embeddings have to be those of its tokens and positions, its queries and keys to
    be rotated by their own positions, and its attention to be what the formula makes of its queries
    and of all keys and values that the cache holds by then; a recurrence has to go on from the
    state that the chunk before left, and to leave its own in the cache. A prompt of one chunk is
    not proven here: it is what the views themselves prove.
    """

    def __init__(self, model: Model, ids: Sequence[int], state: State) -> None:
        self._model, self._ids, self._state = model, ids, state
        chunks = -(-len(ids) // PROMPT_CHUNK)
        self._rows = max(CHUNK_ROWS, ROWS // chunks) if chunks > 1 else 0
        mixers = graph(model.config).mixers if chunks > 1 else ()
        maps = {layer: LayerMap(model, layer) for layer in mixers}
        # maps of something else are not proven here: no cache has their rows
        self._maps = {layer: of for layer, of in maps.items()
                      if of.score is not None or of.signed}  # fmt: skip
        self._ends: dict[int, End] = {}  # of recurrences, after the last chunk
        self._now: dict[str, Tensor] = {}
        self._found: list[ViewCheck] = []

    def watch(self, first: int, name: str, tensor: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`. Raises NotFinite for a NaN."""
        if not self._rows or first >= len(self._ids):
            return
        end = first + tensor.shape[-2]
        layer = layer_of(name)
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
        eps = torch.finfo(self._model.stream_dtype).eps
        cached = self._state.tensors()[of.matrix.name][0]
        self._found += [
            walked.check_results(seen[of.mixed], eps, of.mixed),
            walked.check(cached, of.matrix.name),
        ]

    def _prove(self, end: int, emitted: dict[str, Tensor], names: list[str]) -> None:
        if names:
            self._found.append(
                formula_checks(
                    self._model, self._ids[:end], emitted, names, rows=self._rows,
                    prompt_tokens=len(self._ids),
                )
            )  # fmt: skip

    def checks(self) -> tuple[ViewCheck, ...]:
        """One, of all chunks; none for a prompt of one chunk."""
        if not self._found:
            return ()
        most = worst(self._found)
        words = "every chunk of the prompt, read as `generate` reads it, follows from the formulas"
        return (replace(most, name="chunks", words=words),)
