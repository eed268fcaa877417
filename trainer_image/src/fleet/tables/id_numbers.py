"""A number for each of some ids, in vector code."""

import numpy as np
from numpy.typing import NDArray

from fleet.tables.index import RowIndex

__all__ = ["IdNumbers"]


class IdNumbers:
    """Numbers of 32 bits by id. Not to be called by two threads at once."""

    def __init__(self) -> None:
        self._index = RowIndex()
        self._numbers = np.zeros(0, dtype=np.int32)

    def __len__(self) -> int:
        """Return how many ids have a number."""
        return len(self._index.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that ids and numbers take."""
        return self._index.nbytes + self._numbers.nbytes

    def add(self, ids: NDArray[np.int64], amount: int) -> NDArray[np.int32]:
        """Add to the numbers of ids, of which none comes twice, and return the sums; others begin at 0."""
        rows = self._rows_of(ids)
        sums = self._numbers[rows] + np.int32(amount)
        self._numbers[rows] = sums
        return sums

    def put(self, ids: NDArray[np.int64], numbers: NDArray[np.int32] | int) -> None:
        """Set the numbers of ids, of which none comes twice."""
        rows = self._rows_of(ids)
        self._numbers[rows] = numbers

    def remove(self, ids: NDArray[np.int64]) -> None:
        """Forget ids; those that have no number are passed over."""
        self._index.remove(ids)

    def items(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return all ids, ascending, and their numbers."""
        ids, rows = self._index.numbers.items()
        return ids, self._numbers[rows]

    def _rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        rows, new = self._index.find_or_add(ids)
        if self._index.numbers.end > self._numbers.size:
            self._numbers.resize(self._index.numbers.of_rows.size, refcheck=False)
        self._numbers[rows[new]] = 0
        return rows
