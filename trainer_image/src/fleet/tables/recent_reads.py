"""Records that were read from a disk lately: what is looked up is updated soon after."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["RecentReads"]

Numbers = NDArray[np.int64]


class RecentReads:
    """Copies of records by the number of their row, each in the one place where it may be.

    Parameters
    ----------
    size : int
        How many there may be.
    dtype : numpy.dtype
        Of a record.
    """

    def __init__(self, size: int, dtype: "np.dtype[np.void]") -> None:
        self._numbers = np.full(size, -1, dtype=np.int32)
        self._records = np.zeros(size, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._numbers.nbytes + self._records.nbytes

    def keep(self, numbers: Numbers, records: NDArray[np.void]) -> None:
        """Keep records, in the place of others; not so many that they would be in the way of each other."""
        if numbers.size <= self._numbers.size:
            places = numbers % self._numbers.size
            self._numbers[places] = numbers
            self._records[places] = records

    def find(self, numbers: Numbers) -> tuple[NDArray[np.bool_], NDArray[np.void]]:
        """Return which rows are kept, and copies of their records."""
        places = numbers % self._numbers.size
        kept = self._numbers[places] == numbers
        return kept, self._records[places[kept]]

    def forget(self, numbers: Numbers) -> None:
        """Let records go that are about to be others."""
        places = numbers % self._numbers.size
        self._numbers[places[self._numbers[places] == numbers]] = -1
