"""How far this replica has come: what the script reports and the runtime counts, and who can read it.

One process has one :class:`Progress`. The script calls :func:`report`, the runtime calls :func:`count` and
says by :func:`follow` how many steps it has made, and everybody who shows progress (the table of
``fleetjob run``, the operator's status, Prometheus) reads the one snapshot that :func:`start_server` serves.

Forked children (``DataLoader`` workers) inherit neither the server nor a lock that somebody else holds: the
child closes its copy of the listening socket and starts with counters of its own that nobody serves.
"""

import math
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, SupportsIndex

from fleet.errors import ConfigurationError
from fleet.process.history import LossCurve, SampleRate
from fleet.process.progress_server import ProgressServer

__all__ = [
    "Progress",
    "close",
    "count",
    "follow",
    "holds",
    "identify",
    "made",
    "report",
    "serves",
    "show_tables",
    "snapshot",
    "start_server",
    "waits_for",
]

NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")

MOST_TABLES = 50
"""Of how many tables is told, the largest ones: each is a label of metrics, and adds to what is sent."""

Number = SupportsFloat | SupportsIndex
Tables = Sequence[Mapping[str, Any]]


class Progress:
    """The numbers of one replica, safe to write and read from any thread.

    Parameters
    ----------
    clock : callable
        Seconds of a monotonic clock; only the rate of samples depends on it.
    memory : callable
        Returns how many bytes of memory this process has, None where nobody knows.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], int | None] = lambda: _resident_bytes(),
    ) -> None:
        self._clock = clock
        self._memory = memory
        self._waits_for: str | None = None
        self._parameter_bytes: int | None = None
        self._lock = threading.Lock()
        self._replica: tuple[str | None, int | None] = (None, None)
        self._count_made: Callable[[], int] | None = None
        self._made = 0
        self._tables: Callable[[], Tables] = tuple
        self._reported: dict[str, Any] = dict.fromkeys(("step", "totalSteps", "loss", "samples"))
        """What was reported last, by its name in the snapshot."""
        self._metrics: dict[str, float] = {}
        self._counters: dict[str, int | float] = {}
        self._curve = LossCurve()
        self._rate = SampleRate()

    def identify(self, role: str, index: int) -> None:
        """Say which replica of the job these numbers belong to."""
        with self._lock:
            self._replica = role, index

    def follow(self, made: Callable[[], int]) -> None:
        """Take the step from the runtime for as long as the script reports none; see :func:`follow`."""
        with self._lock:
            self._count_made = made

    def show_tables(self, tables: Callable[[], Tables]) -> None:
        """Tell of embedding tables; see :func:`show_tables`."""
        with self._lock:
            self._tables = tables

    def waits_for(self, what: str | None) -> None:
        """Say what keeps this replica from training; see :func:`waits_for`."""
        with self._lock:
            self._waits_for = what

    def holds(self, num_bytes: int) -> None:
        """Say how large a server's dense parameters are; see :func:`holds`."""
        with self._lock:
            self._parameter_bytes = num_bytes

    def made(self) -> int | None:
        """Return how many steps the runtime has made; see :func:`made`."""
        with self._lock:
            return None if self._count_made is None else self._count_made()

    def report(
        self,
        metrics: Mapping[str, Number] | None = None,
        *,
        step: int | None = None,
        total_steps: int | None = None,
        loss: Number | None = None,
        samples: int | None = None,
    ) -> None:
        """Replace the given values; see :func:`report`."""
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

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of the runtime; see :func:`count`."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def snapshot(self) -> dict[str, Any]:
        """Return the present state as JSON-ready data; values never reported are None."""
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
                "tables": [dict(table) for table in tables[:MOST_TABLES]],
            }

    def _current_step(self) -> int | None:
        """Return the reported step, else the runtime's, once it has made one: also when it is gone."""
        if (step := self._reported["step"]) is not None:
            return int(step)
        self._made = (self._count_made() if self._count_made is not None else 0) or self._made
        return self._made or None


def _resident_bytes() -> int | None:
    """Return how many bytes of this process are in memory; where there is no /proc, how many were at most."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  each second: a Path costs more than the read
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
    if hasattr(value, "detach"):  # torch warns about a number taken out of a graph
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
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"fleet.report: {name!r} is no name for a metric; expected letters, digits and underscores"
        )
    return name


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity: a value that is one of them is absent there."""
    return value if value is not None and math.isfinite(value) else None


