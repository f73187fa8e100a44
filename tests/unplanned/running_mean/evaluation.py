"""Its formulas in float64, and how large what they add up is."""

import torch


def _powers(op, values):
    v_HSe = values.every(op.sources[0])
    ages_TS = torch.tensor(values.positions)[:, None] - torch.arange(v_HSe.shape[1])
    decays_H = torch.sigmoid(values.vector(op.parameters[0]))
    powers_HTS = (decays_H[:, None, None] ** ages_TS.clamp(min=0)) * (ages_TS >= 0)
    return powers_HTS, v_HSe, ages_TS.clamp(min=0) + 1


def pattern(op, values):
    powers, _, ages = _powers(op, values)
    weights = powers / powers.sum(-1, keepdim=True)
    return weights, weights * (ages + (weights * ages).sum(-1, keepdim=True))


def summed(op, values):
    powers, v, ages = _powers(op, values)
    return powers @ v, (powers * ages) @ v.abs()


def counted(op, values):
    powers, _, ages = _powers(op, values)
    return powers.sum(-1, keepdim=True), (powers * ages).sum(-1, keepdim=True)
