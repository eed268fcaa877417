"""Loops in C beside those of NumPy and torch."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.tables.gradients import add_rows, add_rows_by_torch
from fleet.tables.ids import distinct_by_numpy, distinct_ids
from fleet.tables.kernels import library


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to build it with")
def test_there_is_a_compiled_library():
    assert library() is not None


@pytest.mark.parametrize("dimension", [1, 3, 10, 64])
def test_sums_are_those_of_torch_to_the_bit(dimension):
    torch.manual_seed(0)
    places, rows = torch.randint(50, (1000,)), torch.randn(1000, dimension)
    begin = torch.randn(50, dimension)
    expected = add_rows_by_torch(begin.clone(), places, rows)
    assert torch.equal(add_rows(begin, places, rows), expected)
    assert torch.equal(begin, expected), "the totals are changed in place"


@pytest.mark.parametrize(
    "places", [torch.zeros(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)[::2]]
)
def test_any_places_are_taken(places):
    rows = torch.ones(len(places), 2)
    assert add_rows(torch.zeros(1, 2), places, rows).tolist() == [[len(places)] * 2]


@pytest.mark.parametrize(("places", "columns"), [(3, 3), (2, 2)])
def test_rows_that_do_not_go_with_totals_and_places_are_refused(places, columns):
    with pytest.raises((RuntimeError, IndexError)):
        add_rows(torch.zeros(5, 3), torch.zeros(places, dtype=torch.int64), torch.ones(2, columns))


def test_other_numbers_and_rows_that_lie_apart_are_added_too():
    places = torch.tensor([1, 1])
    doubles = add_rows(torch.zeros(2, 2, dtype=torch.float64), places, torch.ones(2, 2, dtype=torch.float64))
    apart = add_rows(torch.zeros(2, 2), places, torch.arange(8.0).reshape(2, 4)[:, ::2])
    assert (doubles.tolist(), apart.tolist()) == ([[0, 0], [2, 2]], [[0, 0], [4, 8]])


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


def test_ids_that_are_not_contiguous_are_taken():
    ids = np.array([[3, 9], [1, 9], [3, 9]])[:, 0]
    distinct, positions = distinct_ids(ids)
    assert (distinct.tolist(), positions.tolist()) == ([1, 3], [1, 0, 1])
