"""Weights in 8 bits: what quantization does to one projection.

Axes: B batch, T tokens, D width, R rows (outputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.nn.decoder import Decoder
from llmcli.nn.linear import Linear
from llmcli.parts.attention.forward import Attention
from llmcli.parts.mlp.forward import GatedMlp, Mlp


class Int8Linear(Linear):
    """A projection whose weights are integers -127 … 127 with one scale a row.

    `Y = (X Wᵢₙₜ₈ᵀ) · scale`: symmetric, rounded to nearest, the scale the row's largest number
    over 127 (absmax quantization; Dettmers et al. 2022, arXiv 2208.07339, section 2.1). The
    activations stay bfloat16, for which PyTorch has a kernel that widens the weights as it reads.
    """

    def __init__(self, linear: Linear) -> None:
        wide_RD = linear.weight.dense(torch.float32)
        scale_R = wide_RD.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self.packed = (wide_RD / scale_R[:, None]).round_().to(torch.int8).contiguous()
        self.scale = scale_R.bfloat16()
        self.bias = linear.bias
        self.rows = linear.rows

    def __call__(self, x_BTD: Tensor) -> Tensor:
        """`[B, T, D]` → `[B, T, R]`."""
        y = torch._weight_int8pack_mm(x_BTD.reshape(-1, x_BTD.shape[-1]), self.packed, self.scale)
        y = y.reshape(*x_BTD.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def wide(self, x_BTD: Tensor) -> Tensor:
        """The same for a float32 stream: PyTorch's kernel rounds its sums to bfloat16."""
        return self(x_BTD).float()


def quantize(decoder: Decoder) -> Decoder:
    """Replaces the projections of every block, in place; the head and the embeddings stay."""
    for block in decoder.blocks:
        mixer, ffn = block.parts.values()
        assert isinstance(mixer, Attention)
        assert isinstance(ffn, Mlp | GatedMlp)
        mixer.qkv = Int8Linear(mixer.qkv)
        mixer.out = Int8Linear(mixer.out)
        if isinstance(ffn, Mlp):
            ffn.up = Int8Linear(ffn.up)
        else:
            ffn.gate_up = Int8Linear(ffn.gate_up)
        ffn.down = Int8Linear(ffn.down)
    return decoder
