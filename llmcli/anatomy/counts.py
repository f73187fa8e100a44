"""How many parameters a model has and how much memory a run takes, from its configuration."""

from __future__ import annotations

from dataclasses import replace

from llmcli.anatomy.graph import graph
from llmcli.anatomy.model import parameters, states
from llmcli.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from llmcli.graph.spec import DTYPE_BYTES
from llmcli.reports.info import LayerType, MemoryNeed, ParameterCounts

PROMPT_CHUNK = 512  # tokens of a prompt that enter the model at a time (`generation.engine`)
_TILE = (64, 512)  # queries and keys that PyTorch's fused attention takes at a time on a CPU

# Measured on x86 with PyTorch 2.13 and one thread (tests/benchmarks/memory_estimate.py): pages of
# its code that computing brings in, and memory that is free but not given back; oneDNN generates
# code of its own for 16-bit products.
_CODE = {False: 17 << 20, True: 24 << 20}  # by whether numbers have 16 bits
_TOKENIZER = (4 << 20, 700)  # its modules, and the tables of each entry of the vocabulary
# of a matrix that are converted to float32 at a time: 2 MiB, in L2 (`ops.product`)
HEAD_NUMBERS = 1 << 19
# Every processor with AMX has 2 MiB of second-level cache per core; oneDNN fills three quarters.
_PACKED = 3 << 19
_CUBLAS = 32 << 20  # the workspace that PyTorch gives to cuBLAS on Hopper; 8 MiB on others


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Every parameter once, by the part that it belongs to; a tied head has none of its own."""
    model = graph(config)
    parts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head"), 0)
    for spec in parameters(config):
        parts[model.parameters[spec.name].kind] += spec.count
    total = sum(parts.values())
    return ParameterCounts(total=total, active=total, **parts)


def layer_types(config: ModelConfig) -> tuple[LayerType, ...]:
    """The layers grouped by what `LayerType` says of them, in the order of their first one."""
    found: dict[LayerType, list[int]] = {}
    for index, layer in enumerate(config.layers):
        found.setdefault(_layer_type(layer), []).append(index)
    return tuple(replace(kind, layers=tuple(layers)) for kind, layers in found.items())


def _layer_type(layer: LayerConfig) -> LayerType:
    mixer, ffn = layer.mixer, layer.ffn
    return LayerType(
        kind="full attention" if mixer.window is None else "sliding window",
        layers=(),
        window=mixer.window,
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        value_dim=mixer.value_dim,
        rotary=mixer.rope is not None,
        qk_norm=mixer.qk_norm is not None,
        norm={"rms": "RMSNorm", "layer": "LayerNorm"}[layer.ln1.kind],
        hidden=ffn.hidden,
        activation=ffn.activation,
        gated=ffn.gated,
    )


def memory_need(
    config: ModelConfig,
    *,
    dtype: str,
    batch: int,
    context: int,
    cuda: bool = False,
    native: bool = False,
    tokenizer: int = 0,
    chunk: int = PROMPT_CHUNK,
) -> MemoryNeed:
    """Bytes of a run of `batch` sequences of `context` tokens each, in that arithmetic.

    `cuda`: on a GPU, where masked attention with shared keys has no fused kernel; only what is
    taken there is counted. `native`: the processor multiplies numbers of 16 bits itself. There is
    a tokenizer of so many entries in the process. A prompt is read `chunk` tokens at a time.
    """
    size = DTYPE_BYTES[dtype]
    per_token = sum(spec.count for spec in states(config, batch=batch, capacity=1)) * size
    cache = per_token * context
    return MemoryNeed(
        dtype=dtype,
        batch=batch,
        context=context,
        weights=sum(spec.bytes or 0 for spec in parameters(config, dtype=dtype)),
        cache=cache,
        cache_per_token=per_token,
        # a sequence that ends leaves the batch: the caches of the others are copied
        copies=cache // batch * (batch - 1),
        activations=prefill_peak(
            config, batch, context, size, cuda=cuda, native=native, chunk=chunk
        ),
        runtime=_CUBLAS if cuda else _CODE[size < 4] + _tables(tokenizer),
    )


def _tables(entries: int) -> int:
    return _TOKENIZER[0] + _TOKENIZER[1] * entries if entries else 0


def longest_context(
    config: ModelConfig,
    need: MemoryNeed,
    *,
    free: int,
    most: int,
    cuda: bool = False,
    native: bool = False,
) -> int:
    """The largest number of tokens, up to `most`, that `free` bytes are enough for.

    `need` is that of the same run at any length. 0 where not even one token fits.
    """
    size, batch = DTYPE_BYTES[need.dtype], need.batch

    def fits(tokens: int) -> bool:
        cache = need.cache_per_token * tokens
        peak = prefill_peak(config, batch, tokens, size, cuda=cuda, native=native)
        copies = cache // batch * (batch - 1)
        return replace(need, cache=cache, copies=copies, activations=peak).total <= free

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def prefill_peak(
    config: ModelConfig,
    batch: int,
    context: int,
    size: int,
    *,
    cuda: bool = False,
    native: bool = False,
    chunk: int = PROMPT_CHUNK,
) -> int:
    """Bytes that are alive at once, at most, while the last chunk of a prompt is read.

    An estimate that leans to too much, counted from `nn`: what each part holds while it runs,
    the largest of them, and what all share: rotation tables, masks. `size`: bytes of a number,
    `native`: see `memory_need`.

    Of PyTorch's own tensors: for smollm2 on one thread of a CPU 17.9 MiB of 512 tokens, of which
    its allocator has 17.9, and 21.1 of 3,072, of which it has 19.1. The process grows by 13 to 19
    MiB more than that: see `_CODE`.
    """
    tokens = min(context, chunk)
    widened = size < 4 and not (cuda or native)
    packed = size < 4 and native and not cuda
    wide = max(size, 4)
    peak = batch * config.vocab * 2 * wide  # the logits of the last position, with their bias
    if size < 4:
        peak += 4 * min(config.vocab * config.width, HEAD_NUMBERS)
    for layer in dict.fromkeys(config.layers):
        peak = max(
            peak,
            _attention_peak(
                config.width, layer.mixer, batch, tokens, context, size, cuda=cuda, packed=packed
            )
            + (_widened(config.width, _product(layer.mixer), batch * tokens) if widened else 0),
            _mlp_peak(config.width, layer.ffn, batch * tokens, size)
            + (_widened(config.width, _columns(layer.ffn), batch * tokens) if widened else 0)
            + (_mlp_workspace(config.width, layer.ffn, batch * tokens) if packed else 0),
        )
    ropes = {layer.mixer.rope for layer in config.layers} - {None}
    tables = sum(_rope_tables(rope, context, wide) for rope in ropes if rope is not None)
    windows = {layer.mixer.window for layer in config.layers}
    masks = tokens * context * sum(_is_masked(tokens, context, window) for window in windows)
    return peak + tables + masks + 8 * tokens  # the last: positions, whole numbers


def _attention_peak(
    width: int,
    a: AttentionConfig,
    batch: int,
    tokens: int,
    keys: int,
    size: int,
    *,
    cuda: bool,
    packed: bool,
) -> int:
    """The stream, its norm and the product, then what is largest: the norm of queries and keys,
    the rotation, the attention itself, or its projection.

    `packed`: the processor multiplies numbers of 16 bits, in an order that they are copied into.
    """
    rows = batch * tokens
    turned = (a.heads + a.kv_heads) * a.head_dim
    mixed = a.heads * a.value_dim
    wide = max(size, 4)
    held = rows * (width * (wide + size) + _product(a) * size)
    # products are normalized in float32: the whole, a copy of the queries, and what comes out
    normed = _product(a) * wide + a.heads * a.head_dim * wide + 2 * turned * size
    norming = rows * normed if a.qk_norm else 0
    # the rotation is done in float32: narrower numbers are copied to it and back
    turning = rows * turned * (3 * size if size >= 4 else size + 16) if a.rope else 0
    projecting = rows * ((turned + mixed) * size + width * _both(size))
    masked = _is_masked(tokens, keys, a.window)
    attending = rows * (turned + mixed) * size
    # the fused kernel's sum of every row, and the tile of scores that one thread works on
    attending += rows * a.heads * wide + _TILE[0] * (_TILE[1] + 2 + a.value_dim) * wide
    if masked:
        attending += tokens * keys * size  # the mask once more, as 0 and -∞
    if masked and cuda and a.heads != a.kv_heads:
        # no fused kernel: keys and values are copied for every head, then all is done in float32
        copied = size + (4 if size < 4 else 0)
        attending += batch * a.heads * keys * (a.head_dim + a.value_dim) * copied
        attending += batch * a.heads * tokens * keys * 2 * wide  # scores and pattern
    products = 0
    if packed:
        # AMX: the fused kernel copies all keys and values, and a tile of the pattern twice
        attending += batch * a.kv_heads * keys * (a.head_dim + a.value_dim) * size
        attending += 2 * _TILE[0] * _TILE[1] * size
        products = _product_workspace(width, _product(a), rows)
        projecting += _product_workspace(mixed, width, rows)
    return held + max(products, norming, turning, attending, projecting)


def _product(a: AttentionConfig) -> int:
    """Columns of queries, keys and values together."""
    return (a.heads + a.kv_heads) * a.head_dim + a.kv_heads * a.value_dim


def _mlp_peak(width: int, mlp: MlpConfig, rows: int, size: int) -> int:
    """Two streams, what attention added, the norm, what comes out; the hidden numbers twice over.

    Gated: gate and up, the gate after its function, and the product of both.
    """
    wide = max(size, 4)
    return rows * (width * (3 * wide + size + _both(size)) + 2 * _columns(mlp) * size)


def _both(size: int) -> int:
    """Bytes of a number that a product gave in 16 bits and that is widened: it is there twice."""
    return size if size >= 4 else size + 4


def _columns(mlp: MlpConfig) -> int:
    return 2 * mlp.hidden if mlp.gated else mlp.hidden


def _is_masked(tokens: int, keys: int, window: int | None) -> bool:
    """Whether it takes a mask: a triangle from position 0 needs none (`nn.step`)."""
    return keys > tokens or (window is not None and window < tokens)


def _widened(inputs: int, columns: int, rows: int) -> int:
    """What a product of 16-bit numbers takes on a CPU without such instructions: float32."""
    return 4 * columns * (inputs + rows)


def _mlp_workspace(width: int, mlp: MlpConfig, rows: int) -> int:
    """What oneDNN takes for the larger one of a feed-forward layer's products."""
    return max(
        _product_workspace(width, _columns(mlp), rows),
        _product_workspace(mlp.hidden, width, rows),
    )


def _product_workspace(inputs: int, columns: int, rows: int) -> int:
    """The most that oneDNN takes for `[rows, inputs] · [inputs, columns]` in 16 bits, one thread.

    Its AMX kernels copy the weights into blocks of 32 inputs, as many of them as fit the cache,
    and where all inputs are too many at a time they keep the sums in float32 meanwhile; its
    AVX512-BF16 kernels take less (oneDNN 3.12, `matmul/amx_blocking_heuristics.cpp`).
    """
    weights = min(2 * columns * (-(-inputs // 32) * 32), _PACKED)
    sums = 4 * rows * min(columns, 1024) if inputs >= 2048 else 0
    return weights + sums + (128 << 10)  # the last: tiles, and what pads inputs and columns


def _rope_tables(rope: RopeConfig, context: int, wide: int) -> int:
    """cos and sin of all positions; the tables double in length when they are too short."""
    return 2 * (1 << max(context - 1, 255).bit_length()) * rope.dims * wide
