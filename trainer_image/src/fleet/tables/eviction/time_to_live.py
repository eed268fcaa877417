"""Rows that had no update for some steps go."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.eviction.interface import Marks, ShardRows, Touched
from fleet.tables.shards import SHARDS

__all__ = ["TimeToLive"]

_PARTS = 8


@dataclass(frozen=True)
class TimeToLive:
    """Rows that had no update for more than `steps` steps go.

    A virtual shard is searched once in an eighth of these steps, with its next update: so a row lives that
    much longer at most in a shard that is updated. Shards have their turns at different steps.

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
        """See `Eviction`."""
        del marks, last, step
        return {}

    def due(self, touched: Touched, step: int) -> NDArray[np.bool_]:
        """See `Eviction`."""
        period = max(1, self.steps // _PARTS)
        offset = touched.shards * period // SHARDS
        due: NDArray[np.bool_] = (step + offset) // period > (touched.previous + offset) // period
        return due

    def leaving(self, rows: ShardRows, step: int) -> NDArray[np.bool_]:
        """See `Eviction`."""
        leaving: NDArray[np.bool_] = rows.last < step - self.steps
        return leaving
