"""Axes: B batch, T tokens, D width, E experts, F hidden numbers."""

import torch
import torch.nn.functional as F

from llmcli.nn.linear import Linear
from llmcli.ops.norm import at_least_float32


class Experts:
    def __init__(self, config, name, parameters):
        self.config, self.name = config, name
        self.router = Linear(parameters, name, "router")
        self.enter = parameters.table(f"{name}.W_in")
        self.leave = parameters.table(f"{name}.W_out")

    def __call__(self, x_BTD, step):
        router_BTE = step.emit(f"{self.name}.router", self.router(x_BTD))
        share_BTE = step.emit(f"{self.name}.share", at_least_float32(router_BTE).softmax(-1))
        x_BTD, enter_EFD = at_least_float32(x_BTD), at_least_float32(self.enter.dense())
        hidden_BETF = F.silu(torch.einsum("btd,efd->betf", x_BTD, enter_EFD))
        hidden_BETF = step.emit(f"{self.name}.hidden", hidden_BETF.to(router_BTE.dtype))
        leave_EDF = at_least_float32(self.leave.dense())
        out_BETD = torch.einsum("betf,edf->betd", at_least_float32(hidden_BETF), leave_EDF)
        return (share_BTE.permute(0, 2, 1)[..., None] * out_BETD).sum(1)
