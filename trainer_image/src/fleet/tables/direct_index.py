"""Where the row of an id lies, where ids are bounded and many of them have a row: an entry for every id."""

import numpy as np
from numpy.typing import NDArray

from fleet.tables.index import MISSING, Ids, Rows
from fleet.tables.numbers import RowNumbers
from fleet.tables.pages import PagedArray

__all__ = ["DirectIndex"]


class DirectIndex:
    """Rows by id, with 4 bytes for each id that there may be. Not to be called by two threads at once.

    An id costs one random read, as nothing must be compared.

    Parameters
    ----------
    num_ids : int
        Ids are 0 to it, exclusive; who calls has checked that.
    numbers : RowNumbers
        The rows that there are.
    """

    def __init__(self, num_ids: int, numbers: RowNumbers) -> None:
        self.numbers = numbers
        self._pages = PagedArray(num_ids, np.int32)
        self._rows[:] = MISSING
        for rows in numbers.parts():
            self._rows[numbers.of_rows[rows]] = rows

    @property
    def _rows(self) -> NDArray[np.int32]:
        return self._pages.values

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index takes."""
        return self._rows.nbytes + self.numbers.nbytes

    def find(self, ids: Ids) -> Rows:
        """Return the rows of ids: int64[n], `MISSING` for an id that has none."""
        return self._rows.take(ids, mode="clip").astype(np.int64)

    def add(self, ids: Ids) -> Rows:
        """Give rows to ids that have none, of which none comes twice; return them."""
        rows = self.numbers.give(ids)
        self._rows[ids] = rows
        return rows

    def remove(self, ids: Ids) -> NDArray[np.int64]:
        """Forget ids, of which none comes twice; return their rows. Those without one are passed over."""
        found = self.find(ids)
        rows: Rows = found[found != MISSING]
        self._rows[ids] = MISSING
        self.numbers.give_back(rows)
        return rows
