"""The kernels of small operations: as PyTorch computes them, with the same bits at every level.

A row of `TWINS` has what is computed, and of what. A kernel computes it of float32; in float64
there is no kernel, so that the same function is its own twin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from kernel_sources import SPECIAL, by_pytorch, scores_like
from tensors import drawn, same

from llmcli.config.mlp import ACTIVATIONS, GateClamp
from llmcli.ops import elements, heads, norm, rope, routing
from llmcli.ops.activations import activation, soft_cap
from llmcli.ops.recurrence import steps_and_decays, with_skip

ULP = 2**-23


@dataclass(frozen=True)
class Twin:
    """`compute` of the tensors `draw(*case)`, for each case.

    In float64 it is `roundings` of float32 away, of each number or with `of_largest` of the largest
    one, or `least`. Without `roundings` it has PyTorch's bits.
    """

    compute: Callable
    draw: Callable
    cases: list
    roundings: float = 0
    least: float = 1e-37
    of_largest: bool = False


def gapped(*shape, seed=0):
    """Rows with gaps between them."""
    return drawn(*shape[:-1], shape[-1] + 5, seed=seed)[..., 2:-3]


def unit(batch, tokens, rows, size):
    x = gapped(batch, tokens, rows * size).unflatten(2, (rows, size))
    x[0, 0, 0] = 0.0
    x[-1, -1, -1] *= 1e12
    return (x,)


def steps(heads, *bounds):
    """Numbers and biases whose sums float32 has, that it rounds no sum."""
    x = torch.cat([torch.linspace(-85, 90, 400), torch.tensor((*SPECIAL[:-2], 1e30, -1e30))])
    x[:400] = x[:400].mul(1024).round() / 1024
    x = x[: len(x) // heads * heads].view(-1, 1, heads)
    bias = drawn(heads).mul(1024).round() / 1024
    return torch.cat((x, x), -1)[..., :heads], bias, torch.linspace(-9, 5, heads)


def of_heads(batch, heads, rows, columns, behind, dtype):
    """Heads' matrices between other rows, and inputs, some of which belong to no matrix."""
    w = drawn(heads, rows + 2, columns, seed=5).to(dtype)[:, 1:-1]
    x = drawn(batch, heads + 1, 1, rows + behind + 3, seed=6)[:, 1:, :, : rows + behind]
    return x, drawn(batch, 1, heads, columns, seed=7).transpose(1, 2), w


