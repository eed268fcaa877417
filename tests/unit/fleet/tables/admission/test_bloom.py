"""Admission by a counting Bloom filter: never too late, seldom too early, in memory that is bounded."""

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.tables import BloomFilter, Constant, Table, TableConfig
from fleet.tables.rules import SGD
from tests.support.tables import Servers, assert_equal, crowd, updates


def config(admission):
    return TableConfig("t", 1, SGD(), first_values=Constant(0.0), admission=admission)


def updated(table, ids, step):
    table.update(ids, torch.zeros(ids.size, 1), step)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_id_is_admitted_later_than_with_its_nth_update(count):
    table, ids = Table(config(BloomFilter(count, 5000))), np.arange(5000)
    for step in range(1, count + 1):
        updated(table, ids, step)
    assert len(table) == 5000


@pytest.mark.parametrize(("error", "count"), [(0.2, 2), (0.01, 2), (0.01, 4)])
def test_few_ids_are_admitted_earlier(error, count):
    table = Table(config(BloomFilter(count, 40_000, error)))
    for step in range(1, count):
        updated(table, np.arange(40_000), step)
    assert 0 < len(table) < 1.5 * error * 40_000


def test_its_memory_is_bounded_whatever_it_sees():
    table = Table(config(BloomFilter(255, 10_000, 0.01)))
    for step in range(1, 30):
        updated(table, np.arange(step * 5000, step * 5000 + 5000) * 7919, step)
    assert table.nbytes - table._memory.nbytes < 13 * 10_000


def test_a_counter_stays_at_its_highest_value():
    table, ids = Table(config(BloomFilter(255, 100))), np.arange(3)
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
    whole, ids = Servers(config(admission), 1), crowd(40)
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
    saved = Table(config(BloomFilter(2, 100)))
    updated(saved, np.arange(10), 1)
    with pytest.raises(
        ConfigurationError, match=r"counters of shape \[7, 8\] were saved, expected \[7, 57\]"
    ):
        Table(config(BloomFilter(2, 10_000))).load(saved.rows())


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((0, 10), r"count is 0, expected 1 to 255"),
        ((256, 10), r"count is 256, expected 1 to 255"),
        ((2, 0), r"num_ids is 0, expected at least 1"),
        ((2, 10, 1.0), r"error is 1.0, expected 1e-6 to 1"),
    ],
)
def test_what_cannot_be_is_refused(numbers, said):
    with pytest.raises(ConfigurationError, match=said):
        BloomFilter(*numbers)
