"""What each part of a forward call takes: FLOPs, and bytes read and written. No torch.

FLOPs are those of the specs: matrix products, 2 a multiply-add, whatever kernel computes them.
Bytes are counted once a call, as if what a part reads a second time were in a cache by then:
parameters as they lie in memory, the keys and values that some new token sees, and each named
activation written once and read by what is computed from it. Of experts those count that ran,
where that was measured, else as many as one token chooses: no call reads fewer. What a kernel keeps
for itself (float32 copies, tiles, masks) is in none of them, nor is what only a tap asks for, such
as the `scale` of a norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.counts import PROMPT_CHUNK
from llmcli.anatomy.graph import Place, graph
from llmcli.anatomy.plan import plan
from llmcli.config import LayerConfig, ModelConfig
from llmcli.graph.node import Node, State
from llmcli.graph.ops import Gate, LookUp, Mix, Project, Rotate, visible_keys
from llmcli.graph.routing import ExpertProject
from llmcli.graph.spec import DTYPE_BYTES, Call, Logits, TensorSpec
from llmcli.records.work import PartWork

Works = tuple[tuple[str, int | None, PartWork], ...]  # part, layer, what it takes
Ran = Mapping[int, int]  # layer → how many experts ran there, over all calls


def part_work(
    config: ModelConfig,
    call: Call,
    *,
    numbers: Arithmetic,
    logits: Logits = "last",
) -> Works:
    """Each (part, layer) of one call in the order of the forward pass, the layer None outside.

    `numbers` is what it is computed in, and what weights, activations and the cache are kept in.
    """
    return calls_work(config, ((call, logits),), numbers=numbers)


def prompt_calls(
    *, batch: int, tokens: int, past: int = 0, chunk: int = PROMPT_CHUNK
) -> Iterator[tuple[Call, Logits]]:
    """The forward calls that read `batch` prompts of `tokens` tokens, `chunk` at a time.

    Only the last one has logits (`Session.prefill`).
    """
    for start in range(0, tokens, chunk):
        size = min(chunk, tokens - start)
        call = Call(batch=batch, tokens=size, past=past + start, phase="prefill")
        yield call, "last" if start + size == tokens else "none"


def decode_calls(*, batch: int, tokens: int, past: int) -> Iterator[tuple[Call, Logits]]:
    """Those that write `tokens` tokens after `past` ones, one a call."""
    for later in range(tokens):
        yield Call(batch=batch, tokens=1, past=past + later, phase="decode"), "last"


def prompt_work(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int = 0,
    chunk: int = PROMPT_CHUNK,
    numbers: Arithmetic,
) -> Works:
    """The same of a whole prompt, read `chunk` tokens at a time: the sum over those calls."""
    calls = prompt_calls(batch=batch, tokens=tokens, past=past, chunk=chunk)
    return calls_work(config, calls, numbers=numbers)


def decode_work(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int,
    numbers: Arithmetic,
) -> Works:
    """The same of `tokens` tokens after `past` ones, one a call: the sum over those calls."""
    calls = decode_calls(batch=batch, tokens=tokens, past=past)
    return calls_work(config, calls, numbers=numbers)


def total_work(
    config: ModelConfig,
    call: Call,
    *,
    numbers: Arithmetic,
    logits: Logits = "last",
) -> PartWork:
    """All parts of one call together."""
    return added(part_work(config, call, numbers=numbers, logits=logits))


def step_bytes(
    config: ModelConfig,
    tokens: int,
    *,
    batch: int = 1,
    numbers: Arithmetic,
) -> int:
    """Bytes that the step which makes it `tokens` tokens streams: weights, keys and values.

    What is not larger than a cache stays in it from one step to the next.
    """
    call = Call(batch=batch, tokens=1, past=max(0, tokens - 1), phase="decode")
    work = total_work(config, call, numbers=numbers)
    return work.weights + work.cache


def added(works: Works) -> PartWork:
    """All parts together."""
    return sum((work for *_, work in works), PartWork())


def calls_work(
    config: ModelConfig,
    calls: Iterable[tuple[Call, Logits]],
    *,
    numbers: Arithmetic,
    ran: Ran | None = None,
    whole: bool = False,
) -> Works:
    """The same of several calls: the sum over them; `ran` are the experts that were measured.

    Layers that keep nothing (`Graph.readers`) compute only tokens with logits, all with `whole`.
    """
    readers = len(config.layers) if whole else graph(config).readers
    # layers that are alike are counted once; their weights may differ in size
    alike: dict[LayerConfig, tuple[ModelConfig, bool]] = {}
    for index, layer in enumerate(config.layers):
        alike.setdefault(layer, (_alone(config, layer), index >= readers))
    sums: dict[LayerConfig, dict[Place, PartWork]] = {layer: {} for layer in alike}
    number = heads = looked_up = positions = 0
    for call, logits in calls:
        number += 1
        heads += logits != "none"
        looked_up += call.batch * call.tokens
        positions += call.tokens
        ends = call if logits == "all" else replace(call, tokens=1, past=call.keys - 1)
        for layer, (single, reads) in alike.items():
            if reads and logits == "none":
                continue
            seen, made = sums[layer], ends if reads else call
            for place, work in _LayerCall(single, made, logits, numbers).works():
                seen[place] = seen.get(place, PartWork()) + work
    weights = _weights(config, numbers, number, heads, looked_up, positions, ran, readers)
    return tuple(
        (part, layer, work + PartWork(weights=weights[part, layer]))
        for part, layer, work in _unrolled(config, sums)
    )


def _alone(config: ModelConfig, layer: LayerConfig) -> ModelConfig:
    """A model of that layer, the last one, and of the layer whose keys and values it reads."""
    attention = layer.attention
    if attention is None or attention.kv.layer is None:
        return replace(config, layers=(layer,))
    lender = config.layers[attention.kv.layer]
    reader = replace(attention, kv=replace(attention.kv, layer=0))
    return replace(config, layers=(lender, layer.with_attention(reader)))


def _unrolled(
    config: ModelConfig, sums: Mapping[LayerConfig, Mapping[Place, PartWork]]
) -> Iterator[tuple[str, int | None, PartWork]]:
    """What comes before the layers, every layer, what comes after them."""
    outside = [item for item in sums[config.layers[0]].items() if item[0][1] is None]
    yield from ((part, None, work) for (part, _), work in outside if part == "embed")
    for index, layer in enumerate(config.layers):
        for (part, inside), work in sums[layer].items():
            if inside is not None:
                yield part, index, work
    yield from ((part, None, work) for (part, _), work in outside if part != "embed")


def _weights(
    config: ModelConfig,
    numbers: Arithmetic,
    calls: int,
    heads: int,
    looked_up: int,
    positions: int,
    ran: Ran | None,
    readers: int,
) -> Counter[Place]:
    """Bytes of parameters that each part reads: all of them in each call, or rows of a table.

    `heads` of the calls have logits: layers from `readers` on are computed in no other.
    """
    found: Counter[Place] = Counter()
    model = graph(config)
    for spec in numbers.parameters(config):
        nbytes = _bytes(spec)
        if spec.name == "embed.W" and config.head.tied:
            found["head", None] += nbytes * heads
            continue
        node = model[model.parameters[spec.name].makes]
        reads = spec.layer is not None and spec.layer >= readers
        times = heads if node.ends or reads else calls
        if isinstance(node.op, LookUp):
            rows = positions if node.op.by_position else looked_up
            found[model.place(spec.name)] += nbytes * rows // spec.shape[0]
        elif isinstance(node.op, ExpertProject):
            assert spec.layer is not None
            chosen = times * model.sizes(spec.layer)["K"] if ran is None else ran[spec.layer]
            found[model.place(spec.name)] += nbytes * chosen // spec.shape[0]
        else:
            found[model.place(spec.name)] += nbytes * times
    return found


class _LayerCall:
    """One call of a model with one layer, all but its parameters."""

    def __init__(
        self, config: ModelConfig, call: Call, logits: Logits, numbers: Arithmetic
    ) -> None:
        self.model = graph(config)
        self.call = numbers.call(call)
        self.specs = {spec.name: spec for spec in plan(config, self.call, logits=logits).tensors}
        self.wide = DTYPE_BYTES[str(self.call.wide_dtype)]
        self.table = numbers.parameters(config)[0]
        self.kept = {
            spec.name: _bytes(spec) for spec in numbers.states(config, batch=call.batch, capacity=1)
        }

    def works(self) -> Iterator[tuple[Place, PartWork]]:
        """What each activation takes; several may be of one part."""
        shared: set[str] = set()  # products and rotations that several activations have in common
        last = len(self.model.config.layers) - 1
        for name, spec in self.specs.items():
            node, place = self.model[name], self.model.place(name)
            if place[1] not in (last, None):
                continue
            if not spec.written or node.shown or place[0] == "gaps":
                continue
            common = node.shares or ""
            if isinstance(node.op, Project | ExpertProject):
                common = node.op.fused
            first = not common or common not in shared
            shared.add(common)
            work = PartWork(
                flops=spec.flops - spec.masked_flops,
                flops_full=spec.flops,
                activations=self._moved(node, spec, first),
            )
            is_product = isinstance(node.op, Project | ExpertProject)
            if is_product and first and node.shares not in self.model:
                single = spec.shape[0] * spec.shape[-2] == 1
                each = spec.shape[1] if isinstance(node.op, ExpertProject) else 1
                work += PartWork(gemv=each * single, gemm=int(not single))
            yield place, work + self._cached(node)

    def _cached(self, node: Node) -> PartWork:
        """What a state holds of it: keys and values that some new token sees, and the new ones put
        beside them; of a state that does not grow all of it, read and written.
        """
        found = PartWork()
        for state in self.model.states.values():
            grows, mix = "S" in state.axes, node.op if isinstance(node.op, Mix) else None
            window = None if mix is None else mix.window
            own = node.name == (self.model.after(state) if grows else state.holds)
            lent = mix is not None and state.layer != node.layer and self._reads(mix, state)
            if not (own or lent):
                continue
            nbytes = self.kept[state.name]
            found += PartWork(
                cache=nbytes * (visible_keys(self.call, window) if grows else 1),
                activations=(2 * nbytes * self.call.tokens if grows else nbytes) if own else 0,
            )
        return found

    def _reads(self, mix: Mix, state: State) -> bool:
        """Whether the keys or values that are mixed are those of that cache."""
        score = self.model.score(mix)
        return state.holds in (mix.value, score and score.key)

    def _moved(self, node: Node, spec: TensorSpec, first: bool) -> int:
        """Bytes that are read to compute an activation, and written.

        `first`: of those that one product, or one rotation, gives.
        """
        op = node.op
        if isinstance(op, LookUp) and op.by_position:  # once for all sequences
            return _bytes(spec) // self.call.batch
        if isinstance(op, LookUp):  # ids, and the rows where the head counts the whole table
            ids = self.call.batch * self.call.tokens
            rows = _bytes(self.table) * ids // self.table.shape[0]
            tied = self.model.config.head.tied and op.table == self.table.name
            return _bytes(spec) + (rows if tied else 0) + 8 * ids
        if node.shares in self.specs:  # a view
            return 0
        if isinstance(op, Project | ExpertProject) and not first:
            return _bytes(spec)
        tables = 0
        if isinstance(op, Rotate) and first:  # cos and sin of the new positions
            tables = 2 * self.call.tokens * op.rope.dims * self.wide
        read = sum(self._read(name, spec) for name in op.reads)
        if isinstance(op, Gate) and op.item is not None:  # one layer's of all
            read -= self._read(op.up, spec)
            read += self._read(op.up, spec) // self.specs[op.up].shape[1]
        return _bytes(spec) + tables + read

    def _read(self, name: str, by: TensorSpec) -> int:
        """Bytes of the rows of an activation that another one is computed from."""
        nbytes = _bytes(self.specs[name])
        if isinstance(self.model[name].op, LookUp) and self.model[name].shares:
            return nbytes // self.call.batch  # rows that all sequences share
        return nbytes * by.shape[-2] // self.specs[name].shape[-2]


def _bytes(spec: TensorSpec) -> int:
    assert spec.bytes is not None
    return spec.bytes
