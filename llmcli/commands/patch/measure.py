"""Activation patching (Meng et al. 2022), and path patching (Goldowsky-Dill et al. 2023).

Axes: B runs, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from llmcli.commands.patch.report import By, PatchCell, PatchReport
from llmcli.decoder.decoder import check_edits
from llmcli.errors import NotFinite, UsageError
from llmcli.graph.block import block_names
from llmcli.graph.edited import EditRequest
from llmcli.graph.graph import graph
from llmcli.inspect.edits import Change, apply_edits, known_places
from llmcli.inspect.kernel import layer_of
from llmcli.inspect.sweep import Sweep
from llmcli.model import Model, dtype_name
from llmcli.nn.step import Edit, Tap
from llmcli.records.document import ViewCheck
from llmcli.records.numbers import counted
from llmcli.records.work import Progress, no_progress
from llmcli.shell.answer import Answer
from llmcli.weights.packed import Packed

ALONE = 3  # cells that are run again, each in passes of its own
# By how many roundings, each as large as the largest number, two runs may differ, in float32 and
# more, and in 16 bits: in the head alone, and in all layers. Measured, the worst of all small
# models: 2.9 and 0, 57 and 19; 44 between prompts of other lengths with MKL's oldest kernels.
HEAD_ROUNDINGS, NARROW_HEAD_ROUNDINGS, ROUNDINGS, NARROW_ROUNDINGS = 64, 2, 256, 32
KEPT_ROUNDINGS = 4  # the same for what a cache and packed products round; of smollm2 0.3

Pairs = Sequence[tuple[int, int]]
Ran = tuple[dict[str, Tensor], Tensor]  # activations without a batch axis; logits `[V]`
Run = Callable[[Sequence[Edit], Tap], Iterable[tuple[list[int], Tensor]]]  # as `Sweep.run`


@dataclass(frozen=True, kw_only=True)
class PatchRequest:
    """What is patched: the activations `names`, one of each layer, which are called `what`.

    `by` None: by head where there are heads. `positions`: of the clean prompt, None for all. `to`:
    the receiver of path patching, as an edit of it.
    """

    what: str
    names: Sequence[str]
    answer: Answer
    by: By | None = None
    noising: bool = False
    positions: Collection[int] | None = None
    to: EditRequest | None = None


class Cell(NamedTuple):
    """What one run patches: one of the aligned positions (its index), or a head at all of them."""

    name: str
    at: int | None = None
    head: int | None = None


def align(clean: Sequence[int], corrupted: Sequence[int]) -> tuple[Pairs, int]:
    """The positions of both prompts that are the same place, and how many tokens begin both.

    All of prompts of as many tokens; of others those of the same tokens at both ends. Raises
    UsageError where nothing differs, or those of other lengths do not end with the same token.
    """
    if tuple(clean) == tuple(corrupted):
        raise UsageError("both prompts have the same tokens: there is nothing to patch")
    begin, sizes = _same(clean, corrupted), (len(clean), len(corrupted))
    if sizes[0] == sizes[1]:
        return [(at, at) for at in range(sizes[0])], begin
    begin = min(begin, min(sizes) - 1)  # the last of both is the same place
    end = min(_same(clean[::-1], corrupted[::-1]), min(sizes) - begin)
    if not end:
        raise UsageError(
            f"the prompts have {sizes[0]} and {counted(sizes[1], 'token')} and end differently: "
            "their positions cannot be aligned",
            hint="`llmcli tokens` shows them; choose words of as many tokens",
        )
    ends = [(sizes[0] - at, sizes[1] - at) for at in range(end, 0, -1)]
    return [*((at, at) for at in range(begin)), *ends], begin


def _same(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(some), len(others)))


def measure_patch(
    model: Model,
    clean: Sequence[int],
    corrupted: Sequence[int],
    request: PatchRequest,
    *,
    rows: int | None = None,
    progress: Progress = no_progress,
) -> PatchReport:
    """Runs one prompt with each of the other one's activations in turn, `rows` at a time.

    Raises UsageError for prompts that cannot be aligned, activations that cannot be patched, and
    an answer whose number is the same in both; NotFinite.
    """
    both = _Both(model, clean, corrupted, request)
    sweep = Sweep(model, both.ids, since=both.first, rows=rows, progress=progress)
    cells = both.cells()
    patched = [cell for cell in cells if cell.at is None or cell.at >= both.first]
    reached = zip(patched, both.received(list(map(both.edit, patched)), sweep.run), strict=True)
    to_run = {cell: edit for cell, edit in reached if edit is not None}
    edits = list(to_run.values())
    nothing = Edit(name=request.names[len(request.names) // 2], fn=lambda x, positions: x)
    found, apart = [0.0] * (len(edits) + 2), 0.0
    for some, logits in sweep.run([*edits, nothing, both.everything]):
        for number, logits_V in zip(some, logits[:, -1].double().cpu(), strict=True):
            found[number] = both.number(logits_V)
            if number == len(edits):
                apart = float((logits_V - both.base_V).abs().max())
    after = dict(zip(to_run, found, strict=False))
    judged = {cell: both.judged(cell, after.get(cell, both.before)) for cell in cells}
    versus = both.answer.versus
    return PatchReport(
        dtype=dtype_name(model.dtype),
        what=request.what,
        by=both.by,
        noising=request.noising,
        to=None if request.to is None else request.to.text,
        clean=model.tokens(clean),
        corrupted=model.tokens(corrupted),
        aligned=tuple(both.pairs),
        first=both.first,
        positions=tuple(both.pairs[at][0] for at in both.chosen),
        answer=model.tokens([both.answer.answer or 0])[0],
        versus=None if versus is None else model.tokens([versus])[0],
        clean_number=both.numbers[0],
        corrupted_number=both.numbers[1],
        layers=len(model.config.layers),
        cells=tuple(judged.values()),
        checks=tuple(both.checks(judged, apart, found[-1])),
    )


class _Both:
    """The runs of both prompts: the `base` gets activations of the other one.

    `numbers`: the answer's, clean and corrupted; `goal` and `before`: the other's and the base's.
    """

    def __init__(
        self, model: Model, clean: Sequence[int], corrupted: Sequence[int], request: PatchRequest
    ) -> None:
        self.model, self._request, self._sizes = model, request, (len(clean), len(corrupted))
        self.pairs, self.first = align(clean, corrupted)
        if len(clean) != len(corrupted) and model.decoder.by_length:
            self.first = 0  # rotations depend on the length
        self.chosen = [
            at for at, pair in enumerate(self.pairs)
            if request.positions is None or pair[0] in request.positions
        ]  # fmt: skip
        self.by = self._by()
        receivers = [] if request.to is None else list(request.to.places)
        apply_edits(model, [clean, corrupted])
        check_edits(model.config, [*request.names, *receivers])
        self._last = f"blocks.{len(model.config.layers) - 1}.resid_post"
        kept = {self._last, *request.names}
        if receivers:
            kept.update(name for sender in request.names for name in self._others(sender))
        runs = [_run(model, ids, kept) for ids in (clean, corrupted)]
        largest = max(float(logits_V.abs().max()) for _, logits_V in runs)
        if not math.isfinite(largest):
            raise NotFinite("the logits are not finite", dtype=dtype_name(model.dtype))
        narrow, eps = model.dtype.itemsize == 2, torch.finfo(model.dtype).eps
        self._near = eps * (NARROW_HEAD_ROUNDINGS if narrow else HEAD_ROUNDINGS)
        weights = map(model.decoder.weight, model.decoder.weight_names)
        digits = [2.0 ** (1 - 8 * one.digits) for one in weights if isinstance(one, Packed)]
        coarse = max([torch.finfo(model.decoder.cache_dtype).eps, *digits])
        self._far = eps * (NARROW_ROUNDINGS if narrow else ROUNDINGS) + KEPT_ROUNDINGS * coarse
        self._largest = largest
        self.answer = _known(request.answer, *(logits_V for _, logits_V in runs))
        self.numbers = [self.number(logits_V) for _, logits_V in runs]
        if abs(self.numbers[0] - self.numbers[1]) <= self._near * largest:
            raise UsageError(
                f"the answer's number is {self.numbers[0]:.5g} in both prompts: there is nothing "
                "to restore",
                hint="name tokens whose logits differ with `--answer` and `--versus`",
            )
        turn = -1 if request.noising else 1
        (self._other, _), (self._base, self.base_V) = runs[::turn]
        self.goal, self.before = self.numbers[::turn]
        self._places = [(b, a) if request.noising else (a, b) for a, b in self.pairs]
        self._tokens = self._sizes[::turn]
        self.ids = (corrupted, clean)[request.noising]

    def _by(self) -> By:
        """Whether positions or heads are patched. Raises UsageError for what does not fit."""
        request, model = self._request, graph(self.model.config)
        heads = all(model[name].axes[0] != "T" for name in request.names)
        if request.by == "head" and not heads:
            raise UsageError(f"`{request.what}` has no heads", hint="use `--by position`")
        if self._sizes[0] != self._sizes[1] and any("S" in model[n].axes for n in request.names):
            raise UsageError(f"`{request.what}` has a number for each key: the prompts have to "
                             "have as many tokens")  # fmt: skip
        if not self.chosen:
            raise UsageError("`--position` has none of the positions that are aligned")
        return request.by or ("head" if heads else "position")

    def number(self, logits_V: Tensor) -> float:
        """The answer's number."""
        return float(self.answer.of(logits_V))

    def cells(self) -> list[Cell]:
        """What is patched, layer by layer."""
        if self.by == "position":
            return [Cell(name, at=at) for name in self._request.names for at in self.chosen]
        return [
            Cell(name, head=head)
            for name in self._request.names for head in range(self._other[name].shape[0])
        ]  # fmt: skip

    def edit(self, cell: Cell) -> Edit:
        """The edit of the base run that patches one cell."""
        chosen = self.chosen if cell.at is None else [cell.at]
        return self._from_other(cell.name, [self._places[at] for at in chosen], cell.head)

    @property
    def everything(self) -> Edit:
        """The edit of all that the logits are made of."""
        return self._from_other(self._last, self._places)

    def _from_other(self, name: str, places: Pairs, head: int | None = None) -> Edit:
        return Edit(name=name, fn=_put(self._other[name], self._tokens[0], places, head))

    def judged(self, cell: Cell, number: float) -> PatchCell:
        """The cell with the number that its run gave."""
        clean, corrupted = self.numbers
        return PatchCell(
            name=cell.name,
            layer=layer_of(cell.name) or 0,
            position=None if cell.at is None else self.pairs[cell.at][0],
            head=cell.head,
            number=number,
            value=(number - corrupted) / (clean - corrupted),
        )

    def received(self, edits: Sequence[Edit], run: Run) -> Sequence[Edit | None]:
        """For each sender's edit one of the receiver: what reaches it from there directly.

        That is the receiver's value where, beside the sender, only the stream and the receiver
        itself change: what all others add to the stream is as in the base. None where the
        receiver comes before the sender.
        """
        if self._request.to is None:
            return edits
        request, decoder = replace(self._request.to, verb="from"), self.model.decoder
        ((name, given),) = request.places.items()
        places = known_places(given, len(self.ids), request)
        if (dict(places)["T"][0] or 0) >= len(self.ids):
            raise UsageError(
                f"`{request.given}`: the prompt has {counted(len(self.ids), 'token')}",
                hint=f"positions go from 0 to {len(self.ids) - 1}; -1 is the last",
            )
        unchanged = Edit(name=name, fn=lambda x, positions: x)
        found, held = list[Edit | None]([None] * len(edits)), decoder.edits
        for sender in self._request.names:
            own = [number for number, edit in enumerate(edits) if edit.name == sender]
            seen = dict[str, Tensor]()
            rows = [(at, at) for at in range(len(self.ids))]
            frozen = [
                Edit(name=one, fn=_put(self._base[one], len(self.ids), rows))
                for one in self._others(sender)
            ]
            decoder.edits = (*held, *frozen, unchanged)  # so that fused kernels store it
            try:
                for some, _ in run([edits[number] for number in own], seen.__setitem__):
                    for row, number in enumerate(some if name in seen else ()):
                        value = seen[name][row].clone()
                        first = len(self.ids) - value.shape[-2]
                        put = Change(request, name, places, value, -first, {request.text: True})
                        found[own[number]] = Edit(name=name, fn=put)
            finally:
                decoder.edits = held
        return found

    def _others(self, sender: str) -> list[str]:
        """What is added to the stream from the sender's layer on, but by what it is part of."""
        layer, found = layer_of(sender) or 0, list[str]()
        for number, config in enumerate(self.model.config.layers[layer:], layer):
            for sublayer in block_names(config, f"blocks.{number}"):
                own = [
                    one for one in sublayer.branches
                    if sender.startswith((f"{one.part}.", f"{one.norm}.", f"{one.post}."))
                    or sender in (one.residual_update, one.output)
                    or sender == one.reads != sublayer.stream
                ]  # fmt: skip
                rest = [one.residual_update for one in sublayer.branches if one not in own]
                found += rest if own else sublayer.residual_updates
        receivers = () if self._request.to is None else self._request.to.places
        return [name for name in found if name not in (*receivers, sender)]

    def checks(
        self, judged: Mapping[Cell, PatchCell], apart: float, whole: float
    ) -> Iterator[ViewCheck]:
        """That runs are what they are said to be.

        `apart`: the logits without a patch from those of the base; `whole`: the number with all of
        the last stream patched.
        """
        names = ["clean", "corrupted"][:: -1 if self._request.noising else 1]
        yield ViewCheck(
            name="all",
            words=f"all of the last layer's output patched gives the {names[0]} run's number",
            value=abs(whole - self.goal),
            tolerance=self._near * self._largest,
        )
        yield ViewCheck(
            name="nothing",
            words=f"without a patch the logits are those of the {names[1]} run",
            value=apart,
            tolerance=self._far * self._largest,
        )
        before = {name: self._before(name) for name in self._request.names}
        where = max(before, key=before.__getitem__)
        yield ViewCheck(
            name="before",
            words="before the first token that differs, both runs have the same activations",
            value=before[where],
            tolerance=self._near,
            where=where,
        )
        strongest = sorted(judged, key=lambda cell: -abs(judged[cell].number - self.before))
        alone = {cell: abs(self._alone(judged[cell]) - judged[cell].number)
                 for cell in strongest[:ALONE]}  # fmt: skip
        worst = max(alone, key=alone.__getitem__)
        yield ViewCheck(
            name="alone",
            words="the strongest places, each in a pass of its own",
            value=alone[worst],
            tolerance=self._far * self._largest,
            where=worst.name,
        )

    def _before(self, name: str) -> float:
        """How far the tokens before the first difference are apart, relative."""
        runs = zip((self._other[name], self._base[name]), self._tokens, strict=True)
        ends = [(x, max(0, self.first - tokens + x.shape[-2])) for x, tokens in runs]
        a, b = (x[..., :end, :].double() for x, end in ends)
        apart = torch.where(a == b, 0.0, (a - b).abs())
        return float(apart.max() / b[b.isfinite()].abs().max()) if apart.numel() else 0.0

    def _alone(self, cell: PatchCell) -> float:
        """The number of a cell of the report, without anything that a sweep shares."""

        def run(
            edits: Sequence[Edit], tap: Tap | None = None
        ) -> Iterator[tuple[list[int], Tensor]]:
            ids = torch.tensor([self.ids], device=self.model.device)
            for number, edit in enumerate(edits):
                yield [number], self.model.decoder(ids, edits=[edit], tap=tap, logits="last")

        index = {pair[0]: at for at, pair in enumerate(self.pairs)}
        at = None if cell.position is None else index[cell.position]
        (edit,) = self.received([self.edit(Cell(cell.name, at, cell.head))], run)
        if edit is None:
            return self.before
        ((_, logits),) = run([edit])
        return self.number(logits[0, -1].double().cpu())


