"""Where the row of an id lies: a hash index of 64-bit ids in vector code.

Open addressing with linear probing. A place of the index holds the number of a row, and the row knows its id;
so an id that is found costs two random reads, and an index takes 12 to 20 bytes a row. Every call takes many
ids at once: those whose first place is not the right one go on to the next together.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

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
_GROWTH: Final = 1.125
_LEAST: Final = 64

Ids = NDArray[np.int64]
Rows = NDArray[np.int64]


class RowIndex:
    """Rows by id. Rows are numbered from 0; the number of one that was removed is used again.

    Not to be called by two threads at once.
    """

    def __init__(self) -> None:
        self._places = np.full(_LEAST, _FREE, dtype=np.int32)
        self._used = 0
        """Places that are not free, removed ones among them."""
        self._ids = np.zeros(_LEAST, dtype=np.int64)
        self._end = 0
        """One more than the highest number of a row that was ever used."""
        self._unused: list[int] = []

    def __len__(self) -> int:
        """Return how many ids have a row."""
        return self._end - len(self._unused)

    @property
    def end(self) -> int:
        """One more than the highest number of a row; rows need memory for so many."""
        return self._end

    @property
    def capacity(self) -> int:
        """For how many rows the index has memory before it grows; at least `end`."""
        return self._ids.size

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index takes."""
        return self._places.nbytes + self._ids.nbytes

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
        rows = self._places.take(places)
        found = self._ids.take(rows, mode="clip") == ids
        found &= rows >= 0
        if found.all():
            return rows.astype(np.int64)
        result = np.where(found, rows, MISSING).astype(np.int64)
        open_ = np.flatnonzero(~found & (rows != _FREE))
        places = places[open_]
        while open_.size:
            places = (places + 1) & (self._places.size - 1)
            rows = self._places.take(places)
            found = (self._ids.take(rows, mode="clip") == ids[open_]) & (rows >= 0)
            result[open_[found]] = rows[found]
            goes_on = ~found & (rows != _FREE)
            open_, places = open_[goes_on], places[goes_on]
        return result

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
        count = ids.size
        again = [self._unused.pop() for _ in range(min(count, len(self._unused)))]
        fresh = count - len(again)
        rows = np.concatenate([np.array(again, dtype=np.int64), np.arange(self._end, self._end + fresh)])
        self._end += fresh
        if self._end > self._ids.size:
            # Memory that is resized in place is moved by its pages, so that growing needs no second copy.
            self._ids.resize(max(self._end, int(self._ids.size * _GROWTH)), refcheck=False)
        self._ids[rows] = ids
        if self._used + count > _FULL * self._places.size:
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
        self._unused.extend(rows.tolist())
        return rows

    def ids(self, rows: Rows) -> Ids:
        """Return the ids of rows that there are."""
        return self._ids[rows]

    def items(self) -> tuple[Ids, Rows]:
        """Return all ids and their rows, by ascending id."""
        rows = self._places[self._places >= 0].astype(np.int64)
        ids = self._ids[rows]
        order = np.argsort(ids)
        return ids[order], rows[order]

    def _first_places(self, ids: Ids) -> NDArray[np.int64]:
        bits = np.uint64(64 - (self._places.size.bit_length() - 1))
        return ((ids.view(np.uint64) * _GOLDEN) >> bits).view(np.int64)

    def _places_of(self, ids: Ids) -> NDArray[np.int64]:
        """Return the places of those ids that have one."""
        at = []
        places, open_ids = self._first_places(ids), ids
        while open_ids.size:
            rows = self._places.take(places)
            found = (self._ids.take(rows, mode="clip") == open_ids) & (rows >= 0)
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
        used = np.ones(self._end, dtype=np.bool_)
        used[self._unused] = False
        rows = np.flatnonzero(used)
        size = _LEAST
        while rows.size > _FULL * size * 0.75:
            size *= 2
        self._places = np.full(size, _FREE, dtype=np.int32)
        self._used = 0
        self._place(self._ids[rows], rows)
