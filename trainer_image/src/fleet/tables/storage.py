"""Where the rows of a table lie: in memory, or the newest ones there and the others on a disk."""

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

_NOWHERE: Final = -1
"""Of a row that was never written: it is zero."""
_FIRST: Final = -2
"""Of a row at place 0 of the file; at place p, so much less."""
_WINDOW: Final = 8
"""Among so many times as many as have to go, those go whose last update is the longest ago."""
_LEAST: Final = 1024
"""Rows in memory, however few bytes that is."""

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
        """Return room for rows of so many words."""


@dataclass(frozen=True)
class Memory:
    """Rows lie in memory."""

    def rows(self, width: int) -> RowStore:
        """Return room for rows of so many words."""
        return _InMemory(width)


@dataclass(frozen=True)
class LocalDisk:
    """The rows that were updated last lie in memory, the others in a file, which goes with the process.

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

    A row is in memory from the time it is written until others are written and it has not been for long.
    Reading changes nothing: what is read from the file stays there.
    """

    def __init__(self, width: int, memory: int, directory: str | None) -> None:
        self._type = _record(width)
        self._log = RowLog(self._type, directory)
        self._most = max(_LEAST, memory // (self._type.itemsize + 8))
        self._where = PagedArray(0, np.int32)
        """By number: the slot of memory, `_NOWHERE`, or counted down from `_FIRST` the place in the file."""
        self._slots = PagedArray(0, self._type)
        self._number_of = PagedArray(0, np.int32)
        """By slot."""
        self._written = PagedArray(0, np.int32)
        """By slot, when it was written last."""
        self._now = 0
        self._used = self._hand = 0
        """Slots in use, and which of them is looked at next."""

    @property
    def nbytes(self) -> int:
        return sum(each.values.nbytes for each in (self._where, self._slots, self._number_of, self._written))

    @property
    def num_on_disk(self) -> int:
        return self._log.num_live

    def resize(self, size: int) -> None:
        before = self._where.values.size
        self._where.resize(size)
        self._where.values[before:] = _NOWHERE

    def read(self, numbers: Numbers, num_words: int | None = None) -> Tensor:
        where = self._where.values.take(numbers).astype(np.int64)
        found = np.zeros(numbers.size, self._type)
        here, there = np.flatnonzero(where >= 0), np.flatnonzero(where <= _FIRST)
        found[here] = self._slots.values.take(where[here])
        if there.size:
            found[there] = self._log.read(_FIRST - where[there])
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

    def _write(self, numbers: Numbers, records: Records) -> None:
        self._now += 1
        where = self._where.values.take(numbers).astype(np.int64)
        here = where >= 0
        self._written.values[where[here]] = self._now  # so that none of them goes
        if not here.all():
            coming = numbers[~here]
            slots = self._slots_for(coming.size)
            before = self._where.values[coming].astype(np.int64)  # now: room was made in the file
            self._log.forget(_FIRST - before[before <= _FIRST])
            self._where.values[coming] = slots
            self._number_of.values[slots] = coming
            self._written.values[slots] = self._now
            where[~here] = slots
        self._slots.values.put(where, records)

    def _slots_for(self, count: int) -> Numbers:
        """Return slots for records: unused ones, and of those that go."""
        begin, self._used = self._used, min(self._used + count, self._most)
        if self._used > self._slots.values.size:
            size = min(self._most, max(self._used, int(self._slots.values.size * 1.125)))
            for each in (self._slots, self._number_of, self._written):
                each.resize(size)
        fresh = np.arange(begin, self._used)
        self._written.values[fresh] = self._now
        return np.concatenate([fresh, self._evict(count - fresh.size)]) if count > fresh.size else fresh

    def _evict(self, count: int) -> Numbers:
        """Bring records to the file; return their slots."""
        window = min(self._most, _WINDOW * count)
        slots = (np.arange(window) + self._hand) % self._most
        self._hand = (self._hand + window) % self._most
        written = self._written.values[slots]
        going = slots[np.argpartition(written, count - 1)[:count]] if count < window else slots
        if (self._written.values[going] == self._now).any():  # what is being written stays
            slots = np.flatnonzero(self._written.values[: self._most] < self._now)
            going = slots[np.argpartition(self._written.values[slots], count - 1)[:count]]
        self._clean()
        self._move(self._number_of.values[going].astype(np.int64), self._slots.values.take(going))
        return going

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
