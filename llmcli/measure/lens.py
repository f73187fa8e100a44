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
from llmcli.generation.sampling import Sampling
from llmcli.measure.chunks import chunk_checks
from llmcli.measure.emitted import Emitted
from llmcli.measure.lens_reader import Reader, Target, need_finite
from llmcli.measure.observe import Watch, observe
from llmcli.measure.stream import Stream
from llmcli.measure.unembedding import Agreement, unembed
from llmcli.model import Model
from llmcli.reports.lens import LensReport
from llmcli.reports.progress import Progress

CHUNK = 1 << 25  # logits R · P · V that exist at a time: 128 MiB of float32


@dataclass(frozen=True, kw_only=True)
class Places:
    """Which rows: of `layers` (None: all, and the embedding first), with `mid` those between.

    The last row of the model is always one of them: the others are compared with it. The rows
    of no chosen layer are read as well, for `settled` is about all of them.
    """

    layers: tuple[int, ...] | None = None
    mid: bool = False

    def names(self, count: int) -> tuple[str, ...]:
        """In execution order, of a model with so many layers."""
        chosen = range(count) if self.layers is None else sorted(set(self.layers))
        found = ["blocks.0.resid_pre"] if self.layers is None else []
        for layer in chosen:
            found += [f"blocks.{layer}.resid_mid"] if self.mid else []
            found.append(f"blocks.{layer}.resid_post")
        return tuple(dict.fromkeys([*found, f"blocks.{count - 1}.resid_post"]))

    def every(self, count: int) -> tuple[str, ...]:
        """Those of all layers, whichever are chosen."""
        return Places(mid=self.mid).names(count)


def measure_lens(
    model: Model,
    ids: Sequence[int],
    *,
    span: Callable[[int], range],
    places: Places,
    top: int = 5,
    target: Target = "output",
    generate: int = 0,
    sampling: Sampling | None = None,
    progress: Progress | None = None,
) -> LensReport:
    """Reads every row at the positions `span(number of tokens)`, `top` tokens of each.

    `target`, whose rank is followed: the output's own likeliest token, the text's next one (at
    the last position the output's), or a token id. One forward pass; kept are the rows of all
    layers at the positions (R · P · D numbers), with `generate` a second copy of keys and values,
    which the cache is compared with, and never all logits. Raises OutOfMemory, NotFinite and what
    `span` raises.
    """
    layers = len(model.config.layers)
    every = places.every(layers)
    total = len(ids) + generate
    # an end of text would move what counts from it
    kept = range(total) if generate else span(total)
    _need(model, len(every), len(kept), total if generate else 0)
    stream = Stream(every, kept, model.stream_dtype)
    agreement = Agreement(model.dtype, model.device)
    emitted = Emitted(model.config) if generate else None
    watch = _watcher(model, stream, agreement, emitted)
    with torch.inference_mode():
        run = observe(model, ids, watch, generate=generate, sampling=sampling, progress=progress)
        also = chunk_checks(model, ids, progress)
        if emitted is not None:
            also = (emitted.check(run), *also)
        positions = span(len(run.ids))
        reader = Reader(model, run.ids, stream, agreement, places.names(layers), top, target)
        step = max(1, CHUNK // (len(every) * model.config.vocab))
        for start in range(positions.start, positions.stop, step):
            if progress is not None:
                progress("reading the rows", start - positions.start, len(positions))
            reader.read(range(start, min(start + step, positions.stop)))
    return reader.report(positions, run.prompt_tokens, also)


def _watcher(model: Model, stream: Stream, agreement: Agreement, emitted: Emitted | None) -> Watch:
    """Shows the run to all of them; its logits, of each call's last token, are compared."""

    def watch(first: int, name: str, tensor: Tensor) -> None:
        stream.watch(first, name, tensor)
        if emitted is not None:
            emitted.watch(first, name, tensor)
        if name != "logits":
            return
        h_TD = stream.last_TD
        position = first + len(h_TD) - 1
        need_finite(tensor, range(position, position + 1), model)
        agreement.add([position], unembed(model, h_TD[-1:]), tensor[0, -1:])

    return watch


def _need(model: Model, rows: int, positions: int, cached: int) -> None:
    """Raises OutOfMemory where the rows, a second copy of the keys and values of `cached` tokens,
    and the logits of one chunk do not fit."""
    vocab, width = model.config.vocab, model.config.width
    at_once = min(max(1, CHUNK // (rows * vocab)), positions)
    # and what a row of cells is worked out with, and the comparison in float64, one after the other
    numbers = (rows + 12) * at_once * vocab
    devices.require_memory(
        rows * positions * width * model.stream_dtype.itemsize
        + model.decoder.state_bytes(1, cached)
        + numbers * model.stream_dtype.itemsize,
        model.device,
        f"{rows} rows of {positions} positions",
        "use a shorter prompt or a smaller --generate"
        if cached
        else "choose fewer positions with --position",
    )
