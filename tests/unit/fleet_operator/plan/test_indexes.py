"""Sets of indexes as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.plan.indexes import format_indexes, parse_indexes


@pytest.mark.parametrize(
    ("indexes", "text"),
    [
        pytest.param((), "", id="none"),
        pytest.param((3,), "3", id="one"),
        pytest.param((0, 1, 2, 4), "0-2,4", id="a-range-and-one"),
        pytest.param((9, 10, 7), "7,9-10", id="in-order"),
    ],
)
def test_format_indexes(indexes, text):
    assert format_indexes(indexes) == text


@given(st.frozensets(st.integers(0, 1000)))
def test_what_was_written_reads_back(indexes):
    assert parse_indexes(format_indexes(indexes)) == indexes
