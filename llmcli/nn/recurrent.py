"""Common base of mixers with a convolution and a recurrence with a matrix state.

Axes: B batch, T new tokens, t some of them, S all tokens, H heads, K heads of queries and keys,
C channels, L tokens of the convolution's window, d size of a query and key, e of a value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from llmcli.errors import UsageError
from llmcli.nn.state import LayerState
from llmcli.nn.step import Emitted, Step
from llmcli.ops.activations import activation
from llmcli.ops.conv import convolve
from llmcli.ops.norm import at_least_float32
from llmcli.ops.recurrence import Inputs, Map, log_decays, recur, states, steps_and_decays


class Recurrent(ABC):
    """A recurrent mixer; prompts and steps use `ops.recurrence.recur`.

    The state has the last L inputs of the convolution in a ring (`ops.conv`), and for each head a
    matrix `[d, e]` in at least float32, flattened.
    """

    name: str
    filter_CL: Tensor
    bias_C: Tensor | None = None
    A_log_H: Tensor
    dt_bias_H: Tensor
    leaves: tuple[str, str, str, str, str]  # names of queries, keys, values, β and log-decays
    plain: bool
    tiled: bool

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Number of heads, and rows and columns of a head's state."""

    def activated(self, x_BTC: Tensor, state: LayerState, step: Step) -> Tensor:
        """`[B, T, C]` → `act` of the same shape; stores the tokens in the ring."""
        made_BTC, act_BTC = convolved(
            x_BTC, self.filter_CL, self.bias_C, state["conv"], step,
            silu=x_BTC.dtype == torch.float32,  # in 16 bits SiLU is applied to the rounded result
        )  # fmt: skip
        conv_BTC = step.emit(f"{self.name}.conv", made_BTC)
        if act_BTC is None or conv_BTC is not made_BTC:
            act_BTC = activation("silu")(conv_BTC)
        return step.emit(f"{self.name}.act", act_BTC)

    def decays(
        self, x_BTH: Tensor, step: Step, *, least: float = 0.0, most: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """`dt` and `log_decay` from the projections, in at least float32."""
        made_BTH, log_BTH = steps_and_decays(
            at_least_float32(x_BTH), self.dt_bias_H, self.A_log_H, least, most
        )
        dt_BTH = step.emit(f"{self.name}.dt", made_BTH)
        if dt_BTH is not made_BTH:
            log_BTH = log_decays(dt_BTH, self.A_log_H)
        return dt_BTH, step.emit(f"{self.name}.log_decay", log_BTH)

    def scanned(self, inputs: Inputs, state: LayerState, step: Step) -> Tensor:
        """The output `[B, H, T, e]` in at least float32; padding does not change the state."""
        if (lengths_B := step.lengths_B) is not None:
            there_BT = torch.arange(step.tokens, device=lengths_B.device) < lengths_B[:, None]
            inputs = inputs.only(there_BT)
        state_BHde = state["state"].view(len(inputs.v_BHTe), *self.shape)
        return recur(inputs, state_BHde)

    def mixed(self, inputs: Inputs, state: LayerState, step: Step) -> Tensor:
        """Like `scanned`; with an edited map, by products of its rows and the values.

        Raises UsageError for an edited map if the state has earlier tokens, which the map lacks.
        """
        name, z_BHTe = f"{self.name}.pattern", self.scanned(inputs, state, step)
        if name not in step.edits:
            return z_BHTe
        if any(step.starts):
            raise UsageError(
                f"`{name}` has columns for the tokens of one call: earlier ones are in the state",
                hint="edit it in a call that begins with the first token",
            )
        return step.emit(name, Map(inputs).rows(0, step.tokens)) @ inputs.v_BHTe

    def read(self, emitted: Emitted, heads: slice = slice(None)) -> Inputs:
        """The recurrence's inputs from emitted tensors of all tokens, for `heads` only."""
        found = {leaf: emitted.get(f"{self.name}.{leaf}") for leaf in self.leaves}
        given = [None if one is None else at_least_float32(one) for one in found.values()]
        q, k, v, beta, decay = given
        assert k is not None
        assert beta is not None
        assert decay is not None
        if v is None:  # the map does not depend on values
            v = k.new_zeros(len(k), self.shape[0], k.shape[2], 0)
        return self.inputs(k if q is None else q, k, v, beta, decay).of_some(heads)

    def inputs(
        self, q_BKTd: Tensor, k_BKTd: Tensor, v_BHTe: Tensor, beta_BTH: Tensor, log_BTH: Tensor
    ) -> Inputs:
        """The recurrence's inputs; β and the log decays come as `[B, T, H]`."""
        beta_BHT, log_BHT = beta_BTH.mT, log_BTH.mT
        return Inputs(q_BKTd, k_BKTd, v_BHTe, beta_BHT, log_BHT, plain=self.plain, tiled=self.tiled)

    def map(self, emitted: Emitted, heads: slice = slice(None)) -> Map:
        """The map `[B, H, T, S]` of `heads`; rows are best requested in order."""
        return Map(self.read(emitted, heads))

    def derive(
        self, name: str, emitted: Emitted, first: int, stop: int, *, heads: slice = slice(None)
    ) -> Tensor:
        """Rows `first` … `stop`-1 of `pattern` `[B, H, t, S]`, or of `state` `[B, H, t, d·e]`.

        In at least float32, from `emitted` tensors of all tokens, for `heads` only.
        """
        if name.endswith(".pattern"):
            return self.map(emitted, heads).rows(first, stop)
        inputs = self.read(emitted, heads)
        batch, count = inputs.v_BHTe.shape[:2]
        empty = inputs.k_BKTd.new_zeros(batch, count, *self.shape[1:])
        found = states(inputs, empty, range(first + 1, stop + 1))
        return torch.stack([one.flatten(2).clone() for one in found], 2)


def convolved(
    x_BTC: Tensor, filter_CL: Tensor, bias_C: Tensor | None, ring_BLC: Tensor, step: Step, *,
    silu: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The convolution, `[B, T, C]` → `[B, T, C]`; the ring stores the tokens without padding.

    Also its SiLU, if requested and our kernel computes both together.
    """
    return convolve(
        x_BTC, filter_CL, bias_C, ring_BLC, step.starts_B, silu=silu, lengths_B=step.lengths_B
    )


def in_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, H·e]` → `[B, H, T, e]`, a view."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def side_by_side(x_BHTe: Tensor) -> Tensor:
    """`[B, H, T, e]` → `[B, T, H·e]`, the inverse of `in_heads`."""
    return x_BHTe.transpose(1, 2).flatten(2)
