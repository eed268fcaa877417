"""Bytes of a frame that are read only when they are about to leave.

A value that may change at any time would have to be copied for each trainer that it is sent to, for as long
as it waits in an unacknowledged queue. So what waits is where it can be read; a sending thread reads it, run
by run, into a buffer of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LazyBytes"]


@dataclass(frozen=True, slots=True)
class LazyBytes:
    """Bytes that may change until they leave, and are read again if they have to be sent again.

    Attributes
    ----------
    num_bytes : int
        How many they are; that does not change.
    read : callable
        Fills a buffer with what begins at a byte; nothing of that changes meanwhile. Called by sending
        threads, several at once, with runs that begin at multiples of 64 bytes.
    """

    num_bytes: int
    read: Callable[[int, memoryview], None]

    def __len__(self) -> int:
        """Return how many bytes they are."""
        return self.num_bytes
