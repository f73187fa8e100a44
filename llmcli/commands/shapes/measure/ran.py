"""What a real run has: every shape, dtype and memory held against what the specs say of it.

Axes: B sequences, T new tokens, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from llmcli import devices
from llmcli.anatomy import TensorSpec
from llmcli.anatomy.graph import graph
from llmcli.commands.shapes.measure.tensors import ShapesRequest
from llmcli.commands.shapes.report import Stored
from llmcli.engine.session import Session
from llmcli.formats.weight import Weight
from llmcli.graph.spec import Phase
from llmcli.model import Ledger, LedgerEntry, Model, dtype_name
from llmcli.nn.state import State
from llmcli.observe.kernel import mixer_of
from llmcli.reports.checks import ViewCheck, difference
from llmcli.reports.numbers import together

PHASES: tuple[Phase, ...] = ("prefill", "decode")
Like = tuple[tuple[int, ...], str]  # a tensor's shape and dtype


@dataclass
class Seen:
    """The tensors of one call, as they were emitted; the tensors themselves are not kept.

    A storage is known by a weak reference: as long as it is held no other storage is taken for
    it, and its memory is free all the same.
    """

    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    storages: list[StorageWeakRef] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        """What a tap is shown."""
        self.names.append(name)
        self.shapes.append(tuple(tensor.shape))
        self.dtypes.append(dtype_name(tensor.dtype))
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.storages.append(storage)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A prompt that was read and one step after it: what was seen, and what is left.

    `last` are all tensors of the step: it has one token, so that they are small.
    """

    model: Model
    seen: dict[Phase, Seen]
    last: dict[str, Tensor]
    state: State


def run_checks(model: Model, ids: Sequence[int], batch: int) -> tuple[ViewCheck, ...]:
    """Reads `batch` times the prompt, takes one step more, and compares all of it with the specs.

    Raises OutOfMemory where cache and logits do not fit.
    """
    request = ShapesRequest(
        config=model.config, batch=batch, tokens=len(ids), numbers=model.arithmetic
    )
    ran = _run(model, ids, batch)
    plans = {phase: request.plan(phase) for phase in PHASES}
    written = {phase: plan.written for phase, plan in plans.items()}
    derived = {spec.name: spec for spec in plans["decode"].derived}
    kept = request.states("decode")
    return (
        _shapes_check(written, ran.seen),
        _dtypes_check(written, ran.seen),
        _memory_check(written, ran.seen),
        _derived_check(derived, ran),
        _cache_check(kept, ran.state),
        _copies_check(kept, ran),
        _parameters_check(request.parameters(), model),
    )


def _run(model: Model, ids: Sequence[int], batch: int) -> Ran:
    decoder, tokens = model.decoder, len(ids)
    logits = 2 * 4 * batch * tokens * model.config.vocab
    devices.require_memory(
        decoder.state_bytes(batch, tokens + 1) + logits,
        model.device,
        "the cache and the logits of this prompt",
        "use a shorter prompt or a smaller --batch",
    )
    session = Session(decoder, batch, tokens + 1)
    prefill, decode, last = Seen(), Seen(), {}

    def step(name: str, tensor: Tensor) -> None:
        decode.add(name, tensor)
        last[name] = tensor

    ids_BT = torch.tensor([list(ids)], device=model.device).expand(batch, -1)
    logits_BV = session.extend(ids_BT, logits="all", tap=prefill.add)[:, -1]
    session.extend(logits_BV.argmax(-1, keepdim=True), logits="all", tap=step)
    seen: dict[Phase, Seen] = {"prefill": prefill, "decode": decode}
    return Ran(model=model, seen=seen, last=last, state=session.state)


def _derived(ran: Ran) -> Iterator[tuple[str, Like]]:
    """What no kernel writes in the step, from what it wrote, and keys from the cache."""
    model, at, cached = graph(ran.model.config), ran.state.lengths[0] - 1, ran.state.tensors()
    kept = {state.holds: cached[state.name] for state in model.states.values()}
    for node in model.nodes.values():
        if not model.written(node.name):
            rows = {  # of the tokens before, which the step has not, any will do
                one: kept[one] if one in kept else F.pad(ran.last[one], (0, 0, at, 0))
                for one in model.sources(node.name)
            }
            mixer = mixer_of(ran.model, node.name)
            yield node.name, _like(mixer.derive(node.name, rows, at, at + 1))


def _like(tensor: Tensor) -> Like:
    return tuple(tensor.shape), dtype_name(tensor.dtype)


def _shapes_check(specs: dict[Phase, tuple[TensorSpec, ...]], seen: dict[Phase, Seen]) -> ViewCheck:
    wrong = []
    for phase in PHASES:
        said = [(spec.name, spec.shape) for spec in specs[phase]]
        was = list(zip(seen[phase].names, seen[phase].shapes, strict=True))
        wrong += [f"{a[0]} ({phase})" for a, b in zip(said, was, strict=False) if a != b]
        wrong += [phase] * abs(len(said) - len(was))
    count = sum(len(specs[phase]) for phase in PHASES)
    words = f"a run has the {count} activations in this order and these shapes"
    return difference("ran_shapes", words, wrong)


