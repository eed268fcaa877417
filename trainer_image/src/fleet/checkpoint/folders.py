"""Numbered checkpoints below one folder: ``checkpoint-0``, ``checkpoint-1``, …; the highest is the newest."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from fleet.checkpoint.cleaning import remove_checkpoint
from fleet.checkpoint.manifest import MANIFEST_NAME, REPLACED_NAME, Manifest
from fleet.checkpoint.reader import Checkpoint
from fleet.errors import CheckpointError, DiskFullError, no_room

__all__ = [
    "CHECKPOINT_PREFIX",
    "find_checkpoint",
    "none_is_whole",
    "numbers_in",
    "remove_numbers",
    "saves_in",
    "superfluous",
    "tell_passed_over",
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
    try:
        return [path.name for path in folder.iterdir()]
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.is_symlink():
            return []  # the first save makes it
        sentence = f"{folder} cannot be looked into for checkpoints ({error.strerror})"
        if no_room(error):  # without a descriptor a save is left out, as on a full disk
            raise DiskFullError(sentence) from error
        raise CheckpointError(f"{sentence}; expected a folder that this process may read") from error


def find_checkpoint(folder: Path, read: Callable[[Checkpoint], object] = bool) -> Checkpoint | None:
    """Return the newest whole checkpoint that a folder is or has; None where there is none at all.

    Parameters
    ----------
    folder : Path
    read : callable
        Raises a CheckpointError for one of which a file is not as it was written.

    Raises
    ------
    CheckpointError
        There are some, and none is whole.
    """
    found, damage = saves_in(folder)
    for checkpoint in found:
        try:
            read(checkpoint)
        except CheckpointError as error:
            damage.append(error)
        else:
            return checkpoint
    if damage:
        raise none_is_whole(folder, damage, read)
    return None


def saves_in(
    folder: Path, check: Callable[[Checkpoint], object] = bool
) -> tuple[list[Checkpoint], list[CheckpointError]]:
    """Return the checkpoints that a folder is or has, the newest first, and what is wrong with others.

    Parameters
    ----------
    folder : Path
    check : callable
        Raises a CheckpointError for one that is not whole. It is asked of all, so it reads no large files.
    """
    numbered = [folder / f"{CHECKPOINT_PREFIX}{number}" for number in reversed(numbers_in(folder))]
    found = []
    damage = [
        CheckpointError(
            f"{folder / name} has a number that no save gives; expected {CHECKPOINT_PREFIX}0 and so on: "
            "rename it, or load it by its own path"
        )
        for name in sorted(_names_in(folder))
        if _BEYOND.fullmatch(name) and not _NUMBERED.fullmatch(name)
    ]
    for path in [folder, *numbered]:
        if path is not folder and os.path.lexists(path) and not path.is_dir():
            damage.append(CheckpointError(f"{path} is no directory, or leads to none; expected a checkpoint"))
        for name in (MANIFEST_NAME, REPLACED_NAME):
            if not os.path.lexists(path / name):  # a save that was cut short has written none
                continue
            try:
                checkpoint = Checkpoint(path, name)
                checkpoint.check_here()
                check(checkpoint)
            except CheckpointError as error:
                damage.append(error)
            else:
                found.append(checkpoint)
    own = [checkpoint for checkpoint in found if checkpoint.directory == folder]
    others = [checkpoint for checkpoint in found if checkpoint.directory != folder]
    ahead = not others or not own or own[0].manifest.step >= others[0].manifest.step
    return ([*own, *others] if ahead else [*others, *own]), damage


def none_is_whole(
    folder: Path, damage: Sequence[CheckpointError | str], read: Callable[[Checkpoint], object]
) -> CheckpointError:
    """Return the error that no checkpoint is whole where some were looked for.

    Parameters
    ----------
    folder : Path
        The checkpoint that was named, or the folder.
    damage : sequence of CheckpointError or str
        What is wrong with each.
    read : callable
        As in `find_checkpoint`: where one of numbered checkpoints was named, the newest whole one beside it
        is named in the message, and never used instead.
    """
    reasons = "; ".join(map(str, damage))
    if not _NUMBERED.fullmatch(folder.name):
        return CheckpointError(
            reasons if len(damage) == 1 else f"no checkpoint in {folder} is whole: {reasons}"
        )
    with suppress(CheckpointError):
        if (whole := find_checkpoint(folder.parent, read)) is not None:
            reasons += f". The newest whole one beside it is {whole.directory}: name that, or {folder.parent}"
    return CheckpointError(reasons)


def tell_passed_over(damage: Sequence[CheckpointError | str], used: str) -> None:
    """Say in one warning which checkpoints were passed over, each file with its reason, and what is used."""
    if damage:
        reasons = "; ".join(map(str, damage))
        _log.warning("passed over a checkpoint: %s. Training goes on from %s", reasons, used)


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
        if path.is_symlink() or not os.path.lexists(path / MANIFEST_NAME):
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
