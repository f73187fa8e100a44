"""One number, derived: the tensors of a prompt as the kernel and the rules compute them, and steps.

A tree of steps leads from the number to its inputs, each step compared with the kernel's number.
And every formula is checked alone: what it makes of the kernel's own inputs is its own output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from llmcli import devices
from llmcli.commands.explain.report import (
    Check,
    Coordinate,
    Explanation,
    Letter,
    LocalCheck,
    Step,
)
from llmcli.config.model import ModelConfig
from llmcli.engine.session import Session
from llmcli.errors import NotFinite
from llmcli.evaluate.attention import Softmax
from llmcli.evaluate.rule import Rule, concatenated, settled, symbol
from llmcli.graph.graph import graph
from llmcli.graph.indexed import NumberRef
from llmcli.graph.ops import Mix
from llmcli.graph.spec import TensorSpec
from llmcli.inspect.formulas import number_found, worst_number
from llmcli.inspect.kernel import Kernel, last_layer, layer_of, origin, rules
from llmcli.inspect.numbers import axis_words, shape_in_letters
from llmcli.model import Model, dtype_name
from llmcli.records.explanation import Cell, Element, Fact
from llmcli.records.text import Token
from llmcli.records.work import Progress, no_progress

if TYPE_CHECKING:
    from llmcli.text import Tokenizer

# the largest ones, which one formula alone needs: computed again rather than kept
_NOT_KEPT = ("scores", "pattern", "gate", "up", "act", "pre", "post")

# How far the kernel may be from the derivation, in roundings (eps) of the largest number of the
# row. The roundings of a kernel are about independent, so that their sum grows as the square root
# of how many formulas follow one another: ROUNDINGS · √formulas. Measured, the worst of all
# numbers of 250 tokens: 23 · √formulas with smollm2, 5 with tiny.
ROUNDINGS = 100

BRANCHING = 4  # so many steps deep every important input is followed, below only the first one

Size = TypeVar("Size", float, Tensor)

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
        progress: Progress = no_progress,
    ) -> None:
        emitted: dict[str, Tensor] = {}
        ids, texts = [token.id for token in tokens], [token.text for token in tokens]
        super().__init__(model, rules, ids, texts, emitted=emitted)
        self.depth = depth
        self.progress = progress
        self.derived: set[str] = set()
        self.whole: set[str] = set()  # of these every number
        self._distance = _distances(rules, target)
        if depth is not None and depth > max(self._distance.values()):
            self.depth = None  # that is all of it
        self._known: dict[str, Tensor] = {}
        self._in_a_row: dict[str, int] = {}
        self._mixed: dict[tuple[int, int, int], None] = {}  # rows of patterns, in order

        def tap(name: str, tensor: Tensor) -> None:
            emitted[name] = tensor[0]

        one = torch.tensor([self.ids], device=model.device)
        model.decoder(one, tap=tap, until=last_layer([target]))

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
        return Kernel.of(self, self.positions, self.alone)

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
        self.progress(what, len(self.derived), len(self._distance))

    def steps(self, root: Cell, specs: Mapping[str, TensorSpec]) -> tuple[Step, ...]:
        """The number and, to `depth`, those that it follows from, each before its inputs.

        A number that several need is one step. Worked off from a list, for the way to the
        embedding rows can be longer than Python nests calls.
        """
        found: dict[Cell, Element] = {}
        pending = [(root, 0)]
        while pending:
            cell, level = pending.pop()
            if cell not in found:
                found[cell] = element = self._element(cell, level)
                pending += [(source, level + 1) for source in reversed(element.follow)]
        numbers = {cell: number for number, cell in enumerate(found, 1)}
        return tuple(
            self._step(cell, specs[cell[0]], element, numbers) for cell, element in found.items()
        )

    def _element(self, cell: Cell, level: int) -> Element:
        """The number with the inputs that are followed from it: deep down only the first."""
        name, index = cell
        if not self.derives(name):
            return Element(value=float(self[name][index]))
        self.derived.add(name)
        element = self._kept(cell, self.rules[name].element(self, index))
        if self.depth is not None and level >= self.depth:
            return replace(element, follow=())
        return element if level < BRANCHING else replace(element, follow=element.follow[:1])

    def _kept(self, cell: Cell, element: Element) -> Element:
        """With its rounding where a cache keeps it in fewer bits than it is computed in."""
        name, index = cell
        if not self.is_kept(name):
            return element
        theirs = self.kernel(name, *index)
        off = self.allowed(name, self.rules[name].magnitude(self, index))
        kept = float(self.as_kept(name, theirs.new_tensor(element.value), theirs, off))
        dtype = dtype_name(self.model.decoder.cache_dtype)
        words = f"as the cache keeps it: {dtype}({{}})"
        rounding = Fact(formula=words, parts=(element.value,), value=kept)
        return replace(element, value=kept, after=(*element.after, rounding))

    def _step(
        self, cell: Cell, spec: TensorSpec, element: Element, numbers: Mapping[Cell, int]
    ) -> Step:
        name, index = cell
        rule = self.rules[name]
        theirs = float(self.kernel(name, *index))
        self._require_finite(name, index, element.value, theirs)
        magnitude = rule.magnitude(self, index)
        self._require_finite(name, (), magnitude)
        if name.endswith((".scores", ".pattern")):
            self._mixed[self.graph[name].layer or 0, index[0], index[1]] = None
        recomputed = ""
        if not self.graph.written(name):  # `the kernel's q and k`
            leaves = (source.rpartition(".")[2] for source in self.graph.sources(name))
            parts = " and ".join(leaf.partition("_")[0] for leaf in leaves)
            recomputed = f"the kernel's {parts}"
        return Step(
            **vars(element),
            number=numbers[cell],
            name=name,
            index=index,
            symbol=symbol(rule.letter, *index),
            formula=rule.formula,
            shape=shape_in_letters(spec),
            where=where(spec, index, self.texts, self.model.tokenizer),
            source="derived" if self.derives(name) else "kernel",
            kernel=theirs,
            tolerance=self.allowed(name, magnitude),
            recomputed=recomputed,
            children=tuple(numbers[source] for source in element.follow),
        )

    def _require_finite(self, name: str, index: tuple[int, ...], *found: float) -> None:
        for value in found:
            masked = name.endswith(".scores") and value == -math.inf
            if not math.isfinite(value) and not masked:
                raise NotFinite(
                    f"`{symbol(name, *index)}` is {value}" if index else f"`{name}` is not finite",
                    dtype=dtype_name(self.model.dtype),
                )

    def checks(self) -> tuple[Check, ...]:
        """For derived rows of patterns: weights times values, compared with the kernel's z."""
        return tuple(self._mixes(*row) for row in self._mixed)

    def _mixes(self, layer: int, head: int, query: int) -> Check:
        node = self.graph.mixers.get(layer)
        assert node is not None
        assert isinstance(node.op, Mix)
        above = self.rules[node.op.pattern]
        if isinstance(above, Softmax):
            row_S = above.row_of(self, head, query)
        else:
            row_S = self[node.op.pattern][head, query]
        v_Se = self[node.op.value][head // node.op.group]
        derived_e = (row_S[:, None] * v_Se).sum(0)
        kernel_e = self.kernel(node.name)[head, query]
        at = int((derived_e - kernel_e).abs().argmax())
        derived, kernel = float(derived_e[at]), float(kernel_e[at])
        self._require_finite(node.name, (head, query, at), derived, kernel)
        magnitude = float(v_Se[row_S > 0].abs().max()) + self.least
        self._require_finite(node.name, (), magnitude)
        never = "S and A" if isinstance(above, Softmax) else self.graph.letter(node.op.pattern)
        return Check(
            words=f"the fused kernel never writes {never}, so {self.graph.formula(node)} is "
            "compared with its output "
            f"{symbol(node.name, head, query, at)}, where they differ most",
            derived=derived,
            kernel=kernel,
            tolerance=self.allowed(node.name, magnitude),
        )

    def local(self, steps: Sequence[Step]) -> LocalCheck | None:
        """The formulas of all derived steps, and of every tensor derived as a whole.

        The number that uses most of what it is allowed; where that is too much, of the first tensor
        in execution order. None where nothing was derived. Raises NotFinite where it is none.
        """
        own, found = self.own(), []
        shown: dict[str, list[Step]] = {}
        for step in steps:
            if step.source == "derived":
                shown.setdefault(step.name, []).append(step)
        for name in self.rules:
            if name in self.whole:
                self.tell("checking")
                found.append(worst_number(own, name))
            for step in shown.get(name, ()):
                element = own.rules[name].element(own, step.index)
                found.append(number_found(own, name, step.index, element.value))
        if not found:
            return None
        wrong = [one for one in found if one.share > 1]
        most = wrong[0] if wrong else max(found, key=lambda one: one.share)
        formulas = sum(map(len, shown.values()))
        return LocalCheck(**vars(most), formulas=formulas, tensors=len(self.whole))


def needed_bytes(
    config: ModelConfig,
    specs: Mapping[str, TensorSpec],
    target: str,
    depth: int | None,
    itemsize: int,
) -> tuple[int, int]:
    """About the bytes of what a tap sees up to `target`, on the device, and of what is derived.

    Derived are the tensors that are kept, and while one is derived and checked some more as large
    as the largest: its inputs, its magnitudes, what they are compared with.
    """
    known, model = rules(config), graph(config)
    last = last_layer([target])

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
        name: math.prod(specs[name].shape)
        for name in near
        if name != target or name.endswith((".scores", ".pattern"))
    }
    kept = sum(n for name, n in whole.items() if name.rpartition(".")[2] not in _NOT_KEPT)
    at_once = _AT_ONCE * max(whole.values(), default=0)
    emitted = sum(math.prod(specs[name].shape) for name in seen)
    return itemsize * emitted, 8 * (kept + at_once)


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