def _put(
    value: Tensor, tokens: int, places: Pairs, head: int | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of an edit: rows of another run's activation, or of one head, at their places.

    `value` has the rows of the last of that run's `tokens`; what is computed for the last token
    alone has one row.
    """
    missing = tokens - value.shape[-2]

    def fn(x: Tensor, positions: Tensor) -> Tensor:
        first = int(positions.flatten()[0])
        rows = [(a - missing, b - first) for a, b in places if a >= missing and b >= first]
        theirs, ours = [a for a, _ in rows], [b for _, b in rows]
        if head is None:
            x[..., ours, :] = value[..., theirs, :].to(x.device)
        else:
            x[:, head, ours] = value[head, theirs].to(x.device)
        return x

    return fn


def _run(model: Model, ids: Sequence[int], names: Collection[str]) -> Ran:
    """The activations of a plain pass, and its last token's logits in float64."""
    found: dict[str, Tensor] = {}

    def tap(name: str, tensor: Tensor) -> None:
        if name in names:
            found[name] = tensor[0].clone()

    # edited, so that fused kernels store them too
    same = [Edit(name=name, fn=lambda x, positions: x) for name in names]
    logits = model.decoder(
        torch.tensor([ids], device=model.device), tap=tap, edits=same, logits="last"
    )
    return found, logits[0, -1].double().cpu()


def _known(answer: Answer, clean_V: Tensor, corrupted_V: Tensor) -> Answer:
    """With no token named: the clean prompt's top token, against the corrupted one's."""
    found = answer.known(clean_V)
    top = int(corrupted_V.argmax())
    named = answer.answer is not None or answer.versus is not None or top == found.answer
    return found if named else replace(found, versus=top)
