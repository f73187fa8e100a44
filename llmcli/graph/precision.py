"""The default precision of a model, and its rounding errors. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from llmcli.config.formats import IN_16_BITS, ON_CARD, ROWS, RUN
from llmcli.config.model import ModelConfig
from llmcli.errors import UsageError
from llmcli.graph.graph import graph
from llmcli.graph.ops import LookUp, Project
from llmcli.graph.plan import parameters, plan, states
from llmcli.graph.routing import ExpertProject
from llmcli.graph.spec import DTYPE_BYTES, Call, TensorSpec
from llmcli.records.info import Formats

# The distance between adjacent numbers, relative to the power of two below them.
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
# 16-bit dtype → the stored format that it holds exactly. Wider dtypes hold all narrower ones;
# integer blocks are defined by their dequantized float32.
HELD = {dtype: stored for stored, dtype in IN_16_BITS.items()}

# Formats of quantized weights and their scales, which do not determine the precision.
_QUANTIZED = {"F8_E4M3", "F8_E5M2", "I8", "U8"}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A model's formats and dtypes: `dtype` of activations and dense parameters.

    In 16 bits the results of products, norms, rotations, activations and attention are rounded
    once, from float32 sums; what is added to the residual stream and the logits may stay float32.
    A processor without arithmetic in these 16 bits widens all operands (`ops.compiled`).

    `cache`: dtype of keys and values. `formats`: of parameters kept in the file's format, by name:
    in 16 bits, or in blocks, for whose products activations are rounded to integers of
    `activations` (16 or 8) bits. `file_layout`: GPU memory has blocks in the file's layout;
    products of few rows then do not round activations, and for many rows blocks are dequantized to
    `dtype`.
    `bf16_dot`: for products with bfloat16 matrices, except head and routers, activations are
    rounded to bfloat16. `portable`: without known vector instructions PyTorch's attention processes
    prompts, from copies of a narrower cache in `dtype`. `on_cpu`: layers (None: what is outside of
    them) on a CPU beside a GPU, whose blocks are packed and multiplied as on a CPU alone.
    """

    dtype: str
    cache: str
    formats: Mapping[str, str] = field(default_factory=dict, hash=False)
    file_layout: bool = False
    bf16_dot: bool = False
    activations: int = 16
    portable: bool = False
    on_cpu: frozenset[int | None] = frozenset()

    @classmethod
    def of(cls, dtype: str) -> Precision:
        """Everything in `dtype`."""
        return cls(dtype=dtype, cache=dtype)

    @property
    def products(self) -> str:
        """The format of inputs multiplied with weights: `int16` or `int8` with packed weights."""
        if self.rounds_inputs:
            return f"int{self.activations}"
        return "bfloat16" if self.bf16_dot and "bfloat16" in self.formats.values() else self.dtype

    @property
    def rounds_inputs(self) -> bool:
        """Whether some products round activations to integers."""
        unrounded = self.file_layout and not self.on_cpu
        return not unrounded and bool(set(self.formats.values()) - set(HELD))

    def given(self, activations: str, cache: str) -> Precision:
        """Apply `--activations` and `--cache-type`, unless `auto`.

        Raises UsageError for a cache type that is not narrower than activations.
        """
        if cache not in ("auto", self.dtype) and DTYPE_BYTES[cache] >= DTYPE_BYTES[self.dtype]:
            raise UsageError(
                f"`--cache-type {cache}` is not narrower than {self.dtype} activations",
                hint="leave it out, or use a narrower type",
            )
        bits = self.activations if activations == "auto" else int(activations)
        return replace(self, activations=bits, cache=self.cache if cache == "auto" else cache)

    def call(self, call: Call) -> Call:
        """The forward call `call` in these dtypes."""
        return replace(call, dtype=self.dtype, cache=self.cache)

    def parameters(self, config: ModelConfig) -> tuple[TensorSpec, ...]:
        """Every parameter as stored in memory."""
        specs = parameters(
            config, dtype=self.dtype, formats=self.formats, file_layout=self.file_layout
        )
        if not (self.file_layout and self.on_cpu):
            return specs
        return tuple(
            replace(spec, file_layout=False) if spec.layer in self.on_cpu else spec
            for spec in specs
        )

    def states(self, config: ModelConfig, *, batch: int, capacity: int) -> tuple[TensorSpec, ...]:
        """States kept between calls, for `capacity` positions."""
        return states(config, batch=batch, capacity=capacity, dtype=self.dtype, cache=self.cache)

    def weight_bytes(self, config: ModelConfig) -> int:
        """Bytes of all parameters; a tied head is counted once."""
        return sum(spec.bytes for spec in self.parameters(config))

    def weight_format(self, config: ModelConfig) -> str:
        """The dtype, or with packed weights the formats of all matrices, by descending bytes."""
        if not self.formats:
            return self.dtype
        held: Counter[str] = Counter()
        named = matrices(config)
        for spec in self.parameters(config):
            if spec.name in named:
                held[str(spec.dtype)] += spec.bytes
        return " + ".join(name for name, _ in held.most_common())

    def describe(self, config: ModelConfig) -> Formats:
        """The formats of weights, activations, cache and products, for JSON documents."""
        return {
            "weight_format": self.weight_format(config),
            "activation_format": self.dtype,
            "cache_format": self.cache,
            "product_format": self.products,
        }


