"""The terms of a number: along the residual stream, or by gradients between two prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from llmcli.inspect.sweep import Sweep
from llmcli.model import Model, dtype_name
from llmcli.nn.step import Edit
from llmcli.records.contribution import Contribution
from llmcli.records.document import ViewCheck
from llmcli.shell.answer import Answer

Number = tuple[str, tuple[int, ...]]  # an activation, and the index in it

# How many roundings the sum may be off, each as large as all numbers on the way together, see
# `Contributions`. Measured, the worst: 2.6 in float64, 0.9 in float32, 0.4 in 16 bits, of all small
# models; of smollm2 0.3 at most.
ROUNDINGS, NARROW_ROUNDINGS = 8, 2
PATCHED = 8  # of the strongest gradients of each kind, by a run each


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
    total = math.fsum(term.value for term in found.terms)
    check = ViewCheck(
        name="sum",
        words=f"the terms add up to the model's number: Σ {total:.6g}, model {found.value:.6g}",
        value=abs(total - found.value),
        tolerance=(NARROW_ROUNDINGS if model.dtype.itemsize == 2 else ROUNDINGS) * found.rounding,
        where=name,
    )
    return _report(
        passes, answer, (name, index), found.value, found.terms, (check, *passes.checks)
    )


def measure_gradient(passes: Passes, corrupted: Sequence[int], answer: Answer) -> AttributeReport:
    """Attribution patching (Nanda 2023): (clean − corrupted) · gradient in the corrupted prompt.

    At every position of the stream before each layer, of what its parts add to it, and of every
    head's result. The strongest of each kind are also patched. Raises UsageError where both prompts
    have not as many tokens.
    """
    model, ids = passes.model, passes.ids
    if len(ids) != len(corrupted):
        raise UsageError(
            f"the prompt has {len(ids)} tokens and `--corrupted` {len(corrupted)}: "
            "both need the same number, for positions are compared one by one",
            hint="`llmcli tokens` shows those of both",
        )
    names, clean = _places(model), dict[str, Tensor]()

    def tap(name: str, tensor: Tensor) -> None:
        if name in names or name == "logits":
            clean[name] = exact(tensor[0])

    passes.at_once(tap, logits="last", until=None)
    answer = answer.known(clean["logits"][-1])
    found = Gradients(model, corrupted, answer.of, names)
    terms = []
    for name in filter(found.at.__contains__, names):
        moved = ((clean[name] - exact(found.emitted[name])) * found.at[name]).sum(-1)
        by_head = moved.ndim == 2
        for at in range(moved.numel()):
            head, position = divmod(at, len(ids))
            terms.append(
                Contribution(
                    kind="head" if by_head else name.rpartition(".")[2], name=name,
                    layer=graph(model.config)[name].layer, index=head if by_head else None,
                    position=position, value=moved.flatten()[at].item(),
                )
            )  # fmt: skip
    worst = max(found.apart, key=found.apart.__getitem__)
    check = ViewCheck(
        name="evaluated",
        words="every block, evaluated for its gradients, leaves the stream as it was, relative",
        value=found.apart[worst],
        tolerance=found.tolerance,
        where=worst,
    )
    value = float(answer.of(clean["logits"][-1]))
    terms = _patched(model, corrupted, terms, clean, answer)
    report = _report(passes, answer, ("logits", None), value, terms, (check,))
    other = model.tokens(corrupted)
    return replace(report, method="gradient", corrupted=other, corrupted_value=found.value)


def _patched(
    model: Model,
    ids: Sequence[int],
    terms: Sequence[Contribution],
    clean: Mapping[str, Tensor],
    answer: Answer,
) -> list[Contribution]:
    """The terms, the strongest of each kind with what a run with the `clean` activation changes."""
    found, kinds = list(terms), dict[str, list[int]]()
    for at in sorted(range(len(terms)), key=lambda at: -abs(terms[at].value)):
        kinds.setdefault(terms[at].kind, []).append(at)
    chosen = [at for numbers in kinds.values() for at in numbers[:PATCHED] if terms[at].value]

    def edit(term: Contribution) -> Edit:
        at = tuple(n for n in (term.index, term.position) if n is not None)

        def fn(x: Tensor, positions: Tensor) -> Tensor:
            x[(0, *at)] = clean[term.name][at].to(x)
            return x

        return Edit(name=term.name, fn=fn)

    sweep = Sweep(model, ids)
    before = float(answer.of(exact(sweep.plain[0, -1])))
    for some, logits in sweep.run([edit(terms[at]) for at in chosen]):
        for number, row in zip(some, logits, strict=True):
            at = chosen[number]
            found[at] = replace(terms[at], patched=float(answer.of(exact(row[-1]))) - before)
    return found


def _report(
    passes: Passes,
    answer: Answer,
    number: tuple[str, tuple[int, ...] | None],
    value: float,
    terms: Sequence[Contribution],
    checks: tuple[ViewCheck, ...],
) -> AttributeReport:
    model, (name, index) = passes.model, number
    if not math.isfinite(value + sum(term.value for term in terms)):
        raise NotFinite(f"`{name}` is not finite", dtype=dtype_name(model.dtype))
    pair = [None if id is None else model.tokens([id])[0] for id in (answer.answer, answer.versus)]
    return AttributeReport(
        dtype=dtype_name(model.dtype), method="direct", tokens=model.tokens(passes.ids),
        number=name, index=index, answer=pair[0], versus=pair[1], value=value,
        terms=tuple(terms), checks=checks,
    )  # fmt: skip


def _places(model: Model) -> list[str]:
    """The activations that are compared."""
    whole, found = graph(model.config), []
    for number, layer in enumerate(model.config.layers):
        found.append(f"blocks.{number}.resid_pre")
        for sublayer in block_names(layer, f"blocks.{number}"):
            found += sublayer.residual_updates
    sources = (node.op.source for node in whole.nodes.values() if isinstance(node.op, Project))
    return [*found, *(name for name in sources if len(whole[name].axes) == 3)]
