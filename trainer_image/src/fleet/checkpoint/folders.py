"""Numbered checkpoints below one folder: ``checkpoint-0``, ``checkpoint-1``, …; the highest is the newest."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from fleet.checkpoint.cleaning import remove_checkpoint
from fleet.checkpoint.manifest import MANIFEST_NAME, REPLACED_NAME, Manifest
from fleet.checkpoint.reader import Checkpoint
from fleet.errors import CheckpointError

__all__ = [
    "CHECKPOINT_PREFIX",
    "find_checkpoint",
    "numbers_in",
    "remove_numbers",
    "saves_in",
    "superfluous",
    "whole_numbers",
]

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
                checkpoint.check_here()
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


def whole_numbers(folder: Path, check: Callable[[Checkpoint], object]) -> list[int]:
    """Return the numbers of the checkpoints that are whole, in ascending order.

    Parameters
    ----------
    folder : Path
        A link in it is no checkpoint of this folder, wherever it leads to.
    check : callable
        Raises a CheckpointError for one that is not.
    """
    whole = []
    for number in numbers_in(folder):
        path = folder / f"{CHECKPOINT_PREFIX}{number}"
        if path.is_symlink() or not (path / MANIFEST_NAME).is_file():
            continue
        try:
            checkpoint = Checkpoint(path)
            checkpoint.check_here()
            check(checkpoint)
        except CheckpointError as error:
            _log.warning("a checkpoint that is not whole counts for nothing: %s", error)
        else:
            whole.append(number)
    return whole


def superfluous(numbers: Sequence[int], whole: Sequence[int], count: int) -> list[int]:
    """Return the numbers that may go, so that `count` whole checkpoints are left.

    What is newer than the newest whole one stays: it may be about to become one. Without a whole one, all do.
    """
    kept, newest = set(whole[-count:]), whole[-1] if whole else -1
    return [number for number in numbers if number not in kept and number < newest]


def remove_numbers(folder: Path, numbers: Iterable[int]) -> None:
    """Remove numbered checkpoints; see `remove_checkpoint`. One stays whose rows another needs that stays."""
    numbers = set(numbers)
    needed = _needed_by(folder, set(numbers_in(folder)) - numbers)
    for number in sorted(numbers):
        path = folder / f"{CHECKPOINT_PREFIX}{number}"
        if number in needed:
            why = "a newer checkpoint has only the rows that have changed since"
        else:
            why = remove_checkpoint(path)
        if why:
            _log.info("%s stays: %s", path, why)


def _needed_by(folder: Path, numbers: Iterable[int]) -> set[int]:
    """Return the numbers of the checkpoints that some others need."""
    names: set[str] = set()
    for number in numbers:
        with suppress(CheckpointError):
            manifest = Manifest.read(folder / f"{CHECKPOINT_PREFIX}{number}")
            names.update(base.directory for base in manifest.bases)
    return {int(match[1]) for match in map(_NUMBERED.fullmatch, names) if match}
