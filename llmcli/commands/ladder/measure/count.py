"""Work: the matrix products that PyTorch runs, and the multiply-adds of the loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
_ATTENTION = _ATEN.scaled_dot_product_attention
_PRODUCTS = {
    *(_ATEN.dot, _ATEN.mv, _ATEN.mm, _ATEN.bmm),
    *(_ATEN.addmv, _ATEN.addmm, _ATEN.baddbmm),  # their first operand is the bias
}
NOTHING = Work(gemv=0, gemm=0, flops=0, bytes=0)


def count(call: Callable[[], object]) -> Work:
    """The products that `call` runs."""
    products = _Products()
    with products:
        call()
    return products.work


def loop_work(config: ModelConfig, tokens: int, more: int) -> tuple[Work, Work]:
    """The loops' work for a prompt, and on average for each of `more` tokens after it.

    Every multiply-add reads two numbers of 8 bytes.
    """
    prompt, *later = (multiply_adds(config, tokens + read) for read in range(more + 1))
    return (
        replace(NOTHING, flops=2 * prompt, bytes=16 * prompt),
        replace(NOTHING, flops=2 * sum(later) / more, bytes=16 * sum(later) / more),
    )


def multiply_adds(config: ModelConfig, tokens: int, until: int | None = None) -> int:
    """Multiply-adds of the dot products and weighted sums of `Loops.forward` on that many tokens.

    With `until`, only of the blocks up to it, without the head. Other operations are not counted.
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
        self.work: Work = NOTHING

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
        packet = func.overloadpacket
        if packet is not _ATTENTION and packet not in _PRODUCTS:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
                return func(*args, **kwargs)
            # `matmul`, `linear` and `einsum` arrive whole in inference mode; `func.decompose` would
            # do it in Python, and import sympy for that
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        out = func(*args, **kwargs)
        operands = [a for a in args if isinstance(a, Tensor)]
        if packet is _ATTENTION:
            q, k, v = operands[:3]
            rows, adds = q.shape[-2], q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        else:  # `[…, m, k] × […, k, n]`, where a vector has no m or n
            a, b = operands[-2:]
            columns = b.shape[-1] if b.ndim > 1 else 1
            rows, adds = min(columns, a.shape[-2] if a.ndim > 1 else 1), a.numel() * columns
        self.work += Work(
            gemv=rows == 1,
            gemm=rows != 1,
            flops=2 * adds,
            bytes=sum(one.numel() * one.element_size() for one in (*operands, out)),
        )
        return out
