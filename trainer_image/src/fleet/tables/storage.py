"""Where the rows of a table lie: in memory, or some there and the others on a disk."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.pages import PagedArray
from fleet.tables.recent_reads import RecentReads
from fleet.tables.row_log import RowLog

__all__ = ["IN_MEMORY", "LocalDisk", "Memory", "RowStore", "Storage"]

_NOWHERE: Final = -1
"""Of a row that was never written: it is zero."""
_FIRST: Final = -2
"""Of a row at place 0 of the file; at place p, so much less."""
_WINDOW: Final = 8
"""Where rows have to go, so many times as many are looked at."""
_RECENT: Final = 1 << 15
"""So many rows that were read from the file are kept as well, for what writes them next."""
_LEAST: Final = 1024
"""Rows in memory, however few bytes that is."""
_LATEST: Final = (1 << 31) - 1
"""So many writes are told apart by their order; then the older half of them is not any more."""

Numbers = NDArray[np.int64]
Records = NDArray[np.void]


class RowStore(Protocol):
    """Rows by number, as words of 32 bits; zero before they are written."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""

    @property
    def num_on_disk(self) -> int:
        """How many rows lie on a disk. Any thread may ask."""

    def resize(self, size: int) -> None:
        """Have room for rows of numbers up to this one, exclusive."""

    def read(self, numbers: Numbers, num_words: int | None = None) -> Tensor:
        """Return copies of rows, or of their first words; float32[n, num_words]."""

    def write(self, numbers: Numbers, words: Tensor) -> None:
        """Put rows, none of them twice, in the place of others.

        Raises
        ------
        FleetError
            A disk refuses; rows can be read, but none can be written any more.
        """

    def runs(self, end: int, at_once: int) -> Iterator[Numbers]:
        """Yield the numbers below this one, each once at least, in the order in which rows lie."""


class Storage(Protocol):
    """Where the rows of a table lie."""

    def rows(self, width: int) -> RowStore:
        """Return room for rows of so many words.

        Parameters
        ----------
        width : int
            In words of 32 bits.

        Returns
        -------
        RowStore
            Without any row yet.
        """


@dataclass(frozen=True)
class Memory:
    """Rows lie in memory."""

    def rows(self, width: int) -> RowStore:
        """Return room for rows of so many words.

        Parameters
        ----------
        width : int
            In words of 32 bits.

        Returns
        -------
        RowStore
            Without any row yet.
        """
        return _InMemory(width)


@dataclass(frozen=True)
class LocalDisk:
    """The rows that are updated most lie in memory, the others in a file, which goes with the process.

    Nothing is ever read that another process has written: what lasts is in checkpoints.

    Attributes
    ----------
    memory : int
        Bytes for rows in memory, on each server and for each table; ids and the index come on top.
    directory : str, optional
        Of the file, on the parameter servers. Without it, that of temporary files: ``TMPDIR``, else ``/tmp``.
    """

    memory: int
    directory: str | None = None

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ConfigurationError(
                f"LocalDisk(memory={self.memory}): expected the bytes for rows in memory"
            )

    def rows(self, width: int) -> RowStore:
        """Return room for rows of so many words.

        Parameters
        ----------
        width : int
            In words of 32 bits.

        Returns
        -------
        RowStore
            Without any row yet.

        Raises
        ------
        ConfigurationError
            The directory is none that may be written to.
        """
        try:
            return _OnDisk(width, self.memory, self.directory)
        except OSError as error:
            raise ConfigurationError(
                f"LocalDisk(directory={self.directory!r}): {error}; expected a directory on the parameter "
                "servers that they may write to, or None for that of temporary files (TMPDIR)"
            ) from error


IN_MEMORY: Final = Memory()


class _InMemory:
    """All rows in memory. See `RowStore`.

    They are records: numpy moves one of them as a whole, which is faster than by its elements.
    """

    def __init__(self, width: int) -> None:
        self._records = PagedArray(0, _record(width))

    @property
    def nbytes(self) -> int:
        return self._records.values.nbytes

    @property
    def num_on_disk(self) -> int:
        return 0

    def resize(self, size: int) -> None:
        self._records.resize(size)

    def read(self, numbers: Numbers, num_words: int | None = None) -> Tensor:
        if num_words is None:
            # All are in range; "wrap" is the mode in which numpy waits least for one read to begin the next.
            return _words(self._records.values.take(numbers, mode="wrap"))
        return torch.index_select(_words(self._records.values)[:, :num_words], 0, torch.from_numpy(numbers))

    def write(self, numbers: Numbers, words: Tensor) -> None:
        self._records.values.put(numbers, _records(words))

    def runs(self, end: int, at_once: int) -> Iterator[Numbers]:
        return _in_order(end, at_once)


