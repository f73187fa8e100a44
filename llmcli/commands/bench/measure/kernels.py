"""Which kernel PyTorch's attention takes: the one that keeps no scores, or the formula."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_NARROW = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)


def attention(*, flash: bool) -> AbstractContextManager[None]:
    """Within it, without `flash`, the scores of all pairs are computed as in the formula."""
    return nullcontext() if flash else sdpa_kernel(SDPBackend.MATH)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is such a kernel: on a CPU, and on newer CUDA devices for 16 bits."""
    if device.type == "cuda":
        available: bool = torch.backends.cuda.is_flash_attention_available()
        return (
            available and dtype in _NARROW and torch.cuda.get_device_capability(device) >= _AMPERE
        )
    return device.type != "mps"  # of shapes nothing is asked
