"""The termination message: the last words of a replica, where the kubelet or the local cluster reads them.

A replica that ends well leaves one line of JSON: whether it had joined its job (`joined`), the trainers that
it knows to have completed (`completedTrainers`, as ``0-2,4``), of a server also after how many restarts each
of them did (`completedAfter`, as ``{"0": "0-2", "1": "4"}``), and its progress. One that fails leaves one
sentence, in which ``(not joined)``, ``(joined, no step made)`` or ``(joined)`` follows its name. Both stay
under the 4096 bytes that Kubernetes keeps. The operator reads both, so their form is part of the contract.
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
MAX_SENTENCE_BYTES = 2000
MAX_LOG_BYTES = 2000
MAX_HISTORY = 64
MAX_TABLES = 10
MAX_ATTEMPTS_BYTES = 1000

_log = logging.getLogger(__name__)
_writing = threading.RLock()
"""One thread writes at a time: the process may end as soon as one of them has."""


def _renew_lock() -> None:
    global _writing
    _writing = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def message_path(environ: Mapping[str, str]) -> Path | None:
    """Return FLEET_TERMINATION_LOG, else the kubelet's file where it can be written, else None."""
    named = environ.get("FLEET_TERMINATION_LOG")
    if named:
        return Path(named)
    return KUBELET_PATH if os.access(KUBELET_PATH, os.W_OK) else None


def format_indexes(indexes: Collection[int]) -> str:
    """Write indexes as an Indexed Job does: ranges in order, as in ``0-2,4``."""
    ranges = []
    for _, group in groupby(enumerate(sorted(indexes)), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        ranges.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(ranges)


def completed_trainers(completed: Collection[int], attempts: Mapping[int, int]) -> dict[str, Any]:
    """Return who has completed, as the last words tell it; attempts of too many kinds are left out."""
    known: dict[str, Any] = {"completedTrainers": format_indexes(completed)}
    after = {
        str(attempt): format_indexes([trainer for trainer, its in attempts.items() if its == attempt])
        for attempt in sorted(set(attempts.values()))
    }
    if after and len(_one_line(after)) <= MAX_ATTEMPTS_BYTES:
        known["completedAfter"] = after
    return known


def progress_message(state: Mapping[str, Any]) -> str:
    """Render a progress snapshot as one line of JSON that fits.

    At most 64 points of the history stay, evenly spaced and the last among them, and the ten largest tables;
    what is still too long loses more points, then its tables, then its counters, then its metrics.
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
    """Leave the progress as the last words of a replica that ended well."""
    path = message_path(environ)
    if path is not None:
        with _writing:
            _write(path, progress_message(state))


def write_failure(sentence: str, environ: Mapping[str, str], *, log: str = "") -> None:
    """Leave one sentence as the last words of a replica that failed.

    Where several processes of a pod fail, the first one's sentence stays: it is the cause, the others' are
    consequences.

    Parameters
    ----------
    sentence : str
        Becomes one line, the last one.
    environ : mapping
        Read for FLEET_TERMINATION_LOG.
    log : str, optional
        What was logged before, an exception's traceback for instance; as much of its end as fits.
    """
    path = message_path(environ)
    if path is None:
        return
    words = " ".join(sentence.split()).encode()[:MAX_SENTENCE_BYTES].decode(errors="ignore")
    before = log.strip().encode()[-MAX_LOG_BYTES:].decode(errors="ignore")
    with _writing:
        if not _holds_sentence(path):
            _write(path, f"{before}\n{words}" if before else words)


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
    return first not in (b"", b"{")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        _log.warning("the termination message could not be written to %s: %s", path, error)
