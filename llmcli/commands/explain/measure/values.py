"""The tensors of one prompt: as the fast kernel computed them, and as the rules do.

And every formula alone: what it makes of the kernel's own inputs is the kernel's own output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from llmcli.anatomy.graph import graph
from llmcli.commands.explain.report import LocalCheck
from llmcli.config import ModelConfig
from llmcli.graph.evaluation.rule import Rule, concatenated, settled
from llmcli.inspect.formulas import number_found, worst_number
from llmcli.inspect.kernel import Kernel, layer_of, rules
from llmcli.model import Model
from llmcli.records.progress import Progress
from llmcli.records.text import Token

# the largest ones, which one formula alone needs: computed again rather than kept
_NOT_KEPT = ("scores", "pattern", "gate", "up", "act", "pre", "post")

# How far the kernel may be from the derivation, in roundings (eps) of the largest number of the
# row. The roundings of a kernel are about independent, so that their sum grows as the square root
# of how many formulas follow one another: ROUNDINGS · √formulas. Measured, the worst of all
# numbers of 250 tokens: 23 · √formulas with smollm2, 5 with tiny.
ROUNDINGS = 100

Size = TypeVar("Size", float, Tensor)
Indices = Sequence[tuple[int, ...]]

_AT_ONCE = 6  # so many float64 tensors as large as the largest exist at the same time


class Values(Kernel):
    """Every activation of `tokens` by name, float64 on the CPU, without a batch axis.

    `values[name]` is derived by its rule where it is fewer than `depth` formulas away from
    `target` (None: always), and else the kernel's own.
    """

    def __init__(
        self,
        model: Model,
        rules: Mapping[str, Rule[Any]],
        tokens: Sequence[Token],
        *,
        target: str,
        depth: int | None,
        progress: Progress | None = None,
    ) -> None:
        emitted: dict[str, Tensor] = {}
        count = len(tokens)
        super().__init__(
            model,
            rules,
            [token.id for token in tokens],
            [token.text for token in tokens],
            emitted=emitted,
            positions=range(count),
            prompt_tokens=count,
            alone=[count == 1] * count,
        )
        self.depth = depth
        self.progress = progress
        self.derived: set[str] = set()
        self.whole: set[str] = set()  # of these every number
        self._distance = _distances(rules, target)
        if depth is not None and depth > max(self._distance.values()):
            self.depth = None  # that is all of it
        self._known: dict[str, Tensor] = {}
        self._in_a_row: dict[str, int] = {}

        def tap(name: str, tensor: Tensor) -> None:
            emitted[name] = tensor[0]

        one = torch.tensor([self.ids], device=model.device)
        model.decoder(one, tap=tap, until=_last_layer(target))

    def derives(self, name: str) -> bool:
        """Whether `values[name]` follows from a rule; the kernel's own is taken where not."""
        return self.depth is None or self._distance.get(name, self.depth) < self.depth

    def read(self, name: str, weight: str) -> Tensor:
        """As its kernel reads it; where that is a coin flip, as it read its own numbers."""
        read_TK = super().read(name, weight)
        if not self.derives(name) or not self.rounded(weight):
            return read_TK
        kernel_TK = concatenated(self.kernel(name))
        off_T1 = self.allowed(name, kernel_TK.abs().amax(-1, keepdim=True) + self.least)
        return settled(concatenated(self[name]), read_TK, self._seen(kernel_TK, weight), off_T1)

    def allowed(self, name: str, magnitude: Size) -> Size:
        """How far numbers of that tensor may be from the kernel's."""
        return ROUNDINGS * math.sqrt(self.formulas(name)) * self.eps * magnitude

    def uncertainty(self, name: str, magnitude: Tensor) -> Tensor:
        """As far as roundings add up to, where it is derived."""
        if not self.derives(name):
            return super().uncertainty(name, magnitude)
        return self.allowed(name, magnitude + self.least)

    def own(self) -> Kernel:
        """The kernel's own numbers as inputs of every formula.

        What a fused kernel never writes is derived from what it wrote.
        """
        return Kernel(
            self.model, self.rules, self.ids, self.texts, emitted=self.emitted,
            positions=self.positions, prompt_tokens=self.prompt_tokens, alone=self.alone,
        )  # fmt: skip

    def formulas(self, name: str) -> int:
        """How many formulas follow one another up to `name`, at least its own."""
        if not self._in_a_row:
            for other, rule in self.rules.items():
                before = [self._in_a_row[source] for source in rule.inputs]
                derived = self.derives(other)
                self._in_a_row[other] = max(before, default=0) + 1 if derived else 0
        return max(1, self._in_a_row[name])

    def __getitem__(self, name: str) -> Tensor:
        if not self.derives(name):
            return self.kernel(name)
        if name not in self._known:
            for earlier in self._missing(name):
                self._known[earlier] = self._derive(earlier)
        return self._known[name] if name in self._known else self._derive(name)

    def every(self, name: str, rows: slice = slice(None)) -> Tensor:
        """All positions are known: rows of `self[name]`."""
        return self[name][..., rows, :]

    def _missing(self, name: str) -> list[str]:
        """What has to be derived for `name`, itself included, in execution order.

        Worked off from the front, for a deep model has more formulas in a row than Python nests
        calls.
        """
        found = {name}
        pending = [name]
        for wanted in pending:
            for source in self.rules[wanted].inputs:
                if source not in self._known and source not in found and self.derives(source):
                    found.add(source)
                    pending.append(source)
        return [n for n in self.rules if n in found and n.rpartition(".")[2] not in _NOT_KEPT]

    def _derive(self, name: str) -> Tensor:
        if name not in self.derived:
            self.tell("deriving")
        tensor = self.rules[name].tensor(self)
        if self.graph.written(name):
            theirs = self.kernel(name)
            off = self.allowed(name, theirs.abs().amax(-1, keepdim=True) + self.least)
            tensor = self.as_kept(name, tensor, theirs, off)
        self.derived.add(name)
        self.whole.add(name)
        return tensor

    def tell(self, what: str) -> None:
        """Reports progress."""
        if self.progress is not None:
            self.progress(what, len(self.derived), len(self._distance))


