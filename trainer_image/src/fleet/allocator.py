"""What becomes of memory that a training step frees: it is kept for the next step.

Each backward pass makes gradients of the whole model's size, and ``zero_grad`` frees them. glibc returns
such pieces to the kernel, which then has to find, zero and map the same pages again at every step: for 100 MB
of gradients that is 25,000 page faults, a tenth of the time of a step.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_HEAP_PIECE_BYTES: Final = (1 << 30, 32 << 20)
"""The second is the most that some builds of glibc accept (HEAP_MAX_SIZE / 2)."""
_NEVER_TRIM: Final = -1
_USER_SETTINGS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

Mallopt = Callable[[int, int], int]


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Tell malloc to keep freed memory; the process then stays as large as it was at its largest.

    Parameters
    ----------
    environ : mapping
        The process's environment. Whoever sets one of glibc's own variables has decided already.

    Returns
    -------
    bool
        Whether it was told: not where the C library has no ``mallopt``, or the user has decided.
    """
    if any(name in environ for name in _USER_SETTINGS):
        return False
    mallopt: Mallopt | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    told = [
        any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_HEAP_PIECE_BYTES),
        mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM),
    ]
    return all(told)