# `--dtype auto` for commands that check numbers: as computed, but not in 16 bits.
WIDE = "wide"

# Kernel levels with fast products of many float32 rows and bfloat16 weights, relative to PyTorch's
# all-bfloat16 products: AMX 0.3, AVX-512 on Zen 5 0.45, where PyTorch's float32 has 0.2.
# Single-token steps are 1.7 to 2.2 times as fast as all-bfloat16 ones.
FAST_WIDE = ("avx512", "vnni", "avx512bf16", "amx")

# Formats of `--quantize`: (matrices of a dense checkpoint, matrices with a row per token).
QUANTIZED = {"int8": ("Q8_0", "Q8_0"), "int4": ("Q4_1", "Q8_0")}


def resolve_precision(
    config: ModelConfig,
    *,
    dtype: str,
    quantize: str,
    device: str,
    stored: Set[str],
    bfloat16: bool,
    kernels: str | None,
    packable: Mapping[str, str],
) -> Precision:
    """The precision on a `cpu`, `cuda` or `mps` device for `--dtype` and `--quantize`.

    `stored`, `bfloat16`: see `auto_dtype`. `kernels`: for packed weights
    (`kernels.native.kernels_of`), None without; `packable`: parameters in blocks or 16 bits in the
    file, kept so by default; quantizing also needs no dtype. Raises UsageError if there are no
    kernels for quantized weights, or a dtype is given too.
    """
    if quantize not in ("auto", "none", *QUANTIZED):
        raise UsageError(
            f"`--quantize {quantize}` is not a weight format",
            hint=f"use auto, none, {' or '.join(QUANTIZED)}",
        )
    given = dtype not in ("auto", WIDE)
    card = device != "cpu"
    no_blocks = in_no_blocks(config, card=card)
    formats = {
        name: kept
        for name, kept in packable.items()
        if kernels and not given and (name not in no_blocks or kept in HELD)
        and (not card or kept in ON_CARD)
    }
    if set(formats.values()) <= set(HELD) and (
        dtype == WIDE or (bfloat16 and kernels not in FAST_WIDE)
    ):
        formats = {}  # all or nothing in 16 bits, including products of many rows
    if quantize in QUANTIZED:
        if given:
            raise UsageError(
                f"`--quantize {quantize}` and `--dtype {dtype}` contradict each other",
                hint="leave out one of them: quantized weights are multiplied as integers",
            )
        if not kernels:
            where = f"on the device `{device}`" if card else "on this machine"
            raise UsageError(
                f"there are no kernels for `--quantize {quantize}` {where}",
                hint="`llmcli env` says which kernels there are; use `--dtype bfloat16`",
            )
        other, tokens = QUANTIZED[quantize]
        for name in quantizable(config, formats):
            per_token = name in ("embed.W", "head.W", "ple.embed.W")
            formats[name] = tokens if per_token else other
    if quantize == "none":
        formats = {}
    precision = Precision(dtype="float32", cache="float16", formats=formats)
    precision = replace(precision, portable=kernels == "portable")
    if formats and not card:
        return replace(precision, bf16_dot=kernels == "avx512bf16")
    if not given:
        dtype = "float32" if dtype == WIDE else auto_dtype(device, stored, bfloat16=bfloat16)
    return replace(precision, dtype=dtype, cache=dtype, file_layout=bool(formats))


def quantizable(config: ModelConfig, formats: Mapping[str, str]) -> list[str]:
    """The matrices that `--quantize` packs: rows of whole blocks, not packed in the file.

    `formats`: of parameters kept in the file's format, by name.
    """
    no_blocks = in_no_blocks(config)
    return [
        name
        for name, columns in matrices(config).items()
        if columns % RUN == 0
        and name != "pos_embed.W"
        and name not in no_blocks
        and formats.get(name, "bfloat16") in HELD
    ]


def matrices(config: ModelConfig) -> dict[str, int]:
    """Weight matrices and lookup tables → stored number of columns."""
    model = graph(config)
    return {
        spec.name: (spec.stored_shape or spec.shape)[-1]
        for spec in parameters(config)
        if len(spec.axes) > 1
        and isinstance(
            model[model.parameters[spec.name].output].op,
            ExpertProject if len(spec.axes) == 3 else Project | LookUp,
        )
    }


def in_no_blocks(config: ModelConfig, *, card: bool = False) -> frozenset[str]:
    """Matrices kept in at least 16 bits.

    Experts without whole groups of rows (except on a GPU), routers (small but decisive), and
    `dense` parameters.
    """
    model = graph(config)
    return frozenset(
        spec.name
        for spec in parameters(config)
        if (len(spec.axes) == 3 and not card and (spec.stored_shape or spec.shape)[1] % ROWS)
        or model[model.parameters[spec.name].output].group == "router"
        or model.parameters[spec.name].dense
    )


