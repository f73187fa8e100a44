"""Operations on few rows by Triton kernels on a CUDA device, if $LLMCLI_KERNELS is `triton`.

They are off by default: tests without a GPU check that they compile and agree with PyTorch, but
their speed has not been measured.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from llmcli.config.attention import Window
from llmcli.config.mlp import CARD_ACTIVATIONS, Activation
from llmcli.kernels import native
from llmcli.kernels.program import Pairs

_FEW_ROWS = 4  # of an input: each rereads the matrix, cached if it fits
_NORMALIZED = 512  # rows: of a few tokens, also with per-head norms
_MOST_SIZE = 256  # of a head
_MOST_LATENT = (576, 512)  # of queries and values in 16 bits, where shared memory suffices
_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


@cache
def kernels() -> Any:
    """The functions of `kernels.triton`, by name; None if off."""
    if not native.wants_triton():
        return None
    from llmcli.kernels.triton import attention, experts, packed, products

    return SimpleNamespace(
        attend_one=attention.attend_one, normalize=products.normalize,
        product=products.product, packed_product=packed.packed_product,
        routed_product=packed.routed_product, expert_product=experts.expert_product,
        sum_experts=experts.sum_experts,
    )  # fmt: skip


def takes(x: Tensor) -> bool:
    """Whether there are kernels for `x`: on a CUDA device, in a supported dtype."""
    return x.is_cuda and x.dtype in _TAKEN and kernels() is not None


def attends(q_BHTd: Tensor, k_BKCd: Tensor, v_BKCe: Tensor) -> bool:
    """Whether a kernel supports one query per head with this cache."""
    sizes = q_BHTd.shape[3], v_BKCe.shape[3]
    return (
        takes(q_BHTd)
        and q_BHTd.shape[2] == 1
        and k_BKCd.stride(3) == v_BKCe.stride(3) == 1
        and (max(sizes) <= _MOST_SIZE or _takes_latents(sizes, q_BHTd, k_BKCd))
    )


def _takes_latents(sizes: tuple[int, int], q_BHTd: Tensor, k_BKCd: Tensor) -> bool:
    """Whether shared memory suffices for more than `_MOST_SIZE`.

    Later NVIDIA cards than Turing have at least 99 KiB per program. AMD's have 64, which suffice
    there, and report a capability of 9.0 or more.
    """
    narrow = q_BHTd.dtype.itemsize == k_BKCd.dtype.itemsize == 2
    if not narrow or any(own > most for own, most in zip(sizes, _MOST_LATENT, strict=True)):
        return False
    return torch.cuda.get_device_capability(q_BHTd.device) >= (8, 0)


def attend(
    q_BH1d: Tensor, k_BKCd: Tensor, v_BKCe: Tensor, starts_B: Tensor, *, scale: float,
    window: Window | None, cap: float | None, sinks_H: Tensor | None,
) -> Tensor:  # fmt: skip
    """`ops.attention.attend` for tokens at positions `starts_B`, with slots already written."""
    out: Tensor = kernels().attend_one(
        q_BH1d, k_BKCd, v_BKCe, starts_B, scale=scale, window=window, cap=cap, sinks_H=sinks_H
    )
    return out


def normalizes(x: Tensor, w: Tensor | None) -> bool:
    """Whether a kernel supports the norm of these rows: of a step, not of a prompt."""
    few = 0 < x.numel() <= _NORMALIZED * x.shape[-1]
    return takes(x) and few and (w is None or w.ndim == 1)


def normalize(
    x: Tensor, w_D: Tensor | None, b_D: Tensor | None, eps: float, dtype: torch.dtype, *,
    centred: bool, offset: float,
) -> Tensor:  # fmt: skip
    """`ops.norm.rms_norm`, or with `centred` `layer_norm`, in one launch, rounded once."""
    x_MD = x.reshape(-1, x.shape[-1])
    x_MD = x_MD if x_MD.stride(1) == 1 else x_MD.contiguous()
    norm = (w_D, b_D, eps, 2 if centred else 1, offset)
    out: Tensor = kernels().normalize(x_MD, norm, dtype)
    return out.view(x.shape)


def multiplies(x: Tensor, w_NK: Tensor) -> bool:
    """Whether a kernel supports this product: few rows with the matrix's dtype."""
    return multiplies_blocks(x) and x.dtype == w_NK.dtype and w_NK.stride(1) == 1


def product(
    x: Tensor, w_NK: Tensor, b_N: Tensor | None, dtype: torch.dtype,
    activation: Activation | None = None,
) -> Tensor:  # fmt: skip
    """`X Wᵀ + b` in `dtype`, from float32 sums; with an `activation` see `gates`.

    That is rounded as by the separate operations.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    return _shaped(kernels().product(x_MK, w_NK, b_N, out=dtype, activation=activation), x)


def multiplies_blocks(x: Tensor) -> bool:
    """Whether a kernel supports products of these rows with blocks in formats of `ON_CARD`."""
    return takes(x) and x.numel() <= _FEW_ROWS * x.shape[-1]


def product_of_blocks(
    x: Tensor, raw_Nr: Tensor, format: str, b_N: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`X Wᵀ + b` in `dtype`, from float32 sums; neither X nor dequantized W is rounded."""
    x_MK = x.reshape(-1, x.shape[-1])
    return _shaped(kernels().packed_product(x_MK, raw_Nr, format, b_N, out=dtype), x)


def product_of_experts(
    x_MK: Tensor, raw_ENr: Tensor, format: str, pairs: Pairs, bias_EN: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`X Wᵀ + b` of pairs in `dtype`: `[P, N]`."""
    out: Tensor = kernels().routed_product(x_MK, raw_ENr, format, pairs, bias_EN, out=dtype)
    return out


def multiplies_experts(x: Tensor, w_ENK: Tensor) -> bool:
    """Whether a kernel supports products of rows with these matrices, whose rows are contiguous."""
    return takes(x) and w_ENK.dtype in _TAKEN and w_ENK.stride(2) == 1


def gates_experts(x: Tensor, w_ENK: Tensor, activation: Activation) -> bool:
    """Whether `product_of_dense_experts` supports `act(X W_gate) ∘ X W_up`."""
    return activation in CARD_ACTIVATIONS and multiplies_experts(x, w_ENK)


def product_of_dense_experts(
    x_MK: Tensor, w_ENK: Tensor, pairs: Pairs, bias_EN: Tensor | None, dtype: torch.dtype,
    activation: Activation | None = None,
) -> Tensor:  # fmt: skip
    """`X Wᵀ + b` of pairs in `dtype`, from float32 sums; with an `activation` as in `product`."""
    out: Tensor = kernels().expert_product(
        x_MK, w_ENK, pairs, bias_EN, out=dtype, activation=activation
    )
    return out


def sums_experts(y: Tensor) -> bool:
    """Whether a kernel sums results of experts."""
    return takes(y) and y.dtype == torch.float32


def sum_experts(y_BKTD: Tensor, weight_BTK: Tensor | None, z_BTD: Tensor | None) -> Tensor:
    """`ops.routing.summed` in one launch."""
    out: Tensor = kernels().sum_experts(y_BKTD, weight_BTK, z_BTD)
    return out


def gates(x: Tensor, w_NK: Tensor, activation: Activation) -> bool:
    """Whether `product` supports `act(X W_gate) ∘ X W_up` with stacked matrices."""
    return activation in CARD_ACTIVATIONS and multiplies(x, w_NK)


def _shaped(out_MN: Tensor, x: Tensor) -> Tensor:
    return out_MN.view(*x.shape[:-1], out_MN.shape[1])
