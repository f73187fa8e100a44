"""The decoder of all models: embedding, blocks, final norm, head. Models differ in values.

Axes: B batch, T new tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from llmcli.config.attention import DynamicScaling, LongRopeScaling
from llmcli.config.model import ModelConfig
from llmcli.decoder.block import Block
from llmcli.decoder.steps import FIRST_BUCKET, GraphRecorder, KernelRecorder, Steps, bucket
from llmcli.devices import available_bytes, require_memory
from llmcli.errors import UsageError
from llmcli.graph.graph import graph
from llmcli.graph.ops import Rotate
from llmcli.graph.precision import Precision
from llmcli.kernels import native
from llmcli.nn.parameters import Memory, Parameters
from llmcli.nn.state import LayerState, State, allocate
from llmcli.nn.step import Clock, Edit, ReplayClock, RopeTables, Step, Tap
from llmcli.ops import compiled, on_card
from llmcli.ops.activations import soft_cap
from llmcli.ops.elements import scale
from llmcli.ops.rope import depends_on_length
from llmcli.parts.norm import Norm
from llmcli.parts.ple import LayerEmbeddings, rounded
from llmcli.weights.weight import Weight

Logits: TypeAlias = Literal["all", "last"]
Given = ParamSpec("Given")
Made = TypeVar("Made")

# Cached tokens and steps by which Triton's kernels are checked: keys of two programs
_CHECKED = 260, 3


def inference(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Decorator: run the call in inference mode.

    `torch.compile` cannot trace a change of modes, so the caller's mode holds while it traces.
    """

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return call


