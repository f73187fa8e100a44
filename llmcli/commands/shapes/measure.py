"""The shapes of a model, and where its parameters are stored, from headers alone. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.commands.shapes.report import (
    CacheGrowth,
    CallFlops,
    Folded,
    LayerKind,
    LetterValue,
    NameRow,
    NamesReport,
    Phases,
    ShapeRow,
    ShapesReport,
    ShapeTensor,
    Stored,
)
from llmcli.config.model import ModelConfig
from llmcli.families.rules import parts_to_fill
from llmcli.families.sources import sources
from llmcli.graph.graph import Graph, graph
from llmcli.graph.memory import state_need
from llmcli.graph.names import Names
from llmcli.graph.ops import size
from llmcli.graph.plan import Plan, plan
from llmcli.graph.precision import Precision
from llmcli.graph.spec import PHASES, Call, Kind, Phase, TensorSpec
from llmcli.prepare.prepared import Prepared
from llmcli.records.document import ViewCheck, difference
from llmcli.records.numbers import counted, spans, together
from llmcli.records.text import Token

LETTERS = ("B", "T", "S", "D", "H", "Hk", "dh", "dv", "F", "V", "P")

# a layer's number in a name or formula: `blocks.3.`, `cache.3.`, `H of block 3`
_NUMBER = re.compile(r"\b(blocks\.|cache\.|of block )(\d+)")
# a layer's input, whose formula differs in the first layer and is ignored
_ENTRY = ".resid_pre"

Extra = Callable[[TensorSpec], Hashable]


@dataclass(frozen=True, kw_only=True)
class ShapesRequest:
    """Reading a prompt of `tokens` tokens, and the step after it, for `batch` sequences.

    Shown are `phases`, and the tensors of those kinds, layers and names (None: all of them).
    `prompt`: its tokens, where one was given; `example`: their number was not.
    """

    config: ModelConfig
    precision: Precision
    batch: int
    tokens: int
    phases: tuple[Phase, ...] = PHASES
    kinds: tuple[Kind, ...] = ("parameter", "activation", "state")
    layers: tuple[int, ...] | None = None
    names: frozenset[str] | None = None
    prompt: tuple[Token, ...] = ()
    example: bool = False

    def takes(self, spec: TensorSpec) -> bool:
        """Whether the tensor is shown."""
        return (
            spec.kind in self.kinds
            and (self.layers is None or spec.layer in self.layers)
            and (self.names is None or spec.name in self.names)
        )

    @cached_property
    def calls(self) -> dict[Phase, Call]:
        """The call of each phase."""
        return {
            "prefill": Call(batch=self.batch, tokens=self.tokens, past=0, phase="prefill"),
            "decode": Call(batch=self.batch, tokens=1, past=self.tokens, phase="decode"),
        }

    def sizes(self, phase: Phase, layer: int | None) -> Mapping[str, int]:
        """Letter of an axis → size in a phase: of the model, plus those of `layer` if given.

        They come from the parts, independent of the specs that are compared with them.
        """
        call = self.calls[phase]
        sizes = graph(self.config).sizes(layer)
        return {**sizes, "B": call.batch, "T": call.tokens, "S": call.keys}

    def documented(
        self, axes: Sequence[str], layer: int | None, phase: Phase | None = None
    ) -> tuple[str, ...]:
        """The axes in the documents' notation: `b`, `h`, `n`, `d/h`. n is all tokens so far.

        A decode step only computes the last row, so its T is `1`. All heads are `d` if they divide
        the width.
        """
        letters = {"B": "b", "S": "n", "D": "d", "V": "v", "T": "1" if phase == "decode" else "n"}
        letters |= graph(self.config).documents(layer)
        written = ("·".join(letters.get(one, one) for one in axis.split("·")) for axis in axes)
        return tuple("d" if axis == "h·d/h" else axis for axis in written)

    def plan(self, phase: Phase) -> Plan:
        """The activations of that phase."""
        return plan(self.config, self.precision.call(self.calls[phase]))

    def states(self, phase: Phase) -> tuple[TensorSpec, ...]:
        """What is kept after that phase, as large as it has to be then."""
        call = self.calls[phase]
        kept = self.precision.states(self.config, batch=call.batch, capacity=call.keys)
        return tuple(replace(spec, phase=phase) for spec in kept)

    def parameters(self) -> tuple[TensorSpec, ...]:
        """The weights as they are in memory."""
        return self.precision.parameters(self.config)

    def tensors(self, phases: Sequence[Phase]) -> list[Phases]:
        """Every tensor once, with its spec in each phase; parameters have one of all phases."""
        found: list[Phases] = [(spec,) for spec in self.parameters()]
        found += zip(*(self.plan(phase).tensors for phase in phases), strict=True)
        found += zip(*(self.states(phase) for phase in phases), strict=True)
        return found


def model_shapes(
    request: ShapesRequest,
    stored: Mapping[str, Stored],
    checks: Iterable[ViewCheck] = (),
) -> ShapesReport:
    """All tensors that are requested, one by one and folded, with the checks of the specs.

    `stored`: parameter → its tensor in the checkpoint, as far as there are any; `checks`: further
    ones, of the headers.
    """
    phases = request.phases
    whole = request.tensors(phases)
    tensors = [item for item in whole if request.takes(item[0])]

    def in_file(spec: TensorSpec) -> object:
        """How it is stored, its layer's number taken out of the name."""
        file = stored.get(spec.name)
        if file is None or spec.layer is None:
            return file
        return replace(file, source=numbered(file.source, spec.layer, "{}", "{} before"))

    rows = fold(tensors, request.config, in_file)
    every = [spec for item in whole for spec in item]
    made = {phase: [spec for spec in every if spec.phase == phase] for phase in phases}
    shown = {
        (spec.name, spec.phase): ShapeTensor(
            **vars(spec),
            documents=request.documented(spec.axes, spec.layer, spec.phase),
            stored=stored.get(spec.name),
        )
        for item in tensors
        for spec in item
    }
    return ShapesReport(
        batch=request.batch,
        tokens=request.tokens,
        phases=phases,
        letters=letter_values(request, phases),
        layers=_kinds(request.config),
        tensors=tuple(shown.values()),
        rows=tuple(_row(row, shown, graph(request.config)) for row in rows),
        cache=_growth(request),
        flops=tuple(
            CallFlops(
                phase=phase,
                flops=sum(spec.flops for spec in specs),
                flops_full=sum(spec.flops_full for spec in specs),
            )
            for phase, specs in made.items()
        ),
        stored_bytes=sum(item.stored_bytes for item in stored.values()) if stored else None,
        prompt=request.prompt,
        example=request.example,
        checks=(symbols_check(tensors, request), folded_check(tensors, rows), *checks),
    )


