"""In which arithmetic a model runs where none is requested, and how far it rounds. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from llmcli.anatomy.graph import graph
from llmcli.anatomy.model import parameters, states
from llmcli.anatomy.plan import plan
from llmcli.config import ModelConfig
from llmcli.errors import UsageError
from llmcli.graph.blocks import IN_16_BITS, ON_CARD, ROWS, RUN
from llmcli.graph.ops import LookUp, Project
from llmcli.graph.routing import ExpertProject
from llmcli.graph.spec import DTYPE_BYTES, Call, TensorSpec

# The distance between neighbouring numbers, relative to the power of two below them.
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
# Which stored numbers 16 bits hold exactly. Wider dtypes hold all that is rounded less than they
# are; blocks of integers are defined by their dequantized float32.
HELD = {dtype: stored for stored, dtype in IN_16_BITS.items()}

# Formats of quantized weights and of what lies beside them: they say nothing of the arithmetic.
_QUANTIZED = {"F8_E4M3", "F8_E5M2", "I8", "U8"}


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """What a model computes in: `dtype` is that of activations and of dense parameters.

    `cache` is that of keys and values. `formats` are those of parameters that stay as the file has
    them, by name: in 16 bits or in blocks, for whose products the `activations` are rounded to
    integers of so many bits, 16 or 8.
    `as_stored`: blocks lie in the memory of a card as in the file. Then products of few rows have
    activations as they are, and for those of many rows the blocks are dequantized to `dtype`.
    `pairs`: for products with matrices that stay in bfloat16 activations are rounded to it, but not
    for those of the head and of routers. `portable`: on a processor without vector instructions
    that we know, PyTorch's attention reads prompts, from copies of a narrower cache in `dtype`.
    """

    dtype: str
    cache: str
    formats: Mapping[str, str] = field(default_factory=dict, hash=False)
    as_stored: bool = False
    pairs: bool = False
    activations: int = 16
    portable: bool = False

    @classmethod
    def of(cls, dtype: str) -> Arithmetic:
        """All in one dtype."""
        return cls(dtype=dtype, cache=dtype)

    @property
    def products(self) -> str:
        """The numbers that weights are multiplied with: `int16` or `int8` with packed ones."""
        if self.rounds_inputs:
            return f"int{self.activations}"
        return "bfloat16" if self.pairs and "bfloat16" in self.formats.values() else self.dtype

    @property
    def rounds_inputs(self) -> bool:
        """Whether there are products for which activations are rounded to integers."""
        return not self.as_stored and bool(set(self.formats.values()) - set(HELD))

    def given(self, activations: str, cache: str) -> Arithmetic:
        """The same with `--activations` and `--cache-type`, where they are not `auto`.

        Raises UsageError for a cache whose numbers are not narrower than those that go into it.
        """
        if cache not in ("auto", self.dtype) and DTYPE_BYTES[cache] >= DTYPE_BYTES[self.dtype]:
            raise UsageError(
                f"`--cache-type {cache}` has nothing to gain with {self.dtype} activations",
                hint="leave it out, or name a narrower type",
            )
        bits = self.activations if activations == "auto" else int(activations)
        return replace(self, activations=bits, cache=self.cache if cache == "auto" else cache)

    def call(self, call: Call) -> Call:
        """The same forward call, in these dtypes."""
        return replace(call, dtype=self.dtype, cache=self.cache)

    def parameters(self, config: ModelConfig) -> tuple[TensorSpec, ...]:
        """Every parameter as it lies in memory."""
        return parameters(
            config, dtype=self.dtype, formats=self.formats, as_stored=self.as_stored
        )

    def states(self, config: ModelConfig, *, batch: int, capacity: int) -> tuple[TensorSpec, ...]:
        """What is kept between calls, for `capacity` positions."""
        return states(config, batch=batch, capacity=capacity, dtype=self.dtype, cache=self.cache)

    def weight_bytes(self, config: ModelConfig) -> int:
        """Of all parameters, a tied head counted once."""
        return sum(spec.bytes or 0 for spec in self.parameters(config))

    def weight_format(self, config: ModelConfig) -> str:
        """The dtype, or where some are packed the formats of all matrices, most bytes first."""
        if not self.formats:
            return self.dtype
        held: Counter[str] = Counter()
        named = matrices(config)
        for spec in self.parameters(config):
            if spec.name in named:
                held[str(spec.dtype)] += spec.bytes or 0
        return " + ".join(name for name, _ in held.most_common())

    def describe(self, config: ModelConfig) -> dict[str, str]:
        """The formats of weights, activations, cache and products, as every document has them."""
        return {
            "weight_format": self.weight_format(config),
            "activation_format": self.dtype,
            "cache_format": self.cache,
            "product_format": self.products,
        }


# `--dtype auto` where numbers are proven: as they are computed, but in no 16 bits.
WIDE = "wide"

# Levels of the kernels whose products of many float32 rows with bfloat16 weights are not far behind
# PyTorch's of bfloat16 rows: AMX has 0.3 of its speed, AVX-512 on Zen 5 0.45, where PyTorch's of
# float32 has 0.2. Steps of one token are 1.7 to 2.2 times as fast as those that are all bfloat16.
FAST_WIDE = ("avx512", "vnni", "bf16", "amx")

# What `--quantize` makes of the matrices of a dense checkpoint, and of those with a row per token.
QUANTIZED = {"int8": ("Q8_0", "Q8_0"), "int4": ("Q4_1", "Q8_0")}


def arithmetic(
    config: ModelConfig,
    *,
    dtype: str,
    quantize: str,
    device: str,
    stored: Set[str],
    bfloat16: bool,
    kernels: str | None,
    packable: Mapping[str, str],
) -> Arithmetic:
    """What a model runs in on a `cpu`, `cuda` or `mps`, as `--dtype` and `--quantize` say.

    `stored`, `bfloat16` as `auto_dtype` has them. `kernels`: those for packed weights
    (`kernels.native.kernels_of`), None without them; `packable`: what the file has in blocks or in
    16 bits. It stays so where neither option is given; quantizing needs no dtype either. Raises
    UsageError where there are no kernels to quantize for, or where a dtype is given, too.
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
        formats = {}  # then all of it has 16 bits, products of many rows among it, or none
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
    if formats and not card:
        return Arithmetic(
            dtype="float32", cache="float16", formats=formats, pairs=kernels == "bf16",
            portable=kernels == "portable",
        )  # fmt: skip
    if not given:
        dtype = "float32" if dtype == WIDE else auto_dtype(device, stored, bfloat16=bfloat16)
    return replace(Arithmetic.of(dtype), formats=formats, as_stored=bool(formats))


