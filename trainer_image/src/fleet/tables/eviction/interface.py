"""What decides which rows of a table go.

Rows go after an update, from the virtual shards that the update has touched. So what a shard holds depends on
its own updates alone, and the number of servers does not show.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Eviction", "ShardRows", "Touched"]

Marks = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Touched:
    """Virtual shards that an update has touched.

    Attributes
    ----------
    shards : int64[n]
    num_rows : int64[n]
        How many rows each has, those that are new included.
    previous : int64[n]
        The step of the update that touched each one before; -1 where there was none.
    """

    shards: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    previous: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShardRows:
    """The rows of one virtual shard.

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
    """Which rows go. All are asked where a table has several."""

    marks: ClassVar[tuple[str, ...]]
    """Names of the numbers that it keeps of each row, beside the step of the last update; 0 in a new row."""

    def touch(self, marks: Marks, last: NDArray[np.int32], step: int) -> Marks:
        """Return the new marks of rows that an update steps.

        Parameters
        ----------
        marks : mapping of name to float32[n]
            Not to be changed.
        last : int32[n]
            The step of each row's last update before this one; that of this one in a new row.
        step : int
            How many updates the table has had, this one included.
        """

    def due(self, touched: Touched, step: int) -> NDArray[np.bool_]:
        """Return of which of the touched shards `leaving` is to be asked.

        Parameters
        ----------
        touched : Touched
            The shards; n of them.
        step : int
            How many updates the table has had, this one included.

        Returns
        -------
        bool[n]
            True of those that are to be asked about.
        """

    def leaving(self, rows: ShardRows, step: int) -> NDArray[np.bool_]:
        """Return which rows of a shard go.

        Parameters
        ----------
        rows : ShardRows
            All n of one shard.
        step : int
            How many updates the table has had, this one included.

        Returns
        -------
        bool[n]
            True of those that go.
        """
