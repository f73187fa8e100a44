"""Activations by name, as the kernel computed them, written and summarized one by one.

New tokens are generated first; then one pass reads all tokens. A tensor is settled as soon as the
kernel has written what it needs, and is then forgotten; what the fused kernel never writes is
computed from what it wrote, a head and some rows at a time.

Axes: B batch (1), H heads, K key/value heads, T rows, S keys, d size of a query and key, e of a
value, D width.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llmcli import devices
from llmcli.commands.dump.report import DumpedTensor, DumpReport
from llmcli.config.model import ModelConfig
from llmcli.errors import NotFinite, UsageError
from llmcli.graph.graph import graph
from llmcli.graph.names import known
from llmcli.graph.ops import HeadShare, size
from llmcli.graph.plan import parameters, plan, states
from llmcli.graph.spec import Call, TensorSpec
from llmcli.inspect.attention import AttentionChecks, Tokens, checked_rows
from llmcli.inspect.edits import emitted
from llmcli.inspect.formulas import formula_checks, formula_inputs, formula_words, worst
from llmcli.inspect.kernel import last_layer, layer_of, mixer_of, refuse_edited
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.passes import Passes, cache_check, filled, remembered
from llmcli.inspect.recurrence import walk
from llmcli.inspect.statistics import AT_ONCE, Statistics, not_finite, parts
from llmcli.model import Model, dtype_name
from llmcli.nn.recurrent import Recurrent
from llmcli.nn.state import State
from llmcli.records.document import ViewCheck

# an array with its name, shape, dtype, and its numbers in C order, a part at a time
Write = Callable[[str, tuple[int, ...], str, Iterable[np.ndarray]], None]

FORMULA_ROWS = 32  # tokens of a longer prompt that are compared with the formulas
# derived from a layer's attention, and proven by what the kernel mixed with it
MATRICES = ("scores", "pattern")


def plan_dump(model: Model, names: Iterable[str], tokens: int) -> tuple[TensorSpec, ...]:
    """The tensors of `names` in execution order, for `tokens` tokens, new ones included.

    They have no batch axis. Parameters in blocks are dequantized. With tokens still to be generated
    shapes are the largest that there can be.
    """
    config, wanted = model.config, set(names)
    dtype, cache = dtype_name(model.dtype), dtype_name(model.decoder.cache_dtype)
    call = Call(batch=1, tokens=tokens, past=0, phase="prefill", dtype=dtype, cache=cache)
    specs = [
        *parameters(config, dtype=dtype),
        *plan(config, call).tensors,
        *states(config, batch=1, capacity=tokens, dtype=dtype, cache=cache),
    ]
    plans = {}
    for spec in specs:
        batch = int(spec.kind != "parameter")
        plans[spec.name] = replace(spec, axes=spec.axes[batch:], shape=spec.shape[batch:])
    return tuple(plans[name] for name in known(config) if name in wanted)


def _sources(config: ModelConfig, one: TensorSpec, *, check: bool) -> frozenset[str]:
    """The activations, written by the kernel, that it needs, with `check` for its checks too.

    None for a parameter.
    """
    model = graph(config)
    if one.kind == "parameter":
        return frozenset()
    if one.kind == "state":
        state = model.states[one.name]
        if model.written(state.holds):
            return frozenset((state.holds, model.after(state)))
        reads = model[state.before].op.inputs  # of the map, and the values
        return frozenset((*model.sources(reads[0]), *reads[1:], model.after(state)))
    own = {one.name} if model.written(one.name) else set(model.sources(one.name))
    mixing = model.mixers.get(layer_of(one.name) or 0)
    if check and one.name.endswith(MATRICES) and mixing is not None:
        own |= {*mixing.op.inputs[1:], mixing.name}
    return frozenset(own) | (formula_inputs(config, [one.name]) if check else frozenset())


def measure_dump(
    passes: Passes, plan: Sequence[TensorSpec], *, check: bool = True, write: Write | None = None
) -> DumpReport:
    """The tensors of `plan` (`plan_dump`).

    Each is given to `write` once. `check`: whether each activation follows from its formula, and
    attention matrices with the values give what the kernel made of them. Numbers that are not
    finite are reported, not raised, and what was computed is written. Raises OutOfMemory before
    the model is run.
    """
    model, dump = passes.model, _Dump(passes, plan, check=check, write=write)
    with torch.inference_mode():
        dump.run()
    bad = (not_finite(one.name, one) for one in dump.done)
    return DumpReport(
        dtype=dtype_name(model.dtype),
        tokens=model.tokens(passes.ids),
        prompt_tokens=passes.prompt_tokens,
        tensors=tuple(dump.done),
        checks=dump.checks(),
        not_finite=next(filter(None, bad), dump.error) or None,
    )


def without_tokens(plan: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """What the activations of `plan` are as a mean over tokens. Raises UsageError for others."""
    found = []
    for one in plan:
        if one.kind != "activation" or "S" in one.axes:
            raise UsageError(
                f"`{one.name}` has no mean over the tokens",
                hint="`--minus` takes activations without keys, such as `8.resid_post`",
            )
        at = one.axes.index("T")
        axes, shape = ((*of[:at], *of[at + 1 :]) for of in (one.axes, one.shape))
        found.append(replace(one, axes=axes, shape=shape, dtype="float32"))
    return tuple(found)


def measure_difference(
    passes: Passes, plan: Sequence[TensorSpec], minus: Sequence[int], write: Write | None
) -> DumpReport:
    """The means over the tokens of `passes` less those over the tokens `minus`."""
    model, names = passes.model, [one.name for one in plan]
    with torch.inference_mode():
        ours, theirs = (emitted(model, [ids], names, mean=True) for ids in (passes.ids, minus))
    done = []
    for one in plan:
        off = (ours[one.name] - theirs[one.name]).squeeze(-2).float()
        done.append(_summary(one, tuple(off.shape), parts(off), write))
    return DumpReport(
        dtype=dtype_name(model.dtype),
        tokens=model.tokens(passes.ids),
        prompt_tokens=passes.prompt_tokens,
        tensors=tuple(done),
        checks=(),
        not_finite=next(filter(None, (not_finite(one.name, one) for one in done)), None),
    )


def _summary(
    one: TensorSpec, shape: tuple[int, ...], numbers: Iterable[Tensor], write: Write | None
) -> DumpedTensor:
    """A tensor whose numbers go to `write`, and their statistics."""
    found = Statistics(masks=one.name.endswith(".scores"))
    arrays = _arrays(numbers, found)
    if write is None:
        deque(arrays, maxlen=0)
    else:
        write(one.name, shape, str(one.dtype), arrays)
    return DumpedTensor(
        name=one.name,
        kind=one.kind,
        axes=one.axes,
        shape=shape,
        dtype=str(one.dtype),
        formula=one.formula,
        norm=found.norm,
        masked=found.masked,
        **found.summary(shape),
    )


class _Dump:
    """Watches one run; `done` are the tensors that were settled so far."""

    def __init__(
        self, passes: Passes, plan: Sequence[TensorSpec], *, check: bool, write: Write | None
    ) -> None:
        self.passes, self.model, self.plan = passes, passes.model, plan
        self._write, self._check = write, check
        config = self.model.config
        self._graph = graph(config)
        self._sources = {one.name: _sources(config, one, check=check) for one in plan}
        self._uses = Counter(chain.from_iterable(self._sources.values()))
        self._kept: dict[str, Tensor] = {}  # activations `[B, …]` by name
        self._state: State | None = None  # the cache where some of it is dumped
        self.done: list[DumpedTensor] = []
        self._formulas: list[ViewCheck] = []
        self._caches: dict[str, list[ViewCheck]] = {}  # of what is written, and of states
        self._proof: AttentionChecks | None = None  # of attention matrices, where there are any
        self._proven: set[int] = set()  # layers
        self._sound = True  # no number so far was NaN or infinite
        self.error = ""  # where something that is not dumped is not finite

    def run(self) -> None:
        """The parameters, and the forward pass where something of it is wanted.

        Without new tokens where none can be drawn.
        """
        for one in self.plan:
            if not self._sources[one.name]:
                self._settle(one)
        if self._uses:
            self._require_memory()
            try:
                self.passes.write(prove=self._check)
            except NotFinite as error:
                self.error = f"new tokens are left out: {error.message}"
            self._streamed()

    def _require_memory(self) -> None:
        """Raises OutOfMemory where what is kept of all tokens does not fit."""
        model, tokens = self.model, self.passes.most
        by_layer = Counter[int | None]()
        for one in plan_dump(model, self._uses, tokens):
            by_layer[layer_of(one.name)] += one.bytes
        needed = max(by_layer.values())  # one layer after the other
        if any(one.kind == "state" for one in self.plan):
            needed += model.decoder.state_bytes(1, tokens)
        if self._logits == "all":  # in the model's dtype and in at least float32
            logits = plan_dump(model, ("logits_raw", "logits"), tokens)
            needed += sum(one.bytes for one in logits)
        hint = "use a shorter prompt, or name fewer tensors"
        devices.require_memory(needed, model.device, "the activations that are dumped", hint)

    @property
    def _logits(self) -> Literal["all", "last"]:
        """Of which tokens the output is computed: the prompt's last alone if none is requested."""
        return "all" if any(self._graph[name].ends for name in self._uses) else "last"

    def _streamed(self) -> None:
        """Every tensor goes out in the layer where it is made."""
        pending = deque(one for one in self.plan if self._sources[one.name])
        session = None
        if any(one.kind == "state" for one in pending):
            session = self.passes.session()
            self._state = session.state

        def watch(name: str, tensor: Tensor) -> None:
            if name in self._uses:
                self._kept[name] = tensor
            while pending and self._sources[pending[0].name] <= self._kept.keys():
                self._settle(pending.popleft())

        until = last_layer(self._uses)
        self.passes.at_once(watch, logits=self._logits, until=until, session=session)

    def _settle(self, one: TensorSpec) -> None:
        """One tensor whole: its statistics, the file, its checks."""
        self.passes.progress("dumping", len(self.done), len(self.plan))
        self.done.append(_summary(one, *self._numbers(one), self._write))
        if one.kind == "state":
            compared = self._compare_cache(one)
            self._caches.setdefault(compared.name, []).append(compared)
        elif self._check and one.kind == "activation":
            self._check_activation(one.name)
        for source in self._sources[one.name]:
            self._uses[source] -= 1
            if not self._uses[source]:
                self._kept.pop(source, None)

    def _check_activation(self, name: str) -> None:
        """Whether it follows, and scores and pattern, with the values, give the kernel's own z."""
        self._sound = self._sound and self.done[-1].first_bad is None
        if not self._sound:
            return  # nothing follows from a number that is not finite
        model, ids, layer = self.model, self.passes.ids, layer_of(name)
        try:
            found = formula_checks(model, ids, self._kept, [name], rows=FORMULA_ROWS)
            self._formulas.append(found)
            if name.endswith(MATRICES) and layer is not None and layer not in self._proven:
                self._proven.add(layer)
                of = LayerMap(model, layer)
                seen = {one: self._kept[one][0] for one in of.reads}
                self._proof = self._proof or AttentionChecks(model.dtype, model.decoder.devices[0])
                heads, tokens = list(range(of.heads)), Tokens(list(ids), model.device)
                deque(checked_rows(self._proof, of, heads, tokens, seen), maxlen=0)
        except NotFinite as error:
            self._sound, self.error = False, self.error or error.message

    def checks(self) -> tuple[ViewCheck, ...]:
        """One check for all formulas, those of attention matrices, one for all caches."""
        found = []
        if self._formulas:
            words = formula_words(len(self._formulas), FORMULA_ROWS, len(self.passes.ids))
            found.append(replace(worst(self._formulas), words=words))
        if self._proof is not None and self._sound:
            found += self._proof.checks()
        return (*found, *map(worst, self._caches.values()), *self.passes.checks)

    def _numbers(self, one: TensorSpec) -> tuple[tuple[int, ...], Iterator[Tensor]]:
        """The shape, without a batch axis, and the numbers in parts."""
        if one.kind == "parameter":
            return one.shape, self._parameter(one.name)
        elif one.kind == "state":
            whole = self._cached(one.name)
        elif not self._graph.written(one.name):
            return self._derived(one.name)
        else:
            whole = self._kept[one.name][0]
        return tuple(whole.shape), parts(whole)

    def _parameter(self, name: str) -> Iterator[Tensor]:
        """A table in blocks is dequantized a part at a time."""
        weight = self.model.decoder.weight(name)
        if self._graph.parameters[name].transposed:
            return parts(weight.dense().mT)
        rows = max(1, AT_ONCE * weight.shape[0] // weight.count)
        firsts = range(0, weight.shape[0], rows)
        return (weight.dense(rows=slice(first, first + rows)) for first in firsts)

    def _derived(self, name: str) -> tuple[tuple[int, ...], Iterator[Tensor]]:
        """What the kernel never writes, head by head."""
        refuse_edited(self.model, [name])
        tokens = len(self.passes.ids)
        mixer = mixer_of(self.model, name)
        emitted = {one: self._kept[one] for one in self._graph.sources(name)}
        node = self._graph[name]
        sizes = self._graph.sizes(node.layer)
        heads = sizes["H"]
        if isinstance(node.op, HeadShare):
            width = self.model.config.width
            # several heads at a time, for every call dequantizes the matrix
            most = max(1, AT_ONCE // (tokens * width))
            whole = (
                mixer.derive(name, emitted, 0, tokens, heads=slice(head, head + most))[0]
                for head in range(0, heads, most)
            )
            return (heads, tokens, width), chain.from_iterable(map(parts, whole))
        columns = size(node.axes[-1], {**sizes, "S": tokens})

        def rows() -> Iterator[Tensor]:
            most = max(1, AT_ONCE // columns)
            for head in range(heads):
                only = slice(head, head + 1)
                read: Callable[[int, int], Tensor] = partial(
                    mixer.derive, name, emitted, heads=only
                )
                if isinstance(mixer, Recurrent) and name.endswith(".pattern"):
                    read = mixer.map(emitted, only).rows
                for first in range(0, tokens, most):
                    yield read(first, min(first + most, tokens))[0, 0]

        return (heads, tokens, columns), rows()

    def _cached(self, name: str) -> Tensor:
        """What the cache has of all tokens."""
        assert self._state is not None
        whole = self._state.tensors()[name][0]
        return filled(self._graph.states[name], whole, len(self.passes.ids))

    def _compare_cache(self, one: TensorSpec) -> ViewCheck:
        """Counts the numbers in the cache that are not those that were put there.

        For the state of a recurrence, which no kernel gives out: whether the tokens lead to it.
        """
        state, cached = self._graph.states[one.name], self._cached(one.name)
        if self._graph.written(state.holds):
            theirs = remembered(self._graph, state, self._kept[state.holds][0])
            return cache_check(theirs, cached, one.name)
        of = LayerMap(self.model, state.layer)
        seen = {name: self._kept[name][0] for name in of.recurrence_reads}
        return walk(of.recurrence(seen)).check(cached, one.name)


def _arrays(numbers: Iterable[Tensor], statistics: Statistics) -> Iterator[np.ndarray]:
    """The parts for a file, each added to `statistics` on its way; bfloat16 as its uint16 bits."""
    for part in numbers:
        ours = part.detach().to("cpu").contiguous()
        statistics.add(ours)
        if ours.dtype == torch.bfloat16:
            yield ours.view(torch.int16).numpy().view(np.uint16)
        else:
            yield ours.numpy()
