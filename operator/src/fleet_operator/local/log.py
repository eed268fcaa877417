"""The log files of a local run: one file per replica, with all of its attempts.

Each attempt begins with a header. The supervisor writes the time before each line that the replica prints;
see `supervisor.Log`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from fleet_operator.cluster import ClusterError

if TYPE_CHECKING:
    from pathlib import Path

# The length of the end of a log that replaces a missing termination message. The kubelet keeps 2048 bytes and
# 80 lines, but torchrun's summary alone fills these, and the exception is above it.
TAIL_LINES = 400
TAIL_BYTES = 16384 + TAIL_LINES * len("2026-11-22T18:30:00.000Z ")  # the times are removed afterwards

_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ", re.MULTILINE)
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_times(text: str) -> str:
    """Return a log's text without the timestamps that the supervisor adds to its lines."""
    return _STAMP.sub("", text)


def split_time(line: str) -> tuple[datetime | None, str]:
    """Split a line into its timestamp, if any, and the rest."""
    if (found := _STAMP.match(line)) is None:
        return None, line
    return datetime.fromisoformat(found[1]), line[found.end() :]


def printable(text: str) -> str:
    """Return a line as a terminal finally shows it: a progress bar's last state, without colours."""
    shown = text.rstrip("\r").rpartition("\r")[2]
    return _CONTROLS.sub("", _ESCAPES.sub("", shown))


def begin_log(path: Path, head: str) -> int:
    """Write a header for a replica's next attempt to its log; return the offset at which its output starts.

    Raises
    ------
    ClusterError
        The file cannot be written, for example because the disk is full. The next pass retries.
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
    """Return the last lines of the attempt whose output begins at `start`."""
    return without_times("\n".join(last_lines(log, TAIL_LINES, start)))


def last_lines(log: Path, count: int, start: int = 0) -> list[str]:
    """Return up to `count` lines from the end of a log after `start`, with their timestamps."""
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]
