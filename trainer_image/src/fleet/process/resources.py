"""Resources of a process: file descriptors, memory, CPU cores, and a clock for watchdogs."""

import contextlib
import ctypes
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

__all__ = [
    "COPY_PAST_CACHES",
    "Reserve",
    "WatchClock",
    "available_cores",
    "for_saves",
    "keep_freed_memory",
    "raise_descriptor_limit",
]

_SAVE_DESCRIPTORS: Final = 16
"""The descriptors reserved for saves and loads, which open a few files and folders simultaneously."""
_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")

COPY_PAST_CACHES: Final = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={2 << 20}"}
"""The environment that makes glibc copy large blocks past the CPU caches, for processes that share memory.

Each step copies the model twice on every trainer, and all processes share the caches: copies that bypass the
caches do not evict the working set of the computation. The threshold is about the size of one core's private
cache. glibc reads the variable when a process starts, so the launcher sets it, unless the user has set it.
Processors other than x86 and other C libraries ignore it.
"""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLDS: Final = (1 << 30, 32 << 20)
"""The mmap thresholds to try; some builds of glibc accept at most the second (HEAP_MAX_SIZE / 2)."""
_NEVER_TRIM: Final = -1
_USER_SETTINGS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_MALLOC_TUNABLES: Final = "glibc.malloc."

Mallopt = Callable[[int, int], int]


class Reserve:
    """A reserve of file descriptors that other code in this process cannot use.

    Parameters
    ----------
    count : int
        The number of descriptors to reserve. They are open on ``/dev/null`` until they are released.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._kept: list[int] = []
        self._keeps = False
        self._lent = 0

    def keep(self) -> None:
        """Reserve as many of the descriptors as are available."""
        with self._lock:
            self._keeps = True
            self._fill()

    def give_up(self) -> None:
        """Release the descriptors permanently."""
        with self._lock:
            self._keeps = False
            self._release()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Make the reserved descriptors available in the `with` block."""
        with self._lock:
            self._lent += 1
            self._release()
        try:
            yield
        finally:
            with self._lock:
                self._lent -= 1
                self._fill()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):  # no descriptor is free at present; the next call retries
            while self._keeps and not self._lent and len(self._kept) < self._count:
                self._kept.append(os.open(os.devnull, os.O_RDONLY))

    def _release(self) -> None:
        while self._kept:
            os.close(self._kept.pop())


for_saves: Final = Reserve(_SAVE_DESCRIPTORS)


def raise_descriptor_limit() -> None:
    """Raise the limit on open files to the hard limit, and reserve descriptors for saves."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS grants less than its hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for_saves.keep()


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Make malloc keep freed memory instead of returning it to the kernel.

    Each backward pass allocates gradients of the whole model's size, and ``zero_grad`` frees them. By default
    glibc returns such blocks to the kernel, which must map and zero the same pages again in every step: 100
    MB of gradients cause 25,000 page faults, which take a tenth of the step's time.

    Parameters
    ----------
    environ : mapping
        The process's environment. If it sets one of glibc's malloc variables, nothing changes.

    Returns
    -------
    bool
        True if malloc accepted the settings; False if the C library has no ``mallopt`` or the user has
        configured malloc.
    """
    user_set = _MALLOC_TUNABLES in environ.get("GLIBC_TUNABLES", "")
    if user_set or any(name in environ for name in _USER_SETTINGS):
        return False
    mallopt: Mallopt | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    accepted = [
        any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS),
        mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM),
    ]
    return all(accepted)


def available_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Return the number of cores that this process's CPU affinity and control group allow.

    Parameters
    ----------
    cpu_max : Path
        The control group's (version 2) CPU quota and period in microseconds; ``max`` means no quota.

    Returns
    -------
    int
        At least 1; a fraction of a core counts as one.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no quota, or no such control group
        return cores


class WatchClock:
    """A clock for watchdogs that excludes time during which the watchdog itself was frozen.

    A process may be stopped, starved, or paused with its container. When it resumes, the heartbeats of its
    peers have arrived but are unread, so the pause must not count as silence of the peers. Each interval
    between two readings counts as at most `most_seconds`, but never as zero: if every reading is late, a
    deadline is delayed but still expires.

    Parameters
    ----------
    most_seconds : float
        The limit on each interval between two readings. A watchdog should read the clock at shorter
        intervals.
    clock : callable
        Returns seconds of a monotonic clock.
    """

    def __init__(self, most_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = self._now = clock()

    def now(self) -> float:
        """Return the time of this clock. Thread-safe."""
        with self._lock:
            read_at = self._clock()
            self._now += min(read_at - self._read_at, self._most)
            self._read_at = read_at
            return self._now
