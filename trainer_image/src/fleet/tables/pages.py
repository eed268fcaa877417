"""Arrays in pages of their own: they grow without a second copy, and leave no holes behind.

An allocator that keeps what is freed, as that of a parameter server does, would keep each smaller array that
a table has grown out of. And where the system has large pages they make random reads cheaper, as fewer
addresses are to be translated; an array has them only where it begins at the border of one.
"""

import mmap
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["PagedArray"]

_LARGE_PAGE: Final = 2 << 20
_SMALL: Final = 4 << 20
"""Bytes below which an array is left to the allocator."""
_RESERVED: Final = 4
"""An array has addresses for so many times its size; memory it takes as it grows."""
_MOVED_AT_ONCE: Final = 32 << 20


class PagedArray:
    """One dimension of zeros, which can grow.

    Parameters
    ----------
    size : int
    dtype : numpy.dtype

    Attributes
    ----------
    values : array[size]
        Another one after `resize`; one from before must not be used any more.
    """

    def __init__(self, size: int, dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._room: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._pages: mmap.mmap | None = None
        self.resize(size)

    def resize(self, size: int) -> None:
        """Grow to a size; what is new is 0."""
        num_bytes = size * self._dtype.itemsize
        if num_bytes > self._room.size:
            self._move(num_bytes)
        self.values: NDArray[Any] = self._room[:num_bytes].view(self._dtype)

    def _move(self, num_bytes: int) -> None:
        """Take room for so many bytes, and move there what there is, part by part: little is there twice."""
        before, pages = self._room, self._pages
        self._room, self._pages = _room_for(num_bytes)
        used = self.values.nbytes if before.size else 0
        for begin in range(0, used, _MOVED_AT_ONCE):
            part = slice(begin, min(begin + _MOVED_AT_ONCE, used))
            self._room[part] = before[part]
            if pages is not None:
                pages.madvise(mmap.MADV_DONTNEED, _border(pages) + begin, part.stop - begin)


def _room_for(num_bytes: int) -> tuple[NDArray[np.uint8], mmap.mmap | None]:
    """Return zeros for so many bytes, with more addresses to grow into, and the pages they are in."""
    if num_bytes < _SMALL:
        return np.zeros(num_bytes, np.uint8), None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, _RESERVED * num_bytes + _LARGE_PAGE, flags=flags)
    except OSError:  # more addresses than this system hands out
        pages = mmap.mmap(-1, num_bytes + _LARGE_PAGE, flags=flags)
    with suppress(OSError, AttributeError):  # a system without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8, len(pages) - _LARGE_PAGE, _border(pages)), pages


def _border(pages: mmap.mmap) -> int:
    """Return where in pages the first large one begins."""
    return int(-np.frombuffer(pages, np.uint8, 1).ctypes.data % _LARGE_PAGE)
