"""Sets of replica indexes and lists of pods, as plans write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.plan.formats import format_indexes, parse_indexes, some


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


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["a-0"], "a-0", id="one"),
        pytest.param(["a-0", "a-1"], "a-0 (and 1 more)", id="two"),
        pytest.param(["a-0", "a-1", "a-2"], "a-0 (and 2 more)", id="several"),
    ],
)
def test_some(names, expected):
    assert some(names) == expected
