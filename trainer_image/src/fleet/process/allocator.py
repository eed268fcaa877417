"""What the C library does with large pieces of memory: freed ones are kept, and copies go past the caches.

Each backward pass makes gradients of the whole model's size, and ``zero_grad`` frees them. glibc returns
such pieces to the kernel, which then has to find, zero and map the same pages again at every step: for 100 MB
of gradients that is 25,000 page faults, a tenth of the time of a step.

Where trainers and servers share memory, each step copies the model's size twice on every trainer, and all
processes share the caches. A copy that passes by them leaves there what is computed with; glibc does so from
a size on that it reads when a process starts, so it is for whoever starts one to say.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["COPY_PAST_CACHES", "keep_freed_memory"]

COPY_PAST_CACHES: Final = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={2 << 20}"}
"""For the environment of processes that share memory, unless the user has set the variable.

About what a core's own cache holds. Other processors than x86, and other C libraries, do not know it.
"""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_HEAP_PIECE_BYTES: Final = (1 << 30, 32 << 20)
"""The second is the most that some builds of glibc accept (HEAP_MAX_SIZE / 2)."""
_NEVER_TRIM: Final = -1
_USER_SETTINGS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_MALLOC_TUNABLES: Final = "glibc.malloc."

Mallopt = Callable[[int, int], int]


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Tell malloc to keep freed memory; the process then stays as large as it was at its largest.

    Parameters
    ----------
    environ : mapping
        The process's environment. Whoever sets one of glibc's own variables for malloc has decided already.

    Returns
    -------
    bool
        Whether it was told: not where the C library has no ``mallopt``, or the user has decided.
    """
    has_decided = _MALLOC_TUNABLES in environ.get("GLIBC_TUNABLES", "")
    if has_decided or any(name in environ for name in _USER_SETTINGS):
        return False
    mallopt: Mallopt | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    told = [
        any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_HEAP_PIECE_BYTES),
        mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM),
    ]
    return all(told)