def _dtypes_check(specs: dict[Phase, tuple[TensorSpec, ...]], seen: dict[Phase, Seen]) -> ViewCheck:
    wrong = [
        f"{spec.name} ({phase})"
        for phase in PHASES
        for spec, was in zip(specs[phase], seen[phase].dtypes, strict=False)
        if spec.dtype != was
    ]
    return difference("ran_dtypes", "each of them in its dtype", wrong)


def _memory_check(specs: dict[Phase, tuple[TensorSpec, ...]], seen: dict[Phase, Seen]) -> ViewCheck:
    wrong: list[str] = []
    for phase in PHASES:
        storages = [storage.cdata for storage in seen[phase].storages]
        wrong += (f"{name} ({phase})" for name in _unlike(specs[phase], storages))
    words = "they share memory exactly where they are called views"
    return difference("ran_memory", words, wrong)


def _derived_check(specs: dict[str, TensorSpec], ran: Ran) -> ViewCheck:
    derived = dict(_derived(ran))
    wrong = [name for name in {**specs, **derived} if not _is(specs.get(name), derived.get(name))]
    words = f"the {len(specs)} that no kernel writes follow from the others in these shapes"
    return difference("ran_derived", words, wrong)


def _cache_check(specs: Sequence[TensorSpec], state: State) -> ViewCheck:
    kept = {name: _like(tensor) for name, tensor in state.tensors().items()}
    wrong = [spec.name for spec in specs if not _is(spec, kept.get(spec.name))]
    if sum(spec.bytes or 0 for spec in specs) != state.nbytes:
        wrong.append("the bytes of all of them")
    return difference("ran_cache", f"the cache has {state.nbytes} bytes after both", wrong)


def _copies_check(specs: Sequence[TensorSpec], ran: Ran) -> ViewCheck:
    """The last position of each cache holds what the step wrote for it.

    What no kernel writes is in the state alone: there is nothing that it could be a copy of.
    """
    wrong, model, cached = [], graph(ran.model.config), ran.state.tensors()
    for spec in specs:
        state = model.states[spec.name]
        if not model.written(state.holds):
            continue
        kept, written = cached[spec.name], ran.last.get(state.holds)
        axes = [axis for axis in spec.axes if axis not in ("B", *model[state.holds].axes)]
        at = spec.axes.index(axes[0]) if axes else 0
        row = (ran.state.lengths[0] - 1) % kept.shape[at] if state.ring else kept.shape[at] - 1
        last = kept.narrow(at, row, 1) if axes else kept
        if written is None or not torch.equal(last, written.view(last.shape)):
            wrong.append(spec.name)
    return difference("ran_copies", "and holds copies of what is named, bit for bit", wrong)


def _parameters_check(specs: Sequence[TensorSpec], model: Model) -> ViewCheck:
    weights = {name: model.decoder.weight(name) for name in model.decoder.weight_names}
    found = {name: (one.shape, one.format, one.nbytes) for name, one in weights.items()}
    wrong = [
        spec.name
        for spec in specs
        if found.get(spec.name) != (spec.stored_shape or spec.shape, spec.dtype, spec.bytes)
    ]
    if not wrong:
        storages = [_address(weights[spec.name]) for spec in specs]
        wrong = _unlike(specs, storages)
    return difference("ran_parameters", f"the {len(specs)} parameters lie in memory so", wrong)


def _address(weight: Weight) -> int:
    """Of the memory that it lies in."""
    return weight.memory()[0].untyped_storage().data_ptr()


def sources_check(ledger: Ledger, stored: Mapping[str, Stored]) -> tuple[ViewCheck, ...]:
    """Every parameter was filled from the tensor that is named; nothing for random weights."""
    if not ledger.entries:
        return ()
    said = {name: (item.source, item.format, item.operations) for name, item in stored.items()}
    entries: dict[str, list[LedgerEntry]] = {}
    for entry in ledger.entries:
        entries.setdefault(entry.target, []).append(entry)
    was = {
        name: (together([item.source for item in items]), items[0].stored, items[0].words)
        for name, items in entries.items()
    }
    wrong = [name for name in {**was, **said} if said.get(name) != was.get(name)]
    words = f"the {len(was)} parameters were filled from the tensors that are named"
    return (difference("ran_sources", words, wrong),)


def _is(spec: TensorSpec | None, was: Like | None) -> bool:
    return spec is not None and was == (spec.shape, spec.dtype)


def _unlike(specs: Sequence[TensorSpec], storages: Sequence[int]) -> list[str]:
    """Names whose storage is shared otherwise than `shares` says: one root, one storage."""
    shares = {spec.name: spec.shares for spec in specs}
    storage_of: dict[str, int] = {}
    root_of: dict[int, str] = {}
    wrong = []
    for spec, storage in zip(specs, storages, strict=False):
        root = spec.name
        while shares.get(root):
            root = str(shares[root])
        if storage_of.setdefault(root, storage) != storage or (
            root_of.setdefault(storage, root) != root
        ):
            wrong.append(spec.name)
    return wrong
