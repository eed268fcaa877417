"""Vectorized indexes from 64-bit ids to row numbers.

`RowIndex` is a hash table with open addressing and linear probing, in buckets of four entries. An entry holds
the number of a row, and `RowNumbers` has the id of each row; so a hit costs two random reads, and the index
takes 12 to 20 bytes per row. The bits that row numbers do not need hold a mark, which is more of the id's
hash. A mark nearly always tells entries of other ids apart without reading those ids. Every call handles many
ids; those that are not in their first bucket, about one in twenty, proceed to the next buckets together. If a
C compiler was available when the package was installed, `kernels/table_rows.c` finds the same rows one by
one. A mark loses one bit with each doubling of the rows: 10 bits at a million rows of one table on one
server, 3 at a hundred million.

`DirectIndex` replaces it if ids are bounded and many of them have a row: it has one entry for every possible
id.
"""

import ctypes
import sys
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.tables.kernels import FEW, RowAddresses, library
from fleet.tables.pages import PagedArray

__all__ = ["MISSING", "DirectIndex", "IdMap", "RowIndex", "RowNumbers", "find_among"]

MISSING: Final = -1
"""The row number of an id without a row."""

_FREE: Final = np.uint32(0xFFFFFFFF)
_REMOVED: Final = np.uint32(0xFFFFFFFE)
"""An entry whose id was removed; searches continue past it."""
_ENTRY_BITS: Final = 31
"""The number of bits for a row number and its mark; the highest bit of an entry is set if it has no row."""
_ENTRY: Final = np.uint32((1 << _ENTRY_BITS) - 1)
_HIGH_HALVES: Final = slice(int(sys.byteorder == "little"), None, 2)
"""Selects the upper 32 bits of 64-bit numbers that are viewed as 32-bit ones."""
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio; multiplying by it spreads neighbouring ids (Fibonacci hashing)."""
_FULL: Final = 0.7
"""The load factor at which the index grows."""
_BUCKET: Final = 4
_BUCKET_TYPE: Final = np.dtype((np.void, 4 * _BUCKET))
"""The dtype of a bucket, with which NumPy reads the whole bucket as one element."""
_BUCKETS_AT_ONCE: Final = 4
"""The number of buckets that each pass of a search reads, after the first bucket."""
_MIN_ENTRIES: Final = 64
_MIN_ROWS: Final = 64
_GROWTH: Final = 1.125
_ROWS_AT_ONCE: Final = 1 << 16

Ids = NDArray[np.int64]
Rows = NDArray[np.int64]


class RowNumbers:
    """Allocates row numbers, starting at 0, and records the id of each row. Not thread-safe."""

    def __init__(self) -> None:
        self._ids = PagedArray(_MIN_ROWS, np.int64)
        self.end = 0
        """One more than the highest number allocated so far."""
        self._unused: Rows = np.zeros(0, dtype=np.int64)

    @property
    def ids(self) -> Ids:
        """The id of each row, by row number; released row numbers keep their last id."""
        return self._ids.values

    def __len__(self) -> int:
        """Return the number of allocated rows."""
        return self.end - self._unused.size

    @property
    def nbytes(self) -> int:
        """The memory in use, in bytes."""
        return self.ids.nbytes + self._unused.nbytes

    def allocate(self, ids: Ids) -> Rows:
        """Return a row number for each id; released numbers are reused first."""
        left = max(0, self._unused.size - ids.size)
        again, self._unused = self._unused[left:], self._unused[:left].copy()
        rows = np.concatenate([again, np.arange(self.end, self.end + ids.size - again.size)])
        self.end += ids.size - again.size
        if self.end > self.ids.size:
            self._ids.resize(max(self.end, int(self.ids.size * _GROWTH)))
        self.ids[rows] = ids
        return rows

    def release(self, rows: Rows) -> None:
        """Release row numbers, which can then be reused."""
        self._unused = np.concatenate([self._unused, rows])

    def chunks(self) -> Iterator[Rows]:
        """Yield the allocated row numbers in ascending order, in chunks."""
        used = np.ones(self.end, dtype=np.bool_)
        used[self._unused] = False
        for begin in range(0, self.end, _ROWS_AT_ONCE):
            yield np.flatnonzero(used[begin : begin + _ROWS_AT_ONCE]) + begin

    def items(self) -> tuple[Ids, Rows]:
        """Return the ids of all rows in ascending order, and their row numbers."""
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *self.chunks()])
        ids = self.ids[rows]
        order = np.argsort(ids)
        return ids[order], rows[order]


class RowIndex:
    """A hash index from ids to row numbers. Not thread-safe.

    Attributes
    ----------
    numbers : RowNumbers
        The rows that exist, and the id of each.
    addresses : RowAddresses
        The addresses of the index, for compiled loops; kept up to date.
    """

    def __init__(self) -> None:
        self.numbers = RowNumbers()
        self.addresses = RowAddresses()
        self._clear(_MIN_ENTRIES)
        self._locate()

    @property
    def nbytes(self) -> int:
        """The memory in use, in bytes."""
        return self._entries.nbytes + self.numbers.nbytes

    def find(self, ids: Ids) -> Rows:
        """Return the row number of each id.

        Parameters
        ----------
        ids : int64[n]

        Returns
        -------
        int64[n]
            `MISSING` for an id without a row.
        """
        rows = _found(self.addresses, ids)
        return self.find_by_numpy(ids) if rows is None else rows

    def find_by_numpy(self, ids: Ids) -> Rows:
        """Compute the result of `find` without compiled code."""
        buckets, marks = self._hash(ids)
        entries = self._read(buckets)
        rows, marked = self._candidates(entries, marks)
        # A candidate without the mark may be any number, which `wrap` keeps in range.
        found = marked & (self.numbers.ids.take(rows, mode="wrap") == ids)
        if not found.all():
            open_ = np.flatnonzero(~found)
            rows[open_] = MISSING
            # A bucket fills in order. If its last entry is free it was never full, so no id overflowed from
            # it.
            open_ = open_[marked[open_] | (entries[open_, -1] != _FREE)]
            places = self._search(ids[open_], buckets[open_], marks[open_])
            rows[open_] = np.where(places == MISSING, MISSING, self._numbers_at(places))
        return rows

    def find_or_add(self, ids: Ids) -> tuple[Rows, NDArray[np.bool_]]:
        """Return the row number of each id; allocate rows for ids that have none.

        Parameters
        ----------
        ids : int64[n]
            Distinct.

        Returns
        -------
        rows : int64[n]
        new : bool[n]
            True for ids that had no row.
        """
        rows = self.find(ids)
        new = rows == MISSING
        if new.any():
            rows[new] = self.add(ids[new])
        return rows, new

    def add(self, ids: Ids) -> Rows:
        """Allocate rows for distinct ids that have none; return their numbers."""
        rows = self.numbers.allocate(ids)
        if self._used + ids.size > _FULL * self._entries.size:
            self._rehash()
        else:
            self._insert(ids, rows)
        self._locate()
        return rows

    def remove(self, ids: Ids) -> Rows:
        """Remove ids and release their rows; return the row numbers.

        Parameters
        ----------
        ids : int64[n]
            Distinct; ids without a row are skipped.
        """
        places = self._search(ids, *self._hash(ids))
        places = places[places != MISSING]
        rows = self._numbers_at(places)
        # Not `_FREE`: an id that overflowed from this bucket would no longer be found.
        self._entries[places] = _REMOVED
        self.numbers.release(rows)
        return rows

    def _locate(self) -> None:
        """Update the addresses that compiled code uses, because arrays may have moved."""
        self.addresses.entries = self._entries.ctypes.data
        self.addresses.size = self._buckets.size
        self.addresses.number_bits = int(self._number_bits)
        self.addresses.ids = self.numbers.ids.ctypes.data

    def _hash(self, ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return each id's first bucket and mark; entries store the mark in the bits above the row number."""
        hashed = ids.view(np.uint64) * _GOLDEN
        marks = hashed.view(np.uint32)[_HIGH_HALVES] << self._number_bits
        marks &= _ENTRY
        hashed >>= np.uint64(64 - (self._buckets.size.bit_length() - 1))
        return hashed.view(np.int64), marks

    def _read(self, buckets: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return copies of the entries in the given buckets as uint32[n, 4]."""
        # All are in range; in mode "wrap" NumPy overlaps the reads best.
        return self._buckets.take(buckets, mode="wrap").view(np.uint32).reshape(buckets.size, _BUCKET)

    def _numbers_at(self, places: NDArray[np.int64]) -> Rows:
        """Return the row numbers in the entries that are in use."""
        return (self._entries[places] & (self._num_numbers - np.uint32(1))).astype(np.int64)

    def _candidates(
        self, entries: NDArray[np.uint32], marks: NDArray[np.uint32]
    ) -> tuple[Rows, NDArray[np.bool_]]:
        """For each bucket, return the lowest row number with the given mark, and whether one was found.

        Parameters
        ----------
        entries : uint32[n, 4]
        marks : uint32[n]
        """
        # What is left of an entry with the right mark is a row number. Any other entry, a free or removed one
        # included, keeps a higher bit.
        numbers = entries[:, 0] ^ marks
        for column in range(1, _BUCKET):
            np.minimum(numbers, entries[:, column] ^ marks, out=numbers)
        found = numbers < self._num_numbers
        numbers &= self._num_numbers - np.uint32(1)
        return numbers.astype(np.int64), found

    def _search(self, ids: Ids, buckets: NDArray[np.int64], marks: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the positions of the ids' entries, or `MISSING`."""
        result = np.full(ids.size, MISSING, dtype=np.int64)
        open_ = np.arange(ids.size)
        while open_.size:
            # Neighbouring buckets are read together: few ids need more, and each pass has a fixed cost.
            reached = (buckets[:, None] + np.arange(_BUCKETS_AT_ONCE)) & (self._buckets.size - 1)
            entries = self._read(reached.ravel()).reshape(buckets.size, -1)
            # A bucket fills in order, so its last entry alone shows whether it overflowed.
            continues = np.maximum.reduce(entries[:, _BUCKET - 1 :: _BUCKET].T) != _FREE
            entries ^= marks[:, None]
            marked = np.flatnonzero(entries < self._num_numbers)
            of, column = np.divmod(marked, entries.shape[1])
            right = self.numbers.ids.take(entries.ravel()[marked], mode="clip") == ids[of]
            of, column = of[right], column[right]
            result[open_[of]] = (buckets[of] * _BUCKET + column) & (self._entries.size - 1)
            continues[of] = False
            left = np.flatnonzero(continues)
            open_, ids, marks, buckets = open_[left], ids[left], marks[left], buckets[left] + _BUCKETS_AT_ONCE
        return result

    def _insert(self, ids: Ids, rows: Rows) -> None:
        """Write each row number to the first free entry for its id."""
        self._used += rows.size
        buckets, entries = self._hash(ids)
        entries |= rows.astype(np.uint32)
        while entries.size:
            free = self._read(buckets) == _FREE
            column = free.argmax(axis=1)
            has_room = free[np.arange(entries.size), column]
            places = buckets * _BUCKET + column
            self._entries[places[has_room]] = entries[has_room]
            # Several rows may have been written to one free entry: the last one keeps it, and the others
            # retry.
            lost = np.flatnonzero(self._entries[places] != entries)
            buckets, entries = (buckets[lost] + ~has_room[lost]) & (self._buckets.size - 1), entries[lost]

    def _rehash(self) -> None:
        """Rebuild the index for its current number of rows; this also frees removed entries."""
        size = _MIN_ENTRIES
        while len(self.numbers) > _FULL * size * 0.75:
            size *= 2
        self._clear(size)
        for rows in self.numbers.chunks():
            self._insert(self.numbers.ids[rows], rows)

    def _clear(self, size: int) -> None:
        """Replace the index with an empty one that has `size` entries."""
        self._pages = PagedArray(size // _BUCKET, _BUCKET_TYPE)
        self._buckets = self._pages.values
        self._entries = self._buckets.view(np.uint32)
        """Each entry is `_FREE`, `_REMOVED`, or a row number with its mark in the bits above it."""
        self._entries[:] = _FREE
        self._used = 0
        """The number of entries that are not free, removed entries included."""
        # There are never more rows than entries, so row numbers fit into these bits until the next call.
        bits = min(_ENTRY_BITS, max(size.bit_length() - 1, self.numbers.end.bit_length()))
        self._number_bits = np.uint32(bits)
        self._num_numbers = np.uint32(1 << bits)


class DirectIndex:
    """An index with a 4-byte entry for every possible id. Not thread-safe.

    A look-up costs one random read, because there is nothing to compare.

    Parameters
    ----------
    num_ids : int
        Ids are 0 to `num_ids`, exclusive; others have no row.
    numbers : RowNumbers
        The rows so far.
    """

    def __init__(self, num_ids: int, numbers: RowNumbers) -> None:
        self.numbers = numbers
        self._rows = PagedArray(num_ids, np.int32)
        self._rows.values[:] = MISSING
        self.addresses = RowAddresses(direct=self._rows.values.ctypes.data, size=num_ids)
        """The addresses of the index, for compiled loops."""
        for rows in numbers.chunks():
            self._rows.values[numbers.ids[rows]] = rows

    @property
    def nbytes(self) -> int:
        """The memory in use, in bytes."""
        return self._rows.values.nbytes + self.numbers.nbytes

    def find(self, ids: Ids) -> Rows:
        """Return the row number of each id, or `MISSING` for an id without a row."""
        rows = _found(self.addresses, ids)
        return self.find_by_numpy(ids) if rows is None else rows

    def find_by_numpy(self, ids: Ids) -> Rows:
        """Compute the result of `find` without compiled code."""
        # An id out of range reads the entry of another one. As an unsigned number a negative id is above all
        # others, so one comparison finds both kinds.
        rows = self._rows.values.take(ids, mode="clip").astype(np.int64)
        rows[ids.view(np.uint64) >= np.uint64(self._rows.values.size)] = MISSING
        return rows

    def add(self, ids: Ids) -> Rows:
        """Allocate rows for distinct ids that have none; return their numbers."""
        rows = self.numbers.allocate(ids)
        self._rows.values[ids] = rows
        return rows

    def remove(self, ids: Ids) -> Rows:
        """Remove distinct ids and release their rows; return the row numbers. Unknown ids are ignored."""
        found = self.find(ids)
        rows: Rows = found[found != MISSING]
        self._rows.values[ids] = MISSING
        self.numbers.release(rows)
        return rows


def _found(addresses: RowAddresses, ids: Ids) -> Rows | None:
    """Find row numbers with compiled code; return None if the compiled library is not available."""
    if (compiled := library(keeps_lock=ids.size <= FEW)) is None:
        return None
    ids, rows = np.ascontiguousarray(ids, np.int64), np.empty(ids.size, np.int64)
    compiled.fleet_find_rows(ctypes.addressof(addresses), ids.ctypes.data, ids.size, rows.ctypes.data)
    return rows


class IdMap:
    """A map from ids to 32-bit integers. Not thread-safe."""

    def __init__(self) -> None:
        self._index = RowIndex()
        self._values = np.zeros(0, dtype=np.int32)

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._index.numbers)

    @property
    def nbytes(self) -> int:
        """The memory in use, in bytes."""
        return self._index.nbytes + self._values.nbytes

    def add(self, ids: Ids, amount: int) -> NDArray[np.int32]:
        """Add a number to the value of each distinct id and return the sums; new ids start at 0."""
        rows = self._rows_of(ids)
        sums = self._values[rows] + np.int32(amount)
        self._values[rows] = sums
        return sums

    def put(self, ids: Ids, values: NDArray[np.int32] | int) -> None:
        """Set the values of distinct ids."""
        rows = self._rows_of(ids)
        self._values[rows] = values

    def remove(self, ids: Ids) -> None:
        """Remove ids; unknown ids are ignored."""
        self._index.remove(ids)

    def items(self) -> tuple[Ids, NDArray[np.int32]]:
        """Return all ids in ascending order, and their values."""
        ids, rows = self._index.numbers.items()
        return ids, self._values[rows]

    def _rows_of(self, ids: Ids) -> Rows:
        rows, new = self._index.find_or_add(ids)
        if self._index.numbers.end > self._values.size:
            # Nothing else refers to the array. NumPy's check also counts references of debuggers and tracers.
            self._values.resize(self._index.numbers.ids.size, refcheck=False)
        self._values[rows[new]] = 0
        return rows


def find_among(ids: Ids, ascending: Ids) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Find ids in a sorted array.

    Parameters
    ----------
    ids : int64[n]
    ascending : int64[m]
        Distinct.

    Returns
    -------
    found : bool[n]
    positions : int64
        In `ascending`, of the ids that were found.
    """
    if not ascending.size:
        return np.zeros(ids.size, dtype=np.bool_), ascending
    positions = np.searchsorted(ascending, ids)
    found: NDArray[np.bool_] = ascending.take(positions, mode="clip") == ids
    return found, positions[found]
