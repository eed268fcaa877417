"""The logs of the replicas of a run on this machine: one file for each, with all of its lives in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.cluster.interface import ClusterError

if TYPE_CHECKING:
    from pathlib import Path

# Of the log of a process that failed without a termination message. The kubelet keeps 2048 bytes and 80
# lines, which torchrun's summary fills alone; the exception stands above it.
TAIL_BYTES, TAIL_LINES = 16384, 400


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
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])
