"""Storage of a table's rows, in memory or partly in a file on a local disk."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.pages import PagedArray
from fleet.tables.row_log import RowLog

__all__ = ["IN_MEMORY", "LocalDisk", "Memory", "RowStore", "Storage"]

_UNWRITTEN: Final = -1
"""The location of a row that was never written; it reads as zero."""
_FIRST: Final = -2
"""The location of a row at place 0 of the file; place p is at ``_FIRST - p``."""
_WINDOW: Final = 8
"""The number of rows in memory that are considered for each row that moves to the file."""
_RECENT: Final = 1 << 15
"""The maximum number of rows read from the file that are cached for the following update."""
_MIN_ROWS: Final = 1024
"""The minimum number of rows in memory, even if fewer bytes are configured."""
_MAX_TIME: Final = (1 << 31) - 1
"""The maximum of the int32 clock that orders writes; on overflow, the older half of all times becomes 0."""

Numbers = NDArray[np.int64]
Records = NDArray[np.void]


class RowStore(Protocol):
    """An array of rows of 32-bit words, indexed by row number. Unwritten rows are zero."""

    @property
    def nbytes(self) -> int:
        """The memory in use, in bytes."""

    @property
    def address(self) -> int | None:
        """The address of the array of all rows, valid until `resize`; None if some rows are not in memory."""

    @property
    def num_on_disk(self) -> int:
        """The number of rows on disk. Any thread may read it."""

    def resize(self, size: int) -> None:
        """Extend the store to all row numbers below `size`."""

    def read(self, numbers: Numbers, num_words: int | None = None) -> Tensor:
        """Return copies of rows, or of their first words, as float32[n, num_words]."""

    def write(self, numbers: Numbers, words: Tensor) -> None:
        """Replace distinct rows.

        Raises
        ------
        FleetError
            A disk operation fails; rows can still be read, but not written.
        """

    def runs(self, end: int, at_once: int) -> Iterator[Numbers]:
        """Yield all row numbers below `end`, in chunks of `at_once`, in the fastest order to read.

        Rows may be written between two yields. A number may be yielded more than once.
        """


@dataclass(frozen=True)
class Memory:
    """Storage of all rows in memory."""

    def rows(self, width: int) -> RowStore:
        """Return an empty `RowStore` that keeps all rows in memory.

        Parameters
        ----------
        width : int
            Words of 32 bits in a row.

        Returns
        -------
        RowStore
            Without rows.
        """
        return _InMemory(width)


@dataclass(frozen=True)
class LocalDisk:
    """Storage that keeps the most frequently updated rows in memory, and the others in a temporary file.

    The file is deleted when the process ends, and no other process reads it; only checkpoints are durable.

    Attributes
    ----------
    memory : int
        Bytes for rows in memory, per server and table, in addition to ids and index.
    directory : str, optional
        Directory of the file, on the parameter servers; by default that of temporary files (``TMPDIR``, else
        ``/tmp``).
    """

    memory: int
    directory: str | None = None

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ConfigurationError(
                f"LocalDisk(memory={self.memory}): expected the bytes for rows in memory"
            )

    def rows(self, width: int) -> RowStore:
        """Return an empty `RowStore` that keeps some rows in a temporary file.

        Parameters
        ----------
        width : int
            Words of 32 bits in a row.

        Returns
        -------
        RowStore
            Without rows.

        Raises
        ------
        ConfigurationError
            The directory cannot be written to.
        """
        try:
            return _OnDisk(width, self.memory, self.directory)
        except OSError as error:
            raise ConfigurationError(
                f"LocalDisk(directory={self.directory!r}): {error}; expected a directory on the parameter "
                "servers that they may write to, or None for that of temporary files (TMPDIR)"
            ) from error


Storage = Memory | LocalDisk
IN_MEMORY: Final = Memory()


class _InMemory:
    """A `RowStore` in memory. A row is one NumPy record, which is copied faster than an array of words."""

    num_on_disk = 0

    def __init__(self, width: int) -> None:
        self._type = _record_type(width)
        self._records = PagedArray(0, self._type)

    @property
    def nbytes(self) -> int:
        return self._records.values.nbytes

    @property
    def address(self) -> int | None:
        return self._records.values.ctypes.data

    def resize(self, size: int) -> None:
        self._records.resize(size)

    def read(self, numbers: Numbers, num_words: int | None = None) -> Tensor:
        if num_words is None:
            # All are in range; in mode "wrap" NumPy overlaps the reads best.
            return _words(self._records.values.take(numbers, mode="wrap"))
        return torch.index_select(_words(self._records.values)[:, :num_words], 0, torch.from_numpy(numbers))

    def write(self, numbers: Numbers, words: Tensor) -> None:
        self._records.values.put(numbers, _records(words, self._type))

    def runs(self, end: int, at_once: int) -> Iterator[Numbers]:
        return _ascending(end, at_once)


class _OnDisk:
    """A `RowStore` with some rows in memory slots and the others in a file.

    Replacement is an approximate LRU-2: memory holds the rows whose second-to-last write is the most recent.
    The time between two writes predicts the next use better than the time of the last one, so rows that are
    updated only once do not displace others; they are written directly to the file. Reads move no rows
    between memory and file.
    """

    address = None

    def __init__(self, width: int, memory: int, directory: str | None) -> None:
        self._type = _record_type(width)
        self._log = RowLog(self._type, directory)
        # A recent read costs a record and its row number; a slot also costs the time of a write.
        recent = min(_RECENT, memory // 16 // (self._type.itemsize + 4))
        self._recent = RecentReads(max(1, _MIN_ROWS // 16, recent), self._type)
        self._num_slots = max(_MIN_ROWS, (memory - self._recent.nbytes) // (self._type.itemsize + 8))
        self._where = PagedArray(0, np.int32)
        """By row: its slot in memory, or ``_FIRST`` minus its place in the file, or else `_UNWRITTEN`."""
        self._last = PagedArray(0, np.int32)
        """By row: the time of its last write, or 0 if it was never written or too long ago."""
        self._slots = PagedArray(0, self._type)
        self._row_of = PagedArray(0, np.int32)
        """The row in each slot."""
        self._before = PagedArray(0, np.int32)
        """For each slot, the time of the second-to-last write of its row."""
        self._now = 0
        self._used = self._hand = 0
        """The number of slots in use, and the slot to consider next for eviction."""

    @property
    def nbytes(self) -> int:
        arrays = (self._where, self._last, self._slots, self._row_of, self._before)
        return sum(each.values.nbytes for each in arrays) + self._recent.nbytes

    @property
    def num_on_disk(self) -> int:
        return self._log.num_live

    def resize(self, size: int) -> None:
        before = self._where.values.size
        self._where.resize(size)
        self._where.values[before:] = _UNWRITTEN
        self._last.resize(size)

    def read(self, numbers: Numbers, num_words: int | None = None) -> Tensor:
        where = self._where.values.take(numbers).astype(np.int64)
        found = np.zeros(numbers.size, self._type)
        in_memory, on_disk = np.flatnonzero(where >= 0), np.flatnonzero(where <= _FIRST)
        found[in_memory] = self._slots.values.take(where[in_memory])
        if on_disk.size:
            # A look-up reads only the first words, and an update of its rows usually follows, so they are
            # kept. Whole rows are read by that update or by a snapshot, after which they are not needed again
            # soon.
            found[on_disk] = self._read_file(numbers[on_disk], _FIRST - where[on_disk], num_words is not None)
        return _words(found)[:, :num_words]

    def write(self, numbers: Numbers, words: Tensor) -> None:
        records, at_once = _records(words, self._type), self._num_slots // 2
        for begin in range(0, numbers.size, at_once):
            self._write(numbers[begin : begin + at_once], records[begin : begin + at_once])

    def runs(self, end: int, at_once: int) -> Iterator[Numbers]:
        """Yield rows in file order, then the rows in memory, then rows that moved in the meantime."""
        yielded = np.zeros(end, dtype=np.bool_)
        for places, numbers in self._log.segments():
            numbers = numbers[self._is_at(numbers, places)]
            for begin in range(0, numbers.size, at_once):
                part = numbers[begin : begin + at_once]
                yield part[part < end]
                yielded[part[part < end]] = True
        for part in _ascending(end, at_once):
            yield part[~yielded[part]]

    def _read_file(self, numbers: Numbers, places: Numbers, keeps: bool) -> Records:
        """Return copies of rows in the file; if `keeps` is True, cache them for the following update."""
        records = np.empty(numbers.size, self._type)
        kept, records_kept = self._recent.find(numbers)
        records[kept] = records_kept
        if not kept.all():
            distinct, first, positions = np.unique(places[~kept], return_index=True, return_inverse=True)
            read = self._log.read(distinct)
            if keeps:
                self._recent.keep(numbers[~kept][first], read)
            records[~kept] = read[positions]
        return records

    def _write(self, numbers: Numbers, records: Records) -> None:
        if self._now == _MAX_TIME:
            half = self._now // 2
            for times in (self._last.values, self._before.values):
                np.maximum(times - half, 0, out=times)
            self._now -= half
        self._now += 1
        where, before = self._where.values.take(numbers), self._last.values.take(numbers)
        self._last.values[numbers] = self._now
        in_memory, coming = np.flatnonzero(where >= 0), np.flatnonzero(where < 0)
        self._recent.forget(numbers[coming])
        slots = where[in_memory].astype(np.int64)
        self._slots.values.put(slots, records[in_memory])
        self._before.values[slots] = before[in_memory]
        if coming.size:
            self._place(numbers[coming], records[coming], before[coming])

    def _place(self, numbers: Numbers, records: Records, before: NDArray[np.int32]) -> None:
        """Write rows that are not yet in memory, either to memory slots or to the file."""
        fresh = self._fresh_slots(numbers.size)
        slots, direct = self._evicted(
            fresh[0] if fresh.size else self._used, before, numbers.size - fresh.size
        )
        if slots.size or direct.any():
            self._compact()
        places = self._where.values.take(numbers).astype(np.int64)  # after compaction, which moves rows
        if slots.size:
            self._append(self._row_of.values[slots].astype(np.int64), self._slots.values.take(slots))
        if direct.any():
            self._append(numbers[direct], records[direct])
        # After the writes: if one of them fails, every row is still where `_where` says.
        self._log.release(_FIRST - places[places <= _FIRST])
        slots, numbers = np.concatenate([fresh, slots]), numbers[~direct]
        self._where.values[numbers] = slots
        self._row_of.values[slots] = numbers
        self._slots.values.put(slots, records[~direct])
        self._before.values[slots] = before[~direct]

    def _fresh_slots(self, count: int) -> Numbers:
        """Return up to `count` memory slots that have never been used."""
        begin, self._used = self._used, min(self._used + count, self._num_slots)
        if self._used > self._slots.values.size:
            size = min(self._num_slots, max(self._used, int(self._slots.values.size * 1.125)))
            for each in (self._slots, self._row_of, self._before):
                each.resize(size)
        return np.arange(begin, self._used)

    def _evicted(self, used: int, coming: NDArray[np.int32], count: int) -> tuple[Numbers, NDArray[np.bool_]]:
        """Select `count` rows to move to the file, from the rows in memory and those being written.

        Parameters
        ----------
        used : int
            Slots that held rows before this write.
        coming : int32[n]
            The times of the previous writes of rows that are not in memory.
        count : int

        Returns
        -------
        int64[m], bool[n]
            Slots of rows in memory, and which of the rows being written.
        """
        window = min(used, _WINDOW * count)
        slots = (np.arange(window) + self._hand) % max(1, used)
        self._hand = (self._hand + window) % max(1, used)
        before = self._before.values[slots]
        # Rows of the current write stay: their slots were just filled.
        before[self._last.values[self._row_of.values[slots]] == self._now] = self._now
        chosen = np.zeros(window + coming.size, dtype=np.bool_)
        if count:
            chosen[np.argpartition(np.concatenate([before, coming]), count - 1)[:count]] = True
        return slots[chosen[:window]], chosen[window:]

    def _compact(self) -> None:
        """Rewrite the live records of a segment if more than half of the file's records are dead."""
        found = self._log.emptiest()
        if found is None:
            return
        places, numbers = found
        live = np.flatnonzero(self._is_at(numbers, places))
        # Read and appended before the old places are released, so that a full disk loses no row.
        self._append(numbers[live], self._log.read(places[live]))
        self._log.release(places[live])

    def _is_at(self, numbers: Numbers, places: Numbers) -> NDArray[np.bool_]:
        """Return which rows are still at the given file positions; a dead record has a stale row number."""
        at: NDArray[np.bool_] = self._where.values.take(numbers, mode="clip") == _FIRST - places
        return at

    def _append(self, numbers: Numbers, records: Records) -> None:
        self._where.values[numbers] = _FIRST - self._log.append(numbers, records)


