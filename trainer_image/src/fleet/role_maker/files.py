"""Which of a data set's files are whose."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import TypeVar

from fleet.errors import ConfigurationError

__all__ = ["File", "share_of_files"]

File = TypeVar("File", bound=str | PurePath)
"""The name of a file, as text or as a path."""


def share_of_files(files: Sequence[File], index: int, num: int) -> list[File]:
    """Return one trainer's files: contiguous blocks, and what remains goes to the lowest indexes.

    Parameters
    ----------
    files : sequence of str or path
        All of them, in the same order on every trainer.
    index, num : int
        Which trainer, of how many.

    Raises
    ------
    ConfigurationError
        `files` is no list of names.
    """
    listed = isinstance(files, Sequence) and not isinstance(files, str)
    if not listed or not all(isinstance(file, str | PurePath) for file in files):
        raise ConfigurationError(f"split_files: files is {files!r}; expected a list of file names or paths")
    share, extra = divmod(len(files), num)
    first = index * share + min(index, extra)
    return list(files[first : first + share + (index < extra)])
