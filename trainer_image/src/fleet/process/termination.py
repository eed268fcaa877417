"""The termination message of a replica, which the kubelet or the local cluster reads.

A successful replica writes one line of JSON: whether it had joined its job (`joined`), the trainers that it
knows to have completed (`completedTrainers`, as ``0-2,4``), and its progress. A server adds the number of
restarts after which each trainer completed (`completedAfter`, as ``{"0": "0-2", "1": "4"}``). A failed
replica writes one sentence, in which ``(not joined)``, ``(joined, no step made)`` or ``(joined)`` follows the
name of the replica. Both forms stay under the 4096 bytes that Kubernetes keeps. The operator parses both, so
their format is part of the contract.
"""

import json
import logging
import os
import threading
from collections.abc import Collection, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

__all__ = [
    "completed_trainers",
    "format_indexes",
    "message_path",
    "progress_message",
    "write_failure",
    "write_progress",
]

KUBELET_PATH = Path("/dev/termination-log")
MAX_PROGRESS_BYTES = 3000
# A sentence and the log before it fit into 4096 bytes together.
MAX_SENTENCE_BYTES = 2000
MAX_LOG_BYTES = 2000
MAX_HISTORY = 64
MAX_TABLES = 10
MAX_ATTEMPTS_BYTES = 1000

_log = logging.getLogger(__name__)
_writing = threading.RLock()
"""Serializes writers, because the process may end as soon as one of them has written."""


def _renew_lock() -> None:
    global _writing
    _writing = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def message_path(environ: Mapping[str, str]) -> Path | None:
    """Return FLEET_TERMINATION_LOG as a path, or else the kubelet's file if writable, or else None."""
    named = environ.get("FLEET_TERMINATION_LOG")
    if named:
        return Path(named)
    return KUBELET_PATH if os.access(KUBELET_PATH, os.W_OK) else None


def format_indexes(indexes: Collection[int]) -> str:
    """Format indexes like an Indexed Job: as sorted ranges such as ``0-2,4``."""
    ranges = []
    for _, group in groupby(enumerate(sorted(indexes)), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        ranges.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(ranges)


def completed_trainers(completed: Collection[int], attempts: Mapping[int, int]) -> dict[str, Any]:
    """Return the fields that list completed trainers; their restarts are omitted if the list is too long."""
    known: dict[str, Any] = {"completedTrainers": format_indexes(completed)}
    after = {
        str(attempt): format_indexes([trainer for trainer, its in attempts.items() if its == attempt])
        for attempt in sorted(set(attempts.values()))
    }
    if after and len(_one_line(after)) <= MAX_ATTEMPTS_BYTES:
        known["completedAfter"] = after
    return known


def progress_message(state: Mapping[str, Any]) -> str:
    """Render a progress snapshot as one line of JSON that fits into the termination message.

    The message has at most 64 points of the history, evenly spaced and including the last, and the ten
    largest tables. If it is still too long, more points are dropped, then tables, then counters, then
    metrics.
    """
    short = dict(state) | {"tables": state["tables"][:MAX_TABLES]}
    points = [[step, float(f"{loss:.6g}")] for step, loss in state["history"]]
    keep = MAX_HISTORY
    while keep > 0:
        short["history"] = _thinned(points, keep)
        if len(text := _one_line(short)) <= MAX_PROGRESS_BYTES:
            return text
        keep //= 2
    short["history"] = []
    for key, none in (("tables", []), ("counters", {}), ("metrics", {})):
        if len(text := _one_line(short)) <= MAX_PROGRESS_BYTES:
            return text
        short[key] = none
    return _one_line(short)


def write_progress(state: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Write progress as the termination message of a successful replica."""
    path = message_path(environ)
    if path is not None:
        with _writing:
            _write(path, progress_message(state))


def write_failure(sentence: str, environ: Mapping[str, str], *, log: str = "") -> None:
    """Write a sentence as the termination message of a failed replica.

    If several processes of a pod fail, the sentence of the first is kept, because it names the cause.

    Parameters
    ----------
    sentence : str
        The sentence, which becomes the last line of the message.
    environ : mapping
        The environment, from which FLEET_TERMINATION_LOG is read.
    log : str, optional
        The preceding log, such as a traceback. As much of the end of the log as fits precedes the sentence.
    """
    path = message_path(environ)
    if path is None:
        return
    line = " ".join(sentence.split()).encode()[:MAX_SENTENCE_BYTES].decode(errors="ignore")
    before = log.strip().encode()[-MAX_LOG_BYTES:].decode(errors="ignore")
    with _writing:
        if not _holds_sentence(path):
            _write(path, f"{before}\n{line}" if before else line)


def _thinned(points: list[Any], keep: int) -> list[Any]:
    if len(points) <= keep:
        return points
    if keep == 1:
        return points[-1:]
    last = len(points) - 1
    return [points[round(i * last / (keep - 1))] for i in range(keep)]


def _one_line(state: Mapping[str, Any]) -> str:
    return json.dumps(state, separators=(",", ":"))


def _holds_sentence(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            first = file.read(1)
    except OSError:
        return False
    # A message that begins with a brace is progress, which a failure replaces.
    return first not in (b"", b"{")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        _log.warning("the termination message could not be written to %s: %s", path, error)
