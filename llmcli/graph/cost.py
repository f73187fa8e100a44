"""Parameters of a model, and the cost of each part of a forward call: FLOPs and bytes.

No torch. FLOPs are those of the specs: matrix products, 2 per multiply-add, for any kernel. Bytes
are counted once per call, as if repeated reads hit a cache: parameters as stored in memory, the
visible keys and values, and each named activation written once and read by its consumers. Experts
count if they ran, when measured, otherwise as many as one token chooses (the minimum of a call).
Kernels' internal memory (float32 copies, tiles, masks) is not counted, nor are tensors computed
only for a tap, such as a norm's `scale`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace

from llmcli.config.attention import seen_keys
from llmcli.config.model import LayerConfig, ModelConfig
from llmcli.graph.graph import Place, graph
from llmcli.graph.node import Node, State
from llmcli.graph.ops import Gate, LookUp, Mix, Project, Rotate
from llmcli.graph.plan import parameters, plan
from llmcli.graph.precision import Precision
from llmcli.graph.routing import ExpertProject
from llmcli.graph.spec import DTYPE_BYTES, Call, Logits, TensorSpec
from llmcli.records.info import ParameterCounts
from llmcli.records.work import Cost

CostByPart = Mapping[Place, Cost]  # (part, layer) → cost, in execution order
ExpertsRun = Mapping[int, int]  # layer → number of experts that ran, over all calls


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count every parameter once, by part; a tied head counts 0.

    Active experts: as many as a token chooses.
    """
    model = graph(config)
    parts = dict.fromkeys(("embedding", "attention", "mixers", "mlp", "norms", "head"), 0)
    idle = 0
    for spec in parameters(config):
        row = model.parameters[spec.name]
        parts[row.kind] += spec.count
        if isinstance(model[row.output].op, ExpertProject):
            idle += spec.count - spec.count // spec.shape[0] * model.sizes(spec.layer)["K"]
    total = sum(parts.values())
    return ParameterCounts(total=total, active=total - idle, **parts)


