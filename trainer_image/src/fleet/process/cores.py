"""How many cores this process may compute on."""

import math
import os
from pathlib import Path
from typing import Final

__all__ = ["available_cores"]

_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


def available_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Return the cores that this process may run on, or the CPU limit of its container where that is less.

    Parameters
    ----------
    cpu_max : Path
        The quota of the control group (version 2) and its period, in microseconds; ``max`` for no quota.

    Returns
    -------
    int
        At least 1; a part of a core counts as one.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no quota, or no such control group
        return cores
