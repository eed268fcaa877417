"""The memory of a table's rows, by number, and which virtual shard each belongs to."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.tables.index import RowIndex
from fleet.tables.shards import SHARDS, shard_of

__all__ = ["RowMemory"]

_GROWTH: Final = 1.125
"""By how much the memory of rows grows: resized in place, by pages, it needs no second copy."""
_LEAST: Final = 64


class RowMemory:
    """Rows of words by id. Not to be called by two threads at once.

    Parameters
    ----------
    width : int
        Words of 32 bits in a row.
    """

    def __init__(self, width: int) -> None:
        self._index = RowIndex()
        self._words = np.zeros((_LEAST, width), dtype=np.float32)
        self._shards = np.zeros(_LEAST, dtype=np.int16)
        """By row, one more than its shard; 0 where there is no row."""
        self.num_rows = np.zeros(SHARDS, dtype=np.int64)
        """By shard."""

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows and their index take."""
        return self._words.nbytes + self._shards.nbytes + self._index.nbytes

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of rows; `fleet.tables.index.MISSING` where there is none."""
        return self._index.find(ids)

    def add(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of new rows, for ids that have none; their words are what was there."""
        rows = self._index.add(ids)
        if self._index.end > len(self._words):
            size = max(self._index.end, int(len(self._words) * _GROWTH))
            self._words.resize((size, self._words.shape[1]), refcheck=False)
            self._shards.resize(size, refcheck=False)
        shards = shard_of(ids)
        self._shards[rows] = shards + 1
        self.num_rows += np.bincount(shards, minlength=SHARDS)
        return rows

    def remove(self, ids: NDArray[np.int64]) -> None:
        """Forget rows; ids that have none are passed over."""
        rows = self._index.remove(ids)
        self.num_rows -= np.bincount(self._shards[rows] - 1, minlength=SHARDS)
        self._shards[rows] = 0

    def read(self, rows: NDArray[np.int64], num_words: int | None = None) -> Tensor:
        """Return copies of rows, or of their first words; float32[n, num_words]."""
        words = torch.from_numpy(self._words)
        return torch.index_select(words[:, :num_words], 0, torch.from_numpy(rows))

    def write(self, rows: NDArray[np.int64], words: Tensor) -> None:
        """Put words into rows."""
        self._words[rows] = words.numpy()

    def items(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all ids, ascending, and the numbers of their rows."""
        return self._index.items()

    def of_shards(
        self, shards: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield of each of some shards its number, the ids, ascending, and the numbers of their rows."""
        wanted = np.zeros(SHARDS + 1, dtype=np.bool_)
        wanted[shards + 1] = True
        rows = np.flatnonzero(wanted[self._shards[: self._index.end]])
        of = self._shards[rows]
        rows = rows[np.argsort(of, kind="stable")]
        ends = np.cumsum(self.num_rows[shards])
        for shard, mine in zip(shards.tolist(), np.split(rows, ends[:-1]), strict=True):
            ids = self._index.ids(mine)
            order = np.argsort(ids)
            yield shard, ids[order], mine[order]
