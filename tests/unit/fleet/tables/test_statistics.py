"""What is told of a table while it is used."""

import numpy as np
import torch

from fleet.tables import Table, TableConfig
from fleet.tables.rules import SGD
from fleet.tables.shards import SHARDS, shard_of


def updated(ids: np.ndarray) -> Table:
    table = Table(TableConfig("t", 2, SGD(), None))
    if ids.size:
        table.update(ids, torch.ones(ids.size, 2), 1)
    return table


def test_a_look_up_finds_what_was_updated():
    table = updated(np.arange(10))
    table.look_up(np.arange(5, 25))
    table.look_up(np.arange(3))
    assert (table.statistics.looked_up, table.statistics.found) == (23, 8)


def test_the_skew_is_that_of_the_fullest_shard_to_the_mean_of_those_that_are_held():
    ids = np.arange(10_000)
    of_two = ids[shard_of(ids) < 2]
    first, second = np.bincount(shard_of(of_two), minlength=2)[:2]
    mean = (first + second) / 2
    assert updated(of_two).statistics.skew(2) == max(first, second) / mean
    assert updated(of_two).statistics.skew(SHARDS) == max(first, second) / (mean * 2 / SHARDS)
    assert updated(ids[:0]).statistics.skew(2) == 1.0
