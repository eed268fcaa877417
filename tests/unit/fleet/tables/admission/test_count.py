"""Admission by count: exact, and of updates alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.tables import Constant, CountFilter, Table, TableConfig
from fleet.tables.rules import SGD
from tests.support.tables import Servers, assert_equal, crowd, updates


def config(count):
    return TableConfig(
        "t", 2, SGD(), first_values=Constant(1.0), options={"lr": 0.5}, admission=CountFilter(count)
    )


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sets(st.integers(-3, 6), min_size=1), max_size=25), st.integers(1, 4))
def test_an_id_has_a_row_from_its_nth_update_on(sets, count):
    table, seen = Table(config(count)), dict.fromkeys(range(-3, 7), 0)
    for step, chosen in enumerate(sets, start=1):
        ids = np.array(sorted(chosen), dtype=np.int64)
        table.update(ids, torch.ones(ids.size, 2), step)
        for number in chosen:
            seen[number] += 1
    applied = {number: max(0, times - count + 1) for number, times in seen.items()}
    assert table.rows().ids.tolist() == [number for number, times in applied.items() if times]
    found = table.look_up(np.arange(-3, 7))
    assert found[:, 0].tolist() == [1.0 - 0.5 * times for times in applied.values()]


def test_looking_up_counts_and_admits_nothing():
    table, ids = Table(config(2)), np.arange(100)
    table.update(ids, torch.ones(100, 2), 1)
    for _ in range(5):
        assert torch.equal(table.look_up(ids), torch.ones(100, 2))
    assert len(table) == 0
    table.update(ids[:50], torch.ones(50, 2), 2)
    assert table.rows().ids.tolist() == list(range(50))


def test_counts_are_saved_with_the_rows():
    servers = Servers(config(3), 2)
    for ids, gradient, step in updates(crowd(20), 10, 2):
        servers.update(ids, gradient, step)
    assert servers.rows().policies["admission.ids"].size
    assert set(servers.rows().policies["admission.counts"].tolist()) == {1, 2}
    moved = servers.moved(3)
    assert_equal(moved.rows(), servers.rows())
    for ids, gradient, step in updates(crowd(20), 10, 2, seed=1):
        for each in (servers, moved):
            each.update(ids, gradient.clone(), step + 10)
    assert_equal(moved.rows(), servers.rows())


def test_an_id_that_has_a_row_is_counted_no_more():
    table = Table(config(2))
    for step in range(1, 200):
        ids = np.arange(step * 50, step * 50 + 100)
        table.update(ids, torch.ones(100, 2), step)
    assert table.rows().policies["admission.ids"].size == 100
    assert table.nbytes - table._memory.nbytes < 10_000


def test_a_count_below_one_is_refused():
    with pytest.raises(ConfigurationError, match=r"count is 0, expected at least 1"):
        CountFilter(0)
