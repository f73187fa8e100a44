"""Work of each part of a forward call: FLOPs, and bytes read and written.

No torch. FLOPs are those of the specs: matrix products, 2 per multiply-add, for any kernel. Bytes
are counted once per call, as if repeated reads hit a cache: parameters as stored in memory, the
visible keys and values, and each named activation written once and read by its consumers. Experts
count if they ran, when measured, otherwise as many as one token chooses (the minimum of a call).
Kernels' internal memory (float32 copies, tiles, masks) is not counted, nor are tensors computed
only for a tap, such as a norm's `scale`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from llmcli.config.model import LayerConfig, ModelConfig
from llmcli.graph.arithmetic import Arithmetic
from llmcli.graph.graph import Place, graph
from llmcli.graph.memory import PROMPT_CHUNK
from llmcli.graph.node import Node, State
from llmcli.graph.ops import Gate, LookUp, Mix, Project, Rotate, visible_keys
from llmcli.graph.plan import plan
from llmcli.graph.routing import ExpertProject
from llmcli.graph.spec import DTYPE_BYTES, Call, Logits, TensorSpec
from llmcli.records.work import PartWork

Works = tuple[tuple[str, int | None, PartWork], ...]  # part, layer, work
Ran = Mapping[int, int]  # layer → number of experts that ran, over all calls


def part_work(
    config: ModelConfig,
    call: Call,
    *,
    numbers: Arithmetic,
    logits: Logits = "last",
) -> Works:
    """Work of each (part, layer) of one call in execution order; layer None outside the blocks.

    `numbers`: the arithmetic, and the formats of weights, activations and cache.
    """
    return calls_work(config, ((call, logits),), numbers=numbers)


def prompt_calls(
    *, batch: int, tokens: int, past: int = 0, chunk: int = PROMPT_CHUNK
) -> Iterator[tuple[Call, Logits]]:
    """The forward calls for `batch` prompts of `tokens` tokens, `chunk` at a time.

    Only the last one has logits (`Session.prefill`).
    """
    for start in range(0, tokens, chunk):
        size = min(chunk, tokens - start)
        call = Call(batch=batch, tokens=size, past=past + start, phase="prefill")
        yield call, "last" if start + size == tokens else "none"


def decode_calls(*, batch: int, tokens: int, past: int) -> Iterator[tuple[Call, Logits]]:
    """The forward calls that decode `tokens` tokens after `past` ones, one per call."""
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
    """Work of a whole prompt, `chunk` tokens at a time, summed over the calls."""
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
    """Work of decoding `tokens` tokens after `past` ones, summed over the calls."""
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
    """Bytes streamed by the decode step that reaches `tokens` tokens: weights, keys and values.

    Data smaller than a cache stays there between steps.
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
    """Work summed over several calls; `ran`: measured experts.

    Layers without a state (`Graph.readers`) only process tokens with logits, or all with `whole`.
    """
    readers = len(config.layers) if whole else graph(config).readers
    # equal layers are counted once; their weights may differ in size
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
    """A model of this layer, after the one whose keys and values it reads, if there is one."""
    attention = layer.attention
    if attention is None or attention.kv.layer is None:
        return replace(config, layers=(layer,))
    lender = config.layers[attention.kv.layer]
    reader = replace(attention, kv=replace(attention.kv, layer=0))
    return replace(config, layers=(lender, layer.with_attention(reader)))


def _unrolled(
    config: ModelConfig, sums: Mapping[LayerConfig, Mapping[Place, PartWork]]
) -> Iterator[tuple[str, int | None, PartWork]]:
    """Yield the work before the layers, of every layer, and after them."""
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
    """Bytes of parameters read by each part: all in each call, or rows of a table.

    `heads`: number of calls with logits; layers from `readers` on run only in these.
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
    """Work of one call of a model with one layer, without parameters."""

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
        """Yield the work of each activation; several may belong to one part."""
        shared: set[str] = set()  # products and rotations shared by activations
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
                flops=spec.flops,
                flops_full=spec.flops_full,
                activations=self._moved(node, spec, first),
            )
            is_product = isinstance(node.op, Project | ExpertProject)
            if is_product and first and node.shares not in self.model:
                single = spec.shape[0] * spec.shape[-2] == 1
                each = spec.shape[1] if isinstance(node.op, ExpertProject) else 1
                work += PartWork(gemv=each * single, gemm=int(not single))
            yield place, work + self._cached(node)

    def _cached(self, node: Node) -> PartWork:
        """Bytes moved in states: visible and new keys and values; all of a fixed-size state."""
        found = PartWork()
        for state in self.model.states.values():
            grows, mix = "S" in state.axes, node.op if isinstance(node.op, Mix) else None
            window = None if mix is None else mix.window
            own = node.name == (self.model.after(state) if grows else state.holds)
            shared = mix is not None and state.layer != node.layer and self._reads(mix, state)
            if not (own or shared):
                continue
            nbytes = self.kept[state.name]
            found += PartWork(
                cache=nbytes * (visible_keys(self.call, window) if grows else 1),
                activations=(2 * nbytes * self.call.tokens if grows else nbytes) if own else 0,
            )
        return found

    def _reads(self, mix: Mix, state: State) -> bool:
        """Whether the mixed keys or values are those of this cache."""
        score = self.model.score(mix)
        return state.holds in (mix.value, score and score.key)

    def _moved(self, node: Node, spec: TensorSpec, first: bool) -> int:
        """Bytes read and written to compute an activation.

        `first`: it is the first result of a fused product or rotation.
        """
        op = node.op
        if isinstance(op, LookUp) and op.by_position:  # once for all sequences
            return _bytes(spec) // self.call.batch
        if isinstance(op, LookUp):  # ids, plus rows if the head counts the whole table
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
        if isinstance(op, Gate) and op.item is not None:  # only one layer's slice
            read -= self._read(op.up, spec)
            read += self._read(op.up, spec) // self.specs[op.up].shape[1]
        return _bytes(spec) + tables + read

    def _read(self, name: str, by: TensorSpec) -> int:
        """Bytes of an activation's rows read for another activation."""
        nbytes = _bytes(self.specs[name])
        if isinstance(self.model[name].op, LookUp) and self.model[name].shares:
            return nbytes // self.call.batch  # rows shared by all sequences
        return nbytes * by.shape[-2] // self.specs[name].shape[-2]


def _bytes(spec: TensorSpec) -> int:
    assert spec.dtype is not None
    return spec.bytes
