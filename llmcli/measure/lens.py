"""The logit lens (nostalgebraist 2020): every place of the residual stream read as an output.

`lens(h) = softmax(Norm_f(h) W_Uᵀ + b_U)`: the model's own final norm and head on a row that has
not gone through the later layers. The norm's statistics are the row's own; with those of the last
row instead (which is right for shares of a logit) early rows look nearly uniform.

Axes: R rows (places of the stream), P positions of one chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llmcli import devices
from llmcli.errors import NotFinite
from llmcli.generation.sampling import Sampling
from llmcli.measure.observe import Progress, Watch, observe
from llmcli.measure.stream import Stream
from llmcli.measure.unembedding import Agreement, own_logits, unembed
from llmcli.model import Model, dtype_name
from llmcli.reports.lens import LensCell, LensReport, LensRow, LensToken

Target = Literal["output", "next"] | int
CHUNK = 1 << 25  # logits R · P · V that exist at a time: 128 MiB of float32


@dataclass(frozen=True, kw_only=True)
class Places:
    """Which rows: of `layers` (None: all, and the embedding first), with `mid` those between.

    The last row of the model is always one of them: the others are compared with it.
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
    the last position the output's), or a token id. One forward pass; kept are the rows at the
    positions (R · P · D numbers), never all logits. Raises OutOfMemory, NotFinite and what
    `span` raises.
    """
    names = places.names(len(model.config.layers))
    total = len(ids) + generate
    chosen = span(total)
    kept = range(total) if generate else chosen  # an end of text would move what counts from it
    _need(model, len(names), len(kept))
    stream, agreement = Stream(names, kept), Agreement(model.dtype, model.device)
    watch = _watcher(model, stream, agreement)
    with torch.inference_mode():
        run = observe(model, ids, watch, generate=generate, sampling=sampling, progress=progress)
        positions = span(len(run.ids))
        reader = _Reader(model, run.ids, stream, agreement, top, target)
        step = max(1, CHUNK // (len(names) * model.config.vocab))
        for start in range(positions.start, positions.stop, step):
            if progress is not None:
                progress("reading the rows", start - positions.start, len(positions))
            reader.read(range(start, min(start + step, positions.stop)))
    return reader.report(positions, model)


def _watcher(model: Model, stream: Stream, agreement: Agreement) -> Watch:
    """Shows the run to `stream`, and its logits, which are of a call's last token, are compared."""

    def watch(first: int, name: str, tensor: Tensor) -> None:
        stream.watch(first, name, tensor)
        if name != "logits":
            return
        h_TD = stream.last_TD
        position = first + len(h_TD) - 1
        _need_finite(tensor, range(position, position + 1))
        agreement.add([position], unembed(model, h_TD[-1:]), tensor[0, -1:])

    return watch


