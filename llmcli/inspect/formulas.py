"""Checks of activations: each is what its formula makes of the kernel's own inputs.

Compared from the embedding on, roundings would add up: a small number left over from large ones
that cancel would be allowed to differ by more than itself. One formula at a time shows a fault
where it is made. The formulas are those of `explain`, independent of `ops` and in float64; some of
the activations are enough, such as one layer's. For a long prompt, some rows are compared where a
formula is a product with a matrix, or of queries and keys; all others are compared in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcli.config.attention import seen_keys
from llmcli.config.model import ModelConfig
from llmcli.errors import NotFinite
from llmcli.evaluate.rule import Rule, symbol
from llmcli.graph.graph import graph
from llmcli.graph.ops import HeadShare, Mix, Project
from llmcli.graph.routing import ExpertProject
from llmcli.inspect.kernel import Kernel, edited, layer_of, rules
from llmcli.model import Model, dtype_name
from llmcli.records.document import ViewCheck
from llmcli.records.explanation import NumberCheck
from llmcli.weights.blocks import FileLayoutWeight
from llmcli.weights.packed import Packed
from llmcli.weights.weight import Weight

NAME = "formulas"

CHEAP = 1 << 22  # multiplications spent on the rows of a product, even if fewer rows are requested
AT_ONCE = 1 << 20  # numbers of what is compared row by row, half a dozen copies in float64

# How many roundings (eps) of Σ|terms| of a number the kernel may be off in one formula. Measured,
# the worst of all numbers: 10.7 with smollm2 (100 tokens, a sum of 1536 in which one term leads),
# 5.3 with tiny (200 tokens), 1.9 with tiny in float64.
ROUNDINGS = 32
# … of a mix of values, beyond this many keys that the query sees times their number: equal values
# are added up with the same rounding again and again. Measured, without positions: 24 with 700
# keys, 83 with 2000.
MIX_KEYS = 256
# A kernel of 16 bits takes its sums in float32, with as many roundings of float32 as above; what it
# rounds to 16 bits (`Rule.halves`) may be off by this many eps. Rounded correctly it is 0.5.
NARROW_ROUNDINGS = 0.6
# On a GPU it may round the parts of a sum, too: this many eps of Σ|terms|. Not measured.
NARROW_ROUNDINGS_GPU = 4


def formula_inputs(config: ModelConfig, names: Iterable[str]) -> frozenset[str]:
    """Which activations, written by the kernel, the formulas of `names` are checked with.

    `names` themselves included. Names without a formula (a parameter, a cache) are passed over.
    """
    known, model = rules(config), graph(config)
    pending = [name for name in names if name in known]
    found = set(pending)
    for name in pending:
        for source in known[name].inputs:
            if source not in found and not model.written(source):
                pending.append(source)  # it is derived from what the kernel did write
            found.add(source)
    return frozenset(name for name in found if model.written(name))


def formula_checks(
    model: Model,
    ids: Sequence[int],
    emitted: Mapping[str, Tensor],
    names: Iterable[str],
    *,
    rows: int | None = None,
    prompt_tokens: int | None = None,
) -> ViewCheck:
    """Whether each of `names` follows from `emitted`, up to the roundings of one formula.

    `emitted` are activations `[1, …, T, …]` of the tokens `ids`, those of `formula_inputs` at
    least; one that has fewer rows than there are tokens (`logits` of the last one) ends with the
    last. Scores, pattern and result are computed by the mixer where they are not among them.
    `rows`: tokens of a product (with a matrix, or of queries and keys) that are compared where more
    are not `CHEAP`, spread evenly, the last and then the first among them, with all of their
    keys: memory is then linear in the prompt. `prompt_tokens`: how many tokens were one forward
    call; each later one was a call of its own (default: all were one). What is edited is not
    compared.

    `value` is the largest difference as a share of what is allowed (`worst_number`): 1 and less
    is right; where some are wrong it is the worst number of the first wrong tensor in execution
    order, and `where` its place. Raises ValueError where a name has no formula or an input is
    missing, NotFinite where a number is NaN.
    """
    known, wanted = rules(model.config), set(names) - edited(model)
    if not wanted and names:
        return ViewCheck(name=NAME, words="all tensors here are edited", value=0.0, tolerance=1.0)
    listed = [name for name in known if name in wanted]
    missing = formula_inputs(model.config, listed) - emitted.keys()
    if missing or len(listed) != len(wanted) or not listed:
        raise ValueError(f"no formula or no inputs: {sorted(wanted - set(listed) | missing)}")
    # the batch is one sequence
    single = {name: tensor[0] for name, tensor in emitted.items()}
    prompt = len(ids) if prompt_tokens is None else prompt_tokens
    found = []
    for name in listed:
        compared = [
            (worst_number(own, name), own)
            for own in kernels(model, known, ids, single, name, rows, prompt)
        ]
        most, own = max(compared, key=lambda one: one[0].share)
        *front, row, column = most.index
        place = symbol(most.name, *front, own.positions[row], column)  # the token's own position
        found.append((place, most.share))
    wrong = [one for one in found if one[1] > 1]
    where, share = wrong[0] if wrong else max(found, key=lambda one: one[1])
    words = formula_words(len(listed), rows, len(ids))
    return ViewCheck(name=NAME, words=words, value=share, tolerance=1.0, where=where)


def worst(checks: Iterable[ViewCheck]) -> ViewCheck:
    """One of several such checks, of layers one after the other: the first that fails, else the
    one with the largest value.
    """
    listed = list(checks)
    return next((check for check in listed if not check.ok), max(listed, key=lambda c: c.value))


def formula_words(tensors: int, rows: int | None, tokens: int) -> str:
    """What such a check says; of products `rows` of all `tokens` were compared."""
    what = "1 tensor is" if tensors == 1 else f"{tensors} tensors are"
    return f"{what} what the formula makes of the kernel's own inputs{some_rows(rows, tokens)}"


def some_rows(rows: int | None, tokens: int) -> str:
    """Which tokens were compared, as the end of a sentence; nothing where it is certainly all."""
    return "" if rows is None or rows >= tokens else f" (products: {rows} or more of {tokens} rows)"


def kernels(
    model: Model,
    known: Mapping[str, Rule[Any]],
    ids: Sequence[int],
    emitted: Mapping[str, Tensor],
    name: str,
    rows: int | None,
    prompt: int,
    weights: Model | None = None,
) -> Iterator[Kernel]:
    """The tokens whose rows are compared, some at a time, with what their formula needs."""
    tokens = len(ids)
    first = tokens - (emitted[name].shape[-2] if name in emitted else tokens)
    chosen: Sequence[int] = range(first, tokens)
    step = tokens
    if not known[name].op.by_rows:
        there = [emitted[one] for one in (name, *known[name].inputs) if one in emitted]
        step = max(1, AT_ONCE // max(one.numel() // one.shape[-2] for one in there))
    elif rows is not None:
        chosen = _spread(chosen, max(rows, CHEAP // _cost(model, known, name, tokens)))
    by_itself = prompt - first == 1
    for begin in range(0, len(chosen), step):
        part = chosen[begin : begin + step]
        yield Kernel(
            model,
            known,
            ids,
            emitted=emitted,
            positions=part,
            prompt_tokens=prompt,
            alone=[by_itself or at >= prompt for at in part],
            weights=weights,
        )


def _spread(every: Sequence[int], rows: int) -> Sequence[int]:
    """So many of them."""
    if rows >= len(every):
        return every
    last = max(rows - 1, 1)
    return sorted({every[-1] - (len(every) - 1) * at // last for at in range(rows)})


def _cost(model: Model, known: Mapping[str, Rule[Any]], name: str, tokens: int) -> int:
    """Multiplications for one row of a product."""
    op = known[name].op
    if isinstance(op, Project | HeadShare):
        return model.decoder.weight(op.weight).count
    sizes = graph(model.config).sizes(layer_of(name))
    if isinstance(op, ExpertProject):
        return model.decoder.weight(op.weight).count * sizes["K"] // sizes["E"]
    return sizes["H"] * sizes.get("dh", sizes["dv"]) * tokens


def worst_number(own: Kernel, name: str) -> NumberCheck:
    """Of all numbers of a tensor the one that uses most of what it is allowed.

    Its index counts the rows that `own` has. Raises NotFinite for a NaN in it or in its inputs.
    """
    ours, theirs, allowed = compared(own, name)
    # of what is allowed; 0 for equal numbers, −∞ of a mask too
    share = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / allowed)
    # numpy's: PyTorch's imports sympy, half a second, to check its argument
    at = tuple(int(i) for i in np.unravel_index(int(share.argmax()), share.shape))
    return _found(own, name, at, ours[at], theirs[at], allowed[at])


def compared(own: Kernel, name: str, rounded: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor by its formula and by the kernel, and what their difference may be.

    `rounded`: by how much the parameters may differ, too, relative to each of them.
    """
    rule = own.rules[name]
    ours, theirs = rule.tensor(own), own.kernel(name)
    halves = rule.halves(own, ours) if _is_narrow(own, name) else ours
    magnitudes = rule.magnitudes(own)
    allowed = _allowed(magnitudes, halves, own, name).expand_as(ours)
    if rounded:  # a row that is looked up has no terms
        allowed = allowed + rounded * torch.maximum(magnitudes, ours.abs())
    return own.as_kept(name, ours, theirs, allowed), theirs, allowed


