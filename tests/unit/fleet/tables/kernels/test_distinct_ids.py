"""Distinct ids in C beside numpy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.tables.kernels.distinct_ids import distinct_by_numpy, distinct_ids

ENDS = (-(2**63), 2**63 - 1, -1, 0, 2**11 - 1, 2**11, -(2**55))
IDS = st.one_of(st.sampled_from(ENDS), st.integers(-9, 9), st.integers(-(2**63), 2**63 - 1))


@given(ids=st.lists(IDS, max_size=300))
def test_ids_are_those_of_numpy(ids):
    given_ids = np.array(ids, dtype=np.int64)
    before = given_ids.copy()
    distinct, positions = distinct_ids(given_ids)
    for found, expected in zip((distinct, positions), distinct_by_numpy(given_ids), strict=True):
        assert found.dtype == np.int64
        assert found.tolist() == expected.tolist()
    assert np.array_equal(given_ids, before)


@pytest.mark.parametrize("number", [1_000_000, 2**62])
def test_each_position_leads_to_its_id(number):
    ids = np.random.default_rng(0).integers(-number, number, 100_000)
    distinct, positions = distinct_ids(ids)
    assert np.array_equal(distinct[positions], ids)
    assert (distinct[1:] > distinct[:-1]).all()


def test_ids_that_lie_apart_in_memory_are_taken():
    ids = np.array([[3, 9], [1, 9], [3, 9]])[:, 0]
    distinct, positions = distinct_ids(ids)
    assert (distinct.tolist(), positions.tolist()) == ([1, 3], [1, 0, 1])
