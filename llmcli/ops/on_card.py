"""Operations on few rows by Triton's kernels on a CUDA device; $LLMCLI_TRITON selects them.

Tests without a GPU check that they compile and agree with PyTorch. Their speed has not been
measured, and no card has run them: loading a model ends with a `check`, and the first `Sampler`
begins with `check_choices`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmcli.config.attention import QueryGrowth, Window
from llmcli.config.experts import RoutingConfig
from llmcli.errors import LlmcliError, as_out_of_memory, first_line
from llmcli.kernels import native
from llmcli.kernels.program import Pairs

if TYPE_CHECKING:
    from llmcli.kernels.triton.products import Hidden, Norm, Onto

SAMPLING = "sampling"  # the group of `choose`
_FEW_ROWS = 4  # of an input: each rereads the matrix, cached if it fits
_NORMALIZED = 512  # rows: of a few tokens, also with per-head norms
_MOST_SIZE = 256  # of a head
_MOST_EXPERTS = 1024  # of a program of one warp
_MOST_LATENT = (576, 512)  # of queries and values in 16 bits, where shared memory suffices
# Supported dtypes, and the allowed distance of logits from those by PyTorch's operations as a share
# of their standard deviation. In 16 bits 8 ε: attention rounds its weights at another place, which
# is 1 to 3 ε after 30 layers (SmolLM2: 0.009 to 0.013 in bfloat16, 0.001 in float16). In float32
# sums have another order, which is 2e-6 there.
_TAKEN = {torch.float32: 5e-5, torch.bfloat16: 8 * 2**-8, torch.float16: 8 * 2**-10}


class KernelFailed(LlmcliError, RuntimeError):
    """A Triton kernel could not be compiled or launched (exit 1).

    By then all kernels are off; if it was the one for sampling, only that one.
    """

    usual_hint = f"run it again with `{native.TRITON_VARIABLE}=off`"


@cache
def kernels() -> Any:
    """The functions of `_kernels`. They raise KernelFailed, as this does if the import fails."""
    made = _guarded("import triton", _kernels)()
    alone = {"choose": SAMPLING}
    return SimpleNamespace(
        **{name: _guarded(name, call, alone.get(name)) for name, call in vars(made).items()}
    )


def _kernels() -> SimpleNamespace:
    """The functions of `kernels.triton`, by name."""
    from llmcli.kernels.triton import (
        attention,
        experts,
        heads,
        packed,
        products,
        routing,
        sampling,
    )

    made = (
        attention.attend_one, heads.enter, products.normalize, products.product,
        packed.packed_product, packed.routed_product, experts.expert_product,
        experts.sum_experts, routing.route, sampling.choose,
    )  # fmt: skip
    return SimpleNamespace(**{one.__name__: _launched(one) for one in made})


def _launched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """With the device of the first argument as the current one, on which Triton launches."""

    @wraps(kernel)
    def launch(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(x.device):
            return kernel(x, *args, **kwargs)

    return launch


def _guarded(name: str, call: Callable[..., Any], group: str | None = None) -> Callable[..., Any]:
    """`call` with its errors as KernelFailed, except out of memory; turns off `group` or all."""

    @wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except KernelFailed:
            raise
        except Exception as error:
            if as_out_of_memory(error) is not None:
                raise
            words = f"`{name}` failed: {first_line(error)}"
            _turn_off(words, group)
            raise KernelFailed(words) from error

    return guarded


def _turn_off(why: str, group: str | None = None) -> None:
    if group is None:
        native.TRITON_STATE.off = why
    else:
        native.TRITON_STATE.groups_off[group] = why
    what = "kernels" if group is None else f"kernels for {group}"
    native.TRITON_STATE.warn(f"Triton's {what} are off: {why}")


def _both(
    run: Callable[[], Tensor], name: str, group: str | None = None
) -> tuple[Tensor, Tensor] | None:
    """What `run` gives by PyTorch's operations and with kernels; None if these fail."""
    state = native.TRITON_STATE
    state.off = "being checked"
    try:
        exact = run().cpu()
    finally:
        state.off = ""
    try:  # a kernel's error may come with the copy
        return exact, _guarded(name, lambda: run().cpu(), group)()
    except KernelFailed:
        return None


