"""Memory of attention during prefill."""

from __future__ import annotations

from collections.abc import Hashable

from llmcli.graph.workspace import Reading, Workspace
from llmcli.parts.attention.config import AttentionConfig

_QUERIES = 256  # per block of scores without a fused kernel (`ops.attention`)
_TILE = (64, 512)  # queries and keys per tile of PyTorch's fused CPU attention


def attention_workspace(a: AttentionConfig, of: Reading) -> Workspace:
    """The stream, its norm and the product, then what is largest: the norm of queries and keys,
    the rotation, the attention itself, or its projection. Layers share rotation tables and masks.
    """
    rows, size, wide = of.rows, of.size, of.wide
    turned = (a.heads + a.kv_heads) * a.head_dim
    mixed = a.heads * a.value_dim
    if a.kv.layer is not None:  # only queries
        turned = a.heads * a.head_dim
    product = turned + a.kv_heads * a.value_dim * ("v" in a.projections) + mixed * a.gated
    held = rows * (of.width * (wide + size) + product * size)
    if of.kept < size:  # the new values in the cache's dtype
        held += rows * a.kv_heads * a.value_dim * of.kept
    # norms in float32: the whole product, a copy of the queries, and the result
    normed = product * wide + a.heads * a.head_dim * wide + turned * size
    norming = rows * normed if a.qk_norm else 0
    if a.kv.norm is not None:  # held during the norm of queries and keys
        held += rows * a.kv_heads * a.value_dim * size
    # rotation in float32: narrower numbers are converted and converted back
    turning = rows * turned * (3 * size if size >= 4 else size + 16) if a.rope else 0
    projecting = rows * ((turned + mixed) * size + of.width * of.both)
    projecting += of.product(mixed, of.width)
    # results reordered by token, the gates' sigmoids, and their product
    gating = rows * (turned + 4 * mixed) * size * a.gated
    products = of.product(of.width, product)
    if a.clip is not None:  # the product and a copy, wide
        products = max(products, rows * product * 2 * wide)
    most = max(products, norming, turning, _attending(a, of), projecting, gating)
    shared: dict[Hashable, int] = {}
    if a.rope is not None:  # cos and sin tables, which double in length when too short
        positions = 1 << max(of.keys - 1, 255).bit_length()
        shared["rope", a.rope] = 2 * positions * a.rope.dims * wide
    if _is_masked(a, of) and (of.kept >= size or of.portable):
        shared["mask", a.window] = of.tokens * of.keys
    return Workspace(peak=held + most + of.widened(product), shared=shared)


def _attending(a: AttentionConfig, of: Reading) -> int:
    size, wide, tokens, keys = of.size, of.wide, of.tokens, of.keys
    turned, mixed = (a.heads + a.kv_heads) * a.head_dim, a.heads * a.value_dim
    pair = a.kv_heads * (a.head_dim + a.value_dim)  # a key and a value
    found = of.rows * (turned + mixed) * size
    # the fused kernel's sum of every row, and one thread's tile of scores
    found += of.rows * a.heads * wide + _TILE[0] * (_TILE[1] + 2 + a.value_dim) * wide
    unfused = a.cap is not None or a.sinks
    if unfused and size < 4 and not of.cuda:  # our kernel reads and writes float32
        return found + of.rows * a.heads * (a.head_dim + a.value_dim) * wide
    if unfused and size != 4:  # no kernel: blocks of queries
        block = min(tokens, _QUERIES) * keys * 4 + keys * (a.head_dim + a.value_dim)
        return found + of.batch * a.heads * block * wide + tokens * keys
    if of.kept < size:  # new keys in the cache's dtype, as our kernel reads them
        found += of.rows * a.kv_heads * a.head_dim * of.kept
        if not of.portable:
            return found
        found += of.batch * keys * pair * size
    if _is_masked(a, of):
        found += tokens * keys * size  # the mask as 0 and -∞
        if of.cuda and a.heads != a.kv_heads:
            # no fused kernel: keys and values are copied for every head, in float32
            copied = size + (4 if size < 4 else 0)
            found += of.batch * a.heads * keys * (a.head_dim + a.value_dim) * copied
            found += of.batch * a.heads * tokens * keys * 2 * wide  # scores and pattern
    if of.packed:
        # AMX: the fused kernel copies all keys and values, and a tile of the pattern twice
        found += of.batch * keys * pair * size
        found += 2 * _TILE[0] * _TILE[1] * size
    return found


def _is_masked(a: AttentionConfig, of: Reading) -> bool:
    """Whether a mask is needed: not for a triangle from position 0 (`nn.step`)."""
    return of.keys > of.tokens or (a.window is not None and a.window < of.tokens)
