"""Eviction rules, which decide when rows are removed. A custom rule implements `Eviction`.

Rows are evicted after an update, and only from the virtual shards that the update touched. The content of a
shard therefore depends only on the shard's own updates, regardless of the number of servers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.ids import SHARDS

__all__ = [
    "Eviction",
    "LeastRecentlyUsed",
    "LowestScore",
    "ShardRows",
    "TimeToLive",
    "TouchedShards",
    "capacity_of",
]

_SLACK: Final = 16
"""A full shard evicts one in this many of its rows at once, so that few updates have to evict."""
_SEARCHES: Final = 8
"""`TimeToLive` searches a shard this many times in `steps` steps."""

Marks = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class TouchedShards:
    """The virtual shards that contain the updated rows.

    Attributes
    ----------
    shards : int64[n]
    num_rows : int64[n]
        Rows of each shard, new ones included.
    previous : int64[n]
        The step of the previous update of each shard; -1 for none.
    """

    shards: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    previous: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShardRows:
    """The rows of one virtual shard, from which a rule selects the rows to evict.

    Attributes
    ----------
    shard : int
    ids : int64[n]
        Ascending.
    last : int32[n]
        The step of each row's last update.
    marks : mapping of name to float32[n]
    """

    shard: int
    ids: NDArray[np.int64]
    last: NDArray[np.int32]
    marks: Marks


class Eviction(Protocol):
    """Selects rows to evict. A table applies each of its eviction rules in turn."""

    marks: ClassVar[tuple[str, ...]]
    """The names of the rule's marks: numbers stored with each row, besides its last step; 0 in a new row."""

    def touch(self, marks: Marks, last: NDArray[np.int32], step: int) -> Marks:
        """Return the new marks of updated rows; marks are numbers by which the rule selects rows to evict.

        Parameters
        ----------
        marks : mapping of name to float32[n]
            Must not be changed.
        last : int32[n]
            The step of each row's previous update; for a new row, the step of this update.
        step : int
            Number of updates of the table, including this one.
        """

    def due(self, touched: TouchedShards, step: int) -> NDArray[np.bool_]:
        """Return which of the updated shards may contain rows to evict.

        Parameters
        ----------
        touched : TouchedShards
            The n shards.
        step : int
            Number of updates of the table, including this one.

        Returns
        -------
        bool[n]
            True for shards to search.
        """

    def leaving(self, rows: ShardRows, step: int) -> NDArray[np.bool_]:
        """Return which rows of a shard to evict, as a mask.

        Parameters
        ----------
        rows : ShardRows
            All n rows of the shard.
        step : int
            Number of updates of the table, including this one.

        Returns
        -------
        bool[n]
            True for rows to evict.
        """


