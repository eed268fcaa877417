"""A replica's progress: values that the script reports, and counters that the runtime keeps.

A process has one :class:`Progress`; its methods are this module's functions. `fleet.report` and the runtime
write to it. `fleet.process.progress_server` serves its snapshot to ``fleetjob run`` (for the table), the
operator (for the status) and Prometheus.

Forked children (``DataLoader`` workers) start with their own counters, which are not served.
"""

import logging
import math
import os
import re
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, SupportsFloat, SupportsIndex

from fleet.errors import ConfigurationError

__all__ = [
    "Number",
    "Progress",
    "count",
    "follow",
    "holds",
    "identify",
    "is_serving",
    "made",
    "report",
    "serves",
    "show_tables",
    "snapshot",
    "waits_for",
]

MAX_HISTORY: Final = 512
"""The maximum number of points in the loss curve."""
MAX_TABLES: Final = 50
"""The maximum number of tables shown, because each adds labels to the metrics and bytes to every snapshot."""
RATE_WINDOW_SECONDS: Final = 10.0
_METRIC_NAME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
_log = logging.getLogger(__name__)

Number = SupportsFloat | SupportsIndex
Tables = Sequence[Mapping[str, Any]]


class _LossCurve:
    """A loss curve of at most 512 points, thinned to every second point whenever it is full."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._latest: tuple[int, float] | None = None
        self._stride = 1
        self._skipped = 0
        self._warned = False

    def record(self, step: int | None, loss: float) -> None:
        """Record a point if the step is known and the loss is finite."""
        if not math.isfinite(loss):
            if not self._warned:
                self._warned = True
                _log.warning("the reported loss is %s at step %s", loss, step)
            return
        if step is None:
            return
        self._latest = (step, loss)
        if self._skipped > 0:
            self._skipped -= 1
            return
        self._points.append(self._latest)
        self._skipped = self._stride - 1
        if len(self._points) == MAX_HISTORY - 1:  # points() may append the latest one
            self._points = self._points[::2]
            self._stride *= 2
            self._skipped = self._stride - 1

    def points(self) -> list[list[float]]:
        """Return the recorded points, which always include the latest."""
        points = list(self._points)
        if self._latest is not None and (not points or points[-1] != self._latest):
            points.append(self._latest)
        return [[step, loss] for step, loss in points]


class _SampleRate:
    """The rate at which a count increased over the last ten seconds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        """Record the count at time `now`, in seconds of a monotonic clock."""
        self._counts.append((now, count))
        while len(self._counts) > 2 and now - self._counts[1][0] >= RATE_WINDOW_SECONDS:
            self._counts.popleft()

    def per_second(self) -> float | None:
        """Return the rate per second, or None if there is too little data."""
        if len(self._counts) < 2:
            return None
        (start, before), (end, after) = self._counts[0], self._counts[-1]
        return (after - before) / (end - start) if end > start and after >= before else None


