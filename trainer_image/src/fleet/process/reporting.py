"""Passes values of ``fleet.report`` to the reporters named in ``FLEET_REPORTERS``.

A reporter may be slow, wait for a network or fail; training and the other reporters continue. Therefore each
reporter has a queue and a thread, and a report only appends to the queues. A reporter that fails is named in
the log once and gets no further values. If a queue is full, its oldest values are dropped, and the log gives
their number at the end.
"""

import importlib.util
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from fleet.errors import ConfigurationError, meant

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Reported", "Reporter", "Reporting", "close", "log"]

GROUP: Final = "fleet.reporters"
"""The entry point group in which packages register reporters."""
VARIABLE: Final = "FLEET_REPORTERS"
CAPACITY: Final = 10_000
"""The maximum number of reports in the queue of a slow reporter; older reports are dropped."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reported:
    """The replica whose values a reporter receives.

    Attributes
    ----------
    job : str
        The name of the job, ``FLEET_JOB_NAME``; ``fleet`` outside a job.
    replica : str
        Its role and index, such as ``trainer-0``.
    restarts : int
        The number of earlier starts of this replica.
    environ : mapping of str to str
        The environment, in which the package of a reporter finds its settings.
    """

    job: str
    replica: str
    restarts: int
    environ: Mapping[str, str]


class Reporter(Protocol):
    """The interface of a reporter; it runs in a separate thread, and any exception stops it."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record the values of one report.

        Parameters
        ----------
        values : mapping of str to float
            The values of one report: ``loss``, ``samples_per_second`` and the named metrics. They may be NaN
            or infinite.
        step : int
            The step that the values belong to. It is lower than that of an earlier call if the job has
            resumed from a checkpoint.
        """

    def close(self) -> None:
        """Write all pending values and release resources; called once."""


Factory = Callable[[Reported], Reporter]
"""Creates a reporter; the target of an entry point. If it has an attribute ``package``, that package must be
importable."""


class Reporting:
    """A reporter, with a queue of reports and a thread that passes them on.

    Parameters
    ----------
    name : str
        The name of the reporter, for the log.
    factory : callable
        Creates the reporter; called in the thread, because it may wait for a network.
    reported : Reported
    capacity : int
        The maximum number of queued reports; if the queue is full, the oldest report is dropped.
    """

    def __init__(self, name: str, factory: Factory, reported: Reported, *, capacity: int = CAPACITY) -> None:
        self._name, self._factory, self._reported = name, factory, reported
        self._queue: deque[tuple[int, Mapping[str, float]]] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()
        self._closing = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"fleet-reporting {name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue the values of a report without waiting for the reporter."""
        with self._changed:
            if not self._thread.is_alive():
                return
            if len(self._queue) >= self._capacity:
                self._queue.popleft()
                self._dropped += 1
            self._queue.append((step, dict(values)))
            self._changed.notify()

    def end(self) -> None:
        """Ask the reporter to write the queued values and close, without waiting for it."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Wait until the reporter has closed; log a warning if it is late or has dropped reports."""
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive():
            _log.warning("the reporter %s has not ended in time; its last values may be missing", self._name)
        elif self._dropped:
            _log.warning(
                "%d reports to %s were dropped, because it is slower than the script reports",
                self._dropped,
                self._name,
            )

    def _run(self) -> None:
        doing = "cannot start"
        try:
            reporter = self._factory(self._reported)
            try:
                while (report := self._next()) is not None:
                    step, values = report
                    doing = f"failed at step {step}"
                    reporter.log(values, step)
                doing = "could not be closed"
            finally:
                reporter.close()
        except Exception as error:  # noqa: BLE001 - training continues without the reporter
            sentence = f"{type(error).__name__}: {' '.join(str(error).split())}"
            _log.warning("the reporter %s %s and gets no further values: %s", self._name, doing, sentence)

    def _next(self) -> tuple[int, Mapping[str, float]] | None:
        """Wait for the next report; return None once the queue is empty and the reporter is closing."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            return self._queue.popleft() if self._queue else None


_starting = threading.Lock()
_reporting: list[Reporting] | None = None
"""The reporters of this process; None before the first report."""


def check(environ: Mapping[str, str]) -> None:
    """Check that ``FLEET_REPORTERS`` names only known reporters, without importing them.

    Raises
    ------
    ConfigurationError
        It names something that is not a reporter.
    """
    _chosen(environ)


def log(values: Mapping[str, float], step: int, identity: str, environ: Mapping[str, str]) -> None:
    """Pass values to the reporters named in the environment; the first call starts them.

    Parameters
    ----------
    values : mapping of str to float
    step : int
    identity : str
        The role and index of this replica, such as ``trainer 0``.
    environ : mapping of str to str
        Read by the first call only.

    Raises
    ------
    ConfigurationError
        The environment names an unknown reporter, or one whose package is not installed.
    """
    global _reporting
    if _reporting is None:
        with _starting:
            if _reporting is None:
                factories = {name: _load(entry) for name, entry in _chosen(environ).items()}
                if factories:
                    # The tools' packages import this in the reporters' threads, where its first import fails
                    # once the script has ended.
                    importlib.import_module("concurrent.futures.thread")
                job = environ.get("FLEET_JOB_NAME") or "fleet"
                restarts = environ.get("FLEET_RESTARTS", "")
                count = int(restarts) if restarts.isascii() and restarts.isdigit() else 0
                reported = Reported(job, identity.replace(" ", "-"), count, environ)
                _reporting = [Reporting(name, factory, reported) for name, factory in factories.items()]
    for each in _reporting if values else ():
        each.log(values, step)


def close(seconds: float) -> None:
    """Close the reporters of this process within a time limit; later calls do nothing."""
    global _reporting
    # Empty and not None, which would start the reporters again.
    ending, _reporting = _reporting or (), []
    until = time.monotonic() + seconds
    for each in ending:
        each.end()
    for each in ending:
        each.join(until - time.monotonic())


def _chosen(environ: Mapping[str, str]) -> dict[str, "EntryPoint"]:
    names = [name.strip() for name in environ.get(VARIABLE, "").split(",") if name.strip()]
    if not names:
        return {}
    from importlib.metadata import entry_points  # imported late, to keep `import fleet` fast

    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"{VARIABLE} names {name!r}{meant(name, known)}; expected names of installed reporters, "
                f"separated by commas: {', '.join(sorted(known)) or 'none is installed'}"
            )
    return {name: known[name] for name in names}


def _load(entry: "EntryPoint") -> Factory:
    try:
        factory: Factory = entry.load()
    except ImportError as error:
        raise ConfigurationError(
            f"{VARIABLE} names {entry.name!r}, which cannot be imported: {error}; install what it needs, or "
            "leave it out"
        ) from error
    package = getattr(factory, "package", None)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigurationError(
            f"{VARIABLE} names {entry.name!r}, but the package {package} is not installed here: pip install "
            f"{package}, or leave it out"
        )
    return factory


def _forget_in_child() -> None:
    """Discard the reporters in a forked child, because their threads exist only in the parent."""
    global _reporting, _starting
    _reporting, _starting = [], threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
