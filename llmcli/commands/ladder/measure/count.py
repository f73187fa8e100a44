"""Work: the matrix products that PyTorch runs, and the multiply-adds of the loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmcli.commands.ladder.measure.rungs.loops import seen
from llmcli.commands.ladder.report import Work
from llmcli.config import ModelConfig
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig

_ATEN = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def count(call: Callable[[], object]) -> Work:
    """The products that `call` runs."""
    with _Products() as products:
        call()
    return Work(gemv=products.gemv, gemm=products.gemm, flops=products.flops, bytes=products.bytes)


def loop_work(config: ModelConfig, tokens: int, more: int) -> tuple[Work, Work]:
    """The loops' work for a prompt, and on average for each of `more` tokens after it.

    Every multiply-add reads two numbers of 8 bytes.
    """
    adds = [multiply_adds(config, tokens + later) for later in range(more + 1)]
    prompt, token = adds[0], sum(adds[1:]) / more
    return (
        Work(gemv=0, gemm=0, flops=2 * prompt, bytes=16 * prompt),
        Work(gemv=0, gemm=0, flops=2 * token, bytes=16 * token),
    )


def multiply_adds(config: ModelConfig, tokens: int, until: int | None = None) -> int:
    """Multiply-adds of the dot products and weighted sums of `Loops.forward` on that many tokens.

    Those of the blocks up to `until`, without the head, where it is given. The rest is small.
    """
    width, count = config.width, 0
    for layer in config.layers[: None if until is None else until + 1]:
        for part in layer.parts:
            match part:
                case AttentionConfig():
                    count += _attention_adds(part, width, tokens)
                case MlpConfig():
                    count += tokens * width * part.hidden * (3 if part.gated else 2)
    return count if until is not None else count + tokens * width * config.vocab


def _attention_adds(mixer: AttentionConfig, width: int, tokens: int) -> int:
    pairs = sum(len(seen(i, mixer)) for i in range(tokens))
    together = mixer.qk_norm_wide  # a head's query needs the queries of all
    q, k = (mixer.head_dim * (n if together else 1) for n in (mixer.heads, mixer.kv_heads))
    head = tokens * width * q  # t_q × W_q
    head += pairs * (width * k + mixer.head_dim)  # t_k × W_k, q · k
    head += pairs * (width + 1) * mixer.value_dim  # t_v × W_v, weight v
    out = 2 if mixer.gated else 1  # c × W_o, t × W_gate
    return mixer.heads * (head + out * tokens * mixer.value_dim * width)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, adds up every product that a kernel is called for.

    A call is a GEMV where one side has a single row or column (a dot product counts as one),
    else a GEMM; a batched call counts once, as it is launched once. The fused attention kernel
    is two products in one call, `Q Kᵀ` and `A V`, over the full square. Bytes are those of the
    operands and results: nothing is assumed to stay in a cache.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gemv = self.gemm = self.flops = self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's: nothing is compiled here, and to keep the compiler out would import it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs `func` and counts it where it is a product; composite ones are taken apart."""
        kwargs = kwargs or {}
        shape = _SHAPES.get(func.overloadpacket)
        if shape is None:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
                return func(*args, **kwargs)
            # `matmul`, `linear` and `einsum` arrive whole in inference mode; `func.decompose` would
            # do it in Python, and import sympy for that
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        out = func(*args, **kwargs)
        operands = [a for a in args if isinstance(a, Tensor)]
        rows, flops = shape(*operands)
        if rows == 1:
            self.gemv += 1
        else:
            self.gemm += 1
        self.flops += flops
        self.bytes += sum(a.numel() * a.element_size() for a in (*operands, _first(out)))
        return out


def _first(out: Any) -> Tensor:
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def _mv(a: Tensor, b: Tensor) -> tuple[int, int]:
    """`a · b` of vectors or `[m, k] × [k]`."""
    return 1, 2 * a.numel()


def _mm(a: Tensor, b: Tensor) -> tuple[int, int]:
    """`[…, m, k] × […, k, n]`: the smaller of m and n, and `2 · m · k · n` for each batch."""
    return min(a.shape[-2], b.shape[-1]), 2 * a.numel() * b.shape[-1]


def _attention(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> tuple[int, int]:
    pairs = math.prod(q.shape[:-1]) * k.shape[-2]
    return q.shape[-2], 2 * pairs * (q.shape[-1] + v.shape[-1])


def _after_bias(count: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    return lambda bias, a, b: count(a, b)


_SHAPES: dict[Any, Callable[..., tuple[int, int]]] = {
    _ATEN.dot: _mv,
    _ATEN.mv: _mv,
    _ATEN.mm: _mm,
    _ATEN.bmm: _mm,
    _ATEN.addmv: _after_bias(_mv),
    _ATEN.addmm: _after_bias(_mm),
    _ATEN.baddbmm: _after_bias(_mm),
    _ATEN.scaled_dot_product_attention: _attention,
}