def number_found(own: Kernel, name: str, index: tuple[int, ...], value: float) -> NumberCheck:
    """One number that its formula makes `value`."""
    theirs = own.kernel(name, *index)
    ours = theirs.new_tensor(value)
    whole = theirs.new_tensor(own.rules[name].bound(own, index))
    allowed = _allowed(whole, 2 * whole, own.at(index[-2]), name)  # no rule has more halves
    ours = own.as_kept(name, ours, theirs, allowed)
    return _found(own, name, index, ours, theirs, allowed)


def _found(
    own: Kernel, name: str, index: tuple[int, ...], ours: Tensor, theirs: Tensor, allowed: Tensor
) -> NumberCheck:
    found = NumberCheck(
        name=name,
        index=index,
        derived=float(ours),
        kernel=float(theirs),
        tolerance=float(allowed),
    )
    if math.isnan(found.share):
        raise NotFinite(
            f"`{symbol(name, *index)}` is {float(theirs)}, and {float(ours)} by its formula",
            dtype=dtype_name(own.model.dtype),
        )
    return found


def _allowed(magnitude: Tensor, halves: Tensor, own: Kernel, name: str) -> Tensor:
    """Roundings, and what a kernel takes for 0; what is not rounded has to be equal."""
    found, wide = torch.finfo(own.dtype_of(name)), torch.finfo(torch.float32)
    if not _is_narrow(own, name):
        allowed = _roundings(own, name) * (found.eps * magnitude + found.tiny)
    elif own.device(name).type == "cpu":
        allowed = NARROW_ROUNDINGS * found.eps * (halves + found.tiny)
        allowed = allowed + ROUNDINGS * (wide.eps * magnitude + wide.tiny)
    else:
        allowed = NARROW_ROUNDINGS_GPU * (found.eps * magnitude + found.tiny)
    if isinstance(_weight(own, name), FileLayoutWeight):  # its numbers may have been rounded
        allowed = allowed + torch.finfo(own.model.dtype).eps / 2 * magnitude
    return torch.where(magnitude > 0, allowed, 0.0)


def _roundings(own: Kernel, name: str) -> Tensor | float:
    """Roundings of one number, in a mix of values by its row, `[T, 1]`.

    In a product of blocks each addition may round by eps/2 of the sum. They are added from left to
    right. What comes after a term that leads (a neuron of the first token of smollm2 is a thousand
    times the others) is rounded in the same direction again and again, where it is less than an ulp
    of that. Measured: 27 roundings, of the 80 of 1536 columns.
    """
    op = own.rules[name].op
    if isinstance(op, Mix) and not op.signed:
        seen_T1 = seen_keys(torch.tensor(own.positions, dtype=torch.float64)[:, None], op.window)
        return ROUNDINGS * (seen_T1 / MIX_KEYS).clamp_min(1)
    weight = _weight(own, name) if isinstance(op, Project) else None
    return ROUNDINGS + (weight.additions / 2 if isinstance(weight, Packed) else 0)


def _weight(own: Kernel, name: str) -> Weight | None:
    """What a product multiplies with."""
    op = own.rules[name].op
    return own.model.decoder.weight(op.weight) if isinstance(op, Project | ExpertProject) else None


def _is_narrow(own: Kernel, name: str) -> bool:
    return own.dtype_of(name).itemsize < torch.float32.itemsize
