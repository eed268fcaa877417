"""Where the row of an id lies: a hash index of 64-bit ids in vector code.

Open addressing with linear probing, of buckets of four places. A place holds the number of a row, and the row
knows its id; so an id that is found costs two random reads, and an index takes 12 to 20 bytes a row. The bits
that numbers of rows leave free hold a mark, which is more of the id's hash: a place of another id is known by
it, nearly always, without a read of that id. Every call takes many ids at once: those that are not in their
first bucket, one in twenty or so, go on to the next together. Where a C compiler was there when the package
was installed, `kernels/find_rows.c` finds the same rows, one after the other. A mark has one bit less with
each doubling of the rows: 10 bits at a million rows of one table on one server, 3 at a hundred million.
"""

import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.tables.kernels import compiled_find
from fleet.tables.numbers import RowNumbers
from fleet.tables.pages import PagedArray

__all__ = ["MISSING", "RowIndex"]

MISSING: Final = -1
"""The row of an id that has none."""

_FREE: Final = np.uint32(0xFFFFFFFF)
_REMOVED: Final = np.uint32(0xFFFFFFFE)
"""A place whose id was removed: a search goes on past it."""
_ENTRY_BITS: Final = 31
"""Of the number of a row and its mark together; the highest bit is that of places without a row."""
_ENTRY: Final = np.uint32((1 << _ENTRY_BITS) - 1)
_HIGH_HALVES: Final = slice(int(sys.byteorder == "little"), None, 2)
"""The higher 32 bits of each of some 64-bit numbers, seen as 32-bit ones."""
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: multiplied by it, neighbouring ids lie far apart."""
_FULL: Final = 0.7
"""The share of places in use at which the index grows."""
_BUCKET: Final = 4
_BUCKET_TYPE: Final = np.dtype((np.void, 4 * _BUCKET))
"""Numpy reads a bucket as one element."""
_AT_ONCE: Final = 4
"""How many buckets a search reads in a turn, after the first ones."""
_LEAST: Final = 64

Ids = NDArray[np.int64]
Rows = NDArray[np.int64]


class RowIndex:
    """Rows by id. Rows are numbered from 0; the number of one that was removed is used again.

    Not to be called by two threads at once.
    """

    def __init__(self) -> None:
        self.numbers = RowNumbers()
        self._clear(_LEAST)

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
        if (find := compiled_find()) is not None:
            return find(self._places, int(self._number_bits), self.numbers.of_rows, ids)
        return self.find_by_numpy(ids)

    def find_by_numpy(self, ids: Ids) -> Rows:
        """Return what `find` does, which may be compiled."""
        buckets, marks = self._hashed(ids)
        entries = self._read(buckets)
        rows, marked = self._beside(entries, marks)
        found = marked & (self.numbers.of_rows.take(rows, mode="wrap") == ids)
        if not found.all():
            open_ = np.flatnonzero(~found)
            rows[open_] = MISSING
            # A bucket with room, which is at its last place, was never full: no id went on from it.
            open_ = open_[marked[open_] | (entries[open_, -1] != _FREE)]
            places = self._places_of(ids[open_], buckets[open_], marks[open_])
            rows[open_] = np.where(places == MISSING, MISSING, self._numbers_at(places))
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
        places = self._places_of(ids, *self._hashed(ids))
        places = places[places != MISSING]
        rows = self._numbers_at(places)
        self._places[places] = _REMOVED
        self.numbers.give_back(rows)
        return rows

    def _hashed(self, ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return the first buckets of ids, and their marks: what an entry has above the number of its row."""
        hashed = ids.view(np.uint64) * _GOLDEN
        marks = hashed.view(np.uint32)[_HIGH_HALVES] << self._number_bits
        marks &= _ENTRY
        hashed >>= np.uint64(64 - (self._buckets.size.bit_length() - 1))
        return hashed.view(np.int64), marks

    def _read(self, buckets: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return copies of the entries of buckets; uint32[n, 4]."""
        # All are in range; "wrap" is the mode in which numpy waits least for one read to begin the next.
        return self._buckets.take(buckets, mode="wrap").view(np.uint32).reshape(buckets.size, _BUCKET)

    def _numbers_at(self, places: NDArray[np.int64]) -> Rows:
        """Return the numbers of rows at places that have one."""
        return (self._places[places] & (self._num_numbers - np.uint32(1))).astype(np.int64)

    def _beside(
        self, entries: NDArray[np.uint32], marks: NDArray[np.uint32]
    ) -> tuple[Rows, NDArray[np.bool_]]:
        """Return of each bucket the least number beside a mark, and whether there is one; else any number.

        Parameters
        ----------
        entries : uint32[n, 4]
        marks : uint32[n]
        """
        numbers = entries[:, 0] ^ marks
        for column in range(1, _BUCKET):
            np.minimum(numbers, entries[:, column] ^ marks, out=numbers)
        found = numbers < self._num_numbers
        numbers &= self._num_numbers - np.uint32(1)
        return numbers.astype(np.int64), found

    def _places_of(
        self, ids: Ids, buckets: NDArray[np.int64], marks: NDArray[np.uint32]
    ) -> NDArray[np.int64]:
        """Return the places of ids, or `MISSING`; of several with an id's mark, that whose row has the id."""
        result = np.full(ids.size, MISSING, dtype=np.int64)
        open_ = np.arange(ids.size)
        while open_.size:
            # Neighbouring buckets are read together: few ids go far, and each turn has its price.
            reached = (buckets[:, None] + np.arange(_AT_ONCE)) & (self._buckets.size - 1)
            entries = self._read(reached.ravel()).reshape(buckets.size, -1)
            # Places of a bucket are taken in their order, so one that has room has it at its last place.
            goes_on = np.maximum.reduce(entries[:, _BUCKET - 1 :: _BUCKET].T) != _FREE
            entries ^= marks[:, None]
            marked = np.flatnonzero(entries < self._num_numbers)
            of, column = np.divmod(marked, entries.shape[1])
            right = self.numbers.of_rows.take(entries.ravel()[marked], mode="clip") == ids[of]
            of, column = of[right], column[right]
            result[open_[of]] = (buckets[of] * _BUCKET + column) & (self._places.size - 1)
            goes_on[of] = False
            going = np.flatnonzero(goes_on)
            open_, ids, marks, buckets = open_[going], ids[going], marks[going], buckets[going] + _AT_ONCE
        return result

    def _place(self, ids: Ids, rows: Rows) -> None:
        """Enter rows at the first free places of their ids."""
        self._used += rows.size
        buckets, entries = self._hashed(ids)
        entries |= rows.astype(np.uint32)
        while entries.size:
            free = self._read(buckets) == _FREE
            column = free.argmax(axis=1)
            room = free[np.arange(entries.size), column]
            places = buckets * _BUCKET + column
            self._places[places[room]] = entries[room]
            # Several rows may have taken one free place: the last one has it, and the others try again.
            lost = np.flatnonzero(self._places[places] != entries)
            buckets, entries = (buckets[lost] + ~room[lost]) & (self._buckets.size - 1), entries[lost]

    def _rehash(self) -> None:
        """Enter every row anew, in as many places as are needed; places of removed ids are free again."""
        size = _LEAST
        while len(self.numbers) > _FULL * size * 0.75:
            size *= 2
        self._clear(size)
        for rows in self.numbers.parts():
            self._place(self.numbers.of_rows[rows], rows)

    def _clear(self, size: int) -> None:
        """Make so many places, all of them free."""
        self._pages = PagedArray(size // _BUCKET, _BUCKET_TYPE)
        self._buckets = self._pages.values
        self._places = self._buckets.view(np.uint32)
        """At each place the number of a row below its mark, `_FREE` or `_REMOVED`."""
        self._places[:] = _FREE
        self._used = 0
        """Places that are not free, removed ones among them."""
        # No row has a number beyond these bits before the next call: there are never more rows than places.
        bits = min(_ENTRY_BITS, max(size.bit_length() - 1, self.numbers.end.bit_length()))
        self._number_bits = np.uint32(bits)
        self._num_numbers = np.uint32(1 << bits)
