"""The memory of a table's rows, by number, and which virtual shard each belongs to."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.direct_index import DirectIndex
from fleet.tables.index import RowIndex
from fleet.tables.pages import PagedArray
from fleet.tables.shards import SHARDS, shard_of
from fleet.tables.storage import IN_MEMORY, Storage

__all__ = ["RowMemory"]

_GROWTH: Final = 1.125
"""By how much the memory of rows grows."""
_LEAST: Final = 64
_MOST: Final = 2**31 - 1
"""Indexes hold the numbers of rows as int32."""
_DENSE: Final = 4
"""Where one in so many ids has a row, an entry for every id takes no more than a hash index would."""


class RowMemory:
    """Rows of words by id. Not to be called by two threads at once.

    Parameters
    ----------
    width : int
        Words of 32 bits in a row.
    num_ids : int, optional
        Ids are 0 to it, exclusive; who calls has checked that. Without it any id is one.
    storage : Storage
        Where rows lie.
    """

    def __init__(self, width: int, num_ids: int | None = None, storage: Storage = IN_MEMORY) -> None:
        self._index: RowIndex | DirectIndex = RowIndex()
        self._num_ids = num_ids
        self._rows = storage.rows(width)
        self._rows.resize(_LEAST)
        self._shards = PagedArray(_LEAST, np.int16)
        """By row, one more than its shard; 0 where there is no row."""
        self.num_rows = np.zeros(SHARDS, dtype=np.int64)
        """By shard."""

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._index.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows and their index take."""
        return self._rows.nbytes + self._shards.values.nbytes + self._index.nbytes

    @property
    def num_on_disk(self) -> int:
        """How many rows lie on a disk, those included that have gone and whose numbers no others have."""
        return self._rows.num_on_disk

    @property
    def end(self) -> int:
        """One more than the highest number that a row has, or has had."""
        return self._index.numbers.end

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of rows; `fleet.tables.index.MISSING` where there is none."""
        return self._index.find(ids)

    def add(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of new rows, for ids that have none; their words are what was there.

        Raises
        ------
        ConfigurationError
            There would be more rows than can be numbered.
        """
        if len(self) + ids.size > _MOST:
            raise ConfigurationError(
                f"a parameter server would hold {len(self) + ids.size} rows of one table, expected {_MOST} "
                "at most; use more parameter servers, or an eviction"
            )
        rows = self._index.add(ids)
        if (end := self._index.numbers.end) > self._shards.values.size:
            size = max(end, int(self._shards.values.size * _GROWTH))
            self._rows.resize(size)
            self._shards.resize(size)
        if (
            isinstance(self._index, RowIndex)
            and self._num_ids is not None
            and len(self) * _DENSE > self._num_ids
        ):
            self._index = DirectIndex(self._num_ids, self._index.numbers)
        shards = shard_of(ids)
        self._shards.values[rows] = shards + 1
        self.num_rows += np.bincount(shards, minlength=SHARDS)
        return rows

    def remove(self, ids: NDArray[np.int64]) -> None:
        """Forget rows; ids that have none are passed over."""
        rows = self._index.remove(ids)
        self.num_rows -= np.bincount(self._shards.values[rows] - 1, minlength=SHARDS)
        self._shards.values[rows] = 0

    def read(self, rows: NDArray[np.int64], num_words: int | None = None) -> Tensor:
        """Return copies of rows, or of their first words; float32[n, num_words]."""
        return self._rows.read(rows, num_words)

    def write(self, rows: NDArray[np.int64], words: Tensor) -> None:
        """Put words into rows."""
        self._rows.write(rows, words)

    def ids_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids of rows."""
        return self._index.numbers.of_rows[rows]

    def at(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_], Tensor]:
        """Return copies of rows of any numbers.

        Parameters
        ----------
        rows : int64[n]

        Returns
        -------
        ids : int64[n]
        there : bool[n]
            Whether there is a row of this number; otherwise id and words are what was there.
        words : float32[n, width]
        """
        return self.ids_of(rows), self._shards.values[rows] > 0, self._rows.read(rows)

    def runs(self, end: int, at_once: int) -> Iterator[NDArray[np.int64]]:
        """Yield the numbers of rows below this one, some at a time, as is best to read them.

        Rows may be written in between. Each number comes once at least.
        """
        return self._rows.runs(end, at_once)

    def items(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all ids, ascending, and the numbers of their rows."""
        return self._index.numbers.items()

    def of_shards(
        self, shards: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield of each of some shards its number, the ids, ascending, and the numbers of their rows."""
        wanted = np.zeros(SHARDS + 1, dtype=np.bool_)
        wanted[shards + 1] = True
        rows = np.flatnonzero(wanted[self._shards.values[: self._index.numbers.end]])
        of = self._shards.values[rows]
        rows = rows[np.argsort(of, kind="stable")]
        ends = np.cumsum(self.num_rows[shards])
        for shard, mine in zip(shards.tolist(), np.split(rows, ends[:-1]), strict=True):
            ids = self._index.numbers.of_rows[mine]
            order = np.argsort(ids)
            yield shard, ids[order], mine[order]