class Decoder:
    """A causal language model with uninitialized parameters, accessed by `weight(name)`.

    `weight_names`: their names without duplicates; `head` is the embedding's weight if tied. Packed
    parameters are placed in `memory` if it provides any; those `in_file` exist already. Works on
    any device; on the meta device only shapes are computed.

    `placed`: the device of each layer, by default `device`, which has everything else: tables,
    final norm, head (a tied one needs its table there), ids and logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        *,
        device: torch.device | str,
        placed: Sequence[torch.device] | None = None,
        memory: Memory | None = None,
        in_file: Mapping[str, Weight] | None = None,
    ) -> None:
        self.config, self.precision = config, precision
        self.device = torch.device(device)
        self.placed = tuple(placed or [self.device] * len(config.layers))
        self.devices = tuple(dict.fromkeys((*self.placed, self.device)))
        specs = precision.parameters(config)
        parameters = Parameters(
            specs, precision, device=self.device, memory=memory, in_file=in_file
        )
        self.dtype, self.cache_dtype = parameters.dtype, parameters.cache_dtype
        tied = config.head.tied  # the table is also the head's matrix
        self.embed = (
            parameters.matrix(("embed.W",), exact=True) if tied else parameters.table("embed.W")
        )
        self._embed_scale = rounded(config.embedding.scale, config.embedding, self.embed)
        self.pos_embed: Weight | None = None
        if config.embedding.positions is not None:
            self.pos_embed = parameters.table("pos_embed.W")
        self.embed_norm: Norm | None = None
        if config.embedding.norm is not None:
            self.embed_norm = Norm(config.embedding.norm, "embed_norm", parameters, wide=True)
        self.embed_proj = self.head_proj = None
        if config.embedding.size is not None:
            self.embed_proj = parameters.matrix(("embed_proj.W",))
            self.head_proj = parameters.matrix(("head_proj.W",))
        self.per_layer: LayerEmbeddings | None = None
        if config.embedding.per_layer is not None:
            self.per_layer = LayerEmbeddings(config.embedding, parameters)
        self.blocks = [
            Block(layer, f"blocks.{i}", parameters.on(on))
            for i, (layer, on) in enumerate(zip(config.layers, self.placed, strict=True))
        ]
        self.ln_final = Norm(config.final_norm, "ln_final", parameters)
        self.head = self.embed if tied else parameters.matrix(("head.W",), exact=True)
        self.head_bias = parameters.vector(("head.b",)) if config.head.bias else None
        if parameters.unclaimed():
            raise AssertionError(f"parameters that no part uses: {parameters.unclaimed()}")
        self.weight_names = parameters.weights.keys()
        self._weights = {**parameters.weights, "head.W": self.head}
        model = graph(config)
        self.readers = model.readers
        nodes = model.nodes.values()
        behind = range(self.readers, len(config.layers))
        self._late = {node.name for node in nodes if node.layer in behind}
        rotations = {node.op.rope for node in nodes if isinstance(node.op, Rotate)}
        dynamic = any(map(depends_on_length, rotations))
        self._stretches = any(isinstance(rope.scaling, DynamicScaling) for rope in rotations)
        self._switches = {
            rope.scaling.original for rope in rotations if isinstance(rope.scaling, LongRopeScaling)
        }
        self.by_length = dynamic
        # Whether decode steps can be captured as CUDA graphs, which read a masked bucket of slots
        # (a CPU only reads existing keys). Not if RoPE frequencies depend on the length, which only
        # the host knows; and a graph is of one device.
        one = len(self.devices) == 1
        self.fixed_shapes = self.device.type == "cuda" and one and not dynamic
        self.first_bucket = FIRST_BUCKET
        attentions = [one.attention for one in config.layers if one.attention is not None]
        shared = {one.kv.layer for one in attentions} - {None}
        self._kv_sources = frozenset(f"blocks.{layer}.attn" for layer in shared)
        ours = precision.formats and self.dtype == torch.float32
        ours = (ours or self.dtype in compiled.EMULATED) and native.level() is not None
        tables = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._ropes = {rope: RopeTables(rope, self.device, tables) for rope in rotations}
        recorder: GraphRecorder | KernelRecorder | None = None
        if self.fixed_shapes:
            recorder = GraphRecorder(self.device)
        elif ours and self.device.type == "cpu" and one and not dynamic:
            recorder = KernelRecorder(self._weights.values(), self._ropes.values())
        off = "the frequencies of its rotation depend on the length" if dynamic else None
        self.steps = Steps(recorder, off if one else "the layers are on several devices")
        self.edits: tuple[Edit, ...] = ()  # of every call, before its own

    @property
    def begins_anywhere(self) -> bool:
        """Whether a pass can begin with any layer: each reads only what the one before made."""
        return self.per_layer is None and not self._kv_sources

    def weight(self, name: str) -> Weight:
        """The parameter `name`; `head.W` of a tied head is `embed.W`. Raises KeyError."""
        return self._weights[name]

    def needs_reprefill(self, state: State, totals: Sequence[int]) -> bool:
        """Whether sequences of these lengths have different rotations than their cached keys.

        This happens when a sequence crosses the length at which LongRoPE changes its frequencies:
        it must be read again from the start (as in Phi-3's `generate` in transformers).
        """
        each = zip(state.lengths, state.read_for, totals, strict=True)
        return any(
            read and (was > switch) != (total > switch)
            for read, was, total in each for switch in self._switches
        )  # fmt: skip

    def can_verify(self, state: State, tokens: int) -> bool:
        """Whether `tokens` tokens per sequence can be read together like single steps.

        They need the same rotation, and memory for a recorded step.
        """
        after = [length + tokens for length in state.lengths]
        if self._stretches or self.needs_reprefill(state, after):
            return False
        single, many = (state.recorded.get((n, self._slots(state, n))) for n in (1, tokens))
        if single is None or many is not None:
            return True
        free = available_bytes(self.device)
        return free is None or tokens * single.nbytes <= free

    def state_bytes(self, batch: int, capacity: int, device: torch.device | None = None) -> int:
        """Bytes that `new_state` would allocate on one of the devices, by default `device`."""
        on = {i for i, one in enumerate(self.placed) if one == (device or self.device)}
        specs = self.precision.states(self.config, batch=batch, capacity=capacity)
        return sum(spec.bytes for spec in specs if spec.layer in on)

    def new_state(self, batch: int, capacity: int) -> State:
        """Empty caches for `batch` sequences of up to `capacity` tokens, allocated once.

        Raises OutOfMemory if they do not fit on another device than `device`.
        """
        what = f"the caches of {batch} × {capacity} tokens"
        for device in self.devices:
            if device != self.device:
                needed = self.state_bytes(batch, capacity, device)
                require_memory(needed, device, what, "use a smaller `--context-length`")
        layers = self._layers(batch, capacity)
        lengths_B = None
        if self.fixed_shapes:
            lengths_B = torch.zeros(batch, dtype=torch.long, device=self.device)
        return State(layers, [0] * batch, capacity, lengths_B)

    def _layers(self, batch: int, capacity: int) -> Iterator[LayerState]:
        return allocate(self.config, self.precision, batch, capacity, self.placed)

    @inference
    def __call__(
        self,
        ids_BT: Tensor,
        state: State | None = None,
        *,
        lengths: Sequence[int] | None = None,
        totals: Sequence[int] | None = None,
        tap: Tap | None = None,
        edits: Sequence[Edit] = (),
        clock: Clock | None = None,
        logits: Logits = "all",
        until: int | None = None,
        begin: tuple[int, Tensor] | None = None,
        verify: bool = False,
    ) -> Tensor:
        """Logits of the new tokens, `[B, T, V]`, in at least float32; appends them to `state`.

        `lengths[b]`: number of real tokens in row b, the rest is padding on the right. `totals[b]`:
        final length of sequence b for a prompt in chunks, which determines rotations of dynamic NTK
        and LongRoPE. `last` only gives the row of each sequence's last real token, `[B, 1, V]`: the
        last layers without a state (`Graph.readers`) only compute this row, unless there is a tap
        or they are edited. `until=i` stops after layer i and returns the residual stream `[B, T,
        D]`; `begin=i, x` begins with layer i, with x `[B, T, D]` as the stream before it, where the
        model `begins_anywhere`. `clock(name)` is called when an activation is computed (on a
        GPU: enqueued), with `step` for work shared by all layers. `edits` change activations, in
        order and after those of the decoder itself; the tap sees the edited values. Raises
        ValueError if the tokens, padding included, do not fit the state or the learned positions,
        UsageError for an edit of an activation that cannot be edited.

        `verify`: read tokens of one sequence as single steps would, bit-identical if those are
        replayed.
        """
        if edits:
            check_edits(self.config, [edit.name for edit in edits])
        edits = (*self.edits, *edits)
        batch, tokens = ids_BT.shape
        starts = [0] * batch if state is None else state.lengths
        if len(starts) != batch:
            raise ValueError(f"a batch of {batch} does not fit a state of {len(starts)}")
        self._check_room(starts, tokens, state)
        watched = tap is not None or edits or until is not None or begin is not None
        late = clock if clock is not None and isinstance(clock, ReplayClock) else None
        single = (verify or tokens == 1) and lengths is None
        if state is not None and single and clock is late and not watched:
            slots = self._slots(state, tokens)
            replayed = self.steps(ids_BT, state, slots, self._fixed, late)
            if replayed is not None:
                return replayed
        lengths = [tokens] * batch if lengths is None else lengths
        fixed = None
        if state is not None and state.lengths_B is not None and set(lengths) == {1} == {tokens}:
            fixed = state.lengths_B, self._slots(state, tokens)
        step = Step(
            starts, tokens, lengths, self._ropes, totals=totals, device=self.device, fixed=fixed,
            cached=state is not None, tap=tap, edits=edits, clock=clock,
            kv_sources=self._kv_sources,
        )  # fmt: skip
        out = self._pass(ids_BT, state, step, logits, until, begin)
        if state is not None:  # last, so that a tap sees the previous lengths
            state.advance(step.lengths, step.totals)
        return out

    @inference
    def check_kernels(self) -> None:
        """`on_card.check` of computed steps after a prompt, if this decoder uses kernels.

        Loading calls it, so that no measured pass contains it. Raises OutOfMemory like a pass.
        """
        if not any(on_card.checks(one, self.dtype) for one in self.devices):
            return
        cached, more = _CHECKED
        slots = min(cached + more, self.config.embedding.positions or cached + more)

        def steps() -> Tensor:
            state = self.new_state(1, slots)
            ids_1T = (torch.arange(slots, device=self.device) % self.config.vocab).unsqueeze(0)
            self(ids_1T[:, :-more], state, logits="last")
            rows = [self(one, state) for one in torch.split(ids_1T[:, -more:], 1, 1)]
            return torch.cat(rows, 1)[0]

        recorder, self.steps.recorder = self.steps.recorder, None  # a clock would undo fusing
        try:
            narrowest = min(self.dtype, self.cache_dtype, key=lambda dtype: dtype.itemsize)
            on_card.check(steps, narrowest)
        finally:
            self.steps.recorder = recorder

    def _pass(
        self, ids_BT: Tensor, state: State | None, step: Step, logits: Logits, until: int | None,
        begin: tuple[int, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """The computation of `__call__`, without updating the state's lengths."""
        step.mark("step")
        first, x_BTD = (0, self._embed(ids_BT, step)) if begin is None else begin
        narrows = logits == "last" and step.tokens > 1 and until is None
        narrows = narrows and self._late.isdisjoint(step.edits)
        last_B1V: Tensor | None = None
        layers = self._layers(len(x_BTD), 0) if state is None else state.layers
        several = len(self.devices) > 1
        for i, (block, layer) in enumerate(zip(self.blocks, layers, strict=True)):
            if i < first:
                continue
            if narrows and i == max(first, self.readers):
                last_B1V = self._last_alone(x_BTD, step, i)
                if step.tap is None:
                    return last_B1V
            if several:
                x_BTD, step = _moved(x_BTD, step, block.device)
            x_BTD = block(x_BTD, layer, step)
            if i == until:
                break
        x_BTD, step = _moved(x_BTD, step, self.device)
        if until is None:
            x_BTD = self._unembed(x_BTD if logits == "all" else _last(x_BTD, step), step)
        # these layers' values for the tap may have different rounding and must not change logits
        return x_BTD if last_B1V is None else last_B1V

    def _last_alone(self, x_BTD: Tensor, step: Step, first: int) -> Tensor:
        """The logits `[B, 1, V]` from the input of layer `first`; it and later ones have no state.
        """
        last = step.last(None if step.per_layer is None else _last(step.per_layer, step))
        x_B1D, none = _last(x_BTD, step), LayerState(())
        for block in self.blocks[first:]:
            x_B1D, last = _moved(x_B1D, last, block.device)
            x_B1D = block(x_B1D, none, last)
        return self._unembed(*_moved(x_B1D, last, self.device))

    def _fixed(
        self, ids_B1: Tensor, state: State, starts: Sequence[int], fixed: tuple[Tensor, int],
        clock: Clock | None,
    ) -> Tensor:  # fmt: skip
        """Logits `[B, 1, V]` of a step with fixed shapes; see `Steps`."""
        step = Step(
            starts, 1, [1] * len(starts), self._ropes, device=self.device, fixed=fixed,
            recorded=state.lengths_B is None, clock=clock, kv_sources=self._kv_sources,
        )  # fmt: skip
        return self._pass(ids_B1, state, step, "all", None)

    def _slots(self, state: State, tokens: int) -> int:
        """Number of slots read by a step with fixed shapes: all, or a bucket on a GPU."""
        if state.lengths_B is None:
            return state.capacity
        return bucket(max(state.lengths) + tokens, state.capacity, self.first_bucket)

    def _check_room(self, starts: Sequence[int], tokens: int, state: State | None) -> None:
        """Raise ValueError if the tokens do not fit the state or the learned positions."""
        longest = max(starts) + tokens
        if state is not None and longest > state.capacity:
            raise ValueError(f"{longest} tokens do not fit a state of {state.capacity}")
        positions = self.config.embedding.positions
        if positions is not None and longest > positions:
            raise ValueError(f"{longest} tokens do not fit {positions} learned positions")

    def _embed(self, ids_BT: Tensor, step: Step) -> Tensor:
        x_BTD = self.embed.rows(ids_BT)
        if self._embed_scale != 1:
            x_BTD = scale(x_BTD, self._embed_scale)
        x_BTD = step.emit("embed", x_BTD)
        if self.per_layer is not None:
            step.per_layer = self.per_layer(ids_BT, x_BTD, step)
        if self.embed_proj is not None:
            x_BTD = self.embed_proj.matmul_fp32_out(x_BTD.to(self.dtype))
            x_BTD = step.emit("embed_proj", x_BTD)
        if self.embed_norm is not None:
            x_BTD = self.embed_norm.observed(x_BTD, step)
        if self.pos_embed is not None:
            rows = self.pos_embed.rows(step.positions)
            pos_BTD = step.emit("pos_embed", rows.expand_as(x_BTD))
            x_BTD = x_BTD + pos_BTD
        return x_BTD

    def _unembed(self, x_BTD: Tensor, step: Step) -> Tensor:
        x_BTD = self.ln_final.observed(x_BTD, step)
        if self.head_proj is not None:
            x_BTD = step.emit("head_proj", self.head_proj.matmul(x_BTD))
        raw_BTV = step.emit("logits_raw", self._raw_logits(x_BTD))
        logits_BTV = self._finished(raw_BTV)
        step.emit("logits", logits_BTV)  # for taps only
        return logits_BTV

    def logits(self, x: Tensor) -> Tensor:
        """Apply the head: normalized rows `[…, D]` → `[…, V]`, never rounded to 16 bits.

        In bfloat16 the best two of 49k logits are often equal: the spacing near 16 is 1/8.
        """
        x = x if self.head_proj is None else self.head_proj.matmul(x)
        return self._finished(self._raw_logits(x))

    def _raw_logits(self, x: Tensor) -> Tensor:
        return self.head.matmul_float32(x, self.head_bias)

    def _finished(self, raw: Tensor) -> Tensor:
        """Apply the head's cap or scale."""
        head = self.config.head
        if head.cap is not None:
            return soft_cap(raw, head.cap)
        return scale(raw, head.scale) if head.scale != 1 else raw


def _moved(x: Tensor, step: Step, device: torch.device) -> tuple[Tensor, Step]:
    """The residual stream and the step on `device`."""
    return (x, step) if step.device == device else (x.to(device), step.on(device))


def _last(x_BTD: Tensor, step: Step) -> Tensor:
    """The row of each sequence's last real token: `[B, 1, …]` (row 0 if it has none)."""
    if all(length == step.tokens for length in step.lengths):
        return x_BTD[:, -1:]
    last_B = torch.tensor([max(n - 1, 0) for n in step.lengths], device=x_BTD.device)
    return x_BTD[torch.arange(len(last_B), device=x_BTD.device), last_B].unsqueeze(1)


def check_edits(config: ModelConfig, names: Iterable[str]) -> None:
    """Raise UsageError for an unknown activation, or one that nothing is computed from.

    The latter includes activations covered by a kernel that is not optional.
    """
    model = graph(config)
    nodes = model.nodes
    # a block's stream is the memory of the previous block's output
    used = {name for node in nodes.values() for name in (*node.op.inputs, node.shares)}
    for name in names:
        if name not in nodes:
            raise UsageError(
                f"there is no activation `{name}` to edit",
                hint="`llmcli shapes` lists the activations of a model",
            )
        node = nodes[name]
        if name not in used or node.tap_only or name in model.derived([name]):
            before = (node.shares,) if node.shares in nodes else node.op.inputs
            before = tuple(name for name in before if not nodes[name].tap_only)
            made_of = " or ".join(f"`{name}`" for name in before)
            raise UsageError(
                f"`{name}` is only shown, nothing is computed from it: it cannot be edited",
                hint=f"edit {made_of}, which it is computed from",
            )
