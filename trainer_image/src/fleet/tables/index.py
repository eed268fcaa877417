"""Where the row of an id lies: a hash index of 64-bit ids in vector code.

Open addressing with linear probing. A place of the index holds the number of a row, and the row knows its id;
so an id that is found costs two random reads, and an index takes 12 to 20 bytes a row. Every call takes many
ids at once: those whose first place is not the right one go on to the next together.
"""

import itertools
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.tables.numbers import RowNumbers
from fleet.tables.pages import PagedArray

__all__ = ["MISSING", "RowIndex"]

MISSING: Final = -1
"""The row of an id that has none."""

_FREE: Final = -1
_REMOVED: Final = -2
"""A place whose id was removed: a search goes on past it."""
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: multiplied by it, neighbouring ids lie far apart."""
_FULL: Final = 0.7
"""The share of places in use at which the index grows."""
_WIDTHS: Final = (1, 2, 8)
"""How many places a search reads at once, one turn after the other."""
_LEAST: Final = 64

Ids = NDArray[np.int64]
Rows = NDArray[np.int64]


class RowIndex:
    """Rows by id. Rows are numbered from 0; the number of one that was removed is used again.

    Not to be called by two threads at once.
    """

    def __init__(self) -> None:
        self._pages = PagedArray(_LEAST, np.int32)
        self._places[:] = _FREE
        self._used = 0
        """Places that are not free, removed ones among them."""
        self.numbers = RowNumbers()

    @property
    def _places(self) -> NDArray[np.int32]:
        """The number of a row, `_FREE` or `_REMOVED` at each place."""
        return self._pages.values

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index takes."""
        return self._places.nbytes + self.numbers.nbytes

    def find(self, ids: Ids) -> Rows:
        """Return the rows of ids.

        Parameters
        ----------
        ids : int64[n]

        Returns
        -------
        int64[n]
            `MISSING` for an id that has no row.
        """
        places = self._first_places(ids)
        rows = self._places.take(places, mode="clip").astype(np.int64)
        found = self.numbers.of_rows.take(rows, mode="clip") == ids
        found &= rows >= 0
        if not found.all():
            open_ = np.flatnonzero(~found)
            rows[open_] = self._search(ids[open_], places[open_])
        return rows

    def find_or_add(self, ids: Ids) -> tuple[Rows, NDArray[np.bool_]]:
        """Return the rows of ids, and which of them are new.

        Parameters
        ----------
        ids : int64[n]
            None of them twice.

        Returns
        -------
        rows : int64[n]
        new : bool[n]
        """
        rows = self.find(ids)
        new = rows == MISSING
        if new.any():
            rows[new] = self.add(ids[new])
        return rows, new

    def add(self, ids: Ids) -> Rows:
        """Give rows to ids that have none, of which none comes twice; return them."""
        rows = self.numbers.give(ids)
        if self._used + ids.size > _FULL * self._places.size:
            self._rehash()
        else:
            self._place(ids, rows)
        return rows

    def remove(self, ids: Ids) -> Rows:
        """Forget ids that have a row; return their rows, whose numbers are used again.

        Parameters
        ----------
        ids : int64[n]
            None of them twice; those that have no row are passed over.
        """
        places = self._places_of(ids)
        rows = self._places[places].astype(np.int64)
        self._places[places] = _REMOVED
        self.numbers.give_back(rows)
        return rows

    def _first_places(self, ids: Ids) -> NDArray[np.int64]:
        bits = np.uint64(64 - (self._places.size.bit_length() - 1))
        return ((ids.view(np.uint64) * _GOLDEN) >> bits).view(np.int64)

    def _search(self, ids: Ids, places: NDArray[np.int64]) -> Rows:
        """Return the rows of ids of which none is at its first place."""
        rows = self._places.take(places, mode="clip")
        result = np.full(ids.size, MISSING, dtype=np.int64)
        open_ = np.flatnonzero(rows != _FREE)
        places = places[open_]
        # Neighbouring places are read together: few ids go far, and each turn has its price.
        for width in itertools.chain(_WIDTHS, itertools.repeat(_WIDTHS[-1])):
            if not open_.size:
                return result
            reached = (places[:, None] + np.arange(1, width + 1)) & (self._places.size - 1)
            rows = self._places.take(reached, mode="clip")
            found = (self.numbers.of_rows.take(rows, mode="clip") == ids[open_, None]) & (rows >= 0)
            at, column = np.nonzero(found)
            result[open_[at]] = rows[at, column]
            goes_on = np.flatnonzero(~(found | (rows == _FREE)).any(axis=1))
            open_, places = open_[goes_on], places[goes_on] + width
        raise AssertionError("widths never end")

    def _places_of(self, ids: Ids) -> NDArray[np.int64]:
        """Return the places of those ids that have one."""
        at = []
        places, open_ids = self._first_places(ids), ids
        while open_ids.size:
            rows = self._places.take(places)
            found = (self.numbers.of_rows.take(rows, mode="clip") == open_ids) & (rows >= 0)
            at.append(places[found])
            goes_on = ~found & (rows != _FREE)
            places, open_ids = (places[goes_on] + 1) & (self._places.size - 1), open_ids[goes_on]
        return np.concatenate(at) if at else np.zeros(0, dtype=np.int64)

    def _place(self, ids: Ids, rows: Rows) -> None:
        """Enter rows at the first free places of their ids."""
        self._used += rows.size
        rows = rows.astype(np.int32)
        places = self._first_places(ids)
        while rows.size:
            free = self._places.take(places) == _FREE
            self._places[places[free]] = rows[free]
            # Several rows may have taken one free place: the last one has it, and the others go on.
            lost = self._places.take(places) != rows
            places, rows = (places[lost] + 1) & (self._places.size - 1), rows[lost]

    def _rehash(self) -> None:
        """Enter every row anew, in as many places as are needed; places of removed ids are free again."""
        size = _LEAST
        while len(self.numbers) > _FULL * size * 0.75:
            size *= 2
        self._pages = PagedArray(size, np.int32)
        self._places[:] = _FREE
        self._used = 0
        for rows in self.numbers.parts():
            self._place(self.numbers.of_rows[rows], rows)
