"""Every formula alone: what it makes of the kernel's own inputs is the kernel's own output.

From the embedding rows on roundings add up, and a number that is small because large ones cancel
is then allowed more than itself. One formula alone is not: a fault is seen where it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcli.errors import NotFinite
from llmcli.formats.packed import Packed
from llmcli.graph.evaluation.rule import symbol
from llmcli.graph.ops import Project
from llmcli.observe.kernel import Kernel
from llmcli.observe.values import Values
from llmcli.reports.explanation import Local

# How many roundings (eps) of Σ|terms| of a number the kernel may be off in one formula. Measured,
# the worst of all numbers: 10.7 with smollm2 (100 tokens, a sum of 1536 in which one term leads),
# 5.3 with tiny (200 tokens), 1.9 with tiny in float64.
ROUNDINGS = 32
# A kernel of 16 bits takes its sums in float32, with as many roundings of float32 as above; what it
# rounds to 16 bits (`Rule.halves`) may be off by so many eps. Rounded correctly it is 0.5.
NARROW_ROUNDINGS = 0.6
# On a GPU it may round the parts of a sum, too: so many eps of Σ|terms|. That is not measured.
NARROW_ROUNDINGS_GPU = 4

Indices = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Found:
    """One number, and the `share` that its difference is of what is allowed."""

    name: str
    index: tuple[int, ...]
    derived: float
    kernel: float
    allowed: float
    share: float


def local(values: Values, shown: Mapping[str, Indices]) -> Local | None:
    """The formulas of the numbers `shown` by name, and of every tensor derived as a whole.

    The number that uses most of what it is allowed; where that is too much, of the first tensor
    in execution order. None where nothing was derived. Raises NotFinite where it is none.
    """
    own = values.own()
    found = []
    for name in values.rules:
        if name in values.whole:
            values.tell("checking")
            found.append(worst_number(own, name))
        found += _of_numbers(own, name, shown.get(name, ()))
    if not found:
        return None
    wrong = [one for one in found if one.share > 1]
    most = wrong[0] if wrong else max(found, key=lambda one: one.share)
    return Local(
        formulas=sum(map(len, shown.values())),
        tensors=len(values.whole),
        name=most.name,
        index=most.index,
        derived=most.derived,
        kernel=most.kernel,
        difference=0.0 if most.derived == most.kernel else abs(most.derived - most.kernel),
        tolerance=most.allowed,
        ok=not wrong,
    )


def worst_number(own: Kernel, name: str) -> Found:
    """Of all numbers of a tensor the one that uses most of what it is allowed.

    Its index counts the rows that `own` has. Raises NotFinite for a NaN in it or in its inputs.
    """
    rule = own.rules[name]
    ours, theirs = rule.tensor(own), own.kernel(name)
    halves = rule.halves(own, ours) if _is_narrow(own, name) else ours
    allowed = _allowed(rule.magnitudes(own), halves, own, name).expand_as(ours)
    ours = own.as_kept(name, ours, theirs, allowed)
    share = _share(ours, theirs, allowed)
    at = tuple(int(i) for i in torch.unravel_index(share.argmax(), share.shape))
    return _found(name, at, ours[at], theirs[at], allowed[at])


def _of_numbers(own: Kernel, name: str, indices: Indices) -> Iterator[Found]:
    for index in indices:
        element = own.rules[name].element(own, index)
        theirs = own.kernel_row(name, index)[index[-1]]
        ours = theirs.new_tensor(element.value)
        magnitude = ours.new_tensor(element.magnitude)
        allowed = _allowed(magnitude, 2 * magnitude, own, name)  # no rule has more halves
        ours = own.as_kept(name, ours, theirs, allowed)
        yield _found(name, index, ours, theirs, allowed)


def _found(
    name: str, index: tuple[int, ...], ours: Tensor, theirs: Tensor, allowed: Tensor
) -> Found:
    share = float(_share(ours, theirs, allowed))
    if math.isnan(share):
        raise NotFinite(
            f"`{symbol(name, *index)}` is {float(theirs)}, and {float(ours)} by its formula",
            hint="try `--dtype float64`; the checkpoint may hold NaN",
        )
    return Found(name, index, float(ours), float(theirs), float(allowed), share)


def _allowed(magnitude: Tensor, halves: Tensor, own: Kernel, name: str) -> Tensor:
    """Roundings, and what a kernel takes for 0; what is not rounded has to be equal."""
    found, wide = torch.finfo(own.dtype_of(name)), torch.finfo(torch.float32)
    if not _is_narrow(own, name):
        allowed = _roundings(own, name) * (found.eps * magnitude + found.tiny)
    elif own.model.device.type == "cpu":
        allowed = NARROW_ROUNDINGS * found.eps * (halves + found.tiny)
        allowed = allowed + ROUNDINGS * (wide.eps * magnitude + wide.tiny)
    else:
        allowed = NARROW_ROUNDINGS_GPU * (found.eps * magnitude + found.tiny)
    return torch.where(magnitude > 0, allowed, 0.0)


def _roundings(own: Kernel, name: str) -> float:
    """Of the sum of a product of blocks each addition may round by half an eps of all of it.

    They are added from left to right. What comes after a term that leads (a neuron of the first
    token of smollm2 is a thousand times the others) is rounded in the same direction again and
    again, where it is less than an ulp of that. Measured: 27 roundings, of the 80 of 1536 columns.
    """
    op = own.rules[name].op
    weight = own.model.decoder.weight(op.weight) if isinstance(op, Project) else None
    return ROUNDINGS + (weight.additions / 2 if isinstance(weight, Packed) else 0)


def _is_narrow(own: Kernel, name: str) -> bool:
    return own.dtype_of(name).itemsize < torch.float32.itemsize


def _share(ours: Tensor, theirs: Tensor, allowed: Tensor) -> Tensor:
    """The difference as a share of what is allowed; 0 for equal numbers, −∞ of a mask too."""
    return torch.where(ours == theirs, 0.0, (ours - theirs).abs() / allowed)
