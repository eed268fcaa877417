"""Criteo's click logs: a label, 13 counts and 26 categories per line, separated by tabs.

Files are streamed, so a data set may be larger than memory. Malformed lines are skipped, counted, and logged
with their file and number.
"""

import gzip
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from fleet.errors import ConfigurationError

__all__ = ["CATEGORIES", "COUNTS", "Batch", "CriteoFiles", "hashed"]

COUNTS: Final = 13
CATEGORIES: Final = 26
_FIELDS: Final = 1 + COUNTS + CATEGORIES
_MAX_LOGGED: Final = 3
"""The number of malformed lines of a file that are logged individually."""
_MIN_LINES: Final = 1000
"""The number of lines after which a file is rejected if most of them are malformed."""
_COUNT_LIMIT: Final = 1 << 63
"""Upper bound of the absolute value of a count."""
_DIGITS: Final = b"0123456789abcdefABCDEF-"
_NO_CATEGORY: Final = 1 << 32
"""The number that stands for a missing category: one more than the highest category."""
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """A batch of samples, each parsed from one line.

    Attributes
    ----------
    dense : float32[n, 13]
        ``log(1 + count)``; 0 for a missing or negative count.
    ids : int64[n, 26]
        Categories, hashed with their column; a missing category counts as a separate one.
    labels : float32[n]
        1 for a click, else 0.
    """

    dense: Tensor
    ids: Tensor
    labels: Tensor


class CriteoFiles(IterableDataset[Batch]):
    """An iterable data set that yields batches of samples from files, in line order.

    Use the data set with ``DataLoader(dataset, batch_size=None)``. With n worker processes, each reads every
    n-th line.

    Parameters
    ----------
    files : sequence of path
        Gzipped if the name ends in ``.gz``.
    batch_size : int
        Lines per batch; a smaller last batch is dropped, so that all batches have the same size.
    hash_size : int
        Ids are 0 to `hash_size`, exclusive.
    share : tuple of two int
        Index of a trainer and number of trainers; the trainer reads every n-th line. ``(0, 1)`` reads all.

    Raises
    ------
    ConfigurationError
        There is no file. While reading: a file cannot be read, is truncated, or has another format.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        batch_size: int,
        *,
        hash_size: int = 1_000_001,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__()
        if not files:
            raise ConfigurationError("no file to read; expected at least one")
        self.malformed = 0
        """The number of malformed lines that this process has skipped."""
        self._files = [Path(file) for file in files]
        self._batch_size = batch_size
        self._hash_size = hash_size
        self._share = share

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches, starting at the beginning of the first file."""
        index, of = self._share
        if (worker := get_worker_info()) is not None:
            index, of = index + of * worker.id, of * worker.num_workers
        lines = islice(self._lines(), index, None, of)
        while len(batch := list(islice(lines, self._batch_size))) == self._batch_size:
            yield _batch(batch, self._hash_size)

    def _lines(self) -> Iterator["_Line"]:
        for path in self._files:
            try:
                with _opened(path) as file:
                    yield from self._parsed(path, file)
            except (OSError, EOFError, zlib.error) as error:
                raise ConfigurationError(
                    f"{path} cannot be read to its end: {error}; is the download complete?"
                ) from error

    def _parsed(self, path: Path, file: Iterable[bytes]) -> Iterator["_Line"]:
        malformed = 0
        for number, text in enumerate(file, start=1):
            found = _parse(text)
            if isinstance(found, _Line):
                yield found
                continue
            malformed += 1
            self.malformed += 1
            if malformed <= _MAX_LOGGED:
                _log.warning("%s, line %d is skipped: %s", path, number, found)
            if number >= _MIN_LINES and malformed * 2 > number:
                raise ConfigurationError(
                    f"{path}: {malformed} of the first {number} lines are malformed, the last one because it "
                    f"is {found}; expected Criteo's format: a label, {COUNTS} counts and {CATEGORIES} "
                    "categories of 8 hexadecimal digits, separated by tabs"
                )
        if malformed > _MAX_LOGGED:
            _log.warning(
                "%s: %d malformed lines were skipped; the first ones are logged above", path, malformed
            )


@dataclass(frozen=True, slots=True)
class _Line:
    """A parsed line, in which `_NO_CATEGORY` stands for a missing category."""

    label: int
    counts: list[int]
    categories: list[int]


def hashed(categories: NDArray[np.uint64], hash_size: int) -> NDArray[np.int64]:
    """Return an id for each category, which is a hash of the category and its column.

    Parameters
    ----------
    categories : uint64[n, 26]
        Below 2**32; 2**32 for a missing category.
    hash_size : int

    Returns
    -------
    int64[n, 26]
        0 to `hash_size` - 1. The column is hashed too, so equal categories of two columns have different ids.
    """
    places = np.arange(categories.shape[1], dtype=np.uint64) << np.uint64(33)
    mixed = (places + categories) * _GOLDEN
    return ((mixed >> np.uint64(20)) % np.uint64(hash_size)).astype(np.int64)


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _parse(text: bytes) -> _Line | str:
    """Return a parsed line, or the reason why the line is malformed."""
    label, *fields = text.rstrip(b"\r\n").split(b"\t")
    if len(fields) + 1 != _FIELDS:
        return f"a line of {len(fields) + 1} fields, expected {_FIELDS}"
    if label not in (b"0", b"1"):
        return f"a line with the label {label[:20]!r}, expected 0 or 1"
    try:
        counts = [int(field) if field else 0 for field in fields[:COUNTS]]
        categories = [int(field, 16) if field else _NO_CATEGORY for field in fields[COUNTS:]]
    except ValueError as error:
        return f"not a line of numbers: {error}"
    if found := b"".join(fields).translate(None, _DIGITS):  # int() also accepts spaces, underscores, + and 0x
        return f"not a line of numbers: it has {found[:20]!r}"
    if max(map(len, fields[COUNTS:])) > 8 or min(categories) < 0 or max(map(abs, counts)) >= _COUNT_LIMIT:
        return "a line with a number out of range, expected categories of 8 hexadecimal digits"
    return _Line(label == b"1", counts, categories)


def _batch(lines: Sequence[_Line], hash_size: int) -> Batch:
    counts = np.array([line.counts for line in lines], dtype=np.float32)
    categories = np.array([line.categories for line in lines], dtype=np.uint64)
    return Batch(
        torch.from_numpy(np.log1p(np.maximum(counts, 0.0))),
        torch.from_numpy(hashed(categories, hash_size)),
        torch.tensor([line.label for line in lines], dtype=torch.float32),
    )
