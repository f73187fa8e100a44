"""The states of recurrences over time: how large they are, and of how many directions.

Axes: H heads, T tokens, d rows of a state, e columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmcli import devices
from llmcli.commands.attention.measure.metrics import effective_rank
from llmcli.commands.attention.measure.run import FORMULA_ROWS, LayerWatch, Seen
from llmcli.commands.attention.report import HeadStates, LayerStates, StatesReport
from llmcli.engine.session import Session
from llmcli.inspect.formulas import formula_checks, some_rows, worst
from llmcli.inspect.generated import generated
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.recurrence import ROUNDINGS, Walk, walk
from llmcli.model import Model, dtype_name
from llmcli.nn.state import State
from llmcli.records.checks import ViewCheck
from llmcli.records.progress import Progress

POINTS = 24  # positions at which states are measured


def measure_states(
    model: Model,
    ids: Sequence[int],
    heads: Mapping[int, Sequence[int]],
    *,
    generate: int = 0,
    progress: Progress | None = None,
) -> StatesReport:
    """The states of `heads[layer]` while `ids`, and up to `generate` likeliest tokens, are read.

    All these layers have a mixer whose state is a matrix (`LayerMap.signed`). The pass is the
    usual one, with a cache; states are walked through once more in float64 from what it emitted,
    and are compared with its cache and its own results. Raises OutOfMemory, and NotFinite for NaN.
    """
    every, steps = generated(model, ids, generate, progress)
    devices.require_memory(
        model.decoder.state_bytes(1, len(every)), model.device,
        f"the cache of {len(every)} tokens", "use a shorter prompt or a smaller --generate",
    )  # fmt: skip
    session = Session(model.decoder, 1, len(every))
    look = _Look(model, every, heads, session.state)
    tap = LayerWatch([LayerMap(model, number) for number in heads], look.settle)
    if progress is not None:
        progress("reading the prompt", 0, len(every))
    with torch.inference_mode():
        session.extend(
            torch.tensor([every], device=model.device), tap=tap, logits="none",
            until=max(heads),
        )  # fmt: skip
    return look.report(len(ids), steps)


class _Look:
    def __init__(
        self, model: Model, ids: tuple[int, ...], heads: Mapping[int, Sequence[int]], state: State
    ) -> None:
        self._model, self._ids, self._heads, self._state = model, ids, heads, state
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
        found = []
        for head in self._heads[of.number]:
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
