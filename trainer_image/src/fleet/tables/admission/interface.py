"""What decides whether an id gets a row."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Admission", "Candidates"]


class Candidates(Protocol):
    """What a rule remembers of the ids of one table that have no row.

    What it remembers and answers for an id depends on the updates of that id's virtual shard alone.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""

    def admit(self, ids: NDArray[np.int64], step: int) -> NDArray[np.bool_]:
        """Count an update of ids that have no row, and return which of them get one now.

        Parameters
        ----------
        ids : int64[n]
            None of them twice.
        step : int
            How many updates the table has had, this one included.

        Returns
        -------
        bool[n]
        """

    def saved(self) -> Mapping[str, NDArray[Any]]:
        """Return copies of all that is remembered; empty where nothing is.

        Arrays of equal length, one of which says to whom each of their entries belongs: ``ids``, or
        ``shards`` where it is one of a virtual shard.
        """

    def load(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Put what was saved in the place of what is remembered of its ids or shards."""


class Admission(Protocol):
    """Which ids get a row. An id without one is read as its first value, and its gradients are dropped."""

    def candidates(self, key: tuple[int, int]) -> Candidates:
        """Return what a table begins with.

        Parameters
        ----------
        key : two int
            Of the table's generator.
        """
