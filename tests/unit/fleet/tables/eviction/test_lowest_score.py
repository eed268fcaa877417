"""A full shard gives up the rows with the lowest scores, beside a dictionary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.tables import Constant, LowestScore, Table, TableConfig
from fleet.tables.rules import SGD
from fleet.tables.shards import SHARDS
from tests.support.tables import crowd

POOL = crowd(30, (90,))


def table(*numbers):
    config = TableConfig("t", 1, SGD(), first_values=Constant(0.0), eviction=(LowestScore(*numbers),))
    return Table(config)


def updated(tried, ids, step):
    tried.update(ids, torch.ones(ids.size, 1), step)


@settings(deadline=None, max_examples=30)
@pytest.mark.parametrize("decay", [1.0, 0.5])
@given(st.lists(st.sets(st.sampled_from(POOL.tolist()), min_size=1), min_size=1, max_size=15))
def test_as_a_dictionary_would(decay, sets):
    times: dict[int, list[int]] = {}
    tried = table(20 * SHARDS, decay)
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
    often, tried = crowd(10, (90,)), table(20 * SHARDS)
    for step in range(1, 4):
        updated(tried, often, step)
    seldom = np.setdiff1d(crowd(400, (90,)), often)
    for step in range(4, 40):
        updated(tried, seldom[10 * step : 10 * step + 10], step)
    assert np.isin(often, tried.rows().ids).all()
    assert len(tried) <= 20


def test_with_decay_what_was_updated_often_goes_in_time():
    often, tried = crowd(10, (90,)), table(20 * SHARDS, 0.5)
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
def test_what_cannot_be_is_refused(numbers, said):
    with pytest.raises(ConfigurationError, match=said):
        LowestScore(*numbers)


def test_a_mark_is_kept_by_one_rule_alone():
    with pytest.raises(ConfigurationError, match=r"two rules of eviction keep the mark score of a row"):
        TableConfig("t", 1, SGD(), eviction=(LowestScore(256), LowestScore(512, 0.5)))
