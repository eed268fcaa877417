"""The runs on this machine, from their records and logs."""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING, Any

from fleet_operator.cli.run_record import POINTS, RECORD, VERSION, is_live, run_id
from fleet_operator.cli.ui.series import Series
from fleet_operator.local.log import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

Document = dict[str, Any]

FINAL = ("Succeeded", "Failed", "Stopped")
LOST = "its runner ended without a summary, for example by SIGKILL; no process of the run is left"
LOG_BYTES = 1 << 18
"""The maximum number of bytes of a log in one response."""

REPLICA = re.compile(r"(?:pserver|trainer)-\d+")


class LocalRuns:
    """The runs on this machine.

    Parameters
    ----------
    folders : sequence of Path
        Log folders of runs, and folders that contain, or have links to, log folders.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._records: dict[str, tuple[tuple[int, ...], Document]] = {}  # by run: what the file was, and held
        self._points: dict[str, Points] = {}
        self._reading = threading.Lock()  # requests run in threads, and two pages may show the same run

    def rows(self) -> list[Document]:
        """Return a table row for each run, latest first."""
        records = ((name, folder, self._record(name, folder)) for name, folder in self._found().items())
        rows = [self._row(name, folder, record) for name, folder, record in records if record is not None]
        return sorted(rows, key=lambda row: row["started"] or "", reverse=True)

    def detail(self, name: str) -> Document | None:
        """Return all data of a run except its logs, or None if the run does not exist."""
        folder = self._found().get(name)
        record = None if folder is None else self._record(name, folder)
        if folder is None or record is None:
            return None
        with self._reading:
            points = self._points.get(name)
            # The file of a later run in the same folder may by now be longer than the part that was read.
            if points is None or points.started != record["started"]:
                points = self._points[name] = Points(folder / POINTS, record["started"])
            points.read()
            series = points.series.thinned()
        return {
            **self._row(name, folder, record),
            "replicas": record["replicas"],
            "events": record["events"],
            "conditions": [],
            "series": series,
            "curves_note": None,
            "folder": str(folder.resolve()),
        }

    def log(self, name: str, replica: str, cursor: str) -> Document | None:
        """Return the lines of a log from a cursor on, and the next cursor; None if the log does not exist.

        Parameters
        ----------
        name : str
            The run.
        replica : str
            The replica, such as ``trainer-0``.
        cursor : str
            The cursor from an earlier response, or empty for the end of the log.
        """
        folder = self._found().get(name)
        if folder is None or REPLICA.fullmatch(replica) is None:
            return None
        try:
            with (folder / f"{replica}.log").open("rb") as file:
                end = file.seek(0, 2)
                # A cursor beyond the end is that of a longer file, which has been replaced.
                known = cursor.isdecimal() and int(cursor) <= end
                start = int(cursor) if known else max(0, end - LOG_BYTES)
                file.seek(start)
                data = file.read(LOG_BYTES)
        except FileNotFoundError:
            return {"lines": [], "next": ""}
        whole, newline, rest = data.rpartition(b"\n")
        if not newline and len(data) == LOG_BYTES:
            whole, newline, rest = data, b"", b""  # a line longer than an answer comes in pieces
        lines = whole.decode(errors="replace").split("\n") if whole or newline else []
        if not known and start > 0:
            lines = lines[1:]
        return {"lines": [printable(line) for line in lines], "next": str(start + len(data) - len(rest))}

    def _found(self) -> dict[str, Path]:
        return {run_id(folder): folder for each in self._folders for folder in _log_folders(each)}

    def _record(self, name: str, folder: Path) -> Document | None:
        path = folder / RECORD
        try:
            found = path.stat()
            # The time has the resolution of the kernel's tick, within which a record may be replaced twice.
            changed = (found.st_mtime_ns, found.st_ino, found.st_size)
            if (known := self._records.get(name)) is not None and known[0] == changed:
                return known[1]
            record: Document = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(record, dict) or record.get("version") != VERSION:
            return None
        self._records[name] = changed, record
        return record

    def _row(self, name: str, folder: Path, record: Document) -> Document:
        state, sentence = record["state"], record["message"]
        if state not in FINAL and not is_live(folder):
            state, sentence = "Lost", LOST
        replicas = record["replicas"]
        trainers = [each for each in replicas if each["name"].startswith("trainer")]
        first = trainers[0] if trainers else {}
        step, total = first.get("step"), first.get("total_steps")
        metrics: dict[str, float] = {}
        for each in reversed(trainers):
            metrics |= each["metrics"]
        return {
            "id": name,
            "place": "machine",
            "namespace": None,
            "name": record["name"],
            "label": folder.resolve().name,
            "mode": record["mode"],
            "state": state,
            "sentence": sentence,
            "started": record["started"],
            "ended": record["ended"],
            "restarts": sum(each["restarts"] for each in replicas),
            "step": step,
            "total_steps": total,
            "percentage": min(100, 100 * step // total) if step is not None and total else None,
            "loss": first.get("loss"),
            "eta_seconds": None if state in (*FINAL, "Lost") else first.get("eta_seconds"),
            "metrics": metrics,
        }


class Points:
    """The curves in a points file, which is read incrementally."""

    def __init__(self, path: Path, started: str) -> None:
        self._path = path
        self._position = 0
        self.started = started
        self.series = Series()

    def read(self) -> None:
        """Read the points that were added to the file."""
        try:
            with self._path.open("rb") as file:
                file.seek(0, 2)
                if file.tell() < self._position:  # another run uses the folder again
                    self._position, self.series = 0, Series()
                file.seek(self._position)
                data = file.read().rpartition(b"\n")
        except OSError:
            return
        self._position += len(data[0]) + len(data[1])
        for line in data[0].splitlines():
            try:
                replica, step, values = json.loads(line)
            except ValueError:
                continue
            if values is None:
                self.series.drop(replica, step)
            else:
                self.series.add(replica, step, values)


def _log_folders(folder: Path) -> Iterator[Path]:
    """Yield the folder itself if it has a record, else its subfolders that have one."""
    if (folder / RECORD).is_file():
        yield folder
        return
    try:
        entries = list(folder.iterdir())
    except OSError:
        return
    yield from (each for each in entries if (each / RECORD).is_file())