X, Y = torch.linspace(-9, 9, 154).view(2, 77), torch.linspace(12, -12, 154).view(2, 77)
X[0, 5] = Y[1, 9] = math.nan
# B, H, rows of a head's matrix, columns, numbers behind the inputs; and the matrices' dtype
HEADS = ((1, 1, 1, 16, 0), (2, 3, 7, 32, 5), (1, 16, 128, 512, 64), (3, 5, 33, 272, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = [(*shape, dtype) for shape in HEADS for dtype in DTYPES]
TWINS = {
    "share": Twin(
        lambda x, sigmoid: routing.share(x, sigmoid=sigmoid),
        lambda experts, sigmoid, kind: (scores_like(30, experts, kind, seed=experts), sigmoid),
        [(e, s, kind) for e in (1, 2, 15, 16, 17, 128) for s in (False, True)
         for kind in ("usual", "equal", "ties", "special")], 16,
    ),
    "sum of experts": Twin(
        routing.summed, lambda batch, count, tokens, columns, plus: (
            scores_like(batch * count * tokens, columns, "special").view(batch, count, tokens, -1),
            drawn(batch, tokens, count, seed=3), drawn(batch, tokens, columns) if plus else None,
        ), [(*shape, plus) for plus in (False, True)
            for shape in ((1, 1, 1, 1), (1, 8, 1, 33), (2, 3, 5, 17), (3, 2, 1, 64))],
    ),
    "factors of rows": Twin(
        elements.scale_rows, lambda rows, columns: (drawn(rows, columns), drawn(rows, 1, seed=1)),
        [(1, 1), (1, 33), (10, 17), (3, 64)],
    ),
    "unit length": Twin(
        lambda x: norm.l2_norm(x, 1e-6, 0.25), unit,
        [(1, 1, 1, 1), (2, 1, 3, 17), (1, 1, 32, 128), (2, 4, 2, 100)], 3, of_largest=True,
    ),
    "groups with weights of their own": Twin(
        lambda x, w: norm.rms_norm(x, w, 1e-5), lambda: (drawn(2, 3, 4, 37), drawn(4, 37, seed=1)),
        [()], 4, of_largest=True,
    ),
    "layer norm": Twin(
        lambda x, w, b: norm.layer_norm(x, w, b, 1e-5, offset=1.0),
        lambda *shape: (gapped(*shape), *drawn(2, shape[-1], seed=1)), [(2, 3, 37), (1, 1, 576)], 4,
        of_largest=True,
    ),
    "steps and decays": Twin(
        lambda *given: torch.stack(steps_and_decays(*given), 1),
        lambda *case: (*steps(*case), *case[1:]),
        [(heads, *bounds) for heads in (1, 8, 19, 64)
         for bounds in ((0.0, math.inf), (0.001, 0.1), (0.0, 3.0))], 12,
    ),
    "past a recurrence": Twin(
        with_skip, lambda batch, heads, size: (
            drawn(batch, heads, 1, size),
            gapped(batch, 1, heads * size, seed=2).unflatten(2, (heads, size)).transpose(1, 2),
            drawn(heads, seed=1),
        ), [(1, 1, 1), (2, 5, 33), (3, 24, 64)],
    ),
    "to columns": Twin(heads.to_columns, lambda *case: of_heads(*case)[::2], HEADS, 84, 1e-4),
    "to rows": Twin(heads.to_rows, lambda *case: of_heads(*case)[1:], HEADS, 84, 1e-4),
    "joined heads": Twin(
        heads.join, lambda tokens: (drawn(3, tokens, 40)[..., :30].view(3, tokens, 5, 6),
                                    drawn(3, tokens, 5, 2, seed=1)), [(1,), (4,)],
    ),
    "sigmoid of any number": Twin(
        activation("sigmoid"), lambda: (torch.cat([torch.linspace(-87, 90, 1001),
                                                   torch.tensor(SPECIAL)]),), [()], 4, 2e-38,
    ),
    "activation": Twin(
        lambda x, name: activation(name)(x), lambda name: (X, name),
        [(name,) for name in ACTIVATIONS], 8, 1e-6,
    ),
    "product": Twin(elements.gate, lambda: (X, Y), [()]),
    "clamped gate": Twin(
        lambda *given: elements.gate(*given, GateClamp(limit=7.0, offset=1.0)), lambda: (X, Y), [()]
    ),
    "clipped": Twin(lambda x: elements.clip(x, 2.5), lambda: (X,), [()]),
    "sum": Twin(elements.add, lambda: (X, Y), [()]),
    "scaled": Twin(elements.scale, lambda by: (X, by), [(0.3,), (1e300,)]),
    "soft cap": Twin(lambda x: soft_cap(x, 3.0), lambda: (X,), [()], 8),
    "rotated": Twin(
        lambda x, at: rope.rotate(x, *(
            table.to(x.dtype)[:, None] for table in rope.tables(torch.logspace(0, -2, 8), at, 1.0)
        )),
        lambda *shape: (gapped(*shape), torch.arange(7, 7 + shape[1])), [(2, 3, 5, 20)], 8, 1e-6,
    ),
}  # fmt: skip
# of which the last row of all tensors has the same bits by itself
BY_ROWS = ("share", "sum of experts", "factors of rows", "unit length", "joined heads", "sum")


@pytest.mark.parametrize(("name", "case"), [
    pytest.param(name, case, id=f"{name}{case or ''}")
    for name, twin in TWINS.items() for case in twin.cases
])  # fmt: skip
@pytest.mark.usefixtures("threads")
def test_a_kernel_computes_what_its_twin_does(every_level, monkeypatch, name, case):
    twin = TWINS[name]
    given = twin.draw(*case)
    found = every_level(lambda: twin.compute(*given))
    if twin.roundings:
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in given]  # fmt: skip
        exact = twin.compute(*wide)
        most = exact.nan_to_num(0, 0, 0).abs().max().item() if twin.of_largest else 0.0
        near = twin.roundings * ULP
        torch.testing.assert_close(
            found.double(), exact, rtol=near, atol=near * most + twin.least, equal_nan=True
        )
    else:
        same(found, by_pytorch(monkeypatch, twin.compute, *given))
    if name in BY_ROWS:
        last = [x[-1:] if isinstance(x, torch.Tensor) else x for x in given]
        same(every_level(lambda: twin.compute(*last)), found[-1:])


def test_one_of_several_groups_has_the_bits_of_all(levels):
    x, w = TWINS["groups with weights of their own"].draw()
    for _ in levels():
        same(norm.rms_norm(x[:, :, 2], w[2], 1e-5), norm.rms_norm(x, w, 1e-5)[:, :, 2])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_bounded_activation_is_that_of_bounded_numbers(every_level, name):
    same(every_level(lambda: activation(name, 2.5)(X)), activation(name)(X.clamp(max=2.5)))


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_products_of_heads_keep_other_numbers_and_widen_those_of_16_bits(levels, case):
    """A sequence alone has the same bits."""
    x, y, w = of_heads(*case)
    for _ in levels():
        into, out = heads.to_columns(x, w), heads.to_rows(y, w)
        assert torch.equal(into[..., case[3] :], x[..., case[2] :])
        same((heads.to_columns(x[-1:], w), heads.to_rows(y[-1:], w)), (into[-1:], out[-1:]))
        narrow = y.bfloat16()
        same(heads.to_rows(narrow, w), heads.to_rows(narrow.float(), w))
