"""The shapes of a model, and where its parameters are stored, from headers alone. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from llmcli.anatomy import Plan, TensorSpec, plan
from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.counts import state_need
from llmcli.anatomy.fold import Folded, Phases, fold_kinds, numbered, unfold
from llmcli.anatomy.graph import Graph, graph
from llmcli.anatomy.letters import Letters
from llmcli.anatomy.names import Names
from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.commands.shapes.report import (
    CacheGrowth,
    CallFlops,
    LayerKind,
    LetterValue,
    NameRow,
    NamesReport,
    ShapeRow,
    ShapesReport,
    ShapeTensor,
    Stored,
)
from llmcli.config import ModelConfig
from llmcli.families import parts_to_fill
from llmcli.families.sources import sources
from llmcli.graph.spec import PHASES, Call, Kind, Phase
from llmcli.loading.prepared import Prepared
from llmcli.measure.fit import misfits, unscaled
from llmcli.records.document import ViewCheck, difference
from llmcli.records.numbers import counted, spans, together
from llmcli.records.text import Token

LETTERS = ("B", "T", "S", "D", "H", "Hk", "dh", "dv", "F", "V", "P")


@dataclass(frozen=True, kw_only=True)
class ShapesRequest:
    """Reading a prompt of `tokens` tokens, and the step after it, for `batch` sequences.

    Shown are `phases`, and the tensors of those kinds, layers and names (None: all of them).
    `prompt`: its tokens, where one was given; `example`: their number was not.
    """

    config: ModelConfig
    numbers: Arithmetic
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
    def letters(self) -> dict[Phase, Letters]:
        """The sizes of each phase's axes."""
        of = partial(Letters, config=self.config, batch=self.batch)
        return {
            "prefill": of(tokens=self.tokens, past=0),
            "decode": of(tokens=1, past=self.tokens),
        }

    def plan(self, phase: Phase) -> Plan:
        """The activations of that phase."""
        of = self.letters[phase]
        call = Call(batch=of.batch, tokens=of.tokens, past=of.past, phase=phase)
        return plan(self.config, self.numbers.call(call))

    def states(self, phase: Phase) -> tuple[TensorSpec, ...]:
        """What is kept after that phase, as large as it has to be then."""
        call = self.letters[phase]
        capacity = call.past + call.tokens
        kept = self.numbers.states(self.config, batch=call.batch, capacity=capacity)
        return tuple(replace(spec, phase=phase) for spec in kept)

    def parameters(self) -> tuple[TensorSpec, ...]:
        """The weights as they are in memory."""
        return self.numbers.parameters(self.config)

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
    tensors = [item for item in request.tensors(phases) if request.takes(item[0])]

    def in_file(spec: TensorSpec) -> object:
        """How it is stored, its layer's number taken out of the name."""
        file = stored.get(spec.name)
        if file is None or spec.layer is None:
            return file
        return replace(file, source=numbered(file.source, spec.layer, "{}"))

    rows = fold_kinds(tensors, request.config, in_file)
    shown = {
        (spec.name, spec.phase): _tensor(spec, request, stored.get(spec.name))
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
        flops=tuple(_flops(phase, request) for phase in phases),
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
        sizes = request.letters[spec.phase or "prefill"]
        if tuple(sizes.size(axis, spec.layer) for axis in spec.axes) != spec.shape:
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


def _tensor(spec: TensorSpec, request: ShapesRequest, stored: Stored | None) -> ShapeTensor:
    letters = request.letters[spec.phase or "prefill"]
    documents = letters.documented(spec.axes, spec.layer)
    return ShapeTensor(**vars(spec), documents=documents, stored=stored)


def _row(
    row: Folded, shown: Mapping[tuple[str, Phase | None], ShapeTensor], model: Graph
) -> ShapeRow:
    tensors = tuple(shown[spec.name, spec.phase] for spec in row.phases)
    source = "" if (file := tensors[0].stored) is None else file.source
    if len(row.layers) > 1:
        source = numbered(source, row.layers[0], f"{{{spans(row.layers)}}}")
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
    known = dict.fromkeys([*LETTERS, *(one for block in blocks for one in model.sizes(block))])
    known.pop("1", None)
    found = []
    for letter in known:
        values: dict[int, None] = {}
        documents: dict[str, None] = {}
        segments = [axis for block in blocks if (axis := model.segments(block).get(letter))]
        for phase in phases:
            letters = request.letters[phase]
            for block in blocks:
                sizes = letters.sizes(block)
                if letter in sizes:
                    values[sizes[letter]] = None
                    call = replace(letters, past=0)  # so that T is n
                    documents[call.documented((letter,), block)[0]] = None
        if values:
            called = "/".join(documents)
            found.append(LetterValue(
                letter=letter, documents=called, values=tuple(values),
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


def _flops(phase: Phase, request: ShapesRequest) -> CallFlops:
    specs = request.plan(phase).tensors
    return CallFlops(
        phase=phase,
        flops=sum(spec.flops for spec in specs),
        flops_full=sum(spec.flops_full for spec in specs),
    )


def _growth(request: ShapesRequest) -> CacheGrowth:
    grown = Counter[int | None]()  # some do not grow
    for capacity, sign in ((1, 1), (0, -1)):
        for spec in request.numbers.states(request.config, batch=request.batch, capacity=capacity):
            grown[spec.layer] += sign * spec.bytes
    return CacheGrowth(
        per_token=sum(grown.values()),
        per_layer=tuple(grown[kind.layers[0]] for kind in _kinds(request.config)),
        prefill=sum(spec.bytes for spec in request.states("prefill")),
        decode=sum(spec.bytes for spec in request.states("decode")),
        states=state_need(request.config, request.numbers),
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
    for row in fold_kinds(tensors, config, lambda spec: None):
        spec = row.phases[0]
        others = known.aliases(spec.name)
        if spec.layer is not None and len(row.layers) > 1:
            # between dots or, in a short name, inside: `k6`
            others = tuple(
                numbered(alias, spec.layer, "{i}")
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
                documents=request.letters["prefill"].documented(spec.axes, spec.layer),
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
    wrong = [*misfits(prepared), *unscaled(prepared)]
    held, made_of = counted(len(tensors), "tensor"), counted(len(prepared.shapes), "parameter")
    other = counted(len(surplus), "surplus tensor") if surplus else "no other"
    words = f"the file has {held}, from which {made_of} can be made, and {other}"
    return (difference("stored", words, wrong),)


def file_tensors(checkpoint: Checkpoint) -> tuple[Stored, ...]:
    """The tensors of a file in its own order and by its own names."""
    return tuple(_stored(info, info.nbytes) for info in checkpoint.tensors.values())


def _stored(info: TensorInfo, nbytes: int, operations: tuple[str, ...] = ()) -> Stored:
    return Stored(
        source=info.name,
        stored_shape=info.shape,
        stored_format=info.format,
        stored_bytes=nbytes,
        operations=operations,
    )
