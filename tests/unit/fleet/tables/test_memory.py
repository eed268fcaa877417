"""Rows of a table by number, and what is counted of them."""

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.tables import Table, TableConfig, memory
from fleet.tables.ids import SHARDS, shard_of
from fleet.tables.memory import RowMemory
from fleet.tables.rules import SGD


def test_a_row_too_many_is_refused_before_anything_changes(monkeypatch):
    monkeypatch.setattr(memory, "_MAX_ROWS", 3)
    rows = RowMemory(1)
    rows.add(np.arange(2))
    with pytest.raises(ConfigurationError, match="would hold 4 rows of one table, expected at most 3"):
        rows.add(np.array([7, 8]))
    assert len(rows) == 2
    assert rows.add(np.array([7])).size == 1


def table_of(ids: np.ndarray) -> Table:
    table = Table(TableConfig("t", 2, SGD(), None))
    if ids.size:
        table.update(ids, torch.ones(ids.size, 2), 1)
    return table


def test_a_look_up_finds_what_was_updated():
    table = table_of(np.arange(10))
    table.look_up(np.arange(5, 25))
    table.look_up(np.arange(3))
    assert (table.statistics.looked_up, table.statistics.found) == (23, 8)


def test_the_skew_is_that_of_the_fullest_shard_to_the_mean_of_those_that_are_held():
    ids = np.arange(10_000)
    of_two = ids[shard_of(ids) < 2]
    first, second = np.bincount(shard_of(of_two), minlength=2)[:2]
    mean = (first + second) / 2
    assert table_of(of_two).statistics.skew(2) == max(first, second) / mean
    assert table_of(of_two).statistics.skew(SHARDS) == max(first, second) / (mean * 2 / SHARDS)
    assert table_of(ids[:0]).statistics.skew(2) == 1.0
