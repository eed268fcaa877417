"""The rows of a table: storage by row number, an index by id, and virtual shards."""

import ctypes
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.ids import SHARDS, shard_of
from fleet.tables.index import MISSING, DirectIndex, RowIndex
from fleet.tables.kernels import FEW, library
from fleet.tables.pages import PagedArray
from fleet.tables.storage import IN_MEMORY, Storage

__all__ = ["RowMemory", "TableStatistics"]

_GROWTH: Final = 1.125
_MIN_ROWS: Final = 64
_MAX_ROWS: Final = 2**31 - 1
"""The maximum number of rows, because indexes store row numbers as int32."""
_DENSE: Final = 4
"""If at least one id in this many has a row, a direct index is no larger than a hash index."""


class RowMemory:
    """A map from ids to rows of 32-bit words. Not thread-safe.

    Parameters
    ----------
    width : int
        Words of a row.
    num_ids : int, optional
        Ids are 0 to `num_ids`, exclusive; the caller has checked them. Without it any 64-bit id is valid.
    storage : Storage
        Where the rows are kept.

    Attributes
    ----------
    numbers : RowNumbers
        The rows that exist, and the id of each.
    store : RowStore
        The words of rows, by number.
    num_rows : int64[SHARDS]
        Rows of each virtual shard.
    """

    def __init__(self, width: int, num_ids: int | None = None, storage: Storage = IN_MEMORY) -> None:
        self._index: RowIndex | DirectIndex = RowIndex()
        self._num_ids = num_ids
        self.numbers = self._index.numbers
        self.store = storage.rows(width)
        self.store.resize(_MIN_ROWS)
        self._shards = PagedArray(_MIN_ROWS, np.int16)
        """For each row number, 1 plus the row's virtual shard, or 0 if there is no such row."""
        self.num_rows = np.zeros(SHARDS, dtype=np.int64)
        self._width = width
        self._few, self._many = library(keeps_lock=True), library()
        self._locate()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        """The memory used by the rows and the index, in bytes."""
        return self.store.nbytes + self._shards.values.nbytes + self._index.nbytes

    @property
    def is_in_memory(self) -> bool:
        """True if compiled code can access all rows in memory."""
        return bool(self._index.addresses.words)

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row number of each id, or `fleet.tables.index.MISSING` for an id without a row."""
        return self._index.find(ids)

    def read(self, ids: NDArray[np.int64], num_words: int) -> tuple[Tensor, NDArray[np.bool_] | None]:
        """Return copies of the first `num_words` words of the rows with the given ids.

        Parameters
        ----------
        ids : int64[n]
        num_words : int

        Returns
        -------
        words : float32[n, num_words]
            Undefined for ids without a row.
        missing : bool[n] or None
            Which ids have no row; None if all have one.
        """
        compiled = self._few if ids.size <= FEW else self._many
        if compiled is None or not self._index.addresses.words:
            rows = self.find(ids)
            missing = rows == MISSING
            if not missing.any():
                return self.store.read(rows, num_words), None
            # Row 0 always has memory, and the caller replaces the words of ids without a row.
            return self.store.read(np.where(missing, 0, rows), num_words), missing
        ids, rows = np.ascontiguousarray(ids, np.int64), np.empty(ids.size, np.int64)
        words = torch.empty(ids.size, num_words, dtype=torch.float32)
        if compiled.fleet_read_rows(
            ctypes.addressof(self._index.addresses),
            ids.ctypes.data,
            ids.size,
            rows.ctypes.data,
            words.data_ptr(),
            num_words,
        ):
            return words, rows == MISSING
        return words, None

    def step(
        self,
        loop: str,
        ids: NDArray[np.int64],
        gradient: Tensor,
        before: Tensor | None,
        options: tuple[float, float, int],
    ) -> bool:
        """Update rows in compiled code if every id has a row; return whether the rows were updated.

        Parameters
        ----------
        loop : str
            As `fleet.tables.rules.compiled_step` returns it.
        ids : int64[n]
            Distinct.
        gradient : float32[n, dimension]
            Contiguous, as `before` is.
        before : float32[n, dimension], optional
            Set to the values before the step.
        options : tuple of float, float and int
            The rate, the weight decay and the number of the step.
        """
        ids, rows = np.ascontiguousarray(ids, np.int64), np.empty(ids.size, np.int64)
        missing: int = getattr(self._few if ids.size <= FEW else self._many, loop)(
            ctypes.addressof(self._index.addresses),
            ids.ctypes.data,
            ids.size,
            rows.ctypes.data,
            gradient.data_ptr(),
            None if before is None else before.data_ptr(),
            gradient.shape[1],
            *options,
        )
        return not missing

    def add(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Allocate rows, with undefined content, for distinct ids that have none; return the row numbers.

        Raises
        ------
        ConfigurationError
            There would be more rows than row numbers.
        """
        if len(self) + ids.size > _MAX_ROWS:
            raise ConfigurationError(
                f"a parameter server would hold {len(self) + ids.size} rows of one table, expected at most "
                f"{_MAX_ROWS}; use more parameter servers, or an eviction rule"
            )
        rows = self._index.add(ids)
        if self.numbers.end > self._shards.values.size:
            size = max(self.numbers.end, int(self._shards.values.size * _GROWTH))
            self.store.resize(size)
            self._shards.resize(size)
        if (
            isinstance(self._index, RowIndex)
            and self._num_ids is not None
            and len(self) * _DENSE > self._num_ids
        ):
            self._index = DirectIndex(self._num_ids, self.numbers)
        self._locate()
        shards = shard_of(ids)
        self._shards.values[rows] = shards + 1
        self.num_rows += np.bincount(shards, minlength=SHARDS)
        return rows

    def remove(self, ids: NDArray[np.int64]) -> None:
        """Remove the rows of distinct ids; ids without a row are ignored."""
        rows = self._index.remove(ids)
        self.num_rows -= np.bincount(self._shards.values[rows] - 1, minlength=SHARDS)
        self._shards.values[rows] = 0

    def _locate(self) -> None:
        """Update the addresses that compiled code uses, because the index or the rows may have moved."""
        self._index.addresses.words, self._index.addresses.width = self.store.address, self._width

    def exist(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the row numbers belong to existing rows."""
        existing: NDArray[np.bool_] = self._shards.values[rows] > 0
        return existing

    def rows_of_shards(
        self, shards: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield each shard with its sorted ids and their row numbers."""
        wanted = np.zeros(SHARDS + 1, dtype=np.bool_)
        wanted[shards + 1] = True
        rows = np.flatnonzero(wanted[self._shards.values[: self.numbers.end]])
        of = self._shards.values[rows]
        rows = rows[np.argsort(of, kind="stable")]
        ends = np.cumsum(self.num_rows[shards])
        for shard, mine in zip(shards.tolist(), np.split(rows, ends[:-1]), strict=True):
            ids = self.numbers.ids[mine]
            order = np.argsort(ids)
            yield shard, ids[order], mine[order]


class TableStatistics:
    """Counters and sizes of a table, or of one server's part of it.

    Any thread may read them, without a lock, while another one changes the table.

    Parameters
    ----------
    memory : RowMemory
        The table's rows.

    Attributes
    ----------
    looked_up : int
        Ids that were looked up.
    found : int
        Looked-up ids that had a row; the others were read as their first values.
    """

    def __init__(self, memory: RowMemory) -> None:
        self.looked_up = 0
        self.found = 0
        self._memory = memory

    @property
    def on_disk(self) -> int:
        """The number of rows on disk, including removed rows whose numbers have not been reused."""
        return self._memory.store.num_on_disk

    @property
    def rows_of_fullest_shard(self) -> int:
        """The number of rows in the largest virtual shard."""
        return int(self._memory.num_rows.max())

    def skew(self, num_shards: int) -> float:
        """Return the ratio of the largest virtual shard's rows to the mean; 1 for an empty table.

        Parameters
        ----------
        num_shards : int
            Number of virtual shards over which the rows are spread: the table's, or one server's.
        """
        total = int(self._memory.num_rows.sum())
        return self.rows_of_fullest_shard * num_shards / total if total else 1.0