def local(values: Values, shown: Mapping[str, Indices]) -> LocalCheck | None:
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
        for index in shown.get(name, ()):
            element = own.rules[name].element(own, index)
            found.append(number_found(own, name, index, element.value, element.magnitude))
    if not found:
        return None
    wrong = [one for one in found if one.share > 1]
    most = wrong[0] if wrong else max(found, key=lambda one: one.share)
    return LocalCheck(
        formulas=sum(map(len, shown.values())),
        tensors=len(values.whole),
        name=most.name,
        index=most.index,
        derived=most.derived,
        kernel=most.kernel,
        tolerance=most.allowed,
    )


def needed_bytes(
    config: ModelConfig,
    sizes: Mapping[str, tuple[int, ...]],
    target: str,
    depth: int | None,
    itemsize: int,
) -> tuple[int, int]:
    """About the bytes of what a tap sees up to `target`, on the device, and of what is derived.

    Derived are the tensors that are kept, and while one is derived and checked some more as large
    as the largest: its inputs, its magnitudes, what they are compared with.
    """
    known, model = rules(config), graph(config)
    last = _last_layer(target)

    def runs(name: str) -> bool:
        """Whether it is computed up to the last block."""
        layer = layer_of(name)
        return last is None or ("embed" in name if layer is None else layer <= last)

    seen = [name for name in known if model.written(name) and runs(name)]
    far = _distances(known, target)
    near = {name for name, at in far.items() if depth is None or at < depth}
    if any(name.rpartition(".")[2] in ("pattern", "z") for name in near):  # of scores
        near |= {name for name in far if not model.written(name)}
    whole = {
        name: math.prod(sizes[name])
        for name in near
        if name != target or name.endswith((".scores", ".pattern"))
    }
    kept = sum(n for name, n in whole.items() if name.rpartition(".")[2] not in _NOT_KEPT)
    at_once = _AT_ONCE * max(whole.values(), default=0)
    return itemsize * sum(math.prod(sizes[name]) for name in seen), 8 * (kept + at_once)


def _last_layer(name: str) -> int | None:
    """The last block that has to be run for it, None for the whole model."""
    return 0 if name in ("embed", "pos_embed") else layer_of(name)


def _distances(rules: Mapping[str, Rule[Any]], target: str) -> dict[str, int]:
    """How many formulas every activation is away from `target`, by the shortest way."""
    found = {target: 0}
    pending = [target]
    for name in pending:
        for source in rules[name].inputs:
            if source not in found:
                found[source] = found[name] + 1
                pending.append(source)
    return found