def quantizable(config: ModelConfig, formats: Mapping[str, str]) -> list[str]:
    """The matrices that `--quantize` packs: whole blocks in a row, and not packed in the file.

    `formats`: what stays as the file has it, by name.
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
    """What is multiplied with, and tables of which rows are looked up: the columns as stored."""
    model = graph(config)
    return {
        spec.name: (spec.stored_shape or spec.shape)[-1]
        for spec in parameters(config)
        if len(spec.axes) > 1
        and isinstance(
            model[model.parameters[spec.name].makes].op,
            ExpertProject if len(spec.axes) == 3 else Project | LookUp,
        )
    }


def in_no_blocks(config: ModelConfig, *, card: bool = False) -> frozenset[str]:
    """Matrices that are kept in 16 bits at least.

    Experts without whole groups of rows, but on a card; routers, small matrices whose numbers
    decide; those that are `dense`.
    """
    model = graph(config)
    return frozenset(
        spec.name
        for spec in parameters(config)
        if (len(spec.axes) == 3 and not card and (spec.stored_shape or spec.shape)[1] % ROWS)
        or model[model.parameters[spec.name].makes].group == "router"
        or model.parameters[spec.name].dense
    )


def auto_dtype(device: str, stored: Set[str], *, bfloat16: bool) -> str:
    """What `--dtype auto` is on a `cpu`, `cuda` or `mps` for weights stored in those formats.

    `bfloat16`: whether the device multiplies it in hardware. A CPU takes it only then (16-bit
    arithmetic without such instructions is many times slower). A GPU takes what the checkpoint
    holds, of weights in 8 bits what is not: float16 for blocks of a GGUF file, and where all of it
    is in 8 bits, where the card has no bfloat16.
    """
    if device == "cpu":
        return "bfloat16" if bfloat16 else "float32"
    matrices = stored - {"F32"} - _QUANTIZED or stored - {"F32"} or stored
    if matrices == {"F32"} or "F64" in matrices:
        return "float32"
    return "bfloat16" if bfloat16 and matrices != {"F16"} else "float16"


def rounding(dtype: str) -> float:
    """The root mean square of one rounding to `dtype`, relative to the number, at most.

    It moves a number by up to eps/2 of the power of two below it, one distance as likely as the
    other: by eps/√12 of that.
    """
    return EPS[dtype] / math.sqrt(12)


# One rounding of the input of a product with blocks, by its bits, relative to the length of the
# row: of 32 numbers each is moved by as much as 1/127 of their largest, or a 256th of that, times
# 1/√12, and the largest is no longer than all 32 together. Measured with SmolLM2 in 8 bits, the
# mean of the rows of each kind of input: 0.007 to 0.011.
INPUT_ROUNDING = {8: math.sqrt(RUN / 12) / 127, 16: math.sqrt(RUN / 12) / 127 / 256}


def stream_noise(config: ModelConfig, numbers: Arithmetic, matrices: Iterable[str]) -> float:
    """How far one step's roundings move the end of the residual stream, relative to its length.

    An estimate (root mean square), too large rather than too small. What is rounded:

    - every activation that a step writes, to the dtype in which `anatomy` says that it is written;
    - rows of the stream that enter a product as they are, without a norm before;
    - every matrix that the checkpoint stores (`matrices`: their formats) in a format that 16 bits
      do not hold; packed ones are what their blocks say, but on a card for products of many rows;
    - to 16 or 8 bits, what enters a product with packed matrices, that of the head included, and
      to bfloat16 what enters one of `pairs`;
    - the sums in products, taken in at least float32: K terms of any sign are as K/2 roundings of
      the whole sum, if they are added up one after the other.

    Roundings know nothing of each other, so their squares add up. Each counts as if it moved the
    whole stream: a branch is taken to be as large as the stream that it is added to, and most are
    smaller. Measured (SmolLM2 and tiny, in float32 and 16 bits), the noise is 0.2 to 0.7 of the
    estimate in the root mean square of all positions, and up to 3 times the estimate at single
    ones. SmolLM2 in its blocks and activations of 8 bits, against the same weights in float32 (1024
    tokens in 4 parts): 0.026, which is 0.18 of the estimate, and at most 0.079.
    """
    dtype = numbers.dtype
    specs = [spec for spec in _written(config, numbers) if spec.dtype != "int64"]
    names = {spec.name for spec in specs}
    # what is a view of another one is not rounded a second time
    squares = [rounding(spec.dtype or dtype) ** 2 for spec in specs if spec.shares not in names]
    nodes = graph(config).nodes  # rows of the stream that enter a product without a norm
    entering = {n.op.fused or n.name for n in nodes.values()
                if isinstance(n.op, Project) and nodes[n.op.source].wide}  # fmt: skip
    squares += [rounding(dtype) ** 2] * len(entering)
    if dtype in HELD:
        dequantized = numbers.formats.values() if numbers.as_stored else ()
        every = (*matrices, *dequantized)
        squares += [rounding(dtype) ** 2 for stored in every if stored != HELD[dtype]]
    squares += _inputs_rounded(config, numbers)
    wide = "float64" if dtype == "float64" else "float32"
    squares += [spec.flops / (2 * spec.count) / 2 * rounding(wide) ** 2 for spec in specs]
    return math.sqrt(sum(squares))


def _inputs_rounded(config: ModelConfig, numbers: Arithmetic) -> list[float]:
    """The squares of the roundings of what enters products: each input is rounded once."""
    if numbers.as_stored:
        return []
    formats = dict(numbers.formats)
    if config.head.tied and "embed.W" in formats:
        formats["head.W"] = formats["embed.W"]
    blocks, pairs = set(), set()
    for node in graph(config).nodes.values():
        if isinstance(node.op, Project) and node.op.weight in formats:
            if (format := formats[node.op.weight]) not in HELD:
                blocks.add(node.op.source)
            elif format == "bfloat16" and numbers.pairs and node.op.weight != "head.W":
                pairs.add(node.op.source)
    square = INPUT_ROUNDING[numbers.activations] ** 2
    return [square] * len(blocks) + [rounding("bfloat16") ** 2] * len(pairs)


def logits_dtype(config: ModelConfig, numbers: Arithmetic) -> str:
    """The dtype to which the head's product is rounded."""
    specs = _written(config, numbers)
    return next(spec.dtype or numbers.dtype for spec in specs if spec.name == "logits_raw")


def _written(config: ModelConfig, numbers: Arithmetic) -> tuple[TensorSpec, ...]:
    """The activations of a step of one token."""
    call = Call(
        batch=1, tokens=1, past=1, phase="decode", dtype=numbers.dtype, cache=numbers.cache
    )
    return plan(config, call, logits="last").written
