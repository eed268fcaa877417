"""Where a table is full, the rows with the fewest updates go; older updates may count less."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.eviction.capacity import check_capacity, over_capacity, the_last
from fleet.tables.eviction.interface import Marks, ShardRows, Touched

__all__ = ["LowestScore"]


@dataclass(frozen=True)
class LowestScore:
    """A table of at most `capacity` rows; those with the lowest scores go.

    A row's score is its number of updates; an update that is n steps old counts for ``decay ** n``. A
    virtual shard holds a 256th of the capacity. One that has more rows after an update gives up a sixteenth
    of its share too. Among equal scores the rows of the latest updates stay, then those of the lowest ids.

    Attributes
    ----------
    capacity : int
        At least 256.
    decay : float
        Above 0, up to 1. With 1 the least frequently used rows go.
    """

    capacity: int
    decay: float = 1.0
    marks: ClassVar[tuple[str, ...]] = ("score",)

    def __post_init__(self) -> None:
        check_capacity("LowestScore", self.capacity)
        if not 0.0 < self.decay <= 1.0:
            raise ConfigurationError(
                f"LowestScore: decay is {self.decay}, expected a number above 0, up to 1"
            )

    def touch(self, marks: Marks, last: NDArray[np.int32], step: int) -> Marks:
        """See `Eviction`."""
        return {"score": self._now(marks["score"], last, step) + np.float32(1.0)}

    def due(self, touched: Touched, step: int) -> NDArray[np.bool_]:
        """See `Eviction`."""
        del step
        return over_capacity(self.capacity, touched)

    def leaving(self, rows: ShardRows, step: int) -> NDArray[np.bool_]:
        """See `Eviction`."""
        scores = self._now(rows.marks["score"], rows.last, step)
        order = np.lexsort((rows.ids, -rows.last.astype(np.int64), -scores))
        return the_last(self.capacity, rows.shard, order)

    def _now(self, scores: NDArray[np.float32], last: NDArray[np.int32], step: int) -> NDArray[np.float32]:
        """Return what scores of the last updates are worth at a step."""
        if self.decay == 1.0:
            return scores
        aged: NDArray[np.float32] = scores * np.float32(self.decay) ** (step - last).astype(np.float32)
        return aged
