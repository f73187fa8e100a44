"""The states of recurrences over time: how large they are, and of how many directions.

Axes: H heads, T tokens, d rows of a state, e columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmcli import devices
from llmcli.commands.attention.measure.layers import LayerWatch, Seen
from llmcli.commands.attention.measure.metrics import effective_rank
from llmcli.commands.attention.report.states import POINTS, HeadStates, LayerStates, StatesReport
from llmcli.inspect.formulas import formula_checks, some_rows, worst
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.passes import Passes
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
    passes = Passes(model, ids, generate, progress)
    passes.write()
    every = passes.ids
    devices.require_memory(
        model.decoder.state_bytes(1, len(every)), model.device,
        f"the cache of {len(every)} tokens", "use a shorter prompt or a smaller --generate",
    )  # fmt: skip
    session = passes.session()
    look = _Look(model, every, heads, session.state)
    tap = LayerWatch({number: LayerMap(model, number) for number in layers}, look.settle)
    passes.at_once(tap, logits="none", until=max(layers), session=session)
    return look.report(len(ids), passes.checks)


class _Look:
    def __init__(
        self,
        model: Model,
        ids: Sequence[int],
        heads: Sequence[int] | None,
        state: State,
    ) -> None:
        self._model, self._ids, self._heads, self._state = model, list(ids), heads, state
        self._found: list[LayerStates] = []
        self._formulas: list[ViewCheck] = []
        self._read: list[ViewCheck] = []
        self._cached: list[ViewCheck] = []
        points = min(POINTS, len(ids))
        self._positions = [-(-len(ids) * (at + 1) // points) - 1 for at in range(points)]

    def report(self, prompt_tokens: int, steps: tuple[ViewCheck, ...]) -> StatesReport:
        """What was seen; the first `prompt_tokens` were given, others proven by `steps`."""
        model = self._model
        words = "norm, projections, convolution, decays and output follow from their formulas"
        formulas = replace(worst(self._formulas), words=words + some_rows(
            FORMULA_ROWS, len(self._ids)
        ))  # fmt: skip
        return StatesReport(
            dtype=dtype_name(model.dtype),
            tokens=model.tokens(self._ids),
            prompt_tokens=prompt_tokens,
            positions=tuple(self._positions),
            layers=tuple(self._found),
            checks=(worst(self._cached), worst(self._read), formulas, *steps),
        )

    def settle(self, of: LayerMap, seen: Seen) -> None:
        """Measures a layer, all of whose activations were seen."""
        self._formulas.append(
            formula_checks(self._model, self._ids, seen, of.checked, rows=FORMULA_ROWS)
        )
        single = {name: tensor[0] for name, tensor in seen.items()}
        recurrence = of.recurrence(single)
        walked = walk(recurrence, self._positions)
        q_HTd = recurrence.of_heads(recurrence.q_BKTd)[0]
        self._read.append(self._results(of, walked, q_HTd, single[of.mixed]))
        cached = self._state.tensors()[of.matrix.name][0]
        self._cached.append(walked.check(cached, of.matrix.name))
        self._found.append(self._layer(of, walked, cached))

    def _results(self, of: LayerMap, walked: Walk, q_HTd: Tensor, z_HTe: Tensor) -> ViewCheck:
        """That each query reads of the state shown what the kernel computed."""
        at = self._positions
        states_HPde = torch.stack([walked.states[position] for position in at], 1)
        q_HP1d = q_HTd[:, at, None].to(states_HPde)
        off_HP = ((q_HP1d @ states_HPde)[:, :, 0] - z_HTe[:, at].to(states_HPde)).abs().amax(-1)
        eps = torch.finfo(self._model.stream_dtype).eps
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
        at = self._positions
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
