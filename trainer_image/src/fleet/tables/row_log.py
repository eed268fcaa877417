"""Rows that memory has no room for, in a file: written one after the other, read wherever they lie.

A row that comes back into memory leaves its place dead. The file is in segments; where more places are dead
than alive, the segment with the most of them is emptied and written anew.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.errors import disk_error
from fleet.tables.settled import SettledSegments

__all__ = ["RowLog"]

_SEGMENT_BYTES: Final = 16 << 20
_PAGE: Final = mmap.PAGESIZE
_NUMBER: Final = np.dtype(np.int32)

Places = NDArray[np.int64]


class RowLog:
    """Records by place, in a file that has no name and goes with the process.

    Parameters
    ----------
    dtype : numpy.dtype
        Of a record.
    directory : str, optional
        Of the file; that of temporary files otherwise.

    Raises
    ------
    OSError
        There is no such directory, or it may not be written to.
    """

    def __init__(self, dtype: "np.dtype[np.void]", directory: str | None) -> None:
        self._dtype = dtype
        self._directory = directory or tempfile.gettempdir()
        self._file = tempfile.TemporaryFile(prefix="fleet-rows-", dir=directory)  # noqa: SIM115 - closed with it
        self._map = mmap.mmap(-1, _PAGE)
        self._per_segment = max(1, _SEGMENT_BYTES // dtype.itemsize)
        self._records_bytes = -(-self._per_segment * dtype.itemsize // _PAGE) * _PAGE
        self._segment_bytes = self._records_bytes + -(-self._per_segment * _NUMBER.itemsize // _PAGE) * _PAGE
        """Records, and then the number of the row of each."""
        self._live = np.zeros(0, dtype=np.int64)
        """By segment, how many of its records are alive."""
        self._next = 0
        """The place after the newest record."""
        self._settled = SettledSegments(self._file.fileno(), dtype, self._segment_bytes)

    @property
    def num_live(self) -> int:
        """Return how many records are alive."""
        return int(self._live.sum())

    @property
    def num_places(self) -> int:
        """How many records the file has room for."""
        return self._live.size * self._per_segment

    def append(self, numbers: NDArray[np.int64], records: NDArray[np.void]) -> Places:
        """Write records of the rows of some numbers; return their places.

        Raises
        ------
        FleetError
            The disk refuses, as a `DiskFullError` where it has no room; the records of before can be read.
        """
        places = []
        try:
            while records.size:
                room = -self._next % self._per_segment
                if not room or not self._live.size:
                    self._begin_segment()
                    room = self._per_segment
                places.append(self._write(numbers[:room], records[:room]))
                numbers, records = numbers[room:], records[room:]
        except OSError as error:
            raise disk_error(error, self._refused(error)) from error
        return np.concatenate(places)

    def forget(self, places: Places) -> None:
        """Let records be dead."""
        self._live -= np.bincount(places // self._per_segment, minlength=self._live.size)

    def read(self, places: Places) -> NDArray[np.void]:
        """Return copies of records.

        Raises
        ------
        FleetError
            The disk refuses.
        """
        offsets, found = self._offsets(places), np.empty(places.size, self._dtype)
        alone = self._settled.have(places // self._per_segment)
        if 2 * np.unique(offsets // _PAGE).size < places.size:
            alone[:] = False  # pages have several of them
        if alone.any():
            try:
                found[alone] = self._settled.read(offsets[alone])
            except BlockingIOError:  # the kernel has no room for so many reads now
                alone[:] = False
            except OSError as error:
                raise disk_error(
                    error,
                    f"rows of a table could not be read from {self._directory}: {error}; look at its disk",
                ) from error
        if not alone.all():
            found[~alone] = self._read_mapped(places[~alone], offsets[~alone])
        return found

    def _read_mapped(self, places: Places, offsets: Places) -> NDArray[np.void]:
        self._expect(offsets)
        found = np.empty(places.size, self._dtype)
        of = places // self._per_segment
        for segment in np.unique(of).tolist():
            mine = np.flatnonzero(of == segment)
            records = np.frombuffer(self._map, self._dtype, self._per_segment, segment * self._segment_bytes)
            found[mine] = records.take(places[mine] % self._per_segment)
        return found

    def _expect(self, begins: Places) -> None:
        """Have the system begin to read records, all at once: it would wait for one after the other."""
        pages = np.unique(np.concatenate([begins, begins + (self._dtype.itemsize - 1)]) // _PAGE)
        will_need = self._map.madvise
        for page in (pages * _PAGE).tolist():
            will_need(mmap.MADV_WILLNEED, page, _PAGE)

    def emptiest(self) -> tuple[Places, NDArray[np.int64]] | None:
        """Return the places of the segment with the fewest live records, and their rows' numbers.

        None where at least half of all places are alive, and there is nothing to be won.
        """
        emptied = self._live > 0
        if not emptied.any():
            return None
        num_places = int(np.count_nonzero(emptied)) * self._per_segment
        emptied[(self._next - 1) // self._per_segment] = False  # which is being written
        if 2 * self.num_live > num_places or not emptied.any():
            return None
        return self._segment(int(np.flatnonzero(emptied)[np.argmin(self._live[emptied])]))

    def segments(self) -> Iterator[tuple[Places, NDArray[np.int64]]]:
        """Yield of each segment that there is now its places, and the numbers of their rows."""
        return (self._segment(segment) for segment in range(self._live.size))

    def _segment(self, segment: int) -> tuple[Places, NDArray[np.int64]]:
        begin = segment * self._segment_bytes + self._records_bytes
        numbers = np.frombuffer(self._map, _NUMBER, self._per_segment, begin).astype(np.int64)
        return np.arange(self._per_segment) + segment * self._per_segment, numbers

    def _write(self, numbers: NDArray[np.int64], records: NDArray[np.void]) -> Places:
        segment, at = divmod(self._next, self._per_segment)
        begin = segment * self._segment_bytes
        _write_at(self._file.fileno(), records, begin + at * self._dtype.itemsize)
        _write_at(
            self._file.fileno(),
            numbers.astype(_NUMBER),
            begin + self._records_bytes + at * _NUMBER.itemsize,
        )
        places = np.arange(self._next, self._next + records.size)
        self._live[segment] += records.size
        self._next += records.size
        return places

    def _begin_segment(self) -> None:
        """Go on in a segment whose records are all dead, or in a new one."""
        if self._live.size:
            self._settled.fill((self._next - 1) // self._per_segment)
        if (dead := np.flatnonzero(self._live == 0)).size:
            self._next = int(dead[0]) * self._per_segment
            self._settled.begin(int(dead[0]))
            return
        begin = self._live.size * self._segment_bytes
        # Now: a disk that is full amid a write to memory would end the process without a word.
        os.posix_fallocate(self._file.fileno(), begin, self._segment_bytes)
        if begin + self._segment_bytes > len(self._map):
            size = 2 * (begin + self._segment_bytes)
            os.truncate(self._file.fileno(), size)
            self._map = mmap.mmap(self._file.fileno(), size, prot=mmap.PROT_READ)
            self._map.madvise(mmap.MADV_RANDOM)
        self._next = self._live.size * self._per_segment
        self._settled.begin(self._live.size)
        self._live = np.append(self._live, 0)

    def _refused(self, error: OSError) -> str:
        disk = os.fstatvfs(self._file.fileno())
        return (
            f"rows of a table could not be written to {self._directory}: {error}; their file has "
            f"{self._live.size * self._segment_bytes} bytes, and {disk.f_bavail * disk.f_frsize} are free "
            "there; expected room for about twice the rows that are not in memory: free some, or set another "
            "directory or more memory in LocalDisk, or use more parameter servers"
        )

    def _offsets(self, places: Places) -> NDArray[np.int64]:
        return (
            places // self._per_segment * self._segment_bytes
            + places % self._per_segment * self._dtype.itemsize
        )


def _write_at(descriptor: int, array: NDArray[np.generic], begin: int) -> None:
    content = np.ascontiguousarray(array).view(np.uint8).data
    while content:
        written = os.pwrite(descriptor, content, begin)
        content, begin = content[written:], begin + written