class _OnDisk:
    """Some rows in memory, the others in a file. See `RowStore`.

    In memory are those of which the last write but one is the most recent, nearly: how long a row was not
    written before tells more of how soon it is needed again than when it was. Others go straight to the file.
    Reading changes nothing: what is read from the file stays there.
    """

    def __init__(self, width: int, memory: int, directory: str | None) -> None:
        self._type = _record(width)
        self._log = RowLog(self._type, directory)
        recent = min(_RECENT, memory // 16 // (self._type.itemsize + 4))
        self._recent = RecentReads(max(1, _LEAST // 16, recent), self._type)
        self._most = max(_LEAST, (memory - self._recent.nbytes) // (self._type.itemsize + 8))
        self._where = PagedArray(0, np.int32)
        """By number: the slot of memory, `_NOWHERE`, or counted down from `_FIRST` the place in the file."""
        self._slots = PagedArray(0, self._type)
        self._number_of = PagedArray(0, np.int32)
        """By slot."""
        self._last = PagedArray(0, np.int32)
        """By number, when the row was written last; 0 for never."""
        self._before = PagedArray(0, np.int32)
        """By slot, when its row was written the time before."""
        self._now = 0
        self._used = self._hand = 0
        """Slots in use, and which of them is looked at next."""

    @property
    def nbytes(self) -> int:
        arrays = (self._where, self._last, self._slots, self._number_of, self._before)
        return sum(each.values.nbytes for each in arrays) + self._recent.nbytes

    @property
    def num_on_disk(self) -> int:
        return self._log.num_live

    def resize(self, size: int) -> None:
        before = self._where.values.size
        self._where.resize(size)
        self._where.values[before:] = _NOWHERE
        self._last.resize(size)

    def read(self, numbers: Numbers, num_words: int | None = None) -> Tensor:
        where = self._where.values.take(numbers).astype(np.int64)
        found = np.zeros(numbers.size, self._type)
        here, there = np.flatnonzero(where >= 0), np.flatnonzero(where <= _FIRST)
        found[here] = self._slots.values.take(where[here])
        if there.size:
            # Whole rows are read to be updated now, or to be saved: neither is read again soon.
            found[there] = self._read(numbers[there], _FIRST - where[there], keeps=num_words is not None)
        return _words(found)[:, :num_words]

    def write(self, numbers: Numbers, words: Tensor) -> None:
        records, at_once = _records(words), self._most // 2
        for begin in range(0, numbers.size, at_once):
            self._write(numbers[begin : begin + at_once], records[begin : begin + at_once])

    def runs(self, end: int, at_once: int) -> Iterator[Numbers]:
        """Yield what lies in the file in its order, what lies in memory, and what has moved meanwhile."""
        given = np.zeros(end, dtype=np.bool_)
        for places, numbers in self._log.segments():
            numbers = numbers[self._is_at(numbers, places)]
            for begin in range(0, numbers.size, at_once):
                part = numbers[begin : begin + at_once]
                yield part[part < end]
                given[part[part < end]] = True
        for part in _in_order(end, at_once):
            yield part[~given[part]]

    def _read(self, numbers: Numbers, places: Numbers, *, keeps: bool) -> Records:
        """Return copies of what lies in the file; keep them for a while, or not."""
        records = np.empty(numbers.size, self._type)
        kept, records_kept = self._recent.find(numbers)
        records[kept] = records_kept
        if not kept.all():
            of, first, again = np.unique(places[~kept], return_index=True, return_inverse=True)
            read = self._log.read(of)
            if keeps:
                self._recent.keep(numbers[~kept][first], read)
            records[~kept] = read[again]
        return records

    def _write(self, numbers: Numbers, records: Records) -> None:
        if self._now == _LATEST:
            self._now = _forget_older_half(self._now, self._last.values, self._before.values)
        self._now += 1
        where, before = self._where.values.take(numbers), self._last.values.take(numbers)
        self._last.values[numbers] = self._now
        here, coming = np.flatnonzero(where >= 0), np.flatnonzero(where < 0)
        self._recent.forget(numbers[coming])
        slots = where[here].astype(np.int64)
        self._slots.values.put(slots, records[here])
        self._before.values[slots] = before[here]
        if coming.size:
            self._take(numbers[coming], records[coming], before[coming])

    def _take(self, numbers: Numbers, records: Records, before: NDArray[np.int32]) -> None:
        """Take rows that are not in memory: there, or into the file."""
        fresh = self._begin_slots(numbers.size)
        slots, direct = self._oldest(
            fresh[0] if fresh.size else self._used, before, numbers.size - fresh.size
        )
        if slots.size or direct.any():
            self._clean()
        places = self._where.values.take(numbers).astype(np.int64)  # now: room was made in the file
        if slots.size:
            self._move(self._number_of.values[slots].astype(np.int64), self._slots.values.take(slots))
        if direct.any():
            self._move(numbers[direct], records[direct])
        self._log.forget(_FIRST - places[places <= _FIRST])
        slots, numbers = np.concatenate([fresh, slots]), numbers[~direct]
        self._where.values[numbers] = slots
        self._number_of.values[slots] = numbers
        self._slots.values.put(slots, records[~direct])
        self._before.values[slots] = before[~direct]

    def _begin_slots(self, count: int) -> Numbers:
        """Return unused slots, so many at most."""
        begin, self._used = self._used, min(self._used + count, self._most)
        if self._used > self._slots.values.size:
            size = min(self._most, max(self._used, int(self._slots.values.size * 1.125)))
            for each in (self._slots, self._number_of, self._before):
                each.resize(size)
        return np.arange(begin, self._used)

    def _oldest(self, used: int, coming: NDArray[np.int32], count: int) -> tuple[Numbers, NDArray[np.bool_]]:
        """Return so many rows that go to the file: slots of the used ones, and which of the coming ones."""
        window = min(used, _WINDOW * count)
        slots = (np.arange(window) + self._hand) % max(1, used)
        self._hand = (self._hand + window) % max(1, used)
        before = self._before.values[slots]
        # What is written now stays where it is.
        before[self._last.values[self._number_of.values[slots]] == self._now] = self._now
        going = np.zeros(window + coming.size, dtype=np.bool_)
        if count:
            going[np.argpartition(np.concatenate([before, coming]), count - 1)[:count]] = True
        return slots[going[:window]], going[window:]

    def _clean(self) -> None:
        """Write what is alive of a segment anew, where the file has more dead places than live ones."""
        found = self._log.emptiest()
        if found is None:
            return
        places, numbers = found
        alive = np.flatnonzero(self._is_at(numbers, places))
        self._move(numbers[alive], self._log.read(places[alive]))
        self._log.forget(places[alive])

    def _is_at(self, numbers: Numbers, places: Numbers) -> NDArray[np.bool_]:
        """Return which rows lie at these places of the file; of dead places the numbers are anything."""
        at: NDArray[np.bool_] = self._where.values.take(numbers, mode="clip") == _FIRST - places
        return at

    def _move(self, numbers: Numbers, records: Records) -> None:
        self._where.values[numbers] = _FIRST - self._log.append(numbers, records)


def _forget_older_half(now: int, *times: NDArray[np.int32]) -> int:
    """Count what was written in the older half of all time as never written; return what time it is."""
    half = now // 2
    for each in times:
        np.maximum(each - half, 0, out=each)
    return now - half


def _in_order(end: int, at_once: int) -> Iterator[Numbers]:
    return (np.arange(begin, min(begin + at_once, end)) for begin in range(0, end, at_once))


def _record(width: int) -> "np.dtype[np.void]":
    return np.dtype((np.void, 4 * width))


def _words(records: Records) -> Tensor:
    """Return the words of records; float32[n, width]."""
    return torch.from_numpy(records.view(np.float32).reshape(records.size, records.dtype.itemsize // 4))


def _records(words: Tensor) -> Records:
    """Return rows as records; void[n]."""
    return words.contiguous().numpy().view(_record(words.shape[1])).reshape(len(words))