@dataclass(frozen=True)
class TimeToLive:
    """Evicts rows that have not been updated for more than `steps` steps.

    A virtual shard is searched once per `steps` / 8 steps, at its next update. In a shard that receives
    updates, a row therefore stays at most an eighth longer. Shards are searched at different steps.

    Attributes
    ----------
    steps : int
    """

    steps: int
    marks: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigurationError(f"TimeToLive: steps is {self.steps}, expected at least 1")

    def touch(self, marks: Marks, last: NDArray[np.int32], step: int) -> Marks:
        """Return no marks, because this rule uses none; see `Eviction.touch`."""
        del marks, last, step
        return {}

    def due(self, touched: TouchedShards, step: int) -> NDArray[np.bool_]:
        """Return which of the updated shards may contain rows to evict; see `Eviction.due`."""
        period = max(1, self.steps // _SEARCHES)
        offset = touched.shards * period // SHARDS
        due: NDArray[np.bool_] = (step + offset) // period > (touched.previous + offset) // period
        return due

    def leaving(self, rows: ShardRows, step: int) -> NDArray[np.bool_]:
        """Return which rows of a shard to evict; see `Eviction.leaving`."""
        leaving: NDArray[np.bool_] = rows.last < step - self.steps
        return leaving


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """Keeps at most `capacity` rows; evicts the least recently updated rows.

    A virtual shard holds a 256th of the capacity. A shard with more rows after an update also evicts a
    sixteenth of its share, so that few updates have to evict. Among rows of the same step, those with the
    lowest ids stay.

    Attributes
    ----------
    capacity : int
        At least 256.
    """

    capacity: int
    marks: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _check_capacity("LeastRecentlyUsed", self.capacity)

    def touch(self, marks: Marks, last: NDArray[np.int32], step: int) -> Marks:
        """Return no marks, because this rule uses none; see `Eviction.touch`."""
        del marks, last, step
        return {}

    def due(self, touched: TouchedShards, step: int) -> NDArray[np.bool_]:
        """Return which of the updated shards may contain rows to evict; see `Eviction.due`."""
        del step
        return _over_capacity(self.capacity, touched)

    def leaving(self, rows: ShardRows, step: int) -> NDArray[np.bool_]:
        """Return which rows of a shard to evict; see `Eviction.leaving`."""
        del step
        # Stable: rows of one step stay in the order of their ids, on any number of servers.
        order = np.argsort(-rows.last.astype(np.int64), kind="stable")
        return _beyond_capacity(self.capacity, rows.shard, order)


@dataclass(frozen=True)
class LowestScore:
    """Keeps at most `capacity` rows; evicts the rows with the lowest scores.

    The score of a row is its number of updates, where an update that is n steps old counts ``decay ** n``. A
    virtual shard holds a 256th of the capacity. A shard with more rows after an update also evicts a
    sixteenth of its share. Among equal scores the most recently updated rows stay, then those with the lowest
    ids.

    Attributes
    ----------
    capacity : int
        At least 256.
    decay : float
        Above 0, up to 1. With 1 the least frequently used rows are evicted.
    """

    capacity: int
    decay: float = 1.0
    marks: ClassVar[tuple[str, ...]] = ("score",)

    def __post_init__(self) -> None:
        _check_capacity("LowestScore", self.capacity)
        if not 0.0 < self.decay <= 1.0:
            raise ConfigurationError(
                f"LowestScore: decay is {self.decay}, expected a number above 0, up to 1"
            )

    def touch(self, marks: Marks, last: NDArray[np.int32], step: int) -> Marks:
        """Return the new scores of updated rows; see `Eviction.touch`."""
        return {"score": self._scores(marks, last, step) + np.float32(1.0)}

    def due(self, touched: TouchedShards, step: int) -> NDArray[np.bool_]:
        """Return which of the updated shards may contain rows to evict; see `Eviction.due`."""
        del step
        return _over_capacity(self.capacity, touched)

    def leaving(self, rows: ShardRows, step: int) -> NDArray[np.bool_]:
        """Return which rows of a shard to evict; see `Eviction.leaving`."""
        scores = self._scores(rows.marks, rows.last, step)
        order = np.lexsort((rows.ids, -rows.last.astype(np.int64), -scores))
        return _beyond_capacity(self.capacity, rows.shard, order)

    def _scores(self, marks: Marks, last: NDArray[np.int32], step: int) -> NDArray[np.float32]:
        """Return the rows' scores at a step; each score decays after its row's last update."""
        if self.decay == 1.0:
            return marks["score"]
        ages = (step - last).astype(np.float32)
        scores: NDArray[np.float32] = marks["score"] * np.float32(self.decay) ** ages
        return scores


def _check_capacity(rule: str, capacity: int) -> None:
    if capacity < SHARDS:
        raise ConfigurationError(
            f"{rule}: capacity is {capacity}, expected at least {SHARDS}: each of {SHARDS} virtual shards "
            "holds an equal part of it"
        )


def capacity_of(capacity: int, shard: Any) -> Any:
    """Return each shard's share of a table's capacity; the shares add up to the capacity."""
    return capacity // SHARDS + (shard < capacity % SHARDS)


def _over_capacity(capacity: int, touched: TouchedShards) -> NDArray[np.bool_]:
    """Return which shards have more rows than their share of the capacity; bool[n]."""
    over: NDArray[np.bool_] = touched.num_rows > capacity_of(capacity, touched.shards)
    return over


def _beyond_capacity(capacity: int, shard: int, order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which rows of a shard to evict, given all rows in order of priority; bool[n]."""
    share = int(capacity_of(capacity, shard))
    leaving = np.zeros(order.size, dtype=np.bool_)
    if order.size > share:
        leaving[order[share - share // _SLACK :]] = True
    return leaving
