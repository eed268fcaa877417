"""The mark that a training leaves in the job's checkpoint folder when all of it has completed.

The pods of a job may all be gone before its operator has seen how they ended. It starts them again then, with
the training of before (``FLEET_LIFE``), and they find here that nothing is left to do. A job that was started
anew for a failure, a suspension or another number of trainers has another training, and another job has
another uid: to them the mark says nothing.

Trainers beside servers are told of the training only where nobody has seen how the pod before ended: one that
was seen to fail in saving its result, when all had completed, would end well without the result.
"""

import errno
import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from fleet.checkpoint.files import open_file, write_bytes
from fleet.process import lifecycle

__all__ = ["FINISHED_NAME", "end_if_finished", "leave_mark", "read_mark"]

FINISHED_NAME: Final = "finished.json"
_MOST_BYTES: Final = 1 << 16
_log = logging.getLogger(__name__)


def leave_mark(environ: Mapping[str, str], completed: Collection[int]) -> None:
    """Note that the training has ended with these trainers; a folder that refuses it is only told of."""
    training = _training(environ)
    if training is None:
        return
    folder, identity = training
    try:
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no such folder")
        text = json.dumps({**identity, "completedTrainers": sorted(completed)})
        write_bytes(folder / FINISHED_NAME, text.encode())
    except OSError as error:
        _log.warning("that the training has ended could not be noted in %s: %s", folder, error)


def read_mark(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the trainers with which this very training has ended; None where no mark says that it has."""
    training = _training(environ)
    if training is None:
        return None
    folder, identity = training
    try:
        with open_file(folder / FINISHED_NAME) as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or any(found.get(key) != value for key, value in identity.items()):
        return None
    trainers = found.get("completedTrainers")
    numbers = isinstance(trainers, list) and all(type(each) is int and each >= 0 for each in trainers)
    return tuple(trainers) if numbers and trainers else None


def end_if_finished(environ: Mapping[str, str], trainer: int | None = None) -> None:
    """End this replica well if its training has ended already; it must have been told who it is.

    Parameters
    ----------
    environ : mapping of str to str
    trainer : int, optional
        The index of a trainer of whom the mark must say that it has completed: others may have been given up.

    Raises
    ------
    SystemExit
        With status 0: there is nothing left to do.
    """
    completed = read_mark(environ)
    if completed is None or (trainer is not None and trainer not in completed):
        return
    _log.warning(
        "this training has ended before, as %s in %s says: nothing is left to do",
        FINISHED_NAME,
        environ["FLEET_CHECKPOINT_DIR"],
    )
    lifecycle.end_completed(completed)


def _training(environ: Mapping[str, str]) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder and what this training is known by; None where the operator has not told them."""
    folder, uid, life = (
        environ.get(name) for name in ("FLEET_CHECKPOINT_DIR", "FLEET_JOB_UID", "FLEET_LIFE")
    )
    return (Path(folder), {"job": uid, "life": life}) if folder and uid and life else None
