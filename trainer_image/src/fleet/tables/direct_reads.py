"""Many small reads of a file at a time, past the system's cache, by Linux's asynchronous I/O.

A disk answers many reads at once several times as fast as one after the other. Pages that come into the cache
for the sake of one record would take memory, and time of the processor, to be thrown out again.
"""

import ctypes
import errno
import mmap
import os
import platform
import weakref
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["DirectReads"]

_PAGE: Final = 4096
"""Reads begin and end at multiples of it, as the blocks of disks do."""
_AT_ONCE: Final = 256
_TOGETHER: Final = 64
"""So many reads that have ended are waited for before others begin."""


class _Calls(NamedTuple):
    """The numbers of system calls."""

    io_setup: int
    io_destroy: int
    io_getevents: int
    io_submit: int


_CALLS: Final = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}
"""By machine."""
_REQUEST: Final = np.dtype(
    {
        "names": ["slot", "operation", "file", "buffer", "bytes", "offset"],
        "formats": ["u8", "u2", "u4", "u8", "u8", "i8"],
        "offsets": [0, 16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
"""What is needed of the kernel's struct iocb; operation 0 is to read."""
_EVENT: Final = np.dtype([("slot", "u8"), ("request", "u8"), ("result", "i8"), ("more", "i8")])
"""Its struct io_event."""
_WRITE_AND_WAIT: Final = 7
"""Of sync_file_range: for all pages, whoever has begun to write them."""


class DirectReads:
    """Reads of one file. One thread at a time may read.

    Parameters
    ----------
    descriptor : int
        Of the file, which need not have a name.
    record : numpy.dtype
        Of what is read.

    Raises
    ------
    OSError
        The file's system, the kernel or this machine has no such reads.
    """

    def __init__(self, descriptor: int, record: "np.dtype[np.void]") -> None:
        if platform.machine() not in _CALLS:
            raise OSError(errno.ENOSYS, f"system calls of {platform.machine()} are not known")
        self._calls = _CALLS[platform.machine()]
        self._library = ctypes.CDLL(None, use_errno=True)
        self._library.syscall.restype = ctypes.c_long
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._context = ctypes.c_ulong(0)
        self._is_reading = False
        self._begin_context()
        weakref.finalize(self, self._library.syscall, ctypes.c_long(self._calls.io_destroy), self._context)
        self._record = record
        self._room = -(-(record.itemsize - 1 + _PAGE) // _PAGE) * _PAGE
        """Bytes of the pages in which a record may lie."""
        self._buffer = mmap.mmap(-1, _AT_ONCE * self._room)
        slots = np.arange(_AT_ONCE)
        self._requests = np.zeros(_AT_ONCE, _REQUEST)
        self._requests["slot"] = slots
        self._requests["file"] = self._file
        self._requests["buffer"] = np.frombuffer(self._buffer, np.uint8).ctypes.data + slots * self._room
        self._events = np.zeros(_AT_ONCE, _EVENT)

    def read(self, offsets: NDArray[np.int64]) -> NDArray[np.void]:
        """Return the records at these offsets in the file.

        Raises
        ------
        OSError
            The disk refuses.
        """
        if self._is_reading:  # it was left by an exception
            # None of its reads may end in the buffer later on: this waits for those that are under way.
            context, self._context.value = ctypes.c_ulong(self._context.value), 0
            self._library.syscall(ctypes.c_long(self._calls.io_destroy), context)
            self._is_reading = False
        if not self._context.value:
            self._begin_context()
        self._is_reading = True
        records = self._read(offsets)
        self._is_reading = False
        return records

    def _read(self, offsets: NDArray[np.int64]) -> NDArray[np.void]:
        records = np.empty(offsets.size, self._record)
        number = np.zeros(_AT_ONCE, dtype=np.int64)
        """By slot, of which record it is."""
        free, begun, ended = np.arange(_AT_ONCE), 0, 0
        while ended < offsets.size:
            slots, free = np.split(free, [min(free.size, offsets.size - begun)])
            number[slots] = np.arange(begun, begun + slots.size)
            self._begin(slots, offsets[number[slots]])
            begun += slots.size
            slots = self._wait(min(begun - ended, _TOGETHER))
            ended += slots.size
            mine = number[slots]
            records[mine] = self._records_at(slots * self._room + offsets[mine] % _PAGE)
            free = np.concatenate([free, slots])
        return records

    def settle(self, begin: int, num_bytes: int) -> None:
        """Wait until what was written to a part of the file is on the disk, and let it leave the cache.

        Raises
        ------
        OSError
            The disk refuses.
        """
        part = ctypes.c_int64(begin), ctypes.c_int64(num_bytes)
        if self._library.sync_file_range(ctypes.c_int(self._file), *part, ctypes.c_uint(_WRITE_AND_WAIT)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.let_go(begin, num_bytes)

    def let_go(self, begin: int, num_bytes: int) -> None:
        """Let what is on the disk leave the cache, and have the system begin to write what is not."""
        os.posix_fadvise(self._file, begin, num_bytes, os.POSIX_FADV_DONTNEED)

    def _begin_context(self) -> None:
        self._call(self._calls.io_setup, ctypes.c_long(_AT_ONCE), ctypes.byref(self._context))

    def _begin(self, slots: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        shifts = offsets % _PAGE
        self._requests["offset"][slots] = offsets - shifts
        self._requests["bytes"][slots] = self._needed(shifts)
        requests = self._requests.ctypes.data + slots.astype(np.uint64) * np.uint64(_REQUEST.itemsize)
        begun = 0
        while begun < slots.size:
            count, rest = ctypes.c_long(slots.size - begun), ctypes.c_void_p(requests.ctypes.data + 8 * begun)
            begun += self._call(self._calls.io_submit, self._context, count, rest)

    def _wait(self, count: int) -> NDArray[np.int64]:
        """Wait for so many reads to end at least; return the slots of all that have."""
        most, events = ctypes.c_long(_AT_ONCE), ctypes.c_void_p(self._events.ctypes.data)
        ended = self._events[
            : self._call(self._calls.io_getevents, self._context, ctypes.c_long(count), most, events, None)
        ]
        slots: NDArray[np.int64] = ended["slot"].astype(np.int64)
        short = ended["result"] < self._requests["bytes"][slots].astype(np.int64)
        if short.any():
            number = max(0, -int(ended["result"][short][0])) or errno.EIO
            raise OSError(number, os.strerror(number))
        return slots

    def _needed(self, shifts: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-(shifts + self._record.itemsize) // _PAGE) * _PAGE

    def _records_at(self, places: NDArray[np.int64]) -> NDArray[np.void]:
        """Return copies of the records that begin at any bytes of the buffer."""
        count = len(self._buffer) - self._record.itemsize + 1
        every: NDArray[np.void] = np.ndarray((count,), self._record, self._buffer, 0, (1,))
        return every[places]

    def _call(self, number: int, *arguments: Any) -> int:
        """Make a system call; it is made again where a signal has come."""
        while (result := int(self._library.syscall(ctypes.c_long(number), *arguments))) < 0:
            if ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result
