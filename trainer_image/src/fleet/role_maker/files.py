"""Which of a data set's files are whose."""

from collections.abc import Sequence

from fleet.errors import ConfigurationError

__all__ = ["share_of_files"]


def share_of_files(files: Sequence[str], index: int, num: int) -> list[str]:
    """Return one trainer's files: contiguous blocks, and what remains goes to the lowest indexes.

    Parameters
    ----------
    files : sequence of str
        All of them, the same on every trainer.
    index, num : int
        Which trainer, of how many.

    Raises
    ------
    ConfigurationError
        `files` is no list of names.
    """
    if isinstance(files, str) or not all(isinstance(file, str) for file in files):
        raise ConfigurationError(f"split_files: files is {files!r}; expected a list of file names")
    share, extra = divmod(len(files), num)
    first = index * share + min(index, extra)
    return list(files[first : first + share + (index < extra)])
