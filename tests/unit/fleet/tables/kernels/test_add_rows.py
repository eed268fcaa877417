"""Rows added up in C beside torch's."""

import shutil

import pytest
import torch

from fleet.tables.kernels import library
from fleet.tables.kernels.add_rows import add_rows, add_rows_by_torch


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
