"""Numbers times the scale of their block, against loops over Python floats."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.ops.scaled import scale_rows


def twin(values, scales, first, rows, columns, divisor):
    """The same, number by number."""
    begin = 0 if rows is None else first // rows
    out = []
    for i, row in enumerate(values):
        down = 0 if rows is None else (first + i) // rows - begin
        out.append(
            [x * (scales[down][0 if columns is None else j // columns] / divisor)
             for j, x in enumerate(row)]
        )  # fmt: skip
    return out


BLOCKS = st.none() | st.integers(1, 9)


@settings(max_examples=150, deadline=None)
@given(
    height=st.integers(1, 12), width=st.integers(1, 20), first=st.integers(0, 11),
    rows=BLOCKS, columns=BLOCKS, divisor=st.sampled_from([1, 127]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_rows_of_any_blocks(height, width, first, rows, columns, divisor, seed):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(height, width, generator=g, dtype=torch.float64)
    begin = 0 if rows is None else first // rows
    down = 1 if rows is None else (first + height - 1) // rows + 1 - begin
    across = 1 if columns is None else -(-width // columns)
    scales = torch.randn(down, across, generator=g, dtype=torch.float64)
    slow = twin(values.tolist(), scales.tolist(), first, rows, columns, divisor)
    fast = scale_rows(values, scales, first=first, rows=rows, columns=columns, divisor=divisor)
    assert fast.tolist() == slow
    assert fast is values


def test_rows_that_are_part_of_wider_memory():
    wide = torch.ones(4, 10)
    scale_rows(wide[:, 2:9], torch.tensor([[2.0, 3.0, 5.0]]), columns=3)
    assert wide[3].tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 5, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_in_the_dtype_of_the_values(dtype):
    values = torch.full((1, 1), 3.0, dtype=dtype)
    third = torch.tensor([[1 / 3]], dtype=torch.float64)
    assert scale_rows(values, third).item() == (torch.tensor(1 / 3, dtype=dtype) * 3).item()
    assert values.dtype == dtype


def test_infinities_and_zeros_are_what_they_are():
    values = torch.tensor([[torch.inf, 0.0], [-2.0, torch.nan]])
    out = scale_rows(values, torch.tensor([[0.5], [0.0]]), rows=1)
    assert out[0].tolist() == [torch.inf, 0.0]
    assert out[1, 0].item() == 0.0
    assert out[1, 1].isnan()
