"""The states of recurrences over time: how large they are, and of how many directions.

Axes: H heads, T tokens, d rows of a state, e columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmcli import devices
from llmcli.commands.attention.measure.metrics import effective_rank
from llmcli.commands.attention.report.states import POINTS, HeadStates, LayerStates, StatesReport
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.inspect.formulas import formula_checks, some_rows, worst
from llmcli.inspect.kernel import layer_of
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.observe import continued, shown_to
from llmcli.inspect.recurrence import ROUNDINGS, Walk, walk
from llmcli.model import Model, dtype_name
from llmcli.nn.state import State
from llmcli.records.checks import ViewCheck
from llmcli.records.progress import Progress

FORMULA_ROWS = 12  # of products so many rows of a longer text are held against the formulas


def measure_states(
    model: Model,
    ids: Sequence[int],
    *,
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
    generate: int = 0,
    progress: Progress | None = None,
) -> StatesReport:
    """The states of `layers` while `ids`, and up to `generate` likeliest tokens more, are read.

    All `layers` have a mixer whose state is a matrix (`LayerMap.signed`); a head that one has not
    got is passed over (None: all). The pass is the usual one, with a cache; states are walked
    through once more in float64 from what it emitted, and are held against its cache and its own
    results. Raises OutOfMemory, and NotFinite for NaN.
    """
    look = _Look(model, ids, layers, heads, generate=generate, progress=progress)
    with torch.inference_mode():
        return look.report()


class _Look:
    def __init__(
        self,
        model: Model,
        ids: Sequence[int],
        layers: Sequence[int],
        heads: Sequence[int] | None,
        *,
        generate: int,
        progress: Progress | None,
    ) -> None:
        self._model, self._ids, self._generate = model, list(ids), generate
        self._prompt, self._heads, self._progress = len(ids), heads, progress
        self._maps = {number: LayerMap(model, number) for number in layers}
        self._pieces: dict[int, dict[str, list[Tensor]]] = {number: {} for number in layers}
        self._state: State | None = None
        self._found: list[LayerStates] = []
        self._formulas: list[ViewCheck] = []
        self._read: list[ViewCheck] = []
        self._cached: list[ViewCheck] = []

    def report(self) -> StatesReport:
        """Runs the pass."""
        model, new = self._model, self._generate
        capacity = self._prompt + new
        devices.require_memory(
            model.decoder.state_bytes(1, capacity), model.device,
            f"the cache of {capacity} tokens", "use a shorter prompt or a smaller --generate",
        )  # fmt: skip
        session = Session(model.decoder, 1, capacity)
        self._state = session.state
        if self._progress is not None:
            self._progress("reading the prompt", 0, self._prompt)
        session.extend(
            torch.tensor([self._ids], device=model.device), tap=shown_to(self._watch, session),
            logits="last" if new else "none", until=None if new else max(self._maps),
        )  # fmt: skip
        if new:
            greedy = Sampling(temperature=0.0)
            seen = continued(session, model, self._watch, new, greedy, self._progress)
            self._ids = list(seen.ids)
            for number in self._maps:
                self._settle(number)
        words = "norm, projections, convolution, decays and output follow from their formulas"
        formulas = replace(worst(self._formulas), words=words + some_rows(
            FORMULA_ROWS, len(self._ids)
        ))  # fmt: skip
        return StatesReport(
            dtype=dtype_name(model.dtype),
            tokens=tuple((id, model.token_text(id)) for id in self._ids),
            prompt_tokens=self._prompt,
            positions=self._positions,
            layers=tuple(self._found),
            checks=(worst(self._cached), worst(self._read), formulas),
        )

    @property
    def _positions(self) -> tuple[int, ...]:
        """Evenly spread, the last token among them."""
        tokens, points = len(self._ids), min(POINTS, len(self._ids))
        return tuple(-(-tokens * (at + 1) // points) - 1 for at in range(points))

    def _watch(self, first: int, name: str, tensor: Tensor) -> None:
        number = layer_of(name)
        if number not in self._maps:
            return
        of = self._maps[number]
        if name in of.inputs:
            self._pieces[number].setdefault(name, []).append(tensor)
        if name == of.adds and not self._generate:
            self._settle(number)

    def _settle(self, number: int) -> None:
        """A layer of which everything was seen."""
        of, pieces = self._maps[number], self._pieces.pop(number)
        seen = {name: parts[0] if len(parts) == 1 else torch.cat(parts, -2)
                for name, parts in pieces.items()}  # fmt: skip
        self._formulas.append(
            formula_checks(
                self._model, self._ids, seen, of.checked, rows=FORMULA_ROWS,
                prompt_tokens=self._prompt,
            )
        )  # fmt: skip
        single = {name: tensor[0] for name, tensor in seen.items()}
        recurrence = of.recurrence(single)
        walked = walk(recurrence, self._positions)
        q_HTd = recurrence.of_heads(recurrence.q_BKTd)[0]
        self._read.append(self._results(of, walked, q_HTd, single[of.mixed]))
        assert self._state is not None
        cached = self._state.tensors()[of.matrix.name][0]
        self._cached.append(walked.check(cached, of.matrix.name))
        self._found.append(self._layer(of, walked, cached))

    def _results(self, of: LayerMap, walked: Walk, q_HTd: Tensor, z_HTe: Tensor) -> ViewCheck:
        """That each query reads of the state shown what the kernel computed."""
        at = list(self._positions)
        states_HPde = torch.stack([walked.states[position] for position in at], 1)
        q_HP1d = q_HTd[:, at, None].to(states_HPde)
        off_HP = ((q_HP1d @ states_HPde)[:, :, 0] - z_HTe[:, at].to(states_HPde)).abs().amax(-1)
        eps = torch.finfo(torch.promote_types(self._model.dtype, torch.float32)).eps
        allowed_HP = ROUNDINGS * eps * walked.sizes_HT[:, at]
        if z_HTe.dtype.itemsize == 2:
            narrow = torch.finfo(z_HTe.dtype).eps / 2
            allowed_HP = allowed_HP + narrow * z_HTe[:, at].to(off_HP).abs().amax(-1)
        share_HP = torch.where(off_HP == 0, 0.0, off_HP / allowed_HP).nan_to_num(torch.inf)
        head, point = divmod(int(share_HP.argmax()), len(at))
        return ViewCheck(
            name="values", words="what a query reads of the state shown is the kernel's own z",
            value=float(share_HP[head, point]), tolerance=1.0,
            where=f"{of.mixed}[{head},{at[point]}]",
        )  # fmt: skip

    def _layer(self, of: LayerMap, walked: Walk, cached: Tensor) -> LayerStates:
        at = list(self._positions)
        heads = range(of.heads) if self._heads is None else sorted(set(self._heads))
        found = []
        for head in (head for head in heads if head < of.heads):
            states_Pde = torch.stack([walked.states[position][head] for position in at])
            found.append(
                HeadStates(
                    head=head,
                    norms=tuple(walked.norms_HT[head, at].tolist()),
                    effective_ranks=tuple(effective_rank(states_Pde).tolist()),
                )
            )
        _, rows, columns = walked.states[at[-1]].shape
        return LayerStates(
            layer=of.number, kind=of.kind, rows=rows, columns=columns, bytes=cached.nbytes,
            heads=tuple(found),
        )  # fmt: skip
