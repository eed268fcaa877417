"""The original's calls and the short ones: what of ``(executor, dirname, …)`` and ``(dirname)`` is meant."""

import os
from typing import Any

from fleet.checkpoint.fields import mapping, whole_number
from fleet.checkpoint.status import TrainStatus
from fleet.errors import ConfigurationError

__all__ = ["directory_of", "refuse_file_system", "status_of"]


def directory_of(call: str, executor: Any, dirname: Any, default: str | None = "") -> str:
    """Return the directory that a call names.

    Parameters
    ----------
    call : str
        Whose arguments these are, for messages.
    executor, dirname
        As in the original, an executor (which is not needed) and a path; or a path first, and no second.
    default : str or None
        Where a job's checkpoints go when nobody says (``FLEET_CHECKPOINT_DIR``); empty for a call that needs
        a directory of its own.

    Raises
    ------
    ConfigurationError
        There is no directory, or something else in its place.
    """
    if isinstance(executor, str | os.PathLike) and dirname is None:
        executor, dirname = None, executor
    if executor is not None and not hasattr(executor, "run"):
        raise ConfigurationError(
            f"fleet.{call}: the executor is {executor!r}; expected a fleet.Executor or None before the "
            "directory, or the directory alone"
        )
    expected = "a path" if default == "" else "a path, or FLEET_CHECKPOINT_DIR to be set"
    if dirname is None:
        dirname = default or None
    if isinstance(dirname, os.PathLike):
        dirname = os.fspath(dirname)
    if not isinstance(dirname, str) or not dirname:
        raise ConfigurationError(f"fleet.{call}: the directory is {dirname!r}; expected {expected}")
    return dirname


def status_of(call: str, status: object) -> TrainStatus:
    """Return a call's status; a new one for None, ConfigurationError for anything else."""
    if status is None:
        return TrainStatus()
    if not isinstance(status, TrainStatus):
        raise ConfigurationError(f"fleet.{call}: train_status is {status!r}; expected a fleet.TrainStatus")
    try:
        whole_number("epoch_no", status.epoch_no, least=-1)
        whole_number("step", status.step)
        mapping("state", status.state)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"fleet.{call}: {error} in train_status") from error
    return status


def refuse_file_system(call: str, fs: object) -> None:
    """Refuse the original's other file systems by name."""
    if fs is not None:
        raise ConfigurationError(
            f"fleet.{call}: fs is {fs!r}; expected None: checkpoints go to mounted directories, so mount the "
            "other file system, or copy a checkpoint's directory there after the save"
        )
