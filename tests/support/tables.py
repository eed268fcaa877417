"""Embedding tables that are distributed over several servers, and updates of their rows."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fleet.tables import Table, TableConfig, TableRows
from fleet.tables.ids import SHARDS, Placement, shard_of
from fleet.tables.rows import join, part

CROWDED = (3, 90, 200)
"""Virtual shards that are on different servers if there are at least three servers."""


def crowd(per_shard: int, shards: tuple[int, ...] = CROWDED, *, negative: bool = False) -> np.ndarray:
    """Return the given number of ids from each of several shards."""
    ids = np.arange(-200_000, 0) if negative else np.arange(200_000)
    of = shard_of(ids)
    return np.sort(np.concatenate([ids[of == shard][:per_shard] for shard in shards]))


def updates(
    ids: np.ndarray, steps: int, dimension: int, seed: int = 0
) -> Iterator[tuple[np.ndarray, Tensor, int]]:
    """Yield updates, each with ids, a gradient and a step; some ids are much more frequent than others."""
    random = np.random.default_rng(seed)
    shuffled = random.permutation(ids)
    chances = 1.0 / np.arange(1, ids.size + 1)
    for step in range(1, steps + 1):
        count = int(random.integers(1, max(2, ids.size // 3)))
        chosen = np.sort(random.choice(shuffled, count, replace=False, p=chances / chances.sum()))
        gradient = torch.from_numpy(random.normal(size=(count, dimension)).astype(np.float32))
        yield chosen, gradient, step


class Servers:
    """A table on several servers; each id's update goes to the server that stores the id."""

    def __init__(self, config: TableConfig, number: int) -> None:
        self.config = config
        self.placement = Placement.over(number)
        self.tables = [Table(config) for _ in range(number)]

    def update(self, ids: np.ndarray, gradient: Tensor, step: int) -> None:
        for server, places in self.placement.positions(ids).items():
            self.tables[server].update(ids[places], gradient[torch.from_numpy(places)], step)

    def look_up(self, ids: np.ndarray) -> Tensor:
        values = torch.empty(ids.size, self.config.dimension)
        for server, places in self.placement.positions(ids).items():
            values[torch.from_numpy(places)] = self.tables[server].look_up(ids[places])
        return values

    def rows(self) -> TableRows:
        return join([table.rows() for table in self.tables])

    def moved(self, number: int) -> "Servers":
        """Return this table on a different number of servers, loaded with the same rows."""
        saved, others = self.rows(), Servers(self.config, number)
        for server, table in enumerate(others.tables):
            table.load(
                part(saved, [shard for shard in range(SHARDS) if others.placement.servers[shard] == server])
            )
        return others


def assert_equal(one: TableRows, other: TableRows) -> None:
    """Check that two tables' rows, with their state and policies, are bitwise identical."""
    assert np.array_equal(one.ids, other.ids)
    assert torch.equal(one.values, other.values)
    for mine, theirs in ((one.state, other.state), (one.marks, other.marks)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert one.policies.keys() == other.policies.keys()
    for name in one.policies:
        rule = name.partition(".")[0]
        owners = f"{rule}.shards" if f"{rule}.shards" in one.policies else f"{rule}.ids"
        first, second = np.argsort(one.policies[owners]), np.argsort(other.policies[owners])
        assert np.array_equal(one.policies[name][first], other.policies[name][second])
