"""Eviction: which rows go, and when."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.tables import Constant, LeastRecentlyUsed, LowestScore, Table, TableConfig, TimeToLive
from fleet.tables.eviction import capacity_of
from fleet.tables.ids import SHARDS, shard_of
from fleet.tables.rules import SGD
from tests.support.tables import Servers, assert_equal, crowd, updates


def timed_table(steps):
    config = TableConfig(
        "t", 1, SGD(), first_values=Constant(1.0), options={"lr": 1.0}, eviction=(TimeToLive(steps),)
    )
    return Table(config)


def updated(tried, ids, step):
    tried.update(ids, torch.ones(ids.size, 1), step)


@pytest.mark.parametrize("steps", [1, 5, 40, 1000])
def test_a_row_goes_after_its_steps_and_an_eighth(steps):
    tried, ids = timed_table(steps), crowd(3)
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
    tried, ids = timed_table(2), crowd(2, (7,))
    updated(tried, ids, 1)
    assert tried.look_up(ids).tolist() == [[0.0], [0.0]]
    updated(tried, ids[:1], 4)
    assert tried.look_up(ids).tolist() == [[-1.0], [1.0]]
    updated(tried, ids[1:], 5)
    assert tried.look_up(ids).tolist() == [[-1.0], [0.0]]


def test_a_shard_without_updates_keeps_its_rows():
    tried = timed_table(2)
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
    stays, moves = (Servers(timed_table(32).config, number) for number in (1, 2))
    for ids, gradient, step in updates(crowd(30), 60, 1):
        for each in (stays, moves):
            each.update(ids, gradient.clone(), step)
        if step == moved_at:
            moves = moves.moved(3)
        assert_equal(moves.rows(), stays.rows())


def test_no_time_to_live_is_refused():
    with pytest.raises(ConfigurationError, match=r"steps is 0, expected at least 1"):
        TimeToLive(0)


TWO_SHARDS = crowd(30, (3, 90))


def recent_table(capacity):
    config = TableConfig("t", 1, SGD(), first_values=Constant(0.0), eviction=(LeastRecentlyUsed(capacity),))
    return Table(config)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sets(st.sampled_from(TWO_SHARDS.tolist()), min_size=1), min_size=1, max_size=15))
def test_the_least_recent_rows_go_as_from_a_dictionary_by_shard(sets):
    last: dict[int, int] = {}
    tried = recent_table(20 * SHARDS)
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
    tried = recent_table(1000)
    random = np.random.default_rng(0)
    for step in range(1, 30):
        updated(tried, np.unique(random.integers(0, 10_000, 400)), step)
        assert len(tried) <= 1000
    assert len(tried) > 850


def test_of_rows_of_one_step_those_of_the_lowest_ids_stay():
    tried, ids = recent_table(300 * SHARDS), crowd(400, (90,))
    updated(tried, ids, 1)
    assert np.array_equal(tried.rows().ids, ids[: 300 - 300 // 16])


def test_shards_share_the_whole_capacity():
    assert capacity_of(1000, np.arange(SHARDS)).sum() == 1000
    assert capacity_of(256, 255) == 1


def test_memory_stays_where_rows_come_and_go():
    tried, ids = recent_table(20 * SHARDS), crowd(600, (3, 90))
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


ONE_SHARD = crowd(30, (90,))


def scored_table(*numbers):
    config = TableConfig("t", 1, SGD(), first_values=Constant(0.0), eviction=(LowestScore(*numbers),))
    return Table(config)


@settings(deadline=None, max_examples=30)
@pytest.mark.parametrize("decay", [1.0, 0.5])
@given(st.lists(st.sets(st.sampled_from(ONE_SHARD.tolist()), min_size=1), min_size=1, max_size=15))
def test_the_lowest_scores_go_as_from_a_dictionary(decay, sets):
    times: dict[int, list[int]] = {}
    tried = scored_table(20 * SHARDS, decay)
    for step, chosen in enumerate(sets, start=1):
        ids = np.array(sorted(chosen))
        updated(tried, ids, step)
        for number in ids.tolist():
            times.setdefault(number, []).append(step)
        if len(times) > 20:
            scores = {number: sum(decay ** (step - at) for at in steps) for number, steps in times.items()}
            order = sorted(times, key=lambda number: (-scores[number], -times[number][-1], number))
            for number in order[19:]:
                del times[number]
    assert tried.rows().ids.tolist() == sorted(times)


def test_what_is_updated_often_stays():
    often, tried = crowd(10, (90,)), scored_table(20 * SHARDS)
    for step in range(1, 4):
        updated(tried, often, step)
    seldom = np.setdiff1d(crowd(400, (90,)), often)
    for step in range(4, 40):
        updated(tried, seldom[10 * step : 10 * step + 10], step)
    assert np.isin(often, tried.rows().ids).all()
    assert len(tried) <= 20


def test_with_decay_what_was_updated_often_goes_in_time():
    often, tried = crowd(10, (90,)), scored_table(20 * SHARDS, 0.5)
    for step in range(1, 4):
        updated(tried, often, step)
    seldom = np.setdiff1d(crowd(400, (90,)), often)
    for step in range(4, 40):
        updated(tried, seldom[10 * step : 10 * step + 10], step)
    assert not np.isin(often, tried.rows().ids).any()


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((255,), r"LowestScore: capacity is 255, expected at least 256"),
        ((256, 0.0), r"decay is 0.0, expected a number above 0, up to 1"),
        ((256, 1.5), r"decay is 1.5, expected a number above 0, up to 1"),
    ],
)
def test_a_score_that_cannot_be_is_refused(numbers, said):
    with pytest.raises(ConfigurationError, match=said):
        LowestScore(*numbers)


def test_a_mark_is_kept_by_one_rule_alone():
    with pytest.raises(ConfigurationError, match=r"two eviction rules have the mark score, expected one"):
        TableConfig("t", 1, SGD(), eviction=(LowestScore(256), LowestScore(512, 0.5)))
