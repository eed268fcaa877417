"""What ``all_reduce_worker`` takes: numbers, and nothing that would fail on its way."""

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.metrics.numbers import numbers_of


@pytest.mark.parametrize(
    "values",
    [
        pytest.param("12", id="text"),
        pytest.param(["a", "b"], id="texts"),
        pytest.param(None, id="none"),
        pytest.param([1, object()], id="object"),
        pytest.param([[1, 2], [3]], id="ragged"),
        pytest.param(np.array("2026-01-01", dtype="datetime64[D]"), id="date"),
        pytest.param(torch.ones(2, dtype=torch.bfloat16), id="bfloat16"),
    ],
)
def test_what_is_no_number_is_the_users_mistake(values):
    with pytest.raises(ConfigurationError, match=r"^all_reduce_worker"):
        numbers_of(values)


@pytest.mark.parametrize(
    ("values", "dtype"), [(True, "int64"), (3, "int64"), ([0.5], "float64"), (1j, "complex128")]
)
def test_numbers_keep_their_type_and_truths_are_counted(values, dtype):
    assert numbers_of(values).dtype == dtype