def derive(
    model: Model,
    tokens: tuple[Token, ...],
    specs: Mapping[str, TensorSpec],
    cell: Cell,
    *,
    depth: int | None,
    progress: Progress = no_progress,
) -> Explanation:
    """Derives one number, and compares it with the kernel's.

    `specs` are those of `inspect.numbers` for as many tokens. `depth` is how many formulas are
    followed back, None all of them, to the embedding rows and the weights; what is further away is
    taken from the kernel. Raises NotFinite where the model's own numbers are not, and OutOfMemory,
    before the model is run, where what is kept and derived does not fit.
    """
    name, index = cell
    letters, dtype = letters_of(model.config, name, len(tokens)), dtype_name(model.dtype)
    if specs[name].kind == "parameter":
        leaf = parameter_step(model, specs[name], index)
        return Explanation(
            tokens=tokens, letters=letters, depth=None, dtype=dtype, tensors=0, steps=(leaf,)
        )
    with torch.inference_mode():
        seen, derived = needed_bytes(model.config, specs, name, depth, model.dtype.itemsize)
        cpu, hint = torch.device("cpu"), "use a shorter prompt, or a small --depth"
        if model.device.type == "cpu":
            derived += seen
        else:
            devices.require_memory(seen, model.device, "the activations of the prompt", hint)
        devices.require_memory(derived, cpu, "the tensors of the derivation", hint)
        made = rules(model.config)
        values = Values(model, made, tokens, target=name, depth=depth, progress=progress)
        steps, checks = values.steps(cell, specs), values.checks()
        return Explanation(
            tokens=tokens,
            letters=letters,
            depth=values.depth,
            dtype=dtype,
            local=values.local(steps),  # derives more
            tensors=len(values.derived),
            checks=checks,
            steps=steps,
        )