def check(steps: Callable[[], Tensor], dtype: torch.dtype) -> None:
    """Compare logits `[N, V]` of `steps` with those by PyTorch's operations.

    If the median distance exceeds the bound of `dtype`, or a kernel fails, the kernels are off for
    this process, with a warning. A median, since in 16 bits a router near a tie may choose other
    experts in one of the steps. Logits that are not finite without them show nothing.
    """
    if (both := _both(steps, "a step")) is None or not both[0].isfinite().all():
        return
    exact_NV, found_NV = (one.double() for one in both)
    least = torch.finfo(torch.float64).tiny  # of logits that are all equal
    off_N = (found_NV - exact_NV).std(-1) / exact_NV.std(-1).clamp(min=least)
    off, bound = float(off_N.median()), _TAKEN[dtype]
    native.TRITON_STATE.checked = off <= bound
    if not native.TRITON_STATE.checked:
        differ = f"their logits differ from PyTorch's by {off:.2g} of their standard deviation"
        _turn_off(f"{differ}, allowed {bound:.2g}")


def check_choices(choices: Callable[[], Tensor]) -> None:
    """Compare ids `[N]`, once per process, with those by PyTorch's operations.

    If one differs, or the kernel fails, those for sampling are off, with a warning.
    """
    native.TRITON_STATE.choices_checked = True
    both = _both(choices, "choose", SAMPLING)
    if both is not None and not torch.equal(*both):
        _turn_off("their tokens differ from PyTorch's", SAMPLING)


def checks_choices(device: torch.device) -> bool:
    """Whether `choose` is used on `device` and must be checked."""
    checked = native.TRITON_STATE.choices_checked
    return device.type == "cuda" and not checked and SAMPLING in native.triton()


def checks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a decoder in `dtype` on `device` uses kernels, which must be checked."""
    used = set(native.triton()) - {SAMPLING}  # which `check_choices` compares
    return device.type == "cuda" and dtype in _TAKEN and bool(used)


def takes(x: Tensor, group: str = "products") -> bool:
    """Whether a group of kernels is on and supports `x`: its device and dtype."""
    return x.is_cuda and x.dtype in _TAKEN and group in native.triton()


def attends(q_BHTd: Tensor, k_BKCd: Tensor, v_BKCe: Tensor) -> bool:
    """Whether a kernel supports one query per head with this cache."""
    sizes = q_BHTd.shape[3], v_BKCe.shape[3]
    return (
        q_BHTd.shape[2] == 1
        and _reads(q_BHTd, k_BKCd, v_BKCe)
        and (max(sizes) <= _MOST_SIZE or _takes_latents(sizes, q_BHTd, k_BKCd))
    )


def _reads(x: Tensor, k_BKCd: Tensor, v_BKCe: Tensor) -> bool:
    return takes(x, "attention") and k_BKCd.stride(3) == v_BKCe.stride(3) == 1


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


def enters(x: Tensor, k_BKCd: Tensor, v_BKCe: Tensor) -> bool:
    """Whether kernels write keys and values computed from `x` into this cache, or read them."""
    return _reads(x, k_BKCd, v_BKCe) and max(k_BKCd.shape[3], v_BKCe.shape[3]) <= 2 * _MOST_SIZE


def enter(
    x_B1N: Tensor, heads: tuple[int, int, int], caches: tuple[Tensor, Tensor], starts_B: Tensor, *,
    dtype: torch.dtype, norms: Sequence[Norm | None], tables_CR: tuple[Tensor, Tensor] | None,
    growth: QueryGrowth | None,
) -> Tensor:  # fmt: skip
    """Queries `[B, H, 1, d]` as they enter the scores; their keys and values are then in the cache.

    Rounded as by `ops.norm`, `ops.rope` and casts; see `kernels.triton.heads.enter`.
    """
    out: Tensor = kernels().enter(
        x_B1N.squeeze(1), heads, caches, starts_B, dtype=dtype, norms=norms, tables_CR=tables_CR,
        growth=growth,
    )  # fmt: skip
    return out


def multiplies(x: Tensor, w_NK: Tensor, inputs: torch.dtype | None = None) -> bool:
    """Whether a kernel supports this product: few rows, which have or get the matrix's dtype."""
    return takes(x) and _few(x) and (inputs or x.dtype) == w_NK.dtype and w_NK.stride(1) == 1


