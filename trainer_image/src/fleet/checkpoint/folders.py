"""Numbered checkpoints below one folder: ``checkpoint-0``, ``checkpoint-1``, …; the highest is the newest."""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fleet.checkpoint.manifest import MANIFEST_NAME, REPLACED_NAME
from fleet.checkpoint.reader import Checkpoint
from fleet.errors import CheckpointError, FleetError

__all__ = ["CHECKPOINT_PREFIX", "find_checkpoint", "keep_newest", "numbers_in", "saves_in"]

CHECKPOINT_PREFIX: Final = "checkpoint-"
_log = logging.getLogger(__name__)
_NUMBERED: Final = re.compile(rf"{CHECKPOINT_PREFIX}(0|[1-9][0-9]{{0,17}})")
_BEYOND: Final = re.compile(rf"{CHECKPOINT_PREFIX}[0-9]+")
"""What looks like a number, and is one that no save gives: too large, or with a zero before it."""


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers that are taken, in ascending order, whether the checkpoints are whole or not."""
    matches = (_NUMBERED.fullmatch(name) for name in _names_in(folder))
    return sorted(int(match[1]) for match in matches if match)


def _names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def find_checkpoint(folder: Path, whole: Callable[[Checkpoint], object] = bool) -> Checkpoint | None:
    """Return the newest checkpoint of `saves_in`; None where there is none."""
    return next(iter(saves_in(folder, whole)), None)


def saves_in(folder: Path, whole: Callable[[Checkpoint], object]) -> list[Checkpoint]:
    """Return the checkpoints that a folder is or has, the newest first.

    Parameters
    ----------
    folder : Path
    whole : callable
        Raises a CheckpointError for one that is not; it is passed over, and the log says so.

    Raises
    ------
    CheckpointError
        There are some, and none is whole.
    """
    numbered = [folder / f"{CHECKPOINT_PREFIX}{number}" for number in reversed(numbers_in(folder))]
    found = []
    damaged = [
        CheckpointError(
            f"{folder / name} has a number that no save gives; expected {CHECKPOINT_PREFIX}0 and so on: "
            "rename it, or load it by its own path"
        )
        for name in sorted(_names_in(folder))
        if _BEYOND.fullmatch(name) and not _NUMBERED.fullmatch(name)
    ]
    for path in [folder, *numbered]:
        for name in (MANIFEST_NAME, REPLACED_NAME):
            if not (path / name).is_file():
                continue
            try:
                checkpoint = Checkpoint(path, name)
                whole(checkpoint)
            except CheckpointError as error:
                damaged.append(error)
            else:
                found.append(checkpoint)
    if damaged and not found:
        raise damaged[0]
    for reason in damaged:
        _log.warning("passed over a checkpoint: %s", reason)
    own = [checkpoint for checkpoint in found if checkpoint.directory == folder]
    others = [checkpoint for checkpoint in found if checkpoint.directory != folder]
    ahead = not others or not own or own[0].manifest.step >= others[0].manifest.step
    return [*own, *others] if ahead else [*others, *own]


def keep_newest(folder: Path, count: int) -> None:
    """Remove numbered checkpoints until `count` whole ones are left, and what no save has finished.

    What is newer than the newest whole one stays: it may be about to become one.

    Raises
    ------
    FleetError
        The disk refuses; the message names the directory.
    """
    numbers = numbers_in(folder)
    whole = [n for n in numbers if (folder / f"{CHECKPOINT_PREFIX}{n}" / MANIFEST_NAME).is_file()]
    kept = set(whole[-count:])
    newest = whole[-1] if whole else -1
    for number in numbers:
        if number in kept or number > newest:
            continue
        path = folder / f"{CHECKPOINT_PREFIX}{number}"
        try:
            # The manifests go first: a removal that is cut short must not leave what looks whole.
            for name in (MANIFEST_NAME, REPLACED_NAME):
                (path / name).unlink(missing_ok=True)
            shutil.rmtree(path)
        except FileNotFoundError:
            shutil.rmtree(path, ignore_errors=True)  # other servers remove it as well
        except OSError as error:
            raise FleetError(
                f"{path} could not be removed: {error}; expected a directory whose contents this process may "
                "remove: do so by hand, or keep more checkpoints"
            ) from error
