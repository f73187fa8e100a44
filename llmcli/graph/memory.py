"""Memory of a prompt: the tensors of its last chunk that are alive at once. No torch.

Bytes follow from the plan and from what operations allocate, except for three terms fitted to
measurements: `_MARGIN`, oneDNN's tiles and padding (`_Chunk._product`), and what an earlier chunk
leaves fragmented (`_Chunk._expanded`). Measured on x86 with PyTorch 2.13:
`tests/graph/test_counts.py` compares with the allocator's record,
`tests/benchmarks/memory_estimate.py` with the resident memory of processes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from math import prod

from llmcli.config.attention import Window, most_keys
from llmcli.config.formats import ACTIVATION_BYTES, DECODED_AT_ONCE, DEEP, DEQUANTIZED_AT_ONCE, RUN
from llmcli.config.latent import LatentConfig
from llmcli.config.model import ModelConfig
from llmcli.graph.graph import Graph, graph
from llmcli.graph.ops import Activate, Add, Mix, Normalize, Project, Rotate, Score, Softmax, size
from llmcli.graph.plan import plan
from llmcli.graph.precision import Precision
from llmcli.graph.recurrence import LinearMap
from llmcli.graph.routing import ExpertProject, SumExperts
from llmcli.graph.spec import DTYPE_BYTES, Call
from llmcli.records.info import MemoryNeed, StateNeed

PROMPT_CHUNK = 512  # tokens of a sequence per prefill call, at least (`prompt_chunk`)
_CUDA_ROWS = 2048  # of all sequences on CUDA: fewer calls, each of which reads all weights
# Numbers of a matrix converted to float32 at a time: 2 MiB, in L2 (`ops.product`).
HEAD_NUMBERS = 1 << 19
# Small tensors that the plan lacks, such as sums of rows and orders of experts: 5 % were measured.
_MARGIN = 1.06
# Processors with AMX have 2 MiB of L2 cache per core; oneDNN fills three quarters.
_PACKED = 3 << 19
_QUERIES = 256  # per block of scores without a fused kernel (`ops.attention`)
_TILE = (64, 512)  # queries and keys per tile of PyTorch's fused CPU attention
_SCANNED = 64  # tokens per chunk of a recurrence (`ops.recurrence`)
# Bytes per decoded number: float32, codes and intermediate values.
_DECODING = 8
# Measured on x86 with PyTorch 2.13 and two threads (tests/benchmarks/memory_estimate.py): code
# pages loaded by computing, and freed memory not returned to the system. Less if matrices are in
# the file's format, with products by our kernels.
_CODE = {False: 33 << 20, True: 36 << 20}  # by whether the dtype has 16 bits
_CODE_OF_KERNELS = 27 << 20
# Code that oneDNN generates and caches per 16-bit product and number of rows. Measured with
# AVX512-BF16 and one thread.
_GENERATED = 600 << 10
# PyTorch's workspaces for cuBLAS on Hopper, of prompts and of captured steps; on others 8 MiB each.
_CUBLAS = 2 * 32 << 20


def prompt_chunk(device: str, batch: int) -> int:
    """Tokens of each of `batch` sequences per prefill call on that type of device."""
    return max(PROMPT_CHUNK, _CUDA_ROWS // batch if device == "cuda" else 0)


@dataclass(frozen=True)
class PlannedRun:
    """A run with `batch` sequences of `context` tokens in a precision.

    `cuda`: on a GPU, where masked attention copies shared keys for every head; only GPU memory is
    counted. `native`: the processor has bfloat16 multiplication, which makes a difference in that
    dtype alone. Prompts are processed `chunk` tokens at a time; None: as a session does.
    """

    config: ModelConfig
    precision: Precision
    _: KW_ONLY
    batch: int
    context: int
    cuda: bool = False
    native: bool = False
    chunk: int | None = None

    @property
    def at_once(self) -> int:
        """Tokens of each sequence in a call, if the prompt has so many."""
        return self.chunk or prompt_chunk("cuda" if self.cuda else "cpu", self.batch)


def prefill_peak(run: PlannedRun) -> int:
    """Peak bytes while the last chunk of a prompt is processed.

    An upper estimate: of tensors alive at once (`_Chunk.spans`) and an operation's temporary
    memory, plus what layers share (tables of RoPE, masks, positions). Of equal layers one is
    enough.
    """
    chunked = _Chunk(run)
    made, freed = chunked.spans()
    now = peak = 0
    for name in chunked.specs:
        now += made[name]
        peak = max(peak, now + chunked.temporary(name))
        now -= freed[name]
    return round(peak * _MARGIN) + chunked.shared() + _dequantized(run.config, run.precision)


class _Chunk:
    """The last chunk of a run's prompt: `tokens` per sequence, with `keys` in its cache.

    `size`: bytes of a number; `wide`: in at least float32; `kept`: in the cache. `native`: the
    processor multiplies the dtype's 16 bits; `emulated`: it does not, and float32 is used. `specs`:
    tensors of one layer of each kind by name.
    """

    def __init__(self, run: PlannedRun) -> None:
        self.model, self.precision = model, precision = graph(run.config), run.precision
        self.batch, self.tokens, self.keys = run.batch, min(run.context, run.at_once), run.context
        self.cuda, self.native = run.cuda, run.native and precision.dtype == "bfloat16"
        self.plain = run.cuda or precision.portable  # attention without our kernel for a CPU
        self.rows = self.batch * self.tokens
        self.size, self.kept = DTYPE_BYTES[precision.dtype], DTYPE_BYTES[precision.cache]
        self.emulated = self.size < 4 and not (self.native or self.cuda)
        self.wide = max(self.size, 4)
        first = {layer: i for i, layer in reversed([*enumerate(model.config.layers)])}
        past = self.keys - self.tokens
        call = Call(batch=self.batch, tokens=self.tokens, past=past, phase="prefill")
        firsts = {None, *first.values()}
        found = plan(model.config, precision.call(call), logits="last", layers=firsts)
        self.specs = {spec.name: spec for spec in found.written if not model[spec.name].tap_only}
        self._columns = Counter[str]()  # of products
        for name in self.specs:
            op = model[name].op
            if isinstance(op, Project | ExpertProject):
                self._columns[op.fused or name] += size(op.columns, self._sizes(name))

    def spans(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Bytes allocated before, and freed after, an activation is computed.

        The tensors of a part are its locals: they and its inputs live until it returns. Summands of
        the residual stream are locals of the block; of several branches there is a partial sum.
        """
        model, names = self.model, list(self.specs)
        at = {name: i for i, name in enumerate(names)}
        blocks = {spec.layer: at[name] for name, spec in self.specs.items()}
        held, born, dies = Counter[str](), dict[str, int](), Counter[str]()

        def memory(name: str) -> str:
            """The tensor with the memory of `name`, or a name for several."""
            shares = self.specs[name].shares
            return name if shares is None else memory(shares) if shares in at else shares

        def read(name: str, until: int) -> None:
            if name in at:
                dies[memory(name)] = max(dies[memory(name)], until)
            elif name in model and not model.written(name):  # derived from others
                for source in model[name].op.inputs:
                    read(source, until)

        for i, (name, spec) in enumerate(self.specs.items()):
            op, own, returns = model[name].op, memory(name), at[model.returns[name]]
            born.setdefault(own, i)
            held[own] += spec.bytes if own == name or own not in at else 0
            read(name, returns)
            summed = isinstance(op, Add) and model[name].group == "residual"
            for source in op.inputs:
                read(source, blocks[spec.layer] if summed else returns)
            if isinstance(op, Add) and len(op.parts) > 2 and spec.shares is None:
                partial = f"{name}.partial"
                held[partial], born[partial], dies[partial] = spec.bytes, at[op.parts[0]], i
        made, freed = Counter[str](), Counter[str]()
        for own, i in born.items():
            made[names[i]] += held[own]
            freed[names[dies[own]]] += held[own]
        return made, freed

    def temporary(self, name: str) -> int:
        """Bytes that are only needed while the activation is computed."""
        op, spec = self.model[name].op, self.specs[name]
        if isinstance(op, Project | ExpertProject):
            inputs, columns = size(op.over, self._sizes(name)), self._columns[op.fused or name]
            copied = spec.count * self.size if self.size < 4 and spec.dtype == "float32" else 0
            if self.model[name].ends:  # the head, a piece at a time in float32
                return copied + 4 * min(inputs * columns, HEAD_NUMBERS) * (self.size < 4)
            if isinstance(op, Project) and op.clip is not None:
                part = op.fused in self.model.wide_products  # or the product and a copy, wide
                copied += (spec.count if part else 2 * self.rows * columns) * self.wide
            if isinstance(op, ExpertProject) and self.precision.formats:  # ordered by expert
                copied += spec.count // spec.shape[-1] * (spec.shape[-1] + inputs) * self.wide
            return copied + self._product(inputs, columns)
        if isinstance(op, Normalize | SumExperts):  # in float32
            return spec.count * self.wide
        if isinstance(op, Activate) and self.emulated:  # in float32, operand and result
            return spec.count * 2 * self.wide
        if isinstance(op, Rotate):  # narrower numbers are converted to float32 and back
            others = (one for one in self.specs.values() if one.shares == spec.shares)
            both = [spec] if spec.shares is None else others
            return sum(one.count for one in both) * (self.size if self.size == 4 else 16)
        if isinstance(op, Mix) and op.state and (self.size > 4 or self.precision.portable):
            sizes = self._sizes(name)  # no kernel: a chunk at a time; narrow inputs are widened
            inputs = (6 if self.size >= 4 else 8) * sizes["dv"]
            return self.rows * sizes["H"] * (4 * _SCANNED + inputs) * self.wide
        score = self.model.score(op) if isinstance(op, Mix) else None
        if not isinstance(op, Mix) or score is None:
            return 0
        if op.latent is not None:
            return self._expanded(op.latent)
        return self._attended(name, op, score)

    def shared(self) -> int:
        """Bytes that layers share: cos and sin of RoPE, masks, positions in int64.

        The tables double in length when too short.
        """
        ops = [self.model[name].op for name in self.specs]
        ropes = {op.rope for op in ops if isinstance(op, Rotate)}
        tables = sum(rope.dims for rope in ropes) * 2 * self.wide
        windows = {op.window for op in ops if isinstance(op, Mix) and self.model.score(op)}
        masks = [window for window in windows if self._is_masked(window)]
        if self.kept < self.size and not self.plain:
            masks = []
        positions = 1 << max(self.keys - 1, 255).bit_length()
        return tables * positions + len(masks) * self.tokens * self.keys + 8 * self.tokens

    def _sizes(self, name: str) -> Mapping[str, int]:
        return self.model.sizes(self.specs[name].layer)

    def _is_masked(self, window: Window | None) -> bool:
        """Whether a mask is needed: not for a triangle from position 0 (`nn.step`)."""
        most = most_keys(window)
        return self.keys > self.tokens or (most is not None and most < self.tokens)

    def _product(self, inputs: int, columns: int) -> int:
        """Maximum bytes of a kernel for `[rows, inputs] · [inputs, columns]`, one thread.

        For packed weights: the rounded inputs. For 16 bits, oneDNN's AMX kernels copy the weights
        into blocks of 32 inputs, as many as fit the cache, and keep the sums in float32 if not all
        inputs fit; its AVX512-BF16 kernels take less (oneDNN 3.12,
        `matmul/amx_blocking_heuristics.cpp`). Without 16-bit instructions all is in float32.
        """
        precision = self.precision
        if precision.formats and not precision.file_layout:
            copied = self.rows * inputs // RUN * ACTIVATION_BYTES[precision.activations // 8]
            deep = 2 * self.rows * -(-inputs // DEEP) * DEEP
            return max(copied, deep if precision.bf16_dot else 0)
        if self.size >= 4 or self.cuda:
            return 0
        if not self.native:
            return 4 * columns * (inputs + self.rows) + (512 << 10)  # the last: blocks of oneDNN
        weights = min(2 * columns * (-(-inputs // 32) * 32), _PACKED)
        sums = 4 * self.rows * min(columns, 1024) if inputs >= 2048 else 0
        return weights + sums + (128 << 10)  # the last: tiles and padding

    def _attended(self, name: str, op: Mix, score: Score) -> int:
        """Bytes of softmax attention besides its result."""
        softmax = self.model[op.pattern].op
        sizes, wide, tokens, keys = self._sizes(name), self.wide, self.tokens, self.keys
        heads, few, dims = sizes["H"], sizes["Hk"], sizes["dh"] + sizes["dv"]
        # the fused kernel's sum of every row, and one thread's tile of scores
        found = self.rows * heads * wide + _TILE[0] * (_TILE[1] + 2 + sizes["dv"]) * wide
        sinks = isinstance(softmax, Softmax) and softmax.sink is not None
        unfused, sloped = score.config.cap is not None or sinks, bool(score.config.slopes)
        ours = (unfused or sloped) and self.size <= 4
        if (ours or self.emulated) and not self.plain:  # our kernel
            return found + self.rows * heads * dims * wide * (self.size < 4)
        if unfused or sloped:  # no kernel: blocks of queries
            # keys and values: of every head, on CUDA only where they are widened
            read = few * (self.kept < self.size) if self.cuda else heads
            block = min(tokens, _QUERIES) * keys * 4 * heads + keys * dims * read
            return found + self.batch * block * wide + tokens * keys
        copied = self.batch * keys * few * dims * self.size  # keys and values
        if self.emulated:  # all in float32
            found += 2 * copied + self.rows * heads * dims * wide
        if self.kept < self.size:  # new keys in the cache's dtype, as our kernel reads them
            found += self.rows * few * sizes["dh"] * self.kept
            if not self.plain:
                return found
            found += copied
        if self._is_masked(op.window):
            found += tokens * keys * (wide if self.emulated else self.size)  # the mask as 0 and -∞
            if self.cuda:
                found += tokens * keys * self.size  # and again, in aligned rows
                each = dims * self.size if heads != few else 0  # keys and values for every head
                each += 2 * tokens * wide if self.size > 4 else 0  # scores, pattern: not fused
                found += self.batch * heads * keys * each
        if self.size < 4 and self.native and not self.cuda:
            # AMX: the fused kernel copies all keys and values, and a tile of the pattern twice
            found += copied + 2 * _TILE[0] * _TILE[1] * self.size
        return found

    def _expanded(self, a: LatentConfig) -> int:
        """Bytes of latent attention: keys and values of all positions, or absorbed queries.

        Expanded: the product, keys joined with their rotated part, padded values, and as much
        fragmented memory of an earlier chunk.
        """
        keys = self.batch * self.keys
        if a.absorbs(self.tokens, self.keys):
            weights = self.rows * a.heads * self.keys
            copied = keys * a.kept * self.wide if self.kept < self.wide else 0
            if self.cuda and self.kept == self.size < self.wide:  # the weights are rounded
                copied = weights * self.size
            return copied + 2 * (self.rows * a.heads * a.kept + weights) * self.wide
        product = a.heads * (a.content + a.value_dim)
        padded = 0 if self.cuda else a.heads * max(a.value_dim, a.head_dim)
        found = keys * (product + a.heads * a.head_dim + padded + a.rank * (self.kept < self.size))
        found += max(0, keys - self.rows) * product
        if self.emulated:  # queries, keys, values and results in float32
            both = keys * (a.heads * a.head_dim + padded)
            found += 2 * (both + 2 * self.rows * a.heads * a.head_dim)
        found += self.tokens * self.keys if self.keys > self.tokens else 0  # the mask as 0 and -∞
        return found * self.size + self._product(a.rank, product)


def _dequantized(config: ModelConfig, precision: Precision) -> int:
    """Bytes for dequantized weights in products of many rows on a GPU."""
    if not precision.file_layout:
        return 0
    specs = [spec for spec in precision.parameters(config) if spec.name in precision.formats]
    largest = max(spec.count // (spec.shape[0] if len(spec.axes) == 3 else 1) for spec in specs)
    held = DTYPE_BYTES[precision.dtype] * min(largest, DEQUANTIZED_AT_ONCE)
    return held + _DECODING * min(largest, DECODED_AT_ONCE)


def memory_need(run: PlannedRun, *, tokenizer: int = 0) -> MemoryNeed:
    """Bytes of a run, with a `tokenizer` of so many."""
    config, precision, batch = run.config, run.precision, run.batch
    states = (precision.states(config, batch=batch, capacity=n) for n in (0, 1))
    fixed, one = (sum(spec.bytes for spec in specs) for specs in states)
    per_token = one - fixed  # states of fixed size
    cache = fixed + per_token * run.context
    return MemoryNeed(
        formats=precision.describe(config),
        batch=batch,
        context=run.context,
        weights_bytes=precision.weight_bytes(config),
        cache_bytes=cache,
        cache_bytes_per_token=per_token,
        states=state_need(config, precision),
        # when a sequence ends, the caches of the others are copied
        cache_copies_bytes=cache // batch * (batch - 1),
        prompt_bytes_estimate=prefill_peak(run),
        runtime_bytes_estimate=_CUBLAS if run.cuda else _runtime(run) + tokenizer,
    )


def state_need(config: ModelConfig, precision: Precision) -> StateNeed | None:
    """States of recurrent mixers, and the length from which a cache would be larger; or None."""
    model = graph(config)
    mixers = ((layer, node.op) for layer, node in model.mixers.items())
    mixed = {layer: op for layer, op in mixers if isinstance(op, Mix) and op.state}
    if not mixed:
        return None
    fixed, grown = 0, Counter[int | None]()  # bytes, and bytes per token of other layers
    for spec in precision.states(config, batch=1, capacity=1):
        if "S" in spec.axes and spec.layer not in mixed:
            grown[spec.layer] += spec.bytes
        elif "S" not in spec.axes and spec.layer in mixed:
            fixed += spec.bytes
    if grown:
        each = grown.total() / len(grown)
    else:
        counts = (_keys_and_values(model, layer, op) for layer, op in mixed.items())
        each = DTYPE_BYTES[precision.cache] * sum(counts) / len(mixed)
    per_token = each * len(mixed)
    return StateNeed(
        layers=len(mixed),
        bytes=fixed,
        against="attention" if grown else "same_size",
        against_per_token=per_token,
        smaller_from=int(fixed // per_token) + 1,
    )


def _keys_and_values(model: Graph, layer: int, op: Mix) -> int:
    """Numbers of keys and values per token in a recurrence."""
    of = model[op.pattern].op
    names = (of.of.key, op.value) if isinstance(of, LinearMap) else (op.value,)
    sizes = {**model.sizes(layer), "T": 1}
    return sum(prod(size(axis, sizes) for axis in model[name].axes) for name in names)


def _runtime(run: PlannedRun) -> int:
    """Bytes of the libraries' code, including generated code."""
    precision = run.precision
    short = DTYPE_BYTES[precision.dtype] < 4
    if precision.formats and not short:
        return _CODE_OF_KERNELS
    if not (run.native and precision.dtype == "bfloat16"):
        return _CODE[short]
    parts: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    for spec in precision.parameters(run.config):
        if spec.layer is not None and spec.stored_shape is not None and len(spec.stored_shape) > 1:
            leaf = (spec.shares or spec.name).split(".", 2)[2]
            parts.setdefault((spec.layer, leaf), []).append(spec.stored_shape)
    products = {(leaf, *shapes) for (_, leaf), shapes in parts.items()}
    chunks = 2 if run.context > run.at_once else 1  # the last one has fewer rows
    # experts have any number of rows, in lots (`ops.linear`)
    lots = -(-min(run.context, run.at_once) // 32)
    each = (lots if len(shapes[0]) == 3 else chunks for _, *shapes in products)
    return _CODE[short] + _GENERATED * sum(each)


def longest_context(run: PlannedRun, need: MemoryNeed, *, free: int, most: int) -> int:
    """The largest number of tokens, up to `most`, that fits in `free` bytes.

    `need`: of the same run at any length. 0 if not even one token fits.
    """
    fixed = need.cache_bytes - need.cache_bytes_per_token * need.context

    def fits(tokens: int) -> bool:
        cache = fixed + need.cache_bytes_per_token * tokens
        peak = prefill_peak(replace(run, context=tokens))
        now = replace(
            need,
            cache_bytes=cache,
            cache_copies_bytes=cache // run.batch * (run.batch - 1),
            prompt_bytes_estimate=peak,
        )
        return now.needed_bytes <= free

    return bisect_left(range(most), True, key=lambda tokens: not fits(tokens + 1))
