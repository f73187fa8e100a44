"""The derivation of one number: a tree of steps, each compared with the kernel's number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from llmcli import devices
from llmcli.anatomy import TensorSpec
from llmcli.anatomy.graph import graph
from llmcli.anatomy.indexed import NumberRef
from llmcli.commands.explain.measure.index import names, shape_in_letters, where
from llmcli.commands.explain.measure.values import Values, local, needed_bytes
from llmcli.commands.explain.report import Check, Explanation, Letter, Step
from llmcli.engine.session import Session
from llmcli.errors import NotFinite
from llmcli.graph.evaluation.attention import Softmax
from llmcli.graph.evaluation.rule import symbol
from llmcli.graph.ops import Mix
from llmcli.inspect.kernel import origin, rules
from llmcli.model import Model, dtype_name
from llmcli.records.explanation import Cell, Element, Fact
from llmcli.records.progress import Progress
from llmcli.records.text import Token

Source = Literal["derived", "kernel"]

BRANCHING = 4  # so many steps deep every important input is followed, below only the first one


def explain(
    model: Model,
    tokens: tuple[Token, ...],
    spec: TensorSpec,
    index: tuple[int, ...],
    *,
    depth: int | None,
    progress: Progress | None = None,
) -> Explanation:
    """Derives the number at `index` of the tensor `spec`, and compares it with the kernel's.

    `depth` is how many formulas are followed back, None all of them, to the embedding rows and
    the weights; what is further away is taken from the kernel. Raises NotFinite where the model's
    own numbers are not.
    """
    letters, dtype = _letters(model, spec, len(tokens)), dtype_name(model.dtype)
    if spec.kind == "parameter":
        leaf = parameter_step(model, spec, index)
        return Explanation(
            tokens=tokens, letters=letters, depth=None, dtype=dtype, tensors=0, steps=(leaf,)
        )
    with torch.inference_mode():
        _require_memory(model, spec.name, len(tokens), depth)
        made = rules(model.config)
        values = Values(model, made, tokens, target=spec.name, depth=depth, progress=progress)
        tree = _Tree(values, len(tokens))
        steps, checks = tree.steps((spec.name, index)), tree.checks()
        shown: dict[str, list[tuple[int, ...]]] = {}
        for step in steps:
            if step.source == "derived":
                shown.setdefault(step.name, []).append(step.index)
        return Explanation(
            tokens=tokens,
            letters=letters,
            depth=values.depth,
            dtype=dtype,
            local=local(values, shown),  # derives more
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
    turned = graph(model.config).parameters[spec.name].turned
    *row, last = (*index[:-2], *index[:-3:-1]) if turned else index
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
        magnitude=0.0,
        kernel=value,
        tolerance=0.0,
        note=origin(model, spec.name),
    )


def _require_memory(model: Model, name: str, tokens: int, depth: int | None) -> None:
    """Raises OutOfMemory where what is kept and derived does not fit; before the model is run."""
    sizes = {n: one.shape for n, one in names(model.config, tokens).items()}
    kept, derived = needed_bytes(model.config, sizes, name, depth, model.dtype.itemsize)
    hint = "use a shorter prompt, or a small --depth"
    if model.device.type == "cpu":
        derived += kept
    else:
        devices.require_memory(kept, model.device, "the activations of the prompt", hint)
    cpu = torch.device("cpu")
    devices.require_memory(derived, cpu, "the tensors of the derivation", hint)


class _Tree:
    """Builds the steps of one derivation."""

    def __init__(self, values: Values, tokens: int) -> None:
        self.values = values
        self.specs = names(values.model.config, tokens)
        self.rows: dict[tuple[int, int, int], None] = {}  # of patterns, in order

    def steps(self, root: Cell) -> tuple[Step, ...]:
        """The number and, to `depth`, those that it follows from, each before its inputs.

        A number that several need is one step. Worked off from a list, for the way to the
        embedding rows can be longer than Python nests calls.
        """
        found: dict[Cell, tuple[Element, Source]] = {}
        pending = [(root, 0)]
        while pending:
            cell, level = pending.pop()
            if cell not in found:
                element = self._element(cell, level)
                derived = self.values.derives(cell[0])
                found[cell] = (element, "derived" if derived else "kernel")
                pending += [(source, level + 1) for source in reversed(element.follow)]
        numbers = {cell: number for number, cell in enumerate(found, 1)}
        return tuple(self._step(cell, *found[cell], numbers) for cell in found)

    def _element(self, cell: Cell, level: int) -> Element:
        """The number with the inputs that are followed from it: deep down only the first."""
        (name, index), values = cell, self.values
        if not values.derives(name):
            return Element(value=float(values[name][index]), magnitude=0.0)
        values.derived.add(name)
        element = self._kept(cell, values.rules[name].element(values, index))
        if values.depth is not None and level >= values.depth:
            return replace(element, follow=())
        return element if level < BRANCHING else replace(element, follow=element.follow[:1])

    def _kept(self, cell: Cell, element: Element) -> Element:
        """With its rounding where a cache keeps it in fewer bits than it is computed in."""
        (name, index), values = cell, self.values
        if not values.is_kept(name):
            return element
        theirs = values.kernel_row(name, index)[index[-1]]
        off = values.allowed(name, values.rules[name].magnitude(values, name, index))
        kept = float(values.as_kept(name, theirs.new_tensor(element.value), theirs, off))
        dtype = dtype_name(values.model.decoder.cache_dtype)
        words = f"as the cache keeps it: {dtype}({{}})"
        rounding = Fact(formula=words, parts=(element.value,), value=kept)
        return replace(element, value=kept, after=(*element.after, rounding))

    def _step(
        self, cell: Cell, element: Element, source: Source, numbers: Mapping[Cell, int]
    ) -> Step:
        (name, index), values = cell, self.values
        rule, spec = values.rules[name], self.specs[name]
        theirs = float(values.kernel_row(name, index)[index[-1]])
        self._require_finite(name, index, element.value, theirs)
        if name.endswith((".scores", ".pattern")):
            self.rows[values.graph[name].layer or 0, index[0], index[1]] = None
        return Step(
            **vars(element),
            number=numbers[cell],
            name=name,
            index=index,
            symbol=symbol(rule.letter, *index),
            formula=rule.formula,
            shape=shape_in_letters(spec),
            where=where(spec, index, values.texts, values.model.tokenizer),
            source=source,
            kernel=theirs,
            tolerance=self._allowed(name, rule.magnitude(values, name, index)),
            recomputed="" if values.graph.written(name) else _sources(values, name),
            children=tuple(numbers[source] for source in element.follow),
        )

    def _require_finite(self, name: str, index: tuple[int, ...], *found: float) -> None:
        for value in found:
            masked = name.endswith(".scores") and value == -math.inf
            if not math.isfinite(value) and not masked:
                raise NotFinite(
                    f"`{symbol(name, *index)}` is {value}" if index else f"`{name}` is not finite",
                    dtype=dtype_name(self.values.model.dtype),
                )

    def _allowed(self, name: str, magnitude: float) -> float:
        """How far a number of that tensor may be from the kernel's."""
        self._require_finite(name, (), magnitude)
        return self.values.allowed(name, magnitude)

    def checks(self) -> tuple[Check, ...]:
        """For derived rows of patterns: weights times values, compared with the kernel's z."""
        return tuple(self._mixes(*row) for row in self.rows)

    def _mixes(self, layer: int, head: int, query: int) -> Check:
        values = self.values
        node = values.graph.mixing(layer)
        assert node is not None
        assert isinstance(node.op, Mix)
        above = values.rules[node.op.pattern]
        if isinstance(above, Softmax):
            row_S = above.row(values, head, query)
        else:
            row_S = values[node.op.pattern][head, query]
        v_Se = values[node.op.value][head // node.op.group]
        derived_e = (row_S[:, None] * v_Se).sum(0)
        kernel_e = values.kernel(node.name)[head, query]
        at = int((derived_e - kernel_e).abs().argmax())
        derived, kernel = float(derived_e[at]), float(kernel_e[at])
        self._require_finite(node.name, (head, query, at), derived, kernel)
        magnitude = float(v_Se[row_S > 0].abs().max()) + values.least
        tolerance = self._allowed(node.name, magnitude)
        never = "S and A" if isinstance(above, Softmax) else values.graph.letter(node.op.pattern)
        return Check(
            words=f"the fused kernel never writes {never}, so {values.graph.formula(node)} is "
            "compared with its output "
            f"{symbol(node.name, head, query, at)}, where they differ most",
            derived=derived,
            kernel=kernel,
            tolerance=tolerance,
        )


def _letters(model: Model, spec: TensorSpec, tokens: int) -> tuple[Letter, ...]:
    """The letters of the documents and what they are in this model (in the number's block)."""
    parts = spec.name.split(".")
    layer = int(parts[1]) if parts[0] == "blocks" else 0
    whole = graph(model.config)
    sizes = whole.sizes(layer)
    found = {"n": tokens, "d": model.config.width}
    for axis, letter in whole.documents(layer).items():
        found.setdefault("F" if axis == "F" else letter, sizes[axis])
    found["v"] = model.config.vocab
    return tuple(Letter(letter=letter, value=value) for letter, value in found.items() if value)


def _sources(values: Values, name: str) -> str:
    """`the kernel's q and k`, from which what it never writes is recomputed."""
    leaves = (source.rpartition(".")[2] for source in values.graph.sources(name))
    return f"the kernel's {' and '.join(leaf.partition('_')[0] for leaf in leaves)}"
