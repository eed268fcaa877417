"""Gradients that hold NaN or infinity are found, and none that are only large."""

import math

import numpy as np
import pytest
import torch

from fleet.errors import FleetError
from fleet.process import progress
from fleet.process.finite import COUNTER, FiniteCheck, tell_of_weights


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


def of_rows(*values: float) -> dict[str, tuple[np.ndarray, torch.Tensor]]:
    """Return the gradients of two tables, of which the second has a row for each number."""
    rows = torch.tensor([[0.5, value] for value in values])
    return {
        "users": (np.array([3]), torch.ones(1, 2)),
        "clicks": (10 * np.arange(len(values), dtype=np.int64), rows),
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps", [0, 6, 16, 17])
def test_a_row_is_looked_at_in_every_step_and_told_of_once(value, steps, caplog):
    check = FiniteCheck("warn", 2, lambda: 5)
    for _ in range(steps):
        assert check.lets_step(gradients(1.0), of_rows(1.0, 2.0))
    for _ in range(3):
        assert check.lets_step(gradients(1.0), of_rows(1.0, value, math.nan))
    told = "the gradient of row 10 of table clicks holds NaN or infinity on trainer 2 in step 5"
    assert caplog.text.count(told) == 1
    assert caplog.text.count("holds NaN") == 1


def test_rows_with_the_largest_numbers_are_finite():
    largest = torch.finfo(torch.float32).max
    assert FiniteCheck("stop", 0, lambda: 0).lets_step({}, of_rows(largest, largest, largest))
    assert FiniteCheck("stop", 0, lambda: 0).lets_step({}, of_rows())


def test_a_row_is_told_of_too_after_another_gradient(caplog):
    check = FiniteCheck("warn", 0, lambda: 0)
    check.lets_step(gradients(math.nan), of_rows(1.0))
    check.lets_step(gradients(math.nan), of_rows(math.nan))
    assert "the gradient of p0 holds" in caplog.text
    assert "the gradient of row 0 of table clicks holds" in caplog.text


def test_what_the_end_tells_of_weights_has_the_tables_whose_rows_were_lost(caplog):
    check = FiniteCheck("warn", 0, lambda: 6)
    check.lets_step({}, of_rows(1.0, math.nan))
    before = progress.snapshot()["counters"].get(COUNTER, 0)
    tell_of_weights({"head": torch.ones(2)}, 9, check.lost_rows)
    assert progress.snapshot()["counters"][COUNTER] == before + 1
    assert (
        "training ends after step 9 with NaN or infinity in 1 of 2 parameters: "
        "table clicks (row 10 in step 6)" in caplog.text
    )


def test_a_row_that_was_left_out_is_not_lost():
    check = FiniteCheck("skip", 0, lambda: 0)
    assert not check.lets_step({}, of_rows(math.nan))
    assert check.lost_rows == {}