class Progress:
    """The progress of one replica. Thread-safe.

    Parameters
    ----------
    clock : callable
        Returns seconds of a monotonic clock; used for the sample rate only.
    memory : callable
        Returns the resident memory of this process in bytes; None if unknown.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], int | None] = lambda: _resident_bytes(),
    ) -> None:
        self._clock = clock
        self._memory = memory
        self.reset()

    def reset(self) -> None:
        """Clear all values, and replace the lock, which another thread may have held during a fork."""
        # Reentrant: a signal handler of the script may report while the main thread holds the lock.
        self._lock = threading.RLock()
        self._serving = False
        self._waits_for: str | None = None
        self._parameter_bytes: int | None = None
        self._replica: tuple[str | None, int | None] = (None, None)
        self._count_made: Callable[[], int] | None = None
        self._made = 0
        self._tables: Callable[[], Tables] = tuple
        self._reported: dict[str, Any] = dict.fromkeys(("step", "totalSteps", "loss", "samples"))
        """The latest reported values, by their names in the snapshot."""
        self._metrics: dict[str, float] = {}
        self._counters: dict[str, int | float] = {}
        self._curve = _LossCurve()
        self._rate = _SampleRate()

    def identify(self, role: str, index: int) -> None:
        """Set this replica's role, TRAINER or PSERVER, and its index."""
        with self._lock:
            self._replica = role, index

    def follow(self, made: Callable[[], int]) -> None:
        """Show the runtime's step count until the script reports a step.

        Parameters
        ----------
        made : callable
            Returns the number of steps run; 0 before the first step, and once the trainer no longer exists.
            It must be thread-safe.
        """
        with self._lock:
            self._count_made = made

    def made(self) -> int | None:
        """Return the runtime's step count, or None if this process does not count steps."""
        with self._lock:
            return None if self._count_made is None else self._count_made()

    def show_tables(self, tables: Callable[[], Tables]) -> None:
        """Show embedding tables in snapshots, or only the largest tables if there are many.

        Parameters
        ----------
        tables : callable
            Returns ``name``, ``rows``, ``bytes``, ``rowsOnDisk`` and ``shardSkew`` of each table. A server
            adds ``lookedUp``, ``found`` and ``rowsOfFullestShard`` of its own part; a trainer adds
            ``hitPercentage``. It must be thread-safe, and must not block.
        """
        with self._lock:
            self._tables = tables

    def waits_for(self, what: str | None) -> None:
        """Set the event that this replica is waiting for; None clears it."""
        with self._lock:
            self._waits_for = what

    def holds(self, num_bytes: int) -> None:
        """Set the size in bytes of the dense parameters on this server."""
        with self._lock:
            self._parameter_bytes = num_bytes

    def serves(self, now: bool) -> None:
        """Set whether this process is serving requests, for the readiness probe."""
        self._serving = now

    def is_serving(self) -> bool:
        """Return whether this process is serving requests."""
        return self._serving

    def count(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the counter `name`, which is exported to Prometheus as ``fleet_{name}_total``."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def report(
        self,
        metrics: Mapping[str, Number] | None = None,
        *,
        step: int | None = None,
        total_steps: int | None = None,
        loss: Number | None = None,
        samples: int | None = None,
    ) -> tuple[int, dict[str, float]]:
        """Update the reported values; see `fleet.report`.

        Returns
        -------
        step : int
            The current step; 0 before the first step.
        values : dict of str to float
            The values of this report by name: ``loss``, ``samples_per_second``, and the named metrics.
        """
        given = {
            "step": _count_of("step", step),
            "totalSteps": _count_of("total_steps", total_steps),
            "loss": None if loss is None else _number_of("loss", loss),
            "samples": _count_of("samples", samples),
        }
        checked = _metrics_of(metrics)
        now = self._clock()
        with self._lock:
            self._reported |= {name: value for name, value in given.items() if value is not None}
            if samples is not None:
                self._rate.add(now, self._reported["samples"])
            if loss is not None:
                self._curve.record(self._current_step(), self._reported["loss"])
            self._metrics.update(checked)
            rate = self._rate.per_second() if samples is not None else None
            values = {"loss": given["loss"], "samples_per_second": rate, **checked}
            return self._current_step() or 0, {
                name: float(value) for name, value in values.items() if value is not None
            }

    def snapshot(self) -> dict[str, Any]:
        """Return the current state as JSON-ready data; values that were never reported are None."""
        with self._lock:
            tables = sorted(self._tables(), key=lambda table: table["bytes"], reverse=True)
            role, index = self._replica
            return {
                "role": role,
                "index": index,
                **self._reported,
                "step": self._current_step(),
                "loss": _finite(self._reported["loss"]),
                "samplesPerSecond": self._rate.per_second(),
                "memoryBytes": self._memory(),
                "parameterBytes": self._parameter_bytes,
                "waitsFor": self._waits_for,
                "metrics": {name: _finite(value) for name, value in self._metrics.items()},
                "history": self._curve.points(),
                "counters": dict(self._counters),
                "tables": [dict(table) for table in tables[:MAX_TABLES]],
            }

    def _current_step(self) -> int | None:
        """Return the reported step, or else the runtime's step count; None before the first step."""
        if (step := self._reported["step"]) is not None:
            return int(step)
        self._made = (self._count_made() if self._count_made is not None else 0) or self._made
        return self._made or None


def _resident_bytes() -> int | None:
    """Return this process's resident memory in bytes (on macOS, its peak), or None if it is unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  read every second; Path is slower
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if sys.platform == "darwin" else None


def _count_of(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        found = f"{value!r} ({type(value).__name__})"
        raise ConfigurationError(f"fleet.report: {name} is {found}; expected a whole number, 0 or more")
    number = value.__index__()
    if number < 0:
        raise ConfigurationError(f"fleet.report: {name} is {number}; expected a whole number, 0 or more")
    return int(number)


def _number_of(name: str, value: Any) -> float:
    if hasattr(value, "detach"):  # torch warns about converting a tensor that requires grad
        value = value.detach()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        found = f"{str(value)[:60]!r} ({type(value).__name__})"
        raise ConfigurationError(f"fleet.report: {name} is {found}; expected one number") from error


def _metrics_of(given: Any) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"fleet.report: metrics is {given!r}; expected a mapping, as {{'test_accuracy': 0.97}}"
        )
    return {name: _number_of(_checked_name(name), value) for name, value in given.items()}


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or _METRIC_NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"fleet.report: {name!r} is not a valid metric name; expected letters, digits and underscores"
        )
    return name


def _finite(value: float | None) -> float | None:
    """Return a finite value unchanged and any other as None, because JSON has no NaN or infinity."""
    return value if value is not None and math.isfinite(value) else None


_progress = Progress()
os.register_at_fork(after_in_child=_progress.reset)

count = _progress.count
follow = _progress.follow
holds = _progress.holds
identify = _progress.identify
is_serving = _progress.is_serving
made = _progress.made
report = _progress.report
serves = _progress.serves
show_tables = _progress.show_tables
snapshot = _progress.snapshot
waits_for = _progress.waits_for