_progress = Progress()
_server: ProgressServer | None = None
_serves = False
_before_first_report: Callable[[], None] | None = None


def before_first_report(act: Callable[[], None]) -> None:
    """Have `act` called once, by the first report: a plain script has no ``fleet.init`` that would."""
    global _before_first_report
    _before_first_report = act


def report(
    metrics: Mapping[str, Number] | None = None,
    *,
    step: int | None = None,
    total_steps: int | None = None,
    loss: Number | None = None,
    samples: int | None = None,
) -> None:
    """Tell everybody who watches this job how far this replica has come.

    Parameters
    ----------
    metrics : mapping of str to number or tensor of one element, optional
        Whatever the script finds worth showing, for example ``{"test_accuracy": 0.97}``. The last value of a
        name counts. A name has letters, digits and underscores.
    step, total_steps : int, optional
        The step just made and how many there will be. Without a step, the one that the runtime has made.
    loss : number or tensor of one element, optional
        The loss of this step. Together with the step it becomes a point of the loss curve, which keeps at
        most 512 points: of a longer run every second, fourth, … report.
    samples : int, optional
        How many samples this replica has trained on since it began; their rate is computed from it.

    Raises
    ------
    ConfigurationError
        A value is no number, or a count is negative or no whole number; the message names the argument.
    """
    global _before_first_report
    act, _before_first_report = _before_first_report, None
    if act is not None:
        act()
    _progress.report(metrics, step=step, total_steps=total_steps, loss=loss, samples=samples)


def follow(made: Callable[[], int]) -> None:
    """Show the runtime's own step for as long as the script reports none.

    Parameters
    ----------
    made : callable
        Returns how many steps have been made, 0 before the first and when nobody knows any more. Any
        thread may call it.
    """
    _progress.follow(made)


def show_tables(tables: Callable[[], Tables]) -> None:
    """Tell of embedding tables, of the largest where there are many.

    Parameters
    ----------
    tables : callable
        Returns ``name``, ``rows``, ``bytes``, ``rowsOnDisk`` and ``shardSkew`` of each; a server also
        ``lookedUp``, ``found`` and ``rowsOfFullestShard``, of its own part, a trainer ``hitPercentage``. Any
        thread may call it, and it must not wait.
    """
    _progress.show_tables(tables)


def waits_for(what: str | None) -> None:
    """Say what this replica waits for before it trains or serves, such as a server; None: for nothing."""
    _progress.waits_for(what)


def holds(num_bytes: int) -> None:
    """Say how many bytes the dense parameters of a server have."""
    _progress.holds(num_bytes)


def made() -> int | None:
    """Return how many steps the runtime has made, as :func:`follow` says; None in a process without one."""
    return _progress.made()


def count(name: str, amount: float = 1) -> None:
    """Add `amount` to the counter `name`, which Prometheus sees as ``fleet_{name}_total``."""
    _progress.count(name, amount)


def snapshot() -> dict[str, Any]:
    """Return what has been reported and counted so far, as JSON-ready data."""
    return _progress.snapshot()


def serves(now: bool) -> None:
    """Say whether this process serves others now, for probes."""
    global _serves
    _serves = now


def identify(role: str, index: int) -> None:
    """Say which replica this process is: TRAINER or PSERVER, and its index."""
    _progress.identify(role, index)


def start_server(host: str, port: int) -> tuple[str, int]:
    """Serve the progress over HTTP from a daemon thread.

    Parameters
    ----------
    host
        The address to bind; the empty string means every interface.
    port
        The port; 0 lets the system choose.

    Returns
    -------
    tuple of str and int
        The address and port that are bound. A second call changes nothing and returns those of the first.

    Raises
    ------
    OSError
        The address cannot be bound.
    """
    global _server
    if _server is None:
        _server = ProgressServer(host, port, snapshot, lambda: _serves)
        _server.start()
    bound = _server.socket.getsockname()
    return str(bound[0]), int(bound[1])


def close() -> None:
    """Stop serving; what was reported stays readable in this process."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.shutdown()
        server.server_close()


def _start_afresh_in_child() -> None:
    """Leave the parent's server to the parent; a lock copied while it was held would never be released."""
    global _progress, _server, _before_first_report
    _before_first_report = None
    if _server is not None:
        _server.socket.close()
    _server = None
    _progress = Progress()


os.register_at_fork(after_in_child=_start_afresh_in_child)
