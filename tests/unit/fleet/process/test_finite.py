"""Gradients that hold NaN or infinity are found, and none that are only large."""

import math

import pytest
import torch

from fleet.errors import FleetError
from fleet.process.finite import FiniteCheck


def gradients(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return one gradient for each number, with ordinary ones around it, and an empty one."""
    found = {
        f"p{number}": torch.tensor([0.5, value, -2.0], dtype=dtype) for number, value in enumerate(values)
    }
    return {"none": torch.empty(0, 4, dtype=dtype), **found}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_numbers_are_finite(dtype):
    """Their squares are not."""
    largest = torch.finfo(dtype).max
    assert FiniteCheck("stop", 0, lambda: 0).lets_step(gradients(1.0, largest, -largest, dtype=dtype))
    assert FiniteCheck("stop", 0, lambda: 0).lets_step({})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_gradient_that_is_no_number_is_named(value, dtype):
    check = FiniteCheck("stop", 3, lambda: 7)
    with pytest.raises(FleetError, match="the gradient of p1 holds NaN or infinity on trainer 3 in step 7"):
        check.lets_step(gradients(1e4, value, math.inf, dtype=dtype))


def test_infinities_of_both_signs_do_not_cancel():
    assert not FiniteCheck("skip", 0, lambda: 0).lets_step(gradients(math.inf, -math.inf))


def test_to_warn_it_looks_in_the_first_steps_and_in_every_sixteenth_until_it_has_warned(caplog):
    check = FiniteCheck("warn", 0, lambda: 0)
    looks = []
    for _ in range(33):
        looks.append(check.looks)
        assert check.lets_step(gradients(1.0))
    assert [step for step, looked in enumerate(looks) if looked] == [0, 1, 2, 3, 16, 32]
    for _ in range(32):
        assert check.lets_step(gradients(math.nan))
    assert caplog.text.count("holds NaN or infinity") == 1
    assert not check.looks


def test_a_sparse_gradient_is_named_as_any_other():
    lost = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([[math.nan, 0.0]]), (4, 2))
    with pytest.raises(FleetError, match="the gradient of rows holds NaN or infinity on trainer 0"):
        FiniteCheck("stop", 0, lambda: 0).lets_step({**gradients(1.0), "rows": lost})