def product(
    x: Tensor, w_NK: Tensor, b_N: Tensor | None, dtype: torch.dtype, *, norm: Norm | None = None,
    hidden: Hidden | None = None, onto: Onto | None = None, kept: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`X Wᵀ + b` in `dtype`, from float32 sums, and what is around it.

    See `kernels.triton.products.product`. That is rounded as by the separate operations.
    """
    out_MN: Tensor = kernels().product(
        x.reshape(-1, x.shape[-1]), w_NK, b_N, out=dtype, norm=norm, hidden=hidden, onto=onto,
        kept_MK=kept,
    )  # fmt: skip
    return _shaped(out_MN, x)


def multiplies_blocks(x: Tensor) -> bool:
    """Whether a kernel supports products of these rows with blocks in formats of `ON_CARD`."""
    return takes(x, "packed") and _few(x)


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


def routes(logits_BTE: Tensor) -> bool:
    """Whether a kernel supports the choice of these experts."""
    few = logits_BTE.shape[-1] <= _MOST_EXPERTS
    return few and takes(logits_BTE) and logits_BTE.dtype == torch.float32


def route(
    logits_BTE: Tensor, correction_E: Tensor | None, factors_E: Tensor | None,
    routing: RoutingConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.routing.choose` and `weigh` of the scores of these logits, in one launch."""
    chosen_BTK, weight_BTK = kernels().route(logits_BTE, correction_E, factors_E, routing)
    return chosen_BTK, weight_BTK


def multiplies_experts(x: Tensor, w_ENK: Tensor) -> bool:
    """Whether a kernel supports products of rows with these matrices, whose rows are contiguous."""
    return takes(x) and w_ENK.dtype in _TAKEN and w_ENK.stride(2) == 1


def product_of_dense_experts(
    x_MK: Tensor, w_ENK: Tensor, pairs: Pairs, bias_EN: Tensor | None, dtype: torch.dtype,
    hidden: Hidden | None = None, weight_P: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`X Wᵀ + b` of pairs in `dtype`, from float32 sums; `hidden` as in `product`.

    With a `weight` each pair's row of X is multiplied by it, and rounded.
    """
    out: Tensor = kernels().expert_product(
        x_MK, w_ENK, pairs, bias_EN, out=dtype, hidden=hidden, weight_P=weight_P
    )
    return out


def sums_experts(y: Tensor) -> bool:
    """Whether a kernel sums results of experts."""
    return takes(y) and y.dtype == torch.float32


def sum_experts(
    y_BKTD: Tensor, weight_BTK: Tensor | None, z_BTD: Tensor | None,
    gate: tuple[Tensor, Tensor] | None = None, *, onto: Onto | None = None,
) -> Tensor:  # fmt: skip
    """`ops.routing.summed` in one launch, and what is around it.

    See `kernels.triton.experts.sum_experts`.
    """
    out: Tensor = kernels().sum_experts(y_BKTD, weight_BTK, z_BTD, gate, onto=onto)
    return out


def chooses(logits_BV: Tensor) -> bool:
    """Whether `choose` supports these logits."""
    return takes(logits_BV, SAMPLING) and logits_BV.stride(1) == 1


def choose(
    logits_BV: Tensor, k: int, numbers: Tensor, u_B: Tensor | None, prompt_BV: Tensor | None,
    output_BV: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`engine.sampling.choose`; see `kernels.triton.sampling.choose`."""
    ids_B, best_B = kernels().choose(logits_BV, k, numbers, u_B, prompt_BV, output_BV)
    return ids_B, best_B


def _few(x: Tensor) -> bool:
    return x.numel() <= _FEW_ROWS * x.shape[-1]


def _shaped(out_MN: Tensor, x: Tensor) -> Tensor:
    return out_MN.view(*x.shape[:-1], out_MN.shape[1])