def prompt_calls(
    *, batch: int, tokens: int, past: int = 0, chunk: int
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


def total_cost(
    config: ModelConfig, call: Call, *, precision: Precision, logits: Logits = "last"
) -> Cost:
    """The cost of all parts of one call together."""
    return total(cost_by_part(config, ((call, logits),), precision=precision))


def total(costs: CostByPart) -> Cost:
    """The cost of all parts together."""
    return sum(costs.values(), Cost())


def step_bytes(config: ModelConfig, tokens: int, *, batch: int = 1, precision: Precision) -> int:
    """Bytes streamed by the decode step that reaches `tokens` tokens: weights, keys and values.

    Data smaller than a cache stays there between steps.
    """
    call = Call(batch=batch, tokens=1, past=max(0, tokens - 1), phase="decode")
    found = total_cost(config, call, precision=precision)
    return found.weights + found.cache


def cost_by_part(
    config: ModelConfig,
    calls: Iterable[tuple[Call, Logits]],
    *,
    precision: Precision,
    ran: ExpertsRun | None = None,
    whole: bool = False,
) -> CostByPart:
    """The cost of each part, summed over several calls; layer None outside the blocks.

    `precision`: formats of weights, activations and cache. `ran`: measured experts. Layers without
    a state (`Graph.readers`) only process tokens with logits, or all with `whole`.
    """
    readers = len(config.layers) if whole else graph(config).readers
    # equal layers are counted once; their weights may differ in size
    firsts: dict[tuple[LayerConfig, bool], int] = {}
    alike = [
        firsts.setdefault((layer, index >= readers), index)
        for index, layer in enumerate(config.layers)
    ]
    late = {one for one in alike if one >= readers}
    costs, summed, counts = _Costs(config, precision), dict[Place, Cost](), Counter[str]()
    for call, logits in calls:
        tokens = call.batch * call.tokens
        counts.update(calls=1, heads=logits != "none", tokens=tokens, positions=call.tokens)
        parts = [*costs.of(call, logits, {None, *alike} - late)]
        if late and logits != "none":
            ends = call if logits == "all" else replace(call, tokens=1, past=call.keys - 1)
            parts += costs.of(ends, logits, late)
        for place, cost in parts:
            summed[place] = summed.get(place, Cost()) + cost
    weights = costs.weights(counts, ran, readers)
    inside = defaultdict[int | None, list[str]](list)
    for part, layer in summed:
        inside[layer].append(part)
    before, *behind = [(part, None, None) for part in inside[None]]
    blocks = [(part, at, first) for at, first in enumerate(alike) for part in inside[first]]
    return {
        (part, layer): summed[part, first] + Cost(weights=weights[part, layer])
        for part, layer, first in (before, *blocks, *behind)
    }


class _Costs:
    """What calls of a model cost in a precision."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        self.model, self.precision = graph(config), precision
        self.parameters = precision.parameters(config)
        kept = precision.states(config, batch=1, capacity=1)
        self.kept = {spec.name: spec.bytes for spec in kept}
        self.moved: dict[str, list[tuple[State, bool]]] = {}  # by node; whether it writes the state
        mixes = [(node, node.op) for node in self.model.nodes.values() if isinstance(node.op, Mix)]
        for state in self.model.states.values():
            writer = self.model.after(state) if "S" in state.axes else state.holds
            self.moved.setdefault(writer, []).append((state, True))
            for node, mix in mixes:
                score = self.model.score(mix)
                mixed = (mix.value, score and score.key)
                if node.layer != state.layer and state.holds in mixed:
                    self.moved.setdefault(node.name, []).append((state, False))

    def weights(
        self, counts: Mapping[str, int], ran: ExpertsRun | None, readers: int
    ) -> Counter[Place]:
        """Bytes of parameters read by each part: all in each call, or rows of a table.

        `counts`: numbers of `calls` and of those with logits (`heads`), of `tokens` and
        `positions`; layers from `readers` on run only in calls with logits.
        """
        found, model = Counter[Place](), self.model
        for spec in self.parameters:
            if spec.name == "embed.W" and model.config.head.tied:
                found["head", None] += spec.bytes * counts["heads"]
                continue
            node = model[model.parameters[spec.name].output]
            late = node.ends or (spec.layer is not None and spec.layer >= readers)
            times, of = counts["heads" if late else "calls"], 1
            if isinstance(node.op, LookUp):
                times, of = counts["positions" if node.op.by_position else "tokens"], spec.shape[0]
            elif isinstance(node.op, ExpertProject):
                assert spec.layer is not None
                each = model.sizes(spec.layer)["K"]
                times, of = times * each if ran is None else ran[spec.layer], spec.shape[0]
            found[model.place(spec.name)] += spec.bytes * times // of
        return found

    def of(
        self, call: Call, logits: Logits, layers: Set[int | None]
    ) -> Iterator[tuple[Place, Cost]]:
        """Yield the cost of each activation of `layers`, without parameters.

        Several may belong to one part.
        """
        model, call = self.model, self.precision.call(call)
        read = {None, len(model.config.layers) - 1, *layers}  # the final norm reads the last one
        tensors = plan(model.config, call, logits=logits, layers=read).tensors
        specs = {spec.name: spec for spec in tensors}
        shared: set[str] = set()  # products and rotations shared by activations
        for name, spec in specs.items():
            node, place = model[name], model.place(name)
            unseen = not spec.written or node.tap_only or place[0] == "gaps"
            if place[1] not in layers or unseen:
                continue
            product = node.op if isinstance(node.op, Project | ExpertProject) else None
            common = product.fused if product is not None else node.shares or ""
            first = not common or common not in shared
            shared.add(common)
            gemv = gemm = 0
            if product is not None and first and node.shares not in model:
                single = spec.shape[0] * spec.shape[-2] == 1
                each = spec.shape[1] if isinstance(product, ExpertProject) else 1
                gemv, gemm = each * single, int(not single)
            cache, copied = self._cached(node, call)
            moved = self._moved(node, specs, call, first=first)
            flops = {"flops": spec.flops, "flops_full": spec.flops_full, "gemv": gemv, "gemm": gemm}
            yield place, Cost(cache=cache, activations=moved + copied, **flops)

    def _cached(self, node: Node, call: Call) -> tuple[int, int]:
        """Bytes read from states: visible keys and values, or a fixed-size state; bytes written."""
        read = written = 0
        window = node.op.window if isinstance(node.op, Mix) else None
        seen = seen_keys(call.past, window) + call.tokens - 1  # those of the first query, and later
        for state, own in self.moved.get(node.name, ()):
            nbytes, grows = call.batch * self.kept[state.name], "S" in state.axes
            read += nbytes * (seen if grows else 1)
            written += nbytes * (2 * call.tokens if grows else 1) * own
        return read, written

    def _moved(
        self, node: Node, specs: Mapping[str, TensorSpec], call: Call, *, first: bool
    ) -> int:
        """Bytes read and written to compute an activation.

        `first`: it is the first result of a fused product or rotation.
        """
        op, spec, tables = node.op, specs[node.name], 0
        if isinstance(op, LookUp) and op.by_position:  # once for all sequences
            return spec.bytes // call.batch
        if isinstance(op, LookUp):  # ids, plus rows if the head counts the whole table
            ids, table = call.batch * call.tokens, self.parameters[0]
            tied = self.model.config.head.tied and op.table == table.name
            return spec.bytes + 8 * ids + tied * (table.bytes * ids // table.shape[0])
        if node.shares in specs:  # a view
            return 0
        if isinstance(op, Project | ExpertProject) and not first:
            return spec.bytes
        if isinstance(op, Rotate) and first:  # cos and sin of the new positions
            tables = 2 * call.tokens * op.rope.dims * DTYPE_BYTES[str(call.wide_dtype)]
        found = spec.bytes + tables
        for name in op.reads:
            source = specs[name]
            if isinstance(self.model[name].op, LookUp) and self.model[name].shares:
                found += source.bytes // call.batch  # rows shared by all sequences
                continue
            read = source.bytes * spec.shape[-2] // source.shape[-2]
            one_layer = isinstance(op, Gate) and op.item is not None and name == op.up
            found += read // source.shape[1] if one_layer else read
        return found
