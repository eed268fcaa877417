"""The benchmark of rows: what it reports, of tables that are too small to say anything of speed."""

import argparse

import pytest

from benchmarks import sparse_rows


def test_every_measurement_has_a_rate_and_a_ratio_with_its_spread(capsys: pytest.CaptureFixture[str]):
    arguments = argparse.Namespace(rows=2000, dimension=3, batch=100, rounds=3, rule="adam")
    rows = sparse_rows.speed(arguments)
    assert [row["ids"] for row in rows] == ["bounded ids", "any 64-bit id"]
    for row in rows:
        assert set(row["rows_per_second"]) == {"read", "look_up", "write", "update"}
        for ratio in (row["look_up_to_read"], row["update_to_write"]):
            median, low, high = ratio
            assert 0.0 < low <= median <= high
    (small,) = sparse_rows.small(2000, 3)
    assert small["rows"] == 25
    assert all(taken > 0.0 for taken in small["microseconds"].values())
    large = sparse_rows.large(3000)
    assert large["touched"] == 3000
    sparse_rows.show({"speed": rows, "small": [small], "large": large})
    printed = capsys.readouterr().out
    assert "any 64-bit id" in printed
    assert "1000000000 x 16, Adagrad, 3000 rows updated" in printed
