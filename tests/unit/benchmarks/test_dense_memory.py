"""What the memory benchmark makes of its measurements."""

import pytest

from benchmarks.dense_memory import PARAMETER_BYTES, report


def test_a_server_is_measured_in_its_own_slices_and_a_trainer_in_all_parameters():
    half = PARAMETER_BYTES // 2
    row = report("shared", 2, [100 + 3 * half, 100 + half, 500 + half, 500], computing=500, imports=100)
    assert row["transport"] == "shared memory"
    assert row["server_in_its_parameters"] == pytest.approx(3.0)
    assert row["trainer_in_parameters"] == pytest.approx(0.5)
