"""The record of a run in its log folder, which ``fleetjob ui`` reads during and after the run.

``run.json`` contains the state of the job and of its replicas, and is replaced whenever the state changes.
``points.jsonl`` contains the points of the trainers' curves, one per line. The runner holds a lock on this
file while it is running. If a record has neither a lock nor an end, its runner was killed.

The user's state folder contains a link to the log folder of each recent run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fleet_operator.api import Role
from fleet_operator.cli.lines import now
from fleet_operator.cli.scalars import NewPoints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime

    from fleet_operator.api import FleetJob
    from fleet_operator.cli.replica import ReplicaView
    from fleet_operator.cli.view import JobView

RECORD = "run.json"
POINTS = "points.jsonl"
VERSION = 1
MAX_EVENTS = 300
"""The maximum number of sentences in a record; the oldest ones are dropped."""

LOCK_TRIES = 10
"""How often a run tries to lock its points file; a reader that tests the lock briefly holds it."""

LOCK_SECONDS = 0.01
"""The pause after a failed attempt to lock the points file."""

KEPT_RUNS = 200
"""The maximum number of links in the state folder; older links are removed, but not their log folders."""


def runs_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of links to this user's recent runs.

    Raises
    ------
    RuntimeError
        The user has no home directory.
    """
    state = environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "fleetjob" / "runs"


def run_id(folder: Path) -> str:
    """Return the identifier of the run that has the given log folder."""
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]


def register(folder: Path, runs: Path) -> None:
    """Link to a run's log folder; remove the oldest links and broken ones.

    Raises
    ------
    OSError
        The link cannot be written.
    """
    runs.mkdir(parents=True, exist_ok=True, mode=0o700)
    link = runs / run_id(folder)
    link.unlink(missing_ok=True)
    link.symlink_to(folder.resolve())
    links = list[tuple[float, Path]]()
    for each in runs.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run that starts now may have removed it
            links.append((each.lstat().st_mtime, each))
    for number, (_, each) in enumerate(sorted(links, reverse=True)):
        if each.is_symlink() and (number >= KEPT_RUNS or not each.exists()):
            each.unlink(missing_ok=True)


def is_live(folder: Path) -> bool:
    """Return whether the runner that owns a log folder is still running."""
    try:
        with (folder / POINTS).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class RunRecord:
    """Writes the record of one run; on a full disk, the record ends but the training continues.

    Parameters
    ----------
    folder : Path
        The log folder; it exists.
    job : FleetJob
        The job at its start.
    say : callable
        Called with a line if the record cannot be written.
    runs : Path, optional
        The folder of links to runs; without one, the run is not linked.
    """

    def __init__(
        self, folder: Path, job: FleetJob, say: Callable[[str], None], *, runs: Path | None = None
    ) -> None:
        self._folder = folder
        self._say = say
        self._job = job
        self._started = now()
        self._events: list[dict[str, str]] = []
        self._new: dict[str, NewPoints] = {}
        self._written: dict[str, Any] = {}
        self._closing = contextlib.ExitStack()
        self._failed = False
        with self._tolerant():
            self._points = self._closing.enter_context((folder / POINTS).open("a"))
            _lock(self._points)
            self._points.truncate(0)  # only now: until then, they may be those of another run
            if runs is not None:
                register(folder, runs)

    def note(self, line: str) -> None:
        """Add a sentence to the record."""
        self._events.append({"time": _stamp(now()) or "", "message": line})
        del self._events[:-MAX_EVENTS]

    def update(self, view: JobView) -> None:
        """Write a job's state if it has changed, and the new points of its curves."""
        explanation = view.status.explanation
        self._write(view, view.state, explanation.message if explanation is not None else "")

    def finish(self, view: JobView, state: str, message: str) -> None:
        """Write the result of the run."""
        self._write(view, state, message, ended=now())

    def close(self) -> None:
        """Close the record and release its lock."""
        self._closing.close()

    def _write(self, view: JobView, state: str, message: str, ended: datetime | None = None) -> None:
        if self._failed:
            return
        record = {
            "version": VERSION,
            "name": view.job.name,
            "mode": view.job.spec.mode.value,
            "state": state,
            "message": message,
            "started": _stamp(self._started),
            "ended": _stamp(ended),
            "replicas": [_replica(replica) for replica in view.replicas.values()],
            "events": self._events,
        }
        with self._tolerant():
            for replica in view.replicas.values():
                self._write_points(replica)
            self._points.flush()
            if record != self._written:
                partial = self._folder / f"{RECORD}.partial"
                partial.write_text(json.dumps(record))
                partial.replace(self._folder / RECORD)
                self._written = {**record, "events": self._events[:]}

    def _write_points(self, replica: ReplicaView) -> None:
        progress = replica.progress
        if replica.role is not Role.TRAINER or progress is None or progress.step is None:
            return
        new = self._new.setdefault(replica.name, NewPoints())
        for step, values in new.take(progress, progress.step):
            self._points.write(json.dumps([replica.name, step, values]) + "\n")

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            self._say(f"`fleetjob ui` cannot show this run: {error.filename or RECORD}: {error.strerror}")


def _lock(file: TextIO) -> None:
    """Lock a run's points file; raise OSError if another run holds the lock."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_SECONDS)
        else:
            return
    raise OSError(errno.EBUSY, "another run uses this log folder; give each run its own --log-dir", file.name)


def _replica(replica: ReplicaView) -> dict[str, Any]:
    progress, pods = replica.progress, [*replica.earlier, *([replica.pod] if replica.pod else [])]
    return {
        "name": replica.name,
        "state": replica.state,
        "restarts": replica.restarts,
        "exit_codes": list(replica.exit_codes),
        "step": progress.step if progress else None,
        "total_steps": progress.total_steps if progress else None,
        "loss": progress.loss if progress else None,
        "samples_per_second": progress.samples_per_second if progress else None,
        "memory_bytes": progress.memory_bytes if progress else None,
        "waits_for": progress.waits_for if progress else None,
        "eta_seconds": replica.eta_seconds,
        "metrics": dict(progress.metrics) if progress else {},
        "lives": [
            {
                "attempt": str(pod.attempt),
                "started": _stamp(pod.started_at),
                "ended": _stamp(pod.finished_at),
                "exit_code": pod.exit_code,
            }
            for pod in pods
        ],
    }


def _stamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