def symbols_check(tensors: Sequence[Phases], request: ShapesRequest) -> ViewCheck:
    """Every shape is what its letters say, with the sizes of the configuration and the call."""
    specs = [spec for item in tensors for spec in item]
    wrong = []
    for spec in specs:
        sizes = request.sizes(spec.phase or "prefill", spec.layer)
        if tuple(size(axis, sizes) for axis in spec.axes) != spec.shape:
            wrong.append(spec.name)
    count = counted(len(specs), "shape")
    return difference("symbols", f"{count} as the sizes of the letters say", wrong)


def folded_check(tensors: Sequence[Phases], rows: Sequence[Folded]) -> ViewCheck:
    """What the rows say of each layer is what that layer's own tensors are."""
    said = {item[0].name: item for row in rows for item in unfold(row)}
    wrong = [item[0].name for item in tensors if said.get(item[0].name) != item]
    if len(said) != len(tensors):
        wrong += sorted(set(said) - {item[0].name for item in tensors})
    words = f"{counted(len(rows), 'row')} with all of {counted(len(tensors), 'tensor')}"
    words += ", layer by layer"
    return difference("folded", words, wrong)


# repeated layers in one row


def fold(tensors: Sequence[Phases], config: ModelConfig, extra: Extra) -> tuple[Folded, ...]:
    """Rows of the parameters, the activations, then the states; equal layers at the first's place.

    Layers are equal if their configurations and specs are, up to the layer's number; any difference
    (a window, a head count, a stored format) keeps them separate. `extra`: an additional key that
    must be equal, without layer numbers.
    """
    rows: list[Folded] = []
    for kind in ("parameter", "activation", "state"):
        some = [phases for phases in tensors if phases[0].kind == kind]
        layers: dict[int, list[tuple[Phases, Phases]]] = {}  # and as if its layer were the first
        for phases in some:
            if (number := phases[0].layer) is not None:
                template = tuple(_moved(spec, -number) for spec in phases)
                layers.setdefault(number, []).append((phases, template))
        alike: dict[Hashable, list[int]] = {}
        for number, members in layers.items():
            inside = tuple(one for phases, one in members if not phases[0].name.endswith(_ENTRY))
            alike.setdefault((config.layers[number], inside), []).append(number)
        equal: dict[int | None, list[int]] = {numbers[0]: numbers for numbers in alike.values()}
        for phases in some:
            if phases[0].layer is None:
                rows.append(Folded(name=phases[0].name, layers=(), phases=phases))
            first = equal.pop(phases[0].layer, [])
            for same in zip(*(layers[number] for number in first), strict=True):
                parts: dict[Hashable, list[Phases]] = {}
                for each, template in same:
                    parts.setdefault((template, extra(each[0])), []).append(each)
                rows += map(_folded, parts.values())
    return tuple(rows)


