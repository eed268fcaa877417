"""Rows without updates go in time, by steps, and only from shards that are updated."""

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.tables import Constant, Table, TableConfig, TimeToLive
from fleet.tables.rules import SGD
from tests.support.tables import Servers, assert_equal, crowd, updates


def table(steps):
    config = TableConfig(
        "t", 1, SGD(), first_values=Constant(1.0), options={"lr": 1.0}, eviction=(TimeToLive(steps),)
    )
    return Table(config)


def updated(tried, ids, step):
    tried.update(ids, torch.ones(ids.size, 1), step)


@pytest.mark.parametrize("steps", [1, 5, 40, 1000])
def test_a_row_goes_after_its_steps_and_an_eighth(steps):
    tried, ids = table(steps), crowd(3)
    old, fresh = ids[::3], np.setdiff1d(ids, ids[::3])
    updated(tried, old, 1)
    gone_at: dict[int, int] = {}
    for step in range(2, 2 * steps + 12):
        updated(tried, fresh, step)
        for number in np.setdiff1d(old, tried.rows().ids).tolist():
            gone_at.setdefault(number, step)
    assert set(gone_at) == set(old.tolist())
    assert min(gone_at.values()) > 1 + steps
    assert max(gone_at.values()) <= 1 + steps + max(1, steps // 8)
    assert np.array_equal(tried.rows().ids, fresh)


def test_a_row_that_goes_is_read_and_begins_as_at_first():
    tried, ids = table(2), crowd(2, (7,))
    updated(tried, ids, 1)
    assert tried.look_up(ids).tolist() == [[0.0], [0.0]]
    updated(tried, ids[:1], 4)
    assert tried.look_up(ids).tolist() == [[-1.0], [1.0]]
    updated(tried, ids[1:], 5)
    assert tried.look_up(ids).tolist() == [[-1.0], [0.0]]


def test_a_shard_without_updates_keeps_its_rows():
    tried = table(2)
    here, there = crowd(2, (7,)), crowd(2, (8,))
    updated(tried, here, 1)
    for step in range(2, 50):
        updated(tried, there, step)
    assert np.isin(here, tried.rows().ids).all()
    updated(tried, here[:1], 50)
    assert np.isin(here, tried.rows().ids).tolist() == [True, False]


def test_searching_is_spread_over_the_steps():
    searched = []

    class Watched(TimeToLive):
        def leaving(self, rows, step):
            searched.append(step)
            return super().leaving(rows, step)

    tried = Table(TableConfig("t", 1, SGD(), eviction=(Watched(80),)))
    for step in range(1, 32):
        updated(tried, np.arange(3000), step)
    counts = np.bincount(searched, minlength=32)[12:]
    assert counts.sum() == 256 * 2
    assert counts.max() <= 27


@pytest.mark.parametrize("moved_at", [20, 21, 22, 23, 24])
def test_shards_keep_their_turns_when_they_move(moved_at):
    stays, moves = (Servers(table(32).config, number) for number in (1, 2))
    for ids, gradient, step in updates(crowd(30), 60, 1):
        for each in (stays, moves):
            each.update(ids, gradient.clone(), step)
        if step == moved_at:
            moves = moves.moved(3)
        assert_equal(moves.rows(), stays.rows())


def test_no_time_to_live_is_refused():
    with pytest.raises(ConfigurationError, match=r"steps is 0, expected at least 1"):
        TimeToLive(0)
