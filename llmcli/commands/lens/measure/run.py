"""The logit lens (nostalgebraist 2020): every place of the residual stream read as an output.

`lens(h) = softmax(Norm_f(h) W_Uᵀ + b_U)`: the model's own final norm and head on a row that has
not gone through the later layers. The norm's statistics are the row's own; with those of the last
row instead (which is right for shares of a logit) early rows look nearly uniform.

Axes: R rows (places of the stream), P positions of one chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcli import devices
from llmcli.anatomy.block import block_names
from llmcli.commands.lens.measure.reader import Reader, Target, need_finite
from llmcli.commands.lens.measure.stream import Stream
from llmcli.commands.lens.measure.unembedding import Agreement, unembed
from llmcli.commands.lens.report import LensReport
from llmcli.config import ModelConfig
from llmcli.engine.session import Session
from llmcli.inspect.chunks import ChunkProof
from llmcli.inspect.generated import generated, read_in_chunks
from llmcli.model import Model
from llmcli.records.progress import Progress

CHUNK = 1 << 25  # logits R · P · V that exist at a time: 128 MiB of float32


@dataclass(frozen=True, kw_only=True)
class Places:
    """Which rows: of `layers` (None: all, and the embedding first), with `mid` those between.

    The last row of the model is always one of them: the others are compared with it. The rows
    of no chosen layer are read as well, for `settled` is about all of them.
    """

    layers: tuple[int, ...] | None = None
    mid: bool = False

    def names(self, config: ModelConfig) -> tuple[str, ...]:
        """In execution order. Where parts of a block stand side by side nothing is between them."""
        count = len(config.layers)
        chosen = range(count) if self.layers is None else sorted(set(self.layers))
        found = ["blocks.0.resid_pre"] if self.layers is None else []
        for layer in chosen:
            leaves = [one.leaves for one in block_names(config.layers[layer], f"blocks.{layer}")]
            found += leaves if self.mid else leaves[-1:]
        return tuple(dict.fromkeys([*found, f"blocks.{count - 1}.resid_post"]))

    def every(self, config: ModelConfig) -> tuple[str, ...]:
        """The rows of all layers, chosen or not."""
        return Places(mid=self.mid).names(config)


def measure_lens(
    model: Model,
    ids: Sequence[int],
    *,
    span: Callable[[int], range],
    places: Places,
    top: int = 5,
    target: Target = "output",
    generate: int = 0,
    progress: Progress | None = None,
) -> LensReport:
    """Reads every row at the positions `span(number of tokens)`, `top` tokens of each.

    `target`, whose rank is followed: the output's own likeliest token, the text's next one (at
    the last position the output's), or a token id. New tokens are generated first; then all are
    read once, as `generate` reads a prompt; kept are the rows of all layers at the positions
    (R · P · D numbers) beside the cache, and never all logits. Raises OutOfMemory, NotFinite and
    what `span` raises.
    """
    every = places.every(model.config)
    total = len(ids) + generate
    # an end of text moves what counts from it
    _need(model, len(every), total if generate else len(span(total)), total)
    known, steps = generated(model, ids, generate, progress)
    positions = span(len(known))
    stream = Stream(model, every, positions)
    agreement = Agreement(model.dtype, model.device)
    session = Session(model.decoder, 1, len(known))
    proof = ChunkProof(model, known, session.state)

    def watch(first: int, name: str, tensor: Tensor) -> None:
        stream.watch(first, name, tensor)
        proof.watch(first, name, tensor)
        if name == "logits":  # of each call's last token, where there are any
            h_TD = stream.last_TD
            position = first + len(h_TD) - 1
            need_finite(tensor, range(position, position + 1), model)
            agreement.add([position], unembed(model, h_TD[-1:]), tensor[0, -1:])

    with torch.inference_mode():
        read_in_chunks(session, known, watch, progress)
        del session  # the cache
        reader = Reader(model, known, stream, agreement, places.names(model.config), top, target)
        step = max(1, CHUNK // (len(every) * model.config.vocab))
        for start in range(positions.start, positions.stop, step):
            if progress is not None:
                progress("reading the rows", start - positions.start, len(positions))
            reader.read(range(start, min(start + step, positions.stop)))
    return reader.report(positions, len(ids), (*proof.checks(), *steps))


def _need(model: Model, rows: int, positions: int, tokens: int) -> None:
    """Raises OutOfMemory where the rows, the cache of so many tokens, and the logits of one chunk
    do not fit."""
    vocab, width = model.config.vocab, model.config.width
    at_once = min(max(1, CHUNK // (rows * vocab)), positions)
    # and what a row of cells is worked out with, and the comparison in float64, one after the other
    numbers = (rows + 12) * at_once * vocab
    devices.require_memory(
        rows * positions * width * model.stream_dtype.itemsize
        + model.decoder.state_bytes(1, tokens)
        + numbers * model.stream_dtype.itemsize,
        model.device,
        f"{rows} rows of {positions} positions and the cache of {tokens} tokens",
        "use a shorter prompt, a smaller --generate, or choose fewer positions with --position",
    )
