"""Snapshots of a table: all rows as of one step, or the rows changed since an earlier snapshot.

Updates continue while a snapshot is read. A row that the snapshot has not returned yet is copied before an
update changes it. A snapshot therefore needs memory for one part and for the rows that change in the
meantime. Rows are read in the order of storage, which suits rows on a disk.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.index import MISSING, IdMap
from fleet.tables.memory import RowMemory
from fleet.tables.rows import RowLayout, TableRows

__all__ = ["PART_BYTES", "RemovedIds", "Snapshot"]

PART_BYTES: Final = 4 << 20
"""The maximum size of a part, in bytes of rows."""
_EXTRA: Final = 3
"""Words that are copied with a row: two for its id, and one for whether the row existed."""
_MIN_REMOVED: Final = 1 << 16
"""The number of removed ids that are recorded even if the table had fewer rows."""


class Snapshot:
    """A table's content as of one step. No other thread may use the table while a method runs.

    `Table.snapshot` creates it. It copies rows before they change until it is read to the end or closed.

    Attributes
    ----------
    step : int
        The step of the newest update that it contains.
    since : int, optional
        Only rows that were updated after this step are in it.
    removed : int64[n]
        Ids whose rows were removed after that step, ascending; empty without `since`.
    policies : mapping of name to array
        As in `TableRows`, of all shards.
    """

    def __init__(
        self,
        memory: RowMemory,
        layout: RowLayout,
        step: int,
        policies: Mapping[str, NDArray[Any]],
        since: int | None = None,
        removed: NDArray[np.int64] | None = None,
    ) -> None:
        self.step = step
        self.since = since
        self.removed = np.zeros(0, dtype=np.int64) if removed is None else removed
        self.policies = policies
        self._memory = memory
        self._layout = layout
        self._returned = np.zeros(memory.numbers.end, dtype=np.bool_)
        """For each row number, whether the row was returned; higher numbers belong to new rows."""
        self.is_done = not memory.numbers.end
        """True once rows no longer have to be copied before they change."""
        self._copies = RowMemory(layout.width + _EXTRA)
        """Copies of rows before they changed, with the table's row numbers as ids."""
        self._num_rows = len(memory)
        self._counting = self._count() if since is not None else iter(())

    @property
    def nbytes(self) -> int:
        """The memory of the copied rows, in bytes."""
        return self._copies.nbytes

    @property
    def none(self) -> TableRows:
        """An empty set of rows, with the dtypes and shapes of `parts`."""
        return self._layout.table_rows(
            np.zeros(0, dtype=np.int64), torch.empty(0, self._layout.width, dtype=torch.float32)
        )

    @property
    def num_rows(self) -> int:
        """The number of rows in the snapshot."""
        while self.count_on():
            pass
        return self._num_rows

    def count_on(self) -> bool:
        """Count the rows of the next part; return whether there are further parts to count.

        With `since`, counting reads all rows. Updates may run between two calls, as between two parts. Make
        all calls before the first part is read.
        """
        return next(self._counting, False)

    def close(self) -> None:
        """Free the copied rows; rows that have not been returned yet are lost."""
        self.is_done = True
        self._copies = RowMemory(self._layout.width + _EXTRA)

    def parts(self) -> Iterator[TableRows]:
        """Yield all rows in parts, in any order, without admission and eviction state. Call this once."""
        for numbers in self._runs():
            # A row that has moved within its store since the last part may come twice.
            numbers = numbers[~self._returned[numbers]]
            ids, existed, words = self._read(numbers)
            self._returned[numbers] = True
            # Returned rows need no copy; their memory serves the rows that change next.
            self._copies.remove(numbers)
            chosen = np.flatnonzero(existed & self._is_wanted(words))
            yield self._layout.table_rows(ids[chosen], words[torch.from_numpy(chosen)])
        self.close()

    def keep(self, rows: NDArray[np.int64], *, existed: bool = True) -> None:
        """Copy rows before they change.

        Parameters
        ----------
        rows : int64[n]
            Distinct row numbers; `MISSING` is skipped.
        existed : bool
            False for numbers that were just allocated to new rows.
        """
        rows = rows[(rows >= 0) & (rows < self._returned.size)]
        rows = rows[~self._returned[rows]]
        rows = rows[self._copies.find(rows) == MISSING]
        if not rows.size:
            return
        words = torch.zeros(rows.size, self._layout.width + _EXTRA, dtype=torch.float32)
        if existed:
            ids = torch.from_numpy(self._memory.numbers.ids[rows])
            words[:, :-_EXTRA] = self._memory.store.read(rows)
            # The id is stored as the bits of two floats; copying keeps them, even if they form a NaN.
            words[:, -_EXTRA:-1] = ids.view(torch.float32).view(-1, 2)
            words[:, -1] = 1.0
        self._copies.store.write(self._copies.add(rows), words)

    def _read(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_], Tensor]:
        """Return the ids, whether each row existed, and the rows' words, as of the snapshot's step."""
        ids, existed = self._memory.numbers.ids[numbers], self._memory.exist(numbers)
        words = self._memory.store.read(numbers)
        if len(self._copies):
            rows = self._copies.find(numbers)
            at = np.flatnonzero(rows != MISSING)
            copies = self._copies.store.read(rows[at])
            words[torch.from_numpy(at)] = copies[:, :-_EXTRA]
            ids[at] = copies.numpy()[:, -_EXTRA:-1].copy().view(np.int64)[:, 0]
            existed[at] = copies[:, -1] > 0.0
        return ids, existed, words

    def _is_wanted(self, words: Tensor) -> NDArray[np.bool_]:
        last = self._layout.last(words)
        return np.ones(last.size, dtype=np.bool_) if self.since is None else last > self.since

    def _count(self) -> Iterator[bool]:
        self._num_rows, counted = 0, np.zeros(self._returned.size, dtype=np.bool_)
        for numbers in self._runs():
            numbers = numbers[~counted[numbers]]
            counted[numbers] = True
            _, existed, words = self._read(numbers)
            self._num_rows += int(np.count_nonzero(existed & self._is_wanted(words)))
            yield True

    def _runs(self) -> Iterator[NDArray[np.int64]]:
        """Yield all row numbers in storage order, in chunks of one part each."""
        at_once = max(1, PART_BYTES // (4 * self._layout.width))
        return self._memory.store.runs(self._returned.size, at_once)


class RemovedIds:
    """The ids of rows removed since the last full snapshot, with the step of each removal.

    No ids are recorded before the first such snapshot. If the ids outnumber the rows of that snapshot, all
    are dropped: a delta would be no smaller than another snapshot of the whole table.
    """

    def __init__(self) -> None:
        self._steps = IdMap()
        self._base: int | None = None
        """The step of the last snapshot of the whole table."""
        self._most = 0
        """The maximum number of recorded ids."""

    @property
    def nbytes(self) -> int:
        """The memory in use, in bytes."""
        return self._steps.nbytes

    def begin(self, step: int, num_rows: int) -> None:
        """Discard the record, and start again from a full snapshot with `num_rows` rows."""
        self._steps, self._base, self._most = IdMap(), step, max(_MIN_REMOVED, num_rows)

    def add(self, ids: NDArray[np.int64], step: int) -> None:
        """Record the ids of removed rows."""
        if self._base is None:
            return
        self._steps.put(ids, step)
        if len(self._steps) > self._most:
            self._steps, self._base = IdMap(), None

    def knows(self, since: int | None) -> bool:
        """Return whether the record includes all removals after a step."""
        return since is not None and self._base is not None and since >= self._base

    def since(self, since: int, memory: RowMemory, table: str) -> NDArray[np.int64]:
        """Return the sorted ids of rows that were removed after a step and do not exist now.

        Raises
        ------
        ConfigurationError
            The last snapshot of the whole table is newer, or there is none.
        """
        if not self.knows(since):
            latest = "there is none" if self._base is None else f"the last one is of step {self._base}"
            raise ConfigurationError(
                f"table {table}: a snapshot since step {since} needs a snapshot of the whole table that is "
                f"not newer, and {latest}; expected Table.snapshot() without a step first"
            )
        ids, steps = self._steps.items()
        ids = ids[steps > since]
        gone: NDArray[np.int64] = ids[memory.find(ids) == MISSING]
        return gone
