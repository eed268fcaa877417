"""A log-structured file of rows, with sequential writes and random reads.

The file consists of segments of equal size, and a place in a segment holds one record. When a row returns to
memory, its record is dead. If more records are dead than live, the owner rewrites the live records of the
segment that has the fewest; the segment's space is then reused.

Single records are read with Linux asynchronous I/O and O_DIRECT. A disk serves many concurrent reads several
times as fast as one read after another. The page cache would use a page of memory for each record, and
processor time to evict the page. Recent segments, which may not be on the disk yet, are read through the page
cache. So are all records if the file system or the kernel does not support such reads.
"""

import ctypes
import errno
import mmap
import os
import platform
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.errors import disk_error

__all__ = ["DirectReads", "RowLog"]

_SEGMENT_BYTES: Final = 16 << 20
_PAGE: Final = mmap.PAGESIZE
_NUMBER: Final = np.dtype(np.int32)
_UNSUPPORTED: Final = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}

_BLOCK: Final = 4096
"""The block size of disks; O_DIRECT reads begin and end at multiples of the block size."""
_READS_AT_ONCE: Final = 256
_READS_TOGETHER: Final = 64
"""The number of reads that are submitted and awaited together."""

Places = NDArray[np.int64]


class RowLog:
    """A log of records in an unnamed file that is deleted when the process ends.

    Parameters
    ----------
    dtype : numpy.dtype
        Type of a record.
    directory : str, optional
        Directory of the file; by default that of temporary files.

    Raises
    ------
    OSError
        The directory does not exist or cannot be written to.
    """

    def __init__(self, dtype: "np.dtype[np.void]", directory: str | None) -> None:
        self._dtype = dtype
        self._directory = directory or tempfile.gettempdir()
        self._file = tempfile.TemporaryFile(prefix="fleet-rows-", dir=directory)  # noqa: SIM115 - closed with the log
        # A placeholder, because an empty file cannot be mapped.
        self._map = mmap.mmap(-1, _PAGE)
        self._per_segment = max(1, _SEGMENT_BYTES // dtype.itemsize)
        self._records_bytes = -(-self._per_segment * dtype.itemsize // _PAGE) * _PAGE
        # A segment starts with its records; the row number of each record follows.
        self._segment_bytes = self._records_bytes + -(-self._per_segment * _NUMBER.itemsize // _PAGE) * _PAGE
        self._live = np.zeros(0, dtype=np.int64)
        """The number of live records in each segment."""
        self._next = 0
        """The position after the newest record."""
        try:
            self._direct: DirectReads | None = DirectReads(self._file.fileno(), dtype)
        except OSError:
            self._direct = None
        self._durable = np.zeros(0, dtype=np.bool_)
        """Whether each segment is completely on the disk, so that direct reads see its records."""
        self._flushing: int | None = None
        """The newest full segment, which the system is writing to the disk."""

    @property
    def num_live(self) -> int:
        """The number of live records."""
        return int(self._live.sum())

    @property
    def num_places(self) -> int:
        """The number of records, live or dead, that fit in the file."""
        return self._live.size * self._per_segment

    def append(self, numbers: NDArray[np.int64], records: NDArray[np.void]) -> Places:
        """Append the records of rows; return their positions in the file.

        Raises
        ------
        FleetError
            The write fails, with a `DiskFullError` if the disk is full; earlier records can still be read.
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
            raise disk_error(error, self._write_failure(error)) from error
        return np.concatenate(places)

    def release(self, places: Places) -> None:
        """Mark the records at these positions as dead."""
        self._live -= np.bincount(places // self._per_segment, minlength=self._live.size)

    def read(self, places: Places) -> NDArray[np.void]:
        """Return copies of the records at these positions.

        Raises
        ------
        FleetError
            A disk operation fails.
        """
        offsets, found = self._offsets(places), np.empty(places.size, self._dtype)
        direct = self._durable[places // self._per_segment]
        if 2 * np.unique(offsets // _PAGE).size < places.size:
            direct[:] = False  # with several records per page the page cache is cheaper
        if self._direct is not None and direct.any():
            try:
                found[direct] = self._direct.read(offsets[direct])
            except BlockingIOError:  # the kernel currently lacks resources for so many reads
                direct[:] = False
            except OSError as error:
                raise disk_error(
                    error,
                    f"rows of a table could not be read from {self._directory}: {error}; check its disk",
                ) from error
        if not direct.all():
            found[~direct] = self._read_mapped(places[~direct], offsets[~direct])
        return found

    def emptiest(self) -> tuple[Places, NDArray[np.int64]] | None:
        """Return positions and row numbers of the records in the segment with the fewest live records.

        Return None if more than half of the records in segments with live records are live, because rewriting
        would free too little.
        """
        candidates = self._live > 0
        if not candidates.any():
            return None
        num_places = int(np.count_nonzero(candidates)) * self._per_segment
        candidates[(self._next - 1) // self._per_segment] = False  # the segment that is being written
        if 2 * self.num_live > num_places or not candidates.any():
            return None
        return self._segment(int(np.flatnonzero(candidates)[np.argmin(self._live[candidates])]))

    def segments(self) -> Iterator[tuple[Places, NDArray[np.int64]]]:
        """Yield the positions and row numbers of the records in each segment."""
        return (self._segment(segment) for segment in range(self._live.size))

    def _segment(self, segment: int) -> tuple[Places, NDArray[np.int64]]:
        begin = segment * self._segment_bytes + self._records_bytes
        numbers = np.frombuffer(self._map, _NUMBER, self._per_segment, begin).astype(np.int64)
        return np.arange(self._per_segment) + segment * self._per_segment, numbers

    def _read_mapped(self, places: Places, offsets: Places) -> NDArray[np.void]:
        # Page faults would read one page after the other, so all pages are requested first.
        pages = np.unique(np.concatenate([offsets, offsets + (self._dtype.itemsize - 1)]) // _PAGE)
        will_need = self._map.madvise
        for page in (pages * _PAGE).tolist():
            will_need(mmap.MADV_WILLNEED, page, _PAGE)
        found = np.empty(places.size, self._dtype)
        of = places // self._per_segment
        for segment in np.unique(of).tolist():
            mine = np.flatnonzero(of == segment)
            records = np.frombuffer(self._map, self._dtype, self._per_segment, segment * self._segment_bytes)
            found[mine] = records.take(places[mine] % self._per_segment)
        return found

    def _write(self, numbers: NDArray[np.int64], records: NDArray[np.void]) -> Places:
        segment, at = divmod(self._next, self._per_segment)
        begin = segment * self._segment_bytes
        _write_at(self._file.fileno(), records, begin + at * self._dtype.itemsize)
        numbers_begin = begin + self._records_bytes + at * _NUMBER.itemsize
        _write_at(self._file.fileno(), numbers.astype(_NUMBER), numbers_begin)
        places = np.arange(self._next, self._next + records.size)
        self._live[segment] += records.size
        self._next += records.size
        return places

    def _begin_segment(self) -> None:
        """Continue writing in a segment without live records, or in a new segment if there is none."""
        if self._live.size:
            self._flush((self._next - 1) // self._per_segment)
        if (dead := np.flatnonzero(self._live == 0)).size:
            segment = int(dead[0])
            self._durable[segment] = False
            if self._flushing == segment:
                self._flushing = None
        else:
            segment = self._live.size
            self._allocate((segment + 1) * self._segment_bytes)
            self._live = np.append(self._live, 0)
            self._durable = np.append(self._durable, False)
        self._next = segment * self._per_segment

    def _allocate(self, end: int) -> None:
        """Extend the file by a segment, to `end` bytes."""
        # Space is allocated now, because a full disk during a write to mapped memory would kill the process.
        os.posix_fallocate(self._file.fileno(), end - self._segment_bytes, self._segment_bytes)
        if end > len(self._map):
            # Twice what is needed, so that the map is rarely replaced; the rest of the file is a hole.
            os.truncate(self._file.fileno(), 2 * end)
            self._map = mmap.mmap(self._file.fileno(), 2 * end, prot=mmap.PROT_READ)
            # Otherwise the system reads ahead, and caches rows that nobody asked for.
            self._map.madvise(mmap.MADV_RANDOM)

    def _flush(self, segment: int) -> None:
        """Start writing a full segment to disk, after the previous segment has been written."""
        if self._direct is None:
            return
        self._direct.drop_cache(segment * self._segment_bytes, self._segment_bytes)
        before = self._flushing
        if before is None:
            self._flushing = segment
            return
        begin = before * self._segment_bytes
        try:
            self._direct.flush(begin, self._segment_bytes)
            self._direct.read(np.array([begin]))  # some file systems fail direct reads only here
        except BlockingIOError:  # the kernel currently lacks resources for more reads
            pass
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._direct = None
            self._durable[:] = False
        else:
            self._durable[before] = True
        self._flushing = segment  # set last, so that a failed flush is retried

    def _write_failure(self, error: OSError) -> str:
        disk = os.fstatvfs(self._file.fileno())
        return (
            f"rows of a table could not be written to {self._directory}: {error}; their file has "
            f"{self._live.size * self._segment_bytes} bytes, and {disk.f_bavail * disk.f_frsize} are free "
            "there; expected room for about twice the rows that are not in memory: free some, or set another "
            "directory or more memory in LocalDisk, or use more parameter servers"
        )

    def _offsets(self, places: Places) -> NDArray[np.int64]:
        segments, at = np.divmod(places, self._per_segment)
        offsets: NDArray[np.int64] = segments * self._segment_bytes + at * self._dtype.itemsize
        return offsets


def _write_at(descriptor: int, array: NDArray[np.generic], begin: int) -> None:
    content = np.ascontiguousarray(array).view(np.uint8).data
    while content:
        written = os.pwrite(descriptor, content, begin)
        content, begin = content[written:], begin + written


class _Calls(NamedTuple):
    """The numbers of the asynchronous I/O system calls, which Python and the C library do not wrap."""

    io_setup: int
    io_destroy: int
    io_getevents: int
    io_submit: int


_CALLS: Final = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}
"""The system call numbers of each machine architecture."""
_REQUEST: Final = np.dtype(
    {
        "names": ["slot", "operation", "file", "buffer", "bytes", "offset"],
        "formats": ["u8", "u2", "u4", "u8", "u8", "i8"],
        "offsets": [0, 16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
"""The fields of the kernel's struct iocb that a read needs; operation 0 is a read."""
_EVENT: Final = np.dtype([("slot", "u8"), ("request", "u8"), ("result", "i8"), ("more", "i8")])
"""The kernel's struct io_event."""
_WRITE_AND_WAIT: Final = 7
"""Flags of sync_file_range: wait for writes in progress, write all pages, and wait for them."""


class DirectReads:
    """Reads small records of a file concurrently, bypassing the page cache. Not thread-safe.

    Parameters
    ----------
    descriptor : int
        The file's descriptor. The file need not have a name.
    record : numpy.dtype
        Type of a record.

    Raises
    ------
    OSError
        The file system, the kernel or the machine does not support such reads.
    """

    def __init__(self, descriptor: int, record: "np.dtype[np.void]") -> None:
        if platform.machine() not in _CALLS:
            raise OSError(errno.ENOSYS, f"system calls of {platform.machine()} are not known")
        self._calls = _CALLS[platform.machine()]
        self._library = ctypes.CDLL(None, use_errno=True)
        self._library.syscall.restype = ctypes.c_long
        # The file has no name; /proc opens it again, with other flags.
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._context = ctypes.c_ulong(0)
        self._is_reading = False
        self._begin_context()
        weakref.finalize(self, self._library.syscall, ctypes.c_long(self._calls.io_destroy), self._context)
        self._record = record
        self._room = -(-(record.itemsize - 1 + _BLOCK) // _BLOCK) * _BLOCK
        """The maximum size in bytes of the blocks that a record spans."""
        # O_DIRECT needs memory that is aligned to blocks, as mappings are.
        self._buffer = mmap.mmap(-1, _READS_AT_ONCE * self._room)
        slots = np.arange(_READS_AT_ONCE)
        self._requests = np.zeros(_READS_AT_ONCE, _REQUEST)
        self._requests["slot"] = slots
        self._requests["file"] = self._file
        self._requests["buffer"] = np.frombuffer(self._buffer, np.uint8).ctypes.data + slots * self._room
        self._events = np.zeros(_READS_AT_ONCE, _EVENT)

    def read(self, offsets: NDArray[np.int64]) -> NDArray[np.void]:
        """Return the records at the given offsets of the file.

        Raises
        ------
        OSError
            The read fails; a BlockingIOError means that the kernel has no resources for more reads.
        """
        if self._is_reading:  # an exception ended the previous call
            # Its reads must not write into the buffer later; io_destroy waits for those in progress.
            context, self._context.value = ctypes.c_ulong(self._context.value), 0
            self._library.syscall(ctypes.c_long(self._calls.io_destroy), context)
            self._is_reading = False
        if not self._context.value:
            self._begin_context()
        self._is_reading = True
        records = np.empty(offsets.size, self._record)
        record_of = np.zeros(_READS_AT_ONCE, dtype=np.int64)
        """The index of the record that each slot reads."""
        free, begun, ended = np.arange(_READS_AT_ONCE), 0, 0
        while ended < offsets.size:
            slots, free = np.split(free, [min(free.size, offsets.size - begun)])
            record_of[slots] = np.arange(begun, begun + slots.size)
            self._submit(slots, offsets[record_of[slots]])
            begun += slots.size
            slots = self._wait(min(begun - ended, _READS_TOGETHER))
            ended += slots.size
            mine = record_of[slots]
            records[mine] = self._records_at(slots * self._room + offsets[mine] % _BLOCK)
            free = np.concatenate([free, slots])
        self._is_reading = False
        return records

    def flush(self, begin: int, num_bytes: int) -> None:
        """Wait until a range of the file is on disk, then drop the range from the page cache.

        Raises
        ------
        OSError
            A disk operation fails.
        """
        part = ctypes.c_int64(begin), ctypes.c_int64(num_bytes)
        if self._library.sync_file_range(ctypes.c_int(self._file), *part, ctypes.c_uint(_WRITE_AND_WAIT)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.drop_cache(begin, num_bytes)

    def drop_cache(self, begin: int, num_bytes: int) -> None:
        """Drop a range's clean pages from the page cache, and start writing its dirty pages to disk."""
        os.posix_fadvise(self._file, begin, num_bytes, os.POSIX_FADV_DONTNEED)

    def _begin_context(self) -> None:
        self._call(self._calls.io_setup, ctypes.c_long(_READS_AT_ONCE), ctypes.byref(self._context))

    def _submit(self, slots: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        shifts = offsets % _BLOCK
        self._requests["offset"][slots] = offsets - shifts
        self._requests["bytes"][slots] = -(-(shifts + self._record.itemsize) // _BLOCK) * _BLOCK
        requests = self._requests.ctypes.data + slots.astype(np.uint64) * np.uint64(_REQUEST.itemsize)
        begun = 0
        while begun < slots.size:
            count, rest = ctypes.c_long(slots.size - begun), ctypes.c_void_p(requests.ctypes.data + 8 * begun)
            begun += self._call(self._calls.io_submit, self._context, count, rest)

    def _wait(self, count: int) -> NDArray[np.int64]:
        """Wait until at least `count` reads have completed; return the slots of all completed reads."""
        most, events = ctypes.c_long(_READS_AT_ONCE), ctypes.c_void_p(self._events.ctypes.data)
        ended = self._events[
            : self._call(self._calls.io_getevents, self._context, ctypes.c_long(count), most, events, None)
        ]
        slots: NDArray[np.int64] = ended["slot"].astype(np.int64)
        short = ended["result"] < self._requests["bytes"][slots].astype(np.int64)
        if short.any():
            number = max(0, -int(ended["result"][short][0])) or errno.EIO
            raise OSError(number, os.strerror(number))
        return slots

    def _records_at(self, offsets: NDArray[np.int64]) -> NDArray[np.void]:
        """Return copies of the records at the given byte offsets of the buffer."""
        count = len(self._buffer) - self._record.itemsize + 1
        overlapping: NDArray[np.void] = np.ndarray((count,), self._record, self._buffer, 0, (1,))
        return overlapping[offsets]

    def _call(self, number: int, *arguments: Any) -> int:
        """Make a system call; retry it if a signal interrupts it."""
        while (result := int(self._library.syscall(ctypes.c_long(number), *arguments))) < 0:
            if ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result
