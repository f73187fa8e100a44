"""Token by token, from what is remembered of those before.

Axes: B batch, T new tokens, t rows, S keys, H heads, e numbers of a head.
"""

import torch

from llmcli.nn.linear import Linear
from llmcli.ops.norm import at_least_float32


class RunningMean:
    def __init__(self, config, name, parameters):
        self.config, self.name = config, name
        self.enter = Linear(parameters, name, "v")
        self.a = parameters.vector((f"{name}.a",))
        self.out = Linear(parameters, name, "o")

    @property
    def decays(self):
        return torch.sigmoid(self.a)

    def __call__(self, x_BTD, state, step):
        name = self.name
        v_BHTe = self.enter(x_BTD).unflatten(-1, (self.config.heads, -1)).transpose(1, 2)
        v_BHTe = step.emit(f"{name}.v", v_BHTe)
        sums, counts = self.recur(at_least_float32(v_BHTe), state)
        for held, rows in (("sum", sums), ("count", counts)):
            for row, length in enumerate(step.lengths):
                if length:
                    state[held][row] = rows[row, :, length - 1]
        sums = step.emit(f"{name}.sum", sums)
        counts = step.emit(f"{name}.count", counts)
        z_BHTe = step.emit(f"{name}.z", (sums / counts).to(x_BTD.dtype))
        return self.out.wide(z_BHTe.transpose(1, 2).flatten(2))

    def recur(self, v_BHTe, state):
        sums, counts, decay_H1 = [state["sum"]], [state["count"]], self.decays[:, None]
        for v_BHe in v_BHTe.unbind(2):
            sums.append(decay_H1 * sums[-1] + v_BHe)
            counts.append(decay_H1 * counts[-1] + 1)
        return torch.stack(sums[1:], 2), torch.stack(counts[1:], 2)

    def derive(self, name, emitted, first, stop, *, heads=slice(None)):
        keys = emitted[f"{self.name}.v"].shape[2]
        ages_tS = torch.arange(first, stop)[:, None] - torch.arange(keys)
        weights_HtS = self.decays[heads, None, None] ** ages_tS.to(self.a.device)
        weights_HtS = weights_HtS.masked_fill((ages_tS < 0).to(self.a.device), 0)
        return (weights_HtS / weights_HtS.sum(-1, keepdim=True))[None]
