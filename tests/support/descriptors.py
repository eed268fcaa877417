"""Exhausts the file descriptors of this process."""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_descriptor_left"]


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Use up all file descriptors within the block."""
    gc.collect()  # otherwise garbage of other tests could free descriptors later
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    highest = max(int(each) for each in os.listdir("/proc/self/fd"))  # noqa: PTH208 (no paths needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in taken:
            os.close(each)
