"""The logs of the replicas of a run on this machine: one file for each, with all of its lives in it.

Each life begins with a head. The supervisor writes the time before each line that the replica prints; see
`supervisor.Log`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from fleet_operator.cluster import ClusterError

if TYPE_CHECKING:
    from pathlib import Path

# Of the log of a process that failed without a termination message. The kubelet keeps 2048 bytes and 80
# lines, which torchrun's summary fills alone; the exception stands above it.
TAIL_LINES = 400
TAIL_BYTES = 16384 + TAIL_LINES * len("2026-11-22T18:30:00.000Z ")

_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ", re.MULTILINE)
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_times(text: str) -> str:
    """Return lines as a replica has printed them, without the times with which the supervisor leads them."""
    return _STAMP.sub("", text)


def split_time(line: str) -> tuple[datetime | None, str]:
    """Return when a line was printed, where it says so, and the line itself."""
    if (found := _STAMP.match(line)) is None:
        return None, line
    return datetime.fromisoformat(found[1]), line[found.end() :]


def printable(text: str) -> str:
    """Return a line as a terminal would show it at last: a progress bar's last state, without colours."""
    shown = text.rstrip("\r").rpartition("\r")[2]
    return _CONTROLS.sub("", _ESCAPES.sub("", shown))


def begin_log(path: Path, head: str) -> int:
    """Begin the log of a replica's next life; return where in the file what it says begins.

    Raises
    ------
    ClusterError
        The file cannot be written: the disk is full, say. The next pass tries again.
    """
    try:
        with path.open("ab") as log:
            log.write(f"{head}\n".encode())
            return log.tell()
    except OSError as error:
        raise ClusterError(
            f"the log {path} cannot be written: {error.strerror or error}; expected a folder with room that "
            "may be written to. Make room, or choose another folder with --log-dir"
        ) from error


def tail(log: Path, start: int) -> str:
    """Return the last lines that a life said which began at `start`."""
    return without_times("\n".join(last_lines(log, TAIL_LINES, start)))


def last_lines(log: Path, count: int, start: int = 0) -> list[str]:
    """Return the last lines of a log from `start` on, with their times; of long ones, fewer."""
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]
