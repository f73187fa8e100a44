"""Its formulas in float64, and how large what they add up is."""

import torch

from llmcli.evaluate.rule import exact


def share(op, values):
    router = values[op.sources[0]]
    shares = router.softmax(-1)
    return shares, shares * (2 + router.abs() + router.abs().amax(-1, keepdim=True))


def hidden(op, values):
    x_TD, enter_EDF = values[op.sources[0]], exact(values.weight(op.parameters[0]))
    sums, sizes = (torch.einsum("td,edf->etf", a, b) for a, b in
                   ((x_TD, enter_EDF), (x_TD.abs(), enter_EDF.abs())))  # fmt: skip
    return torch.nn.functional.silu(sums), 2 * sizes


def mixed(op, values):
    shares_TE, hidden_ETF = (values[name] for name in op.sources)
    leave_EFD = exact(values.weight(op.parameters[0]))
    return tuple(
        torch.einsum("te,etf,efd->td", *parts)
        for parts in ((shares_TE, hidden_ETF, leave_EFD),
                      (shares_TE.abs(), hidden_ETF.abs(), leave_EFD.abs()))
    )  # fmt: skip