def unfold(row: Folded) -> tuple[Phases, ...]:
    """Expand a row to its layers: the first one's specs with the others' numbers."""
    if not row.layers:
        return (row.phases,)
    first = row.layers[0]
    return tuple(tuple(_moved(spec, layer - first) for spec in row.phases) for layer in row.layers)


def numbered(text: str, layer: int, number: str, before: str = "") -> str:
    """`text` with `number` in place of the layer's number between dots, the first in each name.

    Without one, `before` is put in place of the number of the layer before (post-norm blocks).
    """
    found = rf"(?<!\S)(\S*?)(?<![^.]){layer}(?![^.])"  # a later one is a head's or an expert's
    text, times = re.subn(found, lambda match: match[1] + number, text)
    return text if times or not before else numbered(text, layer - 1, before)


def _folded(part: Sequence[Phases]) -> Folded:
    first = part[0][0]
    numbers = tuple(phases[0].layer for phases in part if phases[0].layer is not None)
    label = spans(numbers)
    label = f"{{{label}}}" if len(numbers) > 1 else label
    name = numbered(first.name, numbers[0], label)
    return Folded(name=name, layers=numbers, phases=part[0])


def _moved(spec: TensorSpec, by: int) -> TensorSpec:
    """The same tensor `by` layers later."""
    assert spec.layer is not None

    def moved(text: str) -> str:
        return _NUMBER.sub(lambda found: f"{found[1]}{int(found[2]) + by}", text)

    shares = None if spec.shares is None else moved(spec.shares)
    layer = spec.layer + by
    return replace(
        spec, name=moved(spec.name), formula=moved(spec.formula), shares=shares, layer=layer
    )


# the report


def _row(
    row: Folded, shown: Mapping[tuple[str, Phase | None], ShapeTensor], model: Graph
) -> ShapeRow:
    tensors = tuple(shown[spec.name, spec.phase] for spec in row.phases)
    source = "" if (file := tensors[0].stored) is None else file.source
    if len(row.layers) > 1:
        every, before = (f"{{{spans([one - by for one in row.layers])}}}" for by in (0, 1))
        source = numbered(source, row.layers[0], every, before)
    memory = _memory(tensors[0], model)
    return ShapeRow(**{**vars(row), "phases": tensors}, memory=memory, source=source)


def _memory(spec: TensorSpec, model: Graph) -> str:
    """Whose memory it is: `view of attn.qkv`, `copy of attn.v`, `own` or `derived`."""
    if spec.kind == "state":
        return f"copy of {model.states[spec.name].holds.split('.', 2)[2]}"
    if not spec.written:
        return "derived"
    if spec.shares is None:
        return "own"
    whole = "part of" if spec.kind == "parameter" else "view of"
    if spec.layer is None:
        return f"{whole} {spec.shares}"
    here, before = f"blocks.{spec.layer}.", f"blocks.{spec.layer - 1}."
    if spec.shares.startswith(before):
        return f"{whole} {spec.shares.removeprefix(before)} before"
    return f"{whole} {spec.shares.removeprefix(here)}"


def letter_values(request: ShapesRequest, phases: Sequence[Phase]) -> tuple[LetterValue, ...]:
    """Each letter with its sizes in the phases; where layers differ, with all of theirs."""
    model, blocks = graph(request.config), [*range(len(request.config.layers))] or [None]
    every = [(request.sizes(phase, block), block) for phase in phases for block in blocks]
    known = dict.fromkeys([*LETTERS, *(one for sizes, _ in every for one in sizes)])
    found = []
    for letter in [one for one in known if one != "1"]:
        some = [(sizes[letter], block) for sizes, block in every if letter in sizes]
        documents = dict.fromkeys(request.documented((letter,), block)[0] for _, block in some)
        segments = [axis for block in blocks if (axis := model.segments(block).get(letter))]
        if some:
            found.append(LetterValue(
                letter=letter, documents="/".join(documents),
                values=tuple(dict.fromkeys(value for value, _ in some)),
                segments=" or ".join(dict.fromkeys(segments)),
            ))  # fmt: skip
    return tuple(found)