def top_logit(model: Model, tokens: Sequence[Token]) -> NumberRef:
    """The largest logit of the last token."""
    with torch.inference_mode():
        session = Session(model.decoder, 1, len(tokens))
        logits_BV = session.extend([[token.id for token in tokens]], logits="last")
    return NumberRef("logits", (len(tokens) - 1, int(logits_BV[0].argmax())))


def parameter_step(model: Model, spec: TensorSpec, index: tuple[int, ...]) -> Step:
    """The number of a weight with the tensor of the checkpoint that holds it."""
    transposed = graph(model.config).parameters[spec.name].transposed
    *row, last = (*index[:-2], *index[:-3:-1]) if transposed else index
    stored = model.decoder.weight(spec.name)
    if row:  # of a matrix in blocks no more than the row is dequantized
        value = float(stored.dense(rows=slice(row[0], row[0] + 1))[(0, *row[1:], last)])
    else:
        value = float(stored.dense()[last])
    letter = spec.name.rpartition(".")[2]
    if letter == "W":  # of a table
        letter = graph(model.config).letter(spec.name)
    return Step(
        number=1,
        name=spec.name,
        index=index,
        symbol=symbol(letter, *index),
        formula=f"{letter} was learned",
        shape=shape_in_letters(spec),
        where=where(spec, index, (), model.tokenizer),
        source="weights",
        value=value,
        kernel=value,
        tolerance=0.0,
        note=origin(model, spec.name),
    )


def letters_of(config: ModelConfig, name: str, tokens: int) -> tuple[Letter, ...]:
    """The letters of the documents and what they are in this model (in the number's block)."""
    whole, parts = graph(config), name.split(".")
    layer = int(parts[1]) if parts[0] == "blocks" else 0
    sizes = whole.sizes(layer)
    found = {"n": tokens, "d": config.width}
    for axis, letter in whole.documents(layer).items():
        found.setdefault("F" if axis == "F" else letter, sizes[axis])
    found["v"] = config.vocab
    return tuple(Letter(letter=letter, value=value) for letter, value in found.items() if value)


def where(
    spec: TensorSpec, index: Sequence[int], texts: Sequence[str], tokenizer: Tokenizer | None
) -> tuple[Coordinate, ...]:
    """An index in words, with the tokens that stand there."""
    found = []
    for word, letter, at in zip(axis_words(spec), spec.axes, index, strict=True):
        token = texts[at] if letter in ("T", "S") and texts[at] else None
        if letter == "V" and tokenizer is not None:
            token = tokenizer.token_text(at)
        if letter != "1":
            found.append(Coordinate(axis=word, at=at, token=token))
    return tuple(found)
