"""The marker of a finished training run in the job's checkpoint folder.

All pods of a job may be gone before the operator has observed how they ended. The operator then restarts them
with the same identity of the training run (``FLEET_LIFE``), and the mark shows them that no work is left. The
mark does not apply to a restart after a failure, a suspension or a change of the number of trainers, which
begins another training run. Nor does it apply to another job, which has another uid.

In a parameter-server job a trainer receives ``FLEET_LIFE`` only if the end of its previous pod was not
observed. Otherwise a trainer that failed to save its result, after all trainers had completed the training,
would end successfully without the result.
"""

import errno
import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from fleet.checkpoint.files import open_file, write_bytes
from fleet.errors import DiskFullError
from fleet.process import lifecycle

__all__ = ["FINISHED_NAME", "end_if_finished", "leave_mark", "read_mark"]

FINISHED_NAME: Final = "finished.json"
_MOST_BYTES: Final = 1 << 16
_log = logging.getLogger(__name__)


def leave_mark(environ: Mapping[str, str], completed: Collection[int]) -> None:
    """Write a marker that lists the trainers that have completed; log a warning if the write fails."""
    training = _training(environ)
    if training is None:
        return
    folder, identity = training
    try:
        # `write_bytes` would create the folder, which is missing here only if its volume is not mounted.
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no such folder")
        text = json.dumps({**identity, "completedTrainers": sorted(completed)})
        write_bytes(folder / FINISHED_NAME, text.encode())
    except OSError as error:
        _log.warning("the end of the training run could not be recorded in %s: %s", folder, error)


def read_mark(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the trainers that completed this training run, or None if there is no valid marker."""
    training = _training(environ)
    if training is None:
        return None
    folder, identity = training
    try:
        with open_file(folder / FINISHED_NAME) as file:
            found = json.loads(file.read(_MOST_BYTES))
    # Without a readable mark the job trains again, which costs time but loses no result.
    except (DiskFullError, OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or any(found.get(key) != value for key, value in identity.items()):
        return None
    trainers = found.get("completedTrainers")
    are_indexes = isinstance(trainers, list) and all(type(each) is int and each >= 0 for each in trainers)
    return tuple(trainers) if are_indexes and trainers else None


def end_if_finished(environ: Mapping[str, str], trainer: int | None = None) -> None:
    """Exit successfully if this training run has already finished; call this after `lifecycle.start`.

    Parameters
    ----------
    environ : mapping of str to str
    trainer : int, optional
        The index of this trainer, which must be among those that completed: the run may have finished without
        a lost trainer.

    Raises
    ------
    SystemExit
        With status 0: no work is left.
    """
    completed = read_mark(environ)
    if completed is None or (trainer is not None and trainer not in completed):
        return
    _log.warning(
        "this training run has already finished, according to %s in %s: nothing is left to do",
        FINISHED_NAME,
        environ["FLEET_CHECKPOINT_DIR"],
    )
    lifecycle.end_completed(completed)


def _training(environ: Mapping[str, str]) -> tuple[Path, dict[str, Any]] | None:
    """Return this training run's folder and identity, or None if the job was not started by an operator."""
    folder, uid, life = (
        environ.get(name) for name in ("FLEET_CHECKPOINT_DIR", "FLEET_JOB_UID", "FLEET_LIFE")
    )
    return (Path(folder), {"job": uid, "life": life}) if folder and uid and life else None
