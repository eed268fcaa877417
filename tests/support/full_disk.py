"""Simulates a full disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_room_beyond"]


@contextmanager
def no_room_beyond(num_bytes: int) -> Iterator[None]:
    """Limit the size of the files that this process can write within the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
