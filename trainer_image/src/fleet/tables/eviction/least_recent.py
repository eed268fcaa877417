"""Where a table is full, the rows whose last update is the longest ago go."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fleet.tables.eviction.capacity import check_capacity, over_capacity, the_last
from fleet.tables.eviction.interface import Marks, ShardRows, Touched

__all__ = ["LeastRecentlyUsed"]


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """A table of at most `capacity` rows; those whose last update is the longest ago go.

    A virtual shard holds a 256th of them. One that has more rows after an update gives up a sixteenth of its
    share too, so that few updates evict. Among rows of the same step those of the lowest ids stay.

    Attributes
    ----------
    capacity : int
        At least 256.
    """

    capacity: int
    marks: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_capacity("LeastRecentlyUsed", self.capacity)

    def touch(self, marks: Marks, last: NDArray[np.int32], step: int) -> Marks:
        """See `Eviction`."""
        del marks, last, step
        return {}

    def due(self, touched: Touched, step: int) -> NDArray[np.bool_]:
        """See `Eviction`."""
        del step
        return over_capacity(self.capacity, touched)

    def leaving(self, rows: ShardRows, step: int) -> NDArray[np.bool_]:
        """See `Eviction`."""
        del step
        order = np.argsort(-rows.last.astype(np.int64), kind="stable")
        return the_last(self.capacity, rows.shard, order)