def _kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    found: dict[object, list[int]] = {}
    for index, layer in enumerate(config.layers):
        found.setdefault(layer, []).append(index)
    return tuple(
        LayerKind(layers=tuple(layers), window=config.layers[layers[0]].window)
        for layers in found.values()
    )


def _growth(request: ShapesRequest) -> CacheGrowth:
    grown = Counter[int | None]()  # some do not grow
    for capacity, sign in ((1, 1), (0, -1)):
        kept = request.precision.states(request.config, batch=request.batch, capacity=capacity)
        for spec in kept:
            grown[spec.layer] += sign * spec.bytes
    return CacheGrowth(
        per_token=sum(grown.values()),
        per_layer=tuple(grown[kind.layers[0]] for kind in _kinds(request.config)),
        prefill=sum(spec.bytes for spec in request.states("prefill")),
        decode=sum(spec.bytes for spec in request.states("decode")),
        states=state_need(request.config, request.precision),
    )


# the table of names


def model_names(request: ShapesRequest) -> NamesReport:
    """A row for each requested name, with repeated layers in one.

    In the order of execution, parameters first and states last.
    """
    config = request.config
    known = Names(config, sources(config))
    tensors = [item for item in request.tensors(("prefill",)) if request.takes(item[0])]
    rows = []
    for row in fold(tensors, config, lambda spec: None):
        spec = row.phases[0]
        others = known.aliases(spec.name)
        if spec.layer is not None and len(row.layers) > 1:
            # between dots or, in a short name, inside: `k6`
            others = tuple(
                numbered(alias, spec.layer, "{i}", "{i-1}")
                if "." in alias
                else alias.replace(str(spec.layer), "{i}", 1)
                for alias in others
            )
        rows.append(
            NameRow(
                name=row.name,
                kind=spec.kind,
                axes=spec.axes,
                shape=spec.shape,
                documents=request.documented(spec.axes, spec.layer),
                words=graph(config).words(spec.name),
                formula=row.formula,
                aliases=others,
            )
        )
    letters = letter_values(request, ("prefill",))
    return NamesReport(names=tuple(rows), letters=letters, example=request.example)


# where the parameters are in the files


def stored_tensors(prepared: Prepared) -> dict[str, Stored]:
    """Parameter → where it is in the checkpoint's files; empty where there are no files.

    Tensors that fill one parameter item by item are the first one, with all their bytes.
    """
    found: dict[str, list[Stored]] = {}
    tensors, loads = prepared.checkpoint.tensors, prepared.plan.loads
    shapes = parts_to_fill(loads, prepared.shapes)
    for load in loads:
        info = tensors[load.source]
        beside = () if load.scale is None else load.scale.tensors
        whole = info.nbytes + sum(tensors[name].nbytes for name in beside)
        count = prod(shapes[load.part]) if load.part in shapes else 0
        nbytes = count * whole // max(1, prod(info.shape))
        found.setdefault(load.target, []).append(_stored(info, nbytes, load.words))
    return {
        name: replace(
            parts[0],
            source=together([part.source for part in parts]),
            stored_bytes=sum(part.stored_bytes for part in parts),
        )
        for name, parts in found.items()
    }


def stored_check(prepared: Prepared) -> tuple[ViewCheck, ...]:
    """Every stored shape makes its parameter's; none is missing. Nothing without tensors."""
    tensors, surplus = prepared.checkpoint.tensors, prepared.plan.surplus
    if not tensors:
        return ()
    wrong = [*prepared.misfits, *prepared.unscaled]
    held, made_of = counted(len(tensors), "tensor"), counted(len(prepared.shapes), "parameter")
    other = counted(len(surplus), "surplus tensor") if surplus else "no other"
    words = f"the file has {held}, from which {made_of} can be made, and {other}"
    return (difference("stored", words, wrong),)


def file_tensors(checkpoint: Checkpoint) -> list[Stored]:
    """The tensors of a file in its own order and by its own names."""
    return [_stored(info, info.nbytes) for info in checkpoint.tensors.values()]


def _stored(info: TensorInfo, nbytes: int, operations: tuple[str, ...] = ()) -> Stored:
    return Stored(
        source=info.name,
        stored_shape=info.shape,
        stored_format=info.format,
        stored_bytes=nbytes,
        operations=operations,
    )