class RecentReads:
    """A direct-mapped cache of records read from disk, for the update that follows a look-up.

    Parameters
    ----------
    size : int
        Number of entries.
    dtype : numpy.dtype
        Type of a record.
    """

    def __init__(self, size: int, dtype: "np.dtype[np.void]") -> None:
        self._numbers = np.full(size, -1, dtype=np.int32)
        self._records = np.zeros(size, dtype)

    @property
    def nbytes(self) -> int:
        """The memory in use, in bytes."""
        return self._numbers.nbytes + self._records.nbytes

    def keep(self, numbers: Numbers, records: Records) -> None:
        """Cache the records, unless there are so many that they would evict each other."""
        if numbers.size <= self._numbers.size:
            places = numbers % self._numbers.size
            self._numbers[places] = numbers
            self._records[places] = records

    def find(self, numbers: Numbers) -> tuple[NDArray[np.bool_], Records]:
        """Return which rows are cached, and copies of their records."""
        places = numbers % self._numbers.size
        kept = self._numbers[places] == numbers
        return kept, self._records[places[kept]]

    def forget(self, numbers: Numbers) -> None:
        """Drop rows from the cache before they change."""
        places = numbers % self._numbers.size
        self._numbers[places[self._numbers[places] == numbers]] = -1


def _ascending(end: int, at_once: int) -> Iterator[Numbers]:
    return (np.arange(begin, min(begin + at_once, end)) for begin in range(0, end, at_once))


def _record_type(width: int) -> "np.dtype[np.void]":
    return np.dtype((np.void, 4 * width))


def _words(records: Records) -> Tensor:
    """Return a view of records as words, float32[n, width]."""
    return torch.from_numpy(records.view(np.float32).reshape(records.size, records.dtype.itemsize // 4))


def _records(words: Tensor, dtype: "np.dtype[np.void]") -> Records:
    """Return a view of words as records, void[n]."""
    return words.contiguous().numpy().view(dtype).reshape(len(words))
