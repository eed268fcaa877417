"""A full shard gives up the rows whose last update is the longest ago, beside a dictionary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.tables import Constant, LeastRecentlyUsed, Table, TableConfig
from fleet.tables.eviction.capacity import share
from fleet.tables.rules import SGD
from fleet.tables.shards import SHARDS, shard_of
from tests.support.tables import crowd

POOL = crowd(30, (3, 90))


def table(capacity):
    config = TableConfig("t", 1, SGD(), first_values=Constant(0.0), eviction=(LeastRecentlyUsed(capacity),))
    return Table(config)


def updated(tried, ids, step):
    tried.update(ids, torch.ones(ids.size, 1), step)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sets(st.sampled_from(POOL.tolist()), min_size=1), min_size=1, max_size=15))
def test_as_a_dictionary_by_shard_would(sets):
    last: dict[int, int] = {}
    tried = table(20 * SHARDS)
    for step, chosen in enumerate(sets, start=1):
        ids = np.array(sorted(chosen))
        updated(tried, ids, step)
        last |= dict.fromkeys(ids.tolist(), step)
        for shard in (3, 90):
            mine = [number for number in last if shard_of(np.array([number]))[0] == shard]
            mine.sort(key=lambda number: (-last[number], number))
            if len(mine) > 20:
                for number in mine[19:]:
                    del last[number]
    assert tried.rows().ids.tolist() == sorted(last)


def test_a_table_never_holds_more_than_its_capacity():
    tried = table(1000)
    random = np.random.default_rng(0)
    for step in range(1, 30):
        updated(tried, np.unique(random.integers(0, 10_000, 400)), step)
        assert len(tried) <= 1000
    assert len(tried) > 850


def test_of_rows_of_one_step_those_of_the_lowest_ids_stay():
    tried, ids = table(300 * SHARDS), crowd(400, (90,))
    updated(tried, ids, 1)
    assert np.array_equal(tried.rows().ids, ids[: 300 - 300 // 16])


def test_shards_share_the_whole_capacity():
    assert share(1000, np.arange(SHARDS)).sum() == 1000
    assert share(256, 255) == 1


def test_memory_stays_where_rows_come_and_go():
    tried, ids = table(20 * SHARDS), crowd(600, (3, 90))
    sizes = []
    for step in range(1, 60):
        updated(tried, ids[20 * step : 20 * step + 20], step)
        sizes.append(tried.nbytes)
    assert sizes[-1] == sizes[20]


def test_a_capacity_that_leaves_a_shard_without_rows_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"LeastRecentlyUsed: capacity is 255, expected at least 256"
    ):
        LeastRecentlyUsed(255)
