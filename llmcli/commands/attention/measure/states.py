"""The states of recurrences over time: how large they are, and of how many directions.

Axes: H heads, T tokens, d rows of a state, e columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmcli.commands.attention.measure.metrics import effective_rank
from llmcli.commands.attention.measure.run import FORMULA_ROWS, LayerWatch, Seen
from llmcli.commands.attention.report import HeadStates, LayerStates, StatesReport
from llmcli.inspect.formulas import formula_checks, some_rows, worst
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.passes import Passes
from llmcli.inspect.recurrence import ROUNDINGS, Walk, walk
from llmcli.model import Model, dtype_name
from llmcli.records.document import ViewCheck
from llmcli.records.work import Progress

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
    passes = Passes(model, ids, generate, progress)
    passes.write()
    every = passes.ids
    passes.require_cache(len(every))
    session = passes.session()
    points = min(POINTS, len(every))
    positions = [-(-len(every) * (at + 1) // points) - 1 for at in range(points)]
    found: list[LayerStates] = []
    proofs: list[tuple[ViewCheck, ...]] = []

    def settle(of: LayerMap, seen: Seen) -> None:
        formulas = formula_checks(model, every, seen, of.checked, rows=FORMULA_ROWS)
        single = {name: tensor[0] for name, tensor in seen.items()}
        recurrence = of.recurrence(single)
        walked = walk(recurrence, positions)
        eps = torch.finfo(model.stream_dtype).eps
        results = _results(of, walked, recurrence.of_heads(recurrence.q_BKTd)[0], single, eps)
        cached = session.state.tensors()[of.matrix.name][0]
        proofs.append((walked.check(cached, of.matrix.name), results, formulas))
        found.append(_layer(of, walked, heads[of.number], cached.nbytes))

    tap = LayerWatch([LayerMap(model, number) for number in heads], settle)
    passes.at_once(tap, logits="none", until=max(heads), session=session)
    state, results, formulas = (worst(checks) for checks in zip(*proofs, strict=True))
    words = "norm, projections, convolution, decays and output follow from their formulas"
    formulas = replace(formulas, words=words + some_rows(FORMULA_ROWS, len(every)))
    return StatesReport(
        dtype=dtype_name(model.dtype),
        tokens=model.tokens(every),
        prompt_tokens=len(ids),
        positions=tuple(positions),
        layers=tuple(found),
        checks=(state, results, formulas, *passes.checks),
    )


def _results(
    of: LayerMap, walked: Walk, q_HTd: Tensor, seen: Mapping[str, Tensor], eps: float
) -> ViewCheck:
    """That each query reads of the states shown what the kernel computed."""
    at, z_HTe = sorted(walked.states), seen[of.mixed]
    states_HPde = torch.stack([walked.states[position] for position in at], 1)
    q_HP1d = q_HTd[:, at, None].to(states_HPde)
    off_HP = ((q_HP1d @ states_HPde)[:, :, 0] - z_HTe[:, at].to(states_HPde)).abs().amax(-1)
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


def _layer(of: LayerMap, walked: Walk, heads: Sequence[int], nbytes: int) -> LayerStates:
    at = sorted(walked.states)
    states_HPde = torch.stack([walked.states[position] for position in at], 1)
    return LayerStates(
        layer=of.number, kind=of.kind, rows=states_HPde.shape[2], columns=states_HPde.shape[3],
        bytes=nbytes,
        heads=tuple(
            HeadStates(
                head=head, norms=tuple(walked.norms_HT[head, at].tolist()),
                effective_ranks=tuple(effective_rank(states_HPde[head]).tolist()),
            )
            for head in heads
        ),
    )  # fmt: skip
