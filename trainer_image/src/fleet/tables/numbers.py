"""Numbers of rows, from 0 on: given to ids, given back, and given again."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.tables.pages import PagedArray

__all__ = ["RowNumbers"]

_GROWTH: Final = 1.125
_LEAST: Final = 64
_AT_ONCE: Final = 1 << 16

Ids = NDArray[np.int64]
Rows = NDArray[np.int64]


class RowNumbers:
    """Which row has which id. Not to be called by two threads at once."""

    def __init__(self) -> None:
        self._ids = PagedArray(_LEAST, np.int64)
        self.end = 0
        """One more than the highest number that was ever given."""
        self._unused: Rows = np.zeros(0, dtype=np.int64)

    @property
    def of_rows(self) -> Ids:
        """By row, its id; of a row that was given back, that which it had."""
        return self._ids.values

    def __len__(self) -> int:
        """Return how many rows have an id."""
        return self.end - self._unused.size

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the numbers take."""
        return self.of_rows.nbytes + self._unused.nbytes

    def give(self, ids: Ids) -> Rows:
        """Return a row for each id."""
        left = max(0, self._unused.size - ids.size)
        again, self._unused = self._unused[left:], self._unused[:left].copy()
        rows = np.concatenate([again, np.arange(self.end, self.end + ids.size - again.size)])
        self.end += ids.size - again.size
        if self.end > self.of_rows.size:
            self._ids.resize(max(self.end, int(self.of_rows.size * _GROWTH)))
        self.of_rows[rows] = ids
        return rows

    def give_back(self, rows: Rows) -> None:
        """Take rows back, to be given again."""
        self._unused = np.concatenate([self._unused, rows])

    def parts(self) -> Iterator[Rows]:
        """Yield the rows that have an id, ascending, some at a time."""
        used = np.ones(self.end, dtype=np.bool_)
        used[self._unused] = False
        for begin in range(0, self.end, _AT_ONCE):
            yield np.flatnonzero(used[begin : begin + _AT_ONCE]) + begin

    def items(self) -> tuple[Ids, Rows]:
        """Return all ids that have a row, ascending, and their rows."""
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *self.parts()])
        ids = self.of_rows[rows]
        order = np.argsort(ids)
        return ids[order], rows[order]
