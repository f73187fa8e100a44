"""The terms of a number: along the residual stream, or by gradients between two prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmcli.commands.attribute.report import AttributeReport
from llmcli.errors import NotFinite, UsageError
from llmcli.evaluate.rule import exact
from llmcli.graph.block import block_names
from llmcli.graph.graph import graph
from llmcli.graph.ops import Project
from llmcli.inspect.contributions import Contributions, explained
from llmcli.inspect.gradients import Gradients
from llmcli.inspect.passes import Passes
from llmcli.model import Model, dtype_name
from llmcli.records.contribution import Contribution
from llmcli.records.document import ViewCheck
from llmcli.shell.answer import Answer

Number = tuple[str, tuple[int, ...]]  # an activation, and the index in it

# How many roundings the sum may be off, each as large as all numbers on the way together, see
# `Contributions`. Measured, the worst: 2.6 in float64, 0.9 in float32, 0.4 in 16 bits, of all small
# models; of smollm2 0.3 at most.
ROUNDINGS, NARROW_ROUNDINGS = 8, 2


def measure_direct(passes: Passes, wanted: Answer | Number) -> AttributeReport:
    """The terms of a logit of the last token, or of another number of it.

    A logit is the one before the soft cap where there is one, which is not linear. Raises
    NotFinite, UsageError as `Answer.known` does and for a number that is not linear in the stream.
    """
    model, rows = passes.model, dict[str, Tensor]()

    def watch(first: int, name: str, tensor: Tensor) -> None:
        rows[name] = tensor[0, ..., -1:, :].clone()

    passes.in_chunks(watch)
    name = "logits" if model.config.head.cap is None else "logits_raw"
    answer, index = Answer(), None
    if isinstance(wanted, Answer):
        answer = wanted.known(rows["logits"][0])
    else:
        name, index = wanted
        if not explained(model, name):
            raise UsageError(
                f"`{name}` is not linear in the residual stream, so no terms add up to it",
                hint=f'`llmcli explain "{name}[{",".join(map(str, index))}]"` derives it',
            )
    g = torch.zeros(rows[name].shape, dtype=torch.float64)
    if index is not None:
        axes = graph(model.config)[name].axes
        g[tuple(0 if axis == "T" else at for axis, at in zip(axes, index, strict=True))] = 1.0
    for id, sign in ((answer.answer, 1.0), (answer.versus, -1.0)):
        if id is not None:
            g[0, id] = sign
    with torch.inference_mode():
        found = Contributions(model, passes.ids, rows, name, g.flatten())
    if not math.isfinite(found.value):
        raise NotFinite(f"`{name}` is not finite", dtype=dtype_name(model.dtype))
    check = ViewCheck(
        name="sum",
        words=f"the terms add up to the model's number: Σ {found.sum:.6g}, model {found.value:.6g}",
        value=abs(found.sum - found.value),
        tolerance=(NARROW_ROUNDINGS if model.dtype.itemsize == 2 else ROUNDINGS) * found.rounding,
        where=name,
    )
    return AttributeReport(
        **_about(model, passes.ids, answer),
        method="direct",
        number=name,
        index=index,
        value=found.value,
        terms=tuple(found.terms),
        checks=(check, *passes.checks),
    )


def measure_gradient(passes: Passes, corrupted: Sequence[int], answer: Answer) -> AttributeReport:
    """Attribution patching (Nanda 2023): (clean − corrupted) · gradient in the corrupted prompt.

    At every position of the stream before each layer, of what its parts add to it, and of every
    head's result. Raises UsageError where both prompts have not as many tokens.
    """
    model, ids = passes.model, passes.ids
    if len(ids) != len(corrupted):
        raise UsageError(
            f"the prompt has {len(ids)} tokens and `--corrupted` {len(corrupted)}: "
            "positions are compared, so they have to be as many",
            hint="`llmcli tokens` shows those of both",
        )
    names, clean = _places(model), dict[str, Tensor]()

    def tap(name: str, tensor: Tensor) -> None:
        if name in names or name == "logits":
            clean[name] = exact(tensor[0])

    passes.at_once(tap, logits="last", until=None)
    answer = answer.known(clean["logits"][-1])
    found = Gradients(model, corrupted, answer.of, names)
    if not math.isfinite(found.value):
        raise NotFinite("the logits are not finite", dtype=dtype_name(model.dtype))
    terms = []
    for name, kind in names.items():
        if name in found.at:
            moved = (clean[name] - exact(found.emitted[name])) * found.at[name]
            rows = moved.sum(-1) if kind == "head" else moved.sum(-1)[None]
            terms += [
                Contribution(
                    kind=kind, name=name, layer=graph(model.config)[name].layer,
                    index=index if kind == "head" else None, position=at, value=value,
                )
                for index, row in enumerate(rows.tolist())
                for at, value in enumerate(row)
            ]  # fmt: skip
    worst = max(found.apart, key=found.apart.__getitem__)
    check = ViewCheck(
        name="evaluated",
        words="every block, evaluated for its gradients, leaves the stream as it was, relative",
        value=found.apart[worst],
        tolerance=found.tolerance,
        where=worst,
    )
    return AttributeReport(
        **_about(model, ids, answer),
        method="gradient",
        number="logits",
        index=None,
        value=float(answer.of(clean["logits"][-1])),
        corrupted=model.tokens(corrupted),
        corrupted_value=found.value,
        terms=tuple(terms),
        checks=(check,),
    )


def _about(model: Model, ids: Sequence[int], answer: Answer) -> dict[str, Any]:
    """What both reports say of the run."""
    pair = [None if id is None else model.tokens([id])[0] for id in (answer.answer, answer.versus)]
    return {
        "dtype": dtype_name(model.dtype),
        "tokens": model.tokens(ids),
        "answer": pair[0],
        "versus": pair[1],
        "layers": len(model.config.layers),
    }


def _places(model: Model) -> dict[str, str]:
    """The activations that are compared: the name and what it is called."""
    found = {}
    for number, layer in enumerate(model.config.layers):
        found[f"blocks.{number}.resid_pre"] = "resid_pre"
        for sublayer in block_names(layer, f"blocks.{number}"):
            found |= {one: one.rpartition(".")[2] for one in sublayer.residual_updates}
    whole = graph(model.config)
    for node in whole.nodes.values():
        if isinstance(node.op, Project) and len(whole[node.op.source].axes) == 3:
            found[node.op.source] = "head"
    return found
