"""One row of the residual stream as it would be read: tokens, entropy, divergence, ranks.

Axes: R rows (places of the stream), P positions of one chunk, V vocabulary, k likeliest tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from llmcli.commands.lens.measure.stream import Stream
from llmcli.commands.lens.measure.unembedding import Agreement, own_logits, unembed
from llmcli.commands.lens.report import LensCell, LensReport, LensRow, LensToken
from llmcli.errors import NotFinite
from llmcli.model import Model, dtype_name
from llmcli.records.checks import ViewCheck

Target = Literal["output", "next"] | int


class Reader:
    """Reads positions chunk by chunk into cells."""

    def __init__(
        self,
        model: Model,
        ids: tuple[int, ...],
        stream: Stream,
        agreement: Agreement,
        names: tuple[str, ...],
        top: int,
        target: Target,
    ) -> None:
        self._model = model
        self._ids = ids
        self._stream = stream
        self._agreement = agreement
        self._top = min(top, model.config.vocab)
        self._target: Target = target
        self._cells: dict[str, list[LensCell]] = {name: [] for name in names}
        self._targets: list[LensToken] = []
        self._settled: list[str] = []

    def read(self, positions: range) -> None:
        """All rows at those positions. Raises NotFinite."""
        h_RPD = self._stream.rows(positions)
        own_PV = own_logits(self._model, h_RPD[-1])
        logits_RPV = unembed(self._model, h_RPD.flatten(0, 1)).view(*h_RPD.shape[:2], -1)
        need_finite(own_PV, positions, self._model)
        need_finite(logits_RPV, positions, self._model)
        self._agreement.add(positions, logits_RPV[-1], own_PV)
        output_PV = own_PV.log_softmax(-1)
        best_P = own_PV.argmax(-1)
        target_P = self._followed(positions, best_P)
        probabilities = output_PV.gather(1, target_P[:, None]).exp()[:, 0].tolist()
        self._targets += map(self._token, target_P.tolist(), probabilities)
        for name, logits_PV in zip(self._stream.names, logits_RPV, strict=True):
            if name in self._cells:
                self._cells[name] += self._read_row(logits_PV, output_PV, target_P)
        first_P = settled(logits_RPV, best_P)
        self._settled += [self._stream.names[row] for row in first_P.tolist()]

    def _followed(self, positions: range, best_P: Tensor) -> Tensor:
        if self._target == "output":
            return best_P
        if self._target == "next":
            after = self._ids[positions.start + 1 : positions.stop + 1]
            known_N = torch.tensor(after, device=best_P.device, dtype=best_P.dtype)
            return torch.cat((known_N, best_P[len(after) :]))
        return torch.full_like(best_P, self._target)

    def _read_row(self, logits_PV: Tensor, output_PV: Tensor, target_P: Tensor) -> list[LensCell]:
        """The cells of one row, from its logits and the output's log-probabilities."""
        lens_PV = logits_PV.log_softmax(-1)
        p_PV = lens_PV.exp()
        entropy_P = -(p_PV * lens_PV).sum(-1)
        kl_P = (output_PV.exp() * (output_PV - lens_PV)).sum(-1)
        top_Pk = logits_PV.topk(self._top, -1).indices
        columns = (
            entropy_P.clamp_min(0),
            kl_P.clamp_min(0),
            _rank(logits_PV, target_P),
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
                top_Pk.tolist(),
                p_PV.gather(1, top_Pk).tolist(),
                *(column.tolist() for column in columns),
                strict=True,
            )
        ]

    def _token(self, id: int, probability: float) -> LensToken:
        text = self._model.token_text(id)
        return LensToken(id=id, text=text, probability=probability)

    def report(
        self, positions: range, prompt_tokens: int, also: tuple[ViewCheck, ...]
    ) -> LensReport:
        """What was read; `also`: the check of the chunks, where there is one."""
        model = self._model
        words = {"output": "the model's top token", "next": "the next token of the text"}
        return LensReport(
            dtype=dtype_name(model.dtype),
            vocabulary=model.config.vocab,
            tokens=model.tokens(self._ids),
            prompt_tokens=prompt_tokens,
            positions=tuple(positions),
            target="the token given" if isinstance(self._target, int) else words[self._target],
            targets=tuple(self._targets),
            rows=tuple(
                LensRow(name=name, layer=_layer(name), cells=tuple(cells))
                for name, cells in self._cells.items()
            ),
            settled=tuple(self._settled),
            checks=(*self._agreement.checks(), self._stream.check(), *also),
        )


def _rank(logits_PV: Tensor, ids_P: Tensor) -> Tensor:
    """The rank of each token: 1 for the likeliest."""
    return (logits_PV > logits_PV.gather(1, ids_P[:, None])).sum(-1) + 1


def settled(logits_RPV: Tensor, best_P: Tensor) -> Tensor:
    """The first row from which on `best_P` stay likeliest: the last, which is the output, counts
    whatever it says, for its own roundings are not the model's."""
    likeliest_RP = torch.stack([_rank(logits_PV, best_P) == 1 for logits_PV in logits_RPV])
    likeliest_RP[-1] = True
    return len(likeliest_RP) - likeliest_RP.flip(0).cumprod(0).sum(0)


def _layer(name: str) -> int | None:
    """The layer that wrote it, None for the embedding."""
    return None if name.endswith("resid_pre") else int(name.split(".")[1])


def need_finite(logits: Tensor, positions: range, model: Model) -> None:
    """Raises NotFinite where a logit of the model, `[…, P, V]`, is not finite."""
    bad = ~torch.isfinite(logits).all(-1).reshape(-1, len(positions)).all(0)
    if bad.any():
        raise NotFinite(
            f"the logits at position {positions[int(bad.nonzero()[0])]} are not finite",
            dtype=dtype_name(model.dtype),
        )
