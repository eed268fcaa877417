"""Which segments of a file of rows are on the disk, and reads of records that lie alone there."""

import errno
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.tables.direct_reads import DirectReads

__all__ = ["SettledSegments"]

_NOT_HERE: Final = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


class SettledSegments:
    """The segments that were written long ago; none where the disk has no `DirectReads`.

    What is still written, or in the system's cache only, is read from there.

    Parameters
    ----------
    descriptor : int
        Of the file.
    record : numpy.dtype
        Of what is read.
    segment_bytes : int
        Of each, one after the other.
    """

    def __init__(self, descriptor: int, record: "np.dtype[np.void]", segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        try:
            self._direct: DirectReads | None = DirectReads(descriptor, record)
        except OSError:
            self._direct = None
        self._settled = np.zeros(0, dtype=np.bool_)
        self._full: int | None = None
        """The newest one that is full; the system has begun to write it."""

    def begin(self, segment: int) -> None:
        """Take note that a segment is written from now on, for the first time or anew."""
        if segment >= self._settled.size:
            self._settled = np.append(self._settled, np.zeros(segment + 1 - self._settled.size, np.bool_))
        self._settled[segment] = False
        self._full = None if self._full == segment else self._full

    def fill(self, segment: int) -> None:
        """Have a full segment written to the disk; the one that was full before has had the time for it.

        Raises
        ------
        OSError
            The disk refuses.
        """
        if self._direct is None:
            return
        self._direct.let_go(segment * self._segment_bytes, self._segment_bytes)
        if self._full is not None:
            self._settle(self._direct, self._full)
        self._full = segment

    def _settle(self, direct: DirectReads, segment: int) -> None:
        begin = segment * self._segment_bytes
        try:
            direct.settle(begin, self._segment_bytes)
            direct.read(np.array([begin]))  # some file systems take no such reads, and tell only then
        except BlockingIOError:  # the kernel has no room for more reads now
            return
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self._direct = None
            self._settled[:] = False
        else:
            self._settled[segment] = True

    def have(self, segments: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which segments are settled."""
        found: NDArray[np.bool_] = self._settled[segments]
        return found

    def read(self, offsets: NDArray[np.int64]) -> NDArray[np.void]:
        """Return records of settled segments, by their offsets in the file; raises as `DirectReads.read`."""
        if self._direct is None:
            raise OSError(errno.ENOSYS, "this disk has no direct reads")
        return self._direct.read(offsets)
