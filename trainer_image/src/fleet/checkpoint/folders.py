"""Numbered checkpoints below one folder: ``checkpoint-0``, ``checkpoint-1``, …; the highest is the newest."""

import re
import shutil
from pathlib import Path
from typing import Final

from fleet.checkpoint.manifest import MANIFEST_NAME

__all__ = ["CHECKPOINT_PREFIX", "find_checkpoint", "keep_newest", "numbers_in"]

CHECKPOINT_PREFIX: Final = "checkpoint-"
_NUMBERED: Final = re.compile(rf"{CHECKPOINT_PREFIX}(\d+)")


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers that are taken, in ascending order, whether the checkpoints are whole or not."""
    if not folder.is_dir():
        return []
    matches = (_NUMBERED.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def find_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that a folder is, else the newest whole one of the numbered ones in it."""
    if (folder / MANIFEST_NAME).is_file():
        return folder
    numbered = (folder / f"{CHECKPOINT_PREFIX}{number}" for number in reversed(numbers_in(folder)))
    return next((path for path in numbered if (path / MANIFEST_NAME).is_file()), None)


def keep_newest(folder: Path, count: int) -> None:
    """Remove numbered checkpoints until `count` whole ones are left, and what no save has finished.

    What is newer than the newest whole one stays: it may be about to become one.
    """
    numbers = numbers_in(folder)
    whole = [n for n in numbers if (folder / f"{CHECKPOINT_PREFIX}{n}" / MANIFEST_NAME).is_file()]
    kept = set(whole[-count:] if count else ())
    newest = whole[-1] if whole else -1
    for number in numbers:
        if number in kept or number > newest:
            continue
        path = folder / f"{CHECKPOINT_PREFIX}{number}"
        # The manifest goes first: a removal that is cut short must not leave what looks whole.
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
