"""Arrays in memory pages of their own; they grow without a second copy and return freed memory to the system.

An allocator that keeps freed memory, as a parameter server's does, would keep every smaller array that a
table has outgrown. Large pages, where the system has them, also make random reads cheaper, because fewer
addresses have to be translated; an array gets large pages only if it starts on the boundary of one.
"""

import mmap
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["PagedArray"]

_LARGE_PAGE: Final = 2 << 20
_SMALL: Final = 4 << 20
"""The size in bytes below which the allocator provides the memory of an array."""
_RESERVED: Final = 4
"""The multiple of its size for which an array reserves addresses; memory is used only as the array grows."""
_COPY_BYTES: Final = 32 << 20


class PagedArray:
    """A one-dimensional array that can grow; new elements are zero.

    Parameters
    ----------
    size : int
    dtype : numpy.dtype

    Attributes
    ----------
    values : array[size]
        Replaced by `resize`; do not keep a reference across a call of it.
    """

    def __init__(self, size: int, dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._room: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._pages: mmap.mmap | None = None
        self.resize(size)

    def resize(self, size: int) -> None:
        """Grow the array to `size` elements."""
        num_bytes = size * self._dtype.itemsize
        if num_bytes > self._room.size:
            self._move(num_bytes)
        self.values: NDArray[Any] = self._room[:num_bytes].view(self._dtype)

    def _move(self, num_bytes: int) -> None:
        """Move the array to a larger mapping; only one chunk at a time exists twice."""
        before, pages = self._room, self._pages
        self._room, self._pages = _allocate(num_bytes)
        used = self.values.nbytes if before.size else 0
        for begin in range(0, used, _COPY_BYTES):
            chunk = slice(begin, min(begin + _COPY_BYTES, used))
            self._room[chunk] = before[chunk]
            if pages is not None:
                pages.madvise(mmap.MADV_DONTNEED, _border(pages) + begin, chunk.stop - begin)


def _allocate(num_bytes: int) -> tuple[NDArray[np.uint8], mmap.mmap | None]:
    """Return zeroed memory with unused address space after it, and its mapping."""
    if num_bytes < _SMALL:
        return np.zeros(num_bytes, np.uint8), None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, _RESERVED * num_bytes + _LARGE_PAGE, flags=flags)
    except OSError:  # a system that limits addresses (ulimit -v, no overcommit)
        pages = mmap.mmap(-1, num_bytes + _LARGE_PAGE, flags=flags)
    with suppress(OSError, AttributeError):  # a system without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8, len(pages) - _LARGE_PAGE, _border(pages)), pages


def _border(pages: mmap.mmap) -> int:
    """Return the offset of the first huge page in a mapping."""
    return int(-np.frombuffer(pages, np.uint8, 1).ctypes.data % _LARGE_PAGE)
