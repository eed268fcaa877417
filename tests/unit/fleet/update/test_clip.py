"""The arithmetic of clipping: that of torch.nn.utils, from parts in any order."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.update import clip_coefficient, sum_of_squares, total_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("cut", [1, 40, 99])
def test_a_norm_of_parts_is_the_norm_of_the_whole(dtype, scale, cut):
    whole = (torch.randn(100, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    found = total_of({1: sum_of_squares(whole[cut:]), 0: sum_of_squares(whole[:cut])})
    assert found**0.5 == pytest.approx(whole.double().norm().item(), rel=1e-12)


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("value", [0.0, 1e-4, 3.0, float("inf"), float("nan")])
def test_the_coefficient_is_torch_s(max_norm, value):
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([value, -2 * value], dtype=torch.float64)
    before = parameter.grad.clone()
    torch.nn.utils.clip_grad_norm_(parameter, max_norm)
    ours = before * clip_coefficient(sum_of_squares(before), max_norm)
    torch.testing.assert_close(ours, parameter.grad, rtol=1e-12, atol=0.0, equal_nan=True)


def test_a_large_gradient_does_not_overflow():
    assert sum_of_squares(torch.full((4,), 1e38)) == pytest.approx(4e76)
    assert clip_coefficient(math.inf, 1.0) == 0.0


@given(st.dictionaries(st.integers(0, 50), st.floats(0, 1e30), min_size=1), st.randoms())
def test_the_order_of_the_parts_changes_no_bit(sums, random):
    shuffled = list(sums.items())
    random.shuffle(shuffled)
    assert total_of(dict(shuffled)) == total_of(sums)