def auto_dtype(device: str, stored: Set[str], *, bfloat16: bool) -> str:
    """The dtype for `--dtype auto` on a `cpu`, `cuda` or `mps` device and these stored formats.

    `bfloat16`: whether the device has bfloat16 hardware. A CPU uses bfloat16 only then (16-bit
    arithmetic without such instructions is many times slower). A GPU uses the checkpoint's dtype,
    ignoring 8-bit weights: float16 for GGUF blocks, or if all weights have 8 bits and the GPU lacks
    bfloat16.
    """
    if device == "cpu":
        return "bfloat16" if bfloat16 else "float32"
    matrices = stored - {"F32"} - _QUANTIZED or stored - {"F32"} or stored
    if matrices == {"F32"} or "F64" in matrices:
        return "float32"
    return "bfloat16" if bfloat16 and matrices != {"F16"} else "float16"


def rounding(dtype: str) -> float:
    """Upper bound of the RMS of one rounding to `dtype`, relative to the number.

    Errors are uniform up to eps/2 of the power of two below the number: RMS eps/√12 of that.
    """
    return EPS[dtype] / math.sqrt(12)


# RMS of rounding the input of a product with blocks, by bits, relative to the row's norm: each of
# 32 numbers has a step of 1/127 of their largest, or 1/256 of that, times 1/√12; the largest is at
# most the norm of all 32. Measured with SmolLM2 in 8 bits, mean per kind of input: 0.007 to 0.011.
INPUT_ROUNDING = {8: math.sqrt(RUN / 12) / 127, 16: math.sqrt(RUN / 12) / 127 / 256}


def stream_noise(config: ModelConfig, precision: Precision, matrices: Iterable[str]) -> float:
    """Estimated RMS change of the final stream by one step's roundings, relative to its norm.

    Rather too large than too small. The roundings are of:

    - every stored activation, to its dtype in the graph;
    - rows of the stream that enter a product without a norm;
    - every matrix stored (`matrices`: their formats) in a format that 16 bits do not hold exactly;
    packed ones only on a GPU for products of many rows;
    - inputs of products with packed matrices, head included, to 16 or 8 bits, and inputs of
    products with `bf16_dot` to bfloat16;
    - sums in products, in at least float32: K sequentially added terms of any sign count as K/2
    roundings of the whole sum.

    Roundings are independent, so their squares add up. Each counts for the whole stream: branches
    are assumed as large as the stream, though most are smaller. Measured (SmolLM2 and tiny, in
    float32 and 16 bits), the RMS noise over all positions is 0.2 to 0.7 of the estimate, and up to
    3 times the estimate at single positions. SmolLM2 in blocks with 8-bit activations, against its
    weights in float32 (1024 tokens in 4 parts): 0.026, which is 0.18 of the estimate, and at most
    0.079.
    """
    dtype = precision.dtype
    specs = [spec for spec in _written(config, precision) if spec.dtype != "int64"]
    names = {spec.name for spec in specs}
    # views are not rounded again
    squares = [rounding(spec.dtype or dtype) ** 2 for spec in specs if spec.shares not in names]
    nodes = graph(config).nodes  # stream rows that enter a product without a norm
    products = [(n.name, n.op) for n in nodes.values() if isinstance(n.op, Project)]
    entering = {op.fused or name for name, op in products if nodes[op.source].wide}
    squares += [rounding(dtype) ** 2] * len(entering)
    if dtype in HELD:
        dequantized = precision.formats.values() if precision.file_layout else ()
        every = (*matrices, *dequantized)
        squares += [rounding(dtype) ** 2 for stored in every if stored != HELD[dtype]]
    squares += _inputs_rounded(config, precision)
    wide = "float64" if dtype == "float64" else "float32"
    squares += [spec.flops_full / (2 * spec.count) / 2 * rounding(wide) ** 2 for spec in specs]
    return math.sqrt(sum(squares))


def _inputs_rounded(config: ModelConfig, precision: Precision) -> list[float]:
    """Squared roundings of product inputs; each input is rounded once."""
    if precision.file_layout and not precision.on_cpu:
        return []
    formats = dict(precision.formats)
    if config.head.tied and "embed.W" in formats:
        formats["head.W"] = formats["embed.W"]
    blocks, narrowed = set(), set()
    for node in graph(config).nodes.values():
        if isinstance(node.op, Project) and node.op.weight in formats:
            if (format := formats[node.op.weight]) not in HELD:
                blocks.add(node.op.source)
            elif format == "bfloat16" and precision.bf16_dot and node.op.weight != "head.W":
                narrowed.add(node.op.source)
    square = INPUT_ROUNDING[precision.activations] ** 2
    return [square] * len(blocks) + [rounding("bfloat16") ** 2] * len(narrowed)


def logits_dtype(config: ModelConfig, precision: Precision) -> str:
    """The dtype to which the head's product is rounded."""
    specs = _written(config, precision)
    return next(spec.dtype or precision.dtype for spec in specs if spec.name == "logits_raw")


def _written(config: ModelConfig, precision: Precision) -> tuple[TensorSpec, ...]:
    """The activations of a step of one token."""
    call = precision.call(Call(batch=1, tokens=1, past=1, phase="decode"))
    return plan(config, call, logits="last").written
