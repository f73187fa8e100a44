"""The tensors of one prompt: as the fast kernel computed them, and as the rules do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from llmcli.explain.rule import Rule
from llmcli.model import Model

Progress = Callable[[str, int, int | None], None]

# what a fused kernel never writes: computed from what it wrote, in its own dtype
UNWRITTEN = {"scores": "q and k", "pattern": "q and k", "result": "z"}

# the largest ones, which one formula alone needs: computed again rather than kept
_NOT_KEPT = ("scores", "pattern", "gate", "up", "act", "pre", "post")

_AT_ONCE = 6  # so many float64 tensors as large as the largest exist at the same time


class Values:
    """Every activation of `ids` by name, float64 on the CPU, without a batch axis.

    `values[name]` is derived by its rule where it is fewer than `depth` formulas away from
    `target` (None: always), and else the kernel's own. `texts` are the tokens for people.
    """

    def __init__(
        self,
        model: Model,
        rules: Mapping[str, Rule],
        ids: Sequence[int],
        texts: Sequence[str],
        *,
        target: str,
        depth: int | None,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.rules = rules
        self.ids = tuple(ids)
        self.texts = tuple(texts)
        self.depth = depth
        self.progress = progress
        self.eps: float = torch.finfo(model.dtype).eps
        self.derived: set[str] = set()
        self.whole: set[str] = set()  # of these every number
        self._distance = _distances(rules, target)
        if depth is not None and depth > max(self._distance.values()):
            self.depth = None  # that is all of it
        self._known: dict[str, Tensor] = {}
        self._in_a_row: dict[str, int] = {}
        self._emitted: dict[str, Tensor] = {}
        model.decoder(
            torch.tensor([self.ids], device=model.device), tap=self._tap, until=_last_layer(target)
        )

    def _tap(self, name: str, tensor: Tensor) -> None:
        self._emitted[name] = tensor[0]

    def derives(self, name: str) -> bool:
        """Whether `values[name]` follows from a rule; the kernel's own is taken where not."""
        if self.depth == 0:
            return name.rpartition(".")[2] in ("scores", "pattern")
        return self.depth is None or self._distance.get(name, self.depth) < self.depth

    def own(self) -> Values:
        """The same with the kernel's own numbers as inputs of every formula.

        What a fused kernel never writes is derived from what it wrote.
        """
        own = copy(self)
        own.depth, own.progress = 0, None
        own._known, own.derived, own.whole = {}, set(), set()
        return own

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
        self.derived.add(name)
        self.whole.add(name)
        return tensor

    def tell(self, what: str) -> None:
        """That something goes on."""
        if self.progress is not None:
            self.progress(what, len(self.derived), len(self._distance))

    def kernel(self, name: str) -> Tensor:
        """What the decoder computed, as a whole."""
        return exact(self._written(name))

    def kernel_row(self, name: str, index: tuple[int, ...]) -> Tensor:
        """The row of it in which the number at `index` stands."""
        return exact(self._written(name)[index[:-1]])

    def _written(self, name: str) -> Tensor:
        """As the tap saw it.

        What a fused kernel never writes is computed by the mixer from what it emitted.
        """
        return self._emitted[name] if name in self._emitted else self._unfused(name)

    def _unfused(self, name: str) -> Tensor:
        prefix, _, last = name.rpartition(".")
        layer = _layer(name)
        if layer is None or last not in UNWRITTEN:
            raise KeyError(name)
        mixer = self.model.decoder.blocks[layer].mixer
        if last == "result":
            z_HTe = self._emitted[f"{prefix}.z"]
            heads, _, size = z_HTe.shape
            w_HeD = mixer.out.weight.t().reshape(heads, size, -1)
            return z_HTe @ w_HeD
        q, k = (
            next(
                self._emitted[f"{prefix}.{part}{form}"]
                for form in ("_rot", "_norm", "")
                if f"{prefix}.{part}{form}" in self._emitted
            )[None]
            for part in "qk"
        )
        rows = mixer.score_rows if last == "scores" else mixer.attention_rows
        derived: Tensor = rows(q, k, 0)[0]
        return derived

    def weight(self, name: str) -> Tensor:
        """A parameter in the formula's orientation (`Q = T W_q`), in its own dtype and place."""
        slots = self.model.decoder.slots
        if name == "head.W" and name not in slots:
            return slots["embed.W"].t()
        return slots[name].t() if name == "head.W" or ".W_" in name else slots[name]

    def vector(self, name: str) -> Tensor:
        """A parameter that is a vector, float64 on the CPU."""
        return exact(self.weight(name))


def needed_bytes(
    rules: Mapping[str, Rule],
    sizes: Mapping[str, tuple[int, ...]],
    target: str,
    depth: int | None,
    itemsize: int,
) -> tuple[int, int]:
    """About the bytes of what a tap sees up to `target`, on the device, and of what is derived.

    Derived are the tensors that are kept, and while one is derived and checked some more as large
    as the largest: its inputs, its magnitudes, what they are compared with.
    """
    last = _last_layer(target)
    seen = [
        name
        for name in rules
        if name.rpartition(".")[2] not in UNWRITTEN
        and (last is None or (_layer(name) is None and "embed" in name) or _before(name, last))
    ]
    far = _distances(rules, target)
    near = {name for name, at in far.items() if depth is None or at < depth}
    if any(name.rpartition(".")[2] in ("pattern", "z") for name in near):  # of scores
        near |= {name for name in far if name.rpartition(".")[2] in UNWRITTEN}
    whole = {name: math.prod(sizes[name]) for name in near if name != target or _squares(name)}
    kept = sum(n for name, n in whole.items() if name.rpartition(".")[2] not in _NOT_KEPT)
    at_once = _AT_ONCE * max(whole.values(), default=0)
    return itemsize * sum(math.prod(sizes[name]) for name in seen), 8 * (kept + at_once)


def _before(name: str, last: int) -> bool:
    layer = _layer(name)
    return layer is not None and layer <= last


def _squares(name: str) -> bool:
    return name.rpartition(".")[2] in ("scores", "pattern")


def exact(tensor: Tensor) -> Tensor:
    """A copy of the same numbers in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64, copy=True)


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def _last_layer(name: str) -> int | None:
    """The last block that has to be run for it, None for the whole model."""
    return 0 if name in ("embed", "pos_embed") else _layer(name)


def _distances(rules: Mapping[str, Rule], target: str) -> dict[str, int]:
    """How many formulas every activation is away from `target`, by the shortest way."""
    found = {target: 0}
    pending = [target]
    for name in pending:
        for source in rules[name].inputs:
            if source not in found:
                found[source] = found[name] + 1
                pending.append(source)
    return found