class _Reader:
    """Reads positions chunk by chunk into cells."""

    def __init__(
        self,
        model: Model,
        ids: tuple[int, ...],
        stream: Stream,
        agreement: Agreement,
        top: int,
        target: Target,
    ) -> None:
        self._model = model
        self._ids = ids
        self._stream = stream
        self._agreement = agreement
        self._top = min(top, model.config.vocab)
        self._target: Target = target
        self._cells: list[list[LensCell]] = [[] for _ in stream.names]
        self._targets: list[LensToken] = []
        self._settled: list[int] = []

    def read(self, positions: range) -> None:
        """All rows at those positions. Raises NotFinite."""
        h_RPD = self._stream.rows(positions)
        own_PV = own_logits(self._model, h_RPD[-1])
        logits_RPV = unembed(self._model, h_RPD.flatten(0, 1)).view(*h_RPD.shape[:2], -1)
        _need_finite(own_PV, positions)
        _need_finite(logits_RPV, positions)
        self._agreement.add(positions, logits_RPV[-1], own_PV)
        output_PV = own_PV.log_softmax(-1)
        best_P = output_PV.argmax(-1)
        target_P = self._followed(positions, best_P)
        probabilities = output_PV.gather(1, target_P[:, None]).exp()[:, 0].tolist()
        self._targets += map(self._token, target_P.tolist(), probabilities)
        first_P = torch.full_like(best_P, len(h_RPD) - 1)
        stays_P = torch.ones_like(best_P, dtype=torch.bool)
        for row in reversed(range(len(h_RPD))):
            lens_PV = logits_RPV[row].log_softmax(-1)
            self._cells[row] += self._read_row(lens_PV, output_PV, target_P)
            if row < len(h_RPD) - 1:  # the last row is the output, but for rounding
                stays_P &= _rank(lens_PV, best_P) == 1
                first_P = torch.where(stays_P, row, first_P)
        self._settled += first_P.tolist()

    def _followed(self, positions: range, best_P: Tensor) -> Tensor:
        if self._target == "output":
            return best_P
        if self._target == "next":
            after = self._ids[positions.start + 1 : positions.stop + 1]
            known_N = torch.tensor(after, device=best_P.device, dtype=best_P.dtype)
            return torch.cat((known_N, best_P[len(after) :]))
        return torch.full_like(best_P, self._target)

    def _read_row(self, lens_PV: Tensor, output_PV: Tensor, target_P: Tensor) -> list[LensCell]:
        """The cells of one row, from its and the output's log-probabilities."""
        p_PV = lens_PV.exp()
        entropy_P = -(p_PV * lens_PV).sum(-1)
        kl_P = (output_PV.exp() * (output_PV - lens_PV)).sum(-1)
        top = lens_PV.topk(self._top, -1)
        columns = (
            entropy_P.clamp_min(0),
            kl_P.clamp_min(0),
            _rank(lens_PV, target_P),
            p_PV.gather(1, target_P[:, None])[:, 0],
        )
        return [
            LensCell(
                top=tuple(map(self._token, ids, values)),
                entropy=entropy,
                kl=kl,
                target_rank=rank,
                target_probability=probability,
            )
            for ids, values, entropy, kl, rank, probability in zip(
                top.indices.tolist(),
                top.values.exp().tolist(),
                *(column.tolist() for column in columns),
                strict=True,
            )
        ]

    def _token(self, id: int, probability: float) -> LensToken:
        known = self._model.tokenizer
        text = "" if known is None else known.token_text(id)
        return LensToken(id=id, text=text, probability=probability)

    def report(self, positions: range, model: Model) -> LensReport:
        """What was read."""
        names = self._stream.names
        tokens = tuple((id, self._token(id, 1.0).text) for id in self._ids)
        words = {"output": "the output's likeliest token", "next": "the next token of the text"}
        return LensReport(
            dtype=dtype_name(model.dtype),
            vocabulary=model.config.vocab,
            tokens=tokens,
            positions=tuple(positions),
            target="the token given" if isinstance(self._target, int) else words[self._target],
            targets=tuple(self._targets),
            rows=tuple(
                LensRow(name=name, layer=_layer(name), cells=tuple(cells))
                for name, cells in zip(names, self._cells, strict=True)
            ),
            settled=tuple(self._settled),
            checks=(*self._agreement.checks(), self._stream.check()),
        )


def _rank(lens_PV: Tensor, ids_P: Tensor) -> Tensor:
    """1 for a token that no other is likelier than."""
    return (lens_PV > lens_PV.gather(1, ids_P[:, None])).sum(-1) + 1


def _layer(name: str) -> int | None:
    """The layer that wrote it, None for the embedding."""
    return None if name.endswith("resid_pre") else int(name.split(".")[1])


def _need_finite(logits: Tensor, positions: range) -> None:
    """Raises NotFinite where a logit is none, `[…, P, V]`."""
    bad = ~torch.isfinite(logits).all(-1).reshape(-1, len(positions)).all(0)
    if bad.any():
        raise NotFinite(
            f"the logits at position {positions[int(bad.nonzero()[0])]} are not finite",
            hint="try --dtype float32; the checkpoint may hold NaN",
        )


def _need(model: Model, rows: int, positions: int) -> None:
    """Raises OutOfMemory where the rows, and the logits of one chunk, do not fit."""
    vocab, width = model.config.vocab, model.config.width
    at_once = min(max(1, CHUNK // (rows * vocab)), positions)
    numbers = (rows + 6) * at_once * vocab  # and what a row of cells is worked out with
    devices.require_memory(
        rows * positions * width * model.dtype.itemsize + numbers * max(4, model.dtype.itemsize),
        model.device,
        f"{rows} rows of {positions} positions",
        "choose fewer positions with --position, or fewer layers with --layer",
    )
