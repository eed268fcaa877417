"""Admission: which ids get a row, and when."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.tables import BloomFilter, Constant, CountFilter, Probability, Table, TableConfig
from fleet.tables.rules import SGD
from tests.support.tables import Servers, assert_equal, crowd, updates


def counted_config(count):
    return TableConfig(
        "t", 2, SGD(), first_values=Constant(1.0), options={"lr": 0.5}, admission=CountFilter(count)
    )


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sets(st.integers(-3, 6), min_size=1), max_size=25), st.integers(1, 4))
def test_an_id_has_a_row_from_its_nth_update_on(sets, count):
    table, seen = Table(counted_config(count)), dict.fromkeys(range(-3, 7), 0)
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
    table, ids = Table(counted_config(2)), np.arange(100)
    table.update(ids, torch.ones(100, 2), 1)
    for _ in range(5):
        assert torch.equal(table.look_up(ids), torch.ones(100, 2))
    assert len(table) == 0
    table.update(ids[:50], torch.ones(50, 2), 2)
    assert table.rows().ids.tolist() == list(range(50))


def test_counts_are_saved_with_the_rows():
    servers = Servers(counted_config(3), 2)
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
    table = Table(counted_config(2))
    for step in range(1, 200):
        ids = np.arange(step * 50, step * 50 + 100)
        table.update(ids, torch.ones(100, 2), step)
    assert table.rows().policies["admission.ids"].size == 100
    assert table.nbytes - table._memory.nbytes < 10_000


def test_a_count_below_one_is_refused():
    with pytest.raises(ConfigurationError, match=r"count is 0, expected at least 1"):
        CountFilter(0)


def bloom_config(admission):
    return TableConfig("t", 1, SGD(), first_values=Constant(0.0), admission=admission)


def updated(table, ids, step):
    table.update(ids, torch.zeros(ids.size, 1), step)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_id_is_admitted_later_than_with_its_nth_update(count):
    table, ids = Table(bloom_config(BloomFilter(count, 5000))), np.arange(5000)
    for step in range(1, count + 1):
        updated(table, ids, step)
    assert len(table) == 5000


@pytest.mark.parametrize(("error", "count"), [(0.2, 2), (0.01, 2), (0.01, 4)])
def test_few_ids_are_admitted_earlier(error, count):
    table = Table(bloom_config(BloomFilter(count, 40_000, error)))
    for step in range(1, count):
        updated(table, np.arange(40_000), step)
    assert 0 < len(table) < 1.5 * error * 40_000


def test_its_memory_is_bounded_whatever_it_sees():
    table = Table(bloom_config(BloomFilter(255, 10_000, 0.01)))
    for step in range(1, 30):
        updated(table, np.arange(step * 5000, step * 5000 + 5000) * 7919, step)
    assert table.nbytes - table._memory.nbytes < 13 * 10_000


def test_a_counter_stays_at_its_highest_value():
    table, ids = Table(bloom_config(BloomFilter(255, 100))), np.arange(3)
    for step in range(1, 255):
        updated(table, ids, step)
    assert len(table) == 0
    updated(table, ids, 255)
    assert len(table) == 3
    table.remove(ids)
    updated(table, ids, 256)
    assert len(table) == 3


@pytest.mark.parametrize("servers", [2, 3])
def test_filters_are_saved_by_shard_with_the_rows(servers):
    admission = BloomFilter(3, 300, 0.3)
    whole, ids = Servers(bloom_config(admission), 1), crowd(40)
    for chosen, gradient, step in updates(ids, 12, 1):
        whole.update(chosen, gradient, step)
    moved = whole.moved(servers)
    assert_equal(moved.rows(), whole.rows())
    for chosen, gradient, step in updates(ids, 12, 1, seed=1):
        for each in (whole, moved):
            each.update(chosen, gradient.clone(), step + 12)
    assert_equal(moved.rows(), whole.rows())
    assert whole.rows().policies["admission.shards"].size == 3


def test_filters_of_another_size_are_refused():
    saved = Table(bloom_config(BloomFilter(2, 100)))
    updated(saved, np.arange(10), 1)
    with pytest.raises(ConfigurationError, match=r"saved counters have shape \[7, 8\], expected \[7, 57\]"):
        Table(bloom_config(BloomFilter(2, 10_000))).load(saved.rows())


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((0, 10), r"count is 0, expected 1 to 255"),
        ((256, 10), r"count is 256, expected 1 to 255"),
        ((2, 0), r"num_ids is 0, expected at least 1"),
        ((2, 10, 1.0), r"error is 1.0, expected 1e-6 to 1"),
    ],
)
def test_a_filter_that_cannot_be_is_refused(numbers, said):
    with pytest.raises(ConfigurationError, match=said):
        BloomFilter(*numbers)


def drawn_table(probability, seed=0):
    config = TableConfig(
        "t", 1, SGD(), first_values=Constant(0.0), seed=seed, admission=Probability(probability)
    )
    return Table(config)


def test_each_update_admits_with_the_probability():
    tried, ids, left = drawn_table(0.25), np.arange(20_000), 20_000.0
    for step in range(1, 5):
        tried.update(ids, torch.zeros(ids.size, 1), step)
        left *= 0.75
        assert abs(len(tried) - (20_000 - left)) < 300


def test_a_draw_depends_on_the_seed_the_id_and_the_step_alone():
    together, apart, other = drawn_table(0.5), drawn_table(0.5), drawn_table(0.5, seed=1)
    ids = np.arange(-500, 500)
    for step in (1, 2):
        together.update(ids, torch.zeros(1000, 1), step)
        other.update(ids, torch.zeros(1000, 1), step)
        for third in (ids[ids % 3 == rest] for rest in range(3)):
            apart.update(third, torch.zeros(third.size, 1), step)
    assert np.array_equal(together.rows().ids, apart.rows().ids)
    assert not np.array_equal(together.rows().ids, other.rows().ids)


def test_with_probability_one_every_id_has_a_row():
    tried = drawn_table(1.0)
    tried.update(np.arange(10_000), torch.zeros(10_000, 1), 1)
    assert len(tried) == 10_000


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_refused(probability):
    with pytest.raises(ConfigurationError, match=r"expected a number above 0, up to 1"):
        Probability(probability)
