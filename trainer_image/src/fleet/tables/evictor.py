"""The rules of eviction of one table at work: asked after each update, of the virtual shards it touched."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.tables.eviction import Eviction, ShardRows, Touched
from fleet.tables.layout import Layout
from fleet.tables.memory import RowMemory
from fleet.tables.shards import SHARDS, shard_of

__all__ = ["Evictor"]


class Evictor:
    """Finds the rows that go.

    Parameters
    ----------
    rules : tuple of Eviction
    memory : RowMemory
    layout : Layout
    remove : callable
        Removes the rows of ids from the memory.
    """

    def __init__(
        self,
        rules: tuple[Eviction, ...],
        memory: RowMemory,
        layout: Layout,
        remove: Callable[[NDArray[np.int64]], None],
    ) -> None:
        self._rules = rules
        self._memory = memory
        self._layout = layout
        self._remove = remove
        self._previous = np.full(SHARDS, -1, dtype=np.int64)
        """By shard, the step of the last update that touched it."""

    def touch(
        self, marks: Mapping[str, NDArray[np.float32]], last: NDArray[np.int32], step: int
    ) -> dict[str, NDArray[np.float32]]:
        """Return the new marks of rows that an update steps; see `Eviction`."""
        new: dict[str, NDArray[np.float32]] = {}
        for rule in self._rules:
            new.update(rule.touch(marks, last, step))
        return new

    def evict(self, ids: NDArray[np.int64], step: int) -> None:
        """Remove the rows that go after an update of ids."""
        if not self._rules:
            return
        shards = np.flatnonzero(np.bincount(shard_of(ids), minlength=SHARDS))
        for rule in self._rules:
            touched = Touched(shards, self._memory.num_rows[shards], self._previous[shards])
            if (due := rule.due(touched, step)).any():
                self._remove_leaving(rule, shards[due], step)
        self._previous[shards] = step

    def saved(self) -> Mapping[str, NDArray[Any]]:
        """Return what is remembered beside the rows."""
        if not self._rules:
            return {}
        shards = np.flatnonzero(self._previous >= 0)
        return {"shards": shards, "steps": self._previous[shards]}

    def load(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Put what was saved in the place of what is remembered of its shards."""
        self._previous[saved["shards"]] = saved["steps"]

    def _remove_leaving(self, rule: Eviction, shards: NDArray[np.int64], step: int) -> None:
        leaving = []
        for shard, ids, rows in self._memory.of_shards(shards):
            words = self._memory.read(rows)
            of_shard = ShardRows(shard, ids, self._layout.last(words), self._layout.marks(words))
            leaving.append(ids[rule.leaving(of_shard, step)])
        self._remove(np.concatenate(leaving))
