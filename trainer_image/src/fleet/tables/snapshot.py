"""A table as of one moment, given out in the order of its memory while updates go on.

What an update is about to change is set aside first, until it has been given out. So a snapshot takes the
memory of the rows that change meanwhile, and of one part. Memory is read from its beginning to its end, as
suits rows that are on a disk.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.tables.index import MISSING
from fleet.tables.layout import Layout
from fleet.tables.memory import RowMemory
from fleet.tables.saved import TableRows

__all__ = ["PART_BYTES", "Snapshot"]

PART_BYTES: Final = 4 << 20
"""Of the rows of a part, at most."""
_BESIDE: Final = 3
"""Words beside a row that was set aside: its id takes two, and one says whether there was a row."""


class Snapshot:
    """What a table holds as of one moment. Not to be called by another thread while its table is.

    `Table.snapshot` makes one. Once it has given out every part, or is closed, updates set nothing aside.

    Attributes
    ----------
    step : int
        The newest update that is in it.
    since : int, optional
        Only rows that were updated after this step are in it.
    removed : int64[n]
        Of a snapshot since a step: ids whose rows have gone since, ascending.
    policies : mapping of name to array
        As in `TableRows`, of all shards.
    """

    def __init__(
        self,
        memory: RowMemory,
        layout: Layout,
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
        self._given = np.zeros(memory.end, dtype=np.bool_)
        """By number, which rows were given out; those of higher numbers are new."""
        self.is_done = not memory.end
        """Whether nothing is to be set aside any more."""
        self._before = RowMemory(layout.width + _BESIDE)
        """Rows as they were, by their number."""
        self._num_rows = len(memory)
        self._counting = self._count() if since is not None else iter(())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows take that were set aside."""
        return self._before.nbytes

    @property
    def none(self) -> TableRows:
        """No rows, in the types and shapes of the parts."""
        return self._layout.table_rows(
            np.zeros(0, dtype=np.int64), torch.empty(0, self._layout.width, dtype=torch.float32)
        )

    @property
    def num_rows(self) -> int:
        """How many rows it gives out."""
        while self.count_on():
            pass
        return self._num_rows

    def count_on(self) -> bool:
        """Count the rows of one more part; return whether some are left.

        Of a snapshot since a step all rows have to be looked at. Updates may go on between two calls, as
        between two parts; all calls come before the first part.
        """
        return next(self._counting, False)

    def close(self) -> None:
        """Let go what was set aside; rows that were not given out are lost."""
        self.is_done = True
        self._before = RowMemory(self._layout.width + _BESIDE)

    def parts(self) -> Iterator[TableRows]:
        """Yield all rows, some at a time, in no order, without policies. To be called once."""
        for numbers in self._runs():
            numbers = numbers[~self._given[numbers]]
            yield self._part(numbers)
        self.close()

    def keep(self, rows: NDArray[np.int64], *, existed: bool = True) -> None:
        """Set aside what is about to change.

        Parameters
        ----------
        rows : int64[n]
            Their numbers, none of them twice; those of `MISSING` are passed over.
        existed : bool
            False for numbers that are about to be those of new rows.
        """
        rows = rows[(rows >= 0) & (rows < self._given.size)]
        rows = rows[~self._given[rows]]
        rows = rows[self._before.find(rows) == MISSING]
        if not rows.size:
            return
        words = torch.zeros(rows.size, self._layout.width + _BESIDE, dtype=torch.float32)
        if existed:
            words[:, :-_BESIDE] = self._memory.read(rows)
            words[:, -_BESIDE:-1] = (
                torch.from_numpy(self._memory.ids_of(rows)).view(torch.float32).view(-1, 2)
            )
            words[:, -1] = 1.0
        self._before.write(self._before.add(rows), words)

    def _part(self, numbers: NDArray[np.int64]) -> TableRows:
        ids, there, words = self._as_they_were(numbers)
        self._given[numbers] = True
        self._before.remove(numbers)
        chosen = np.flatnonzero(there & self._wanted(self._layout.last(words)))
        return self._layout.table_rows(ids[chosen], words[torch.from_numpy(chosen)])

    def _as_they_were(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], Tensor]:
        """Return rows that were not given out, as of the snapshot's moment; as `RowMemory.at`."""
        ids, there, words = self._memory.at(numbers)
        if len(self._before):
            kept = self._before.find(numbers)
            at = np.flatnonzero(kept != MISSING)
            before = self._before.read(kept[at])
            words[torch.from_numpy(at)] = before[:, :-_BESIDE]
            ids[at] = before.numpy()[:, -_BESIDE:-1].copy().view(np.int64)[:, 0]
            there[at] = before[:, -1] > 0.0
        return ids, there, words

    def _wanted(self, last: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.ones(last.size, dtype=np.bool_) if self.since is None else last > self.since

    def _count(self) -> Iterator[bool]:
        self._num_rows, counted = 0, np.zeros(self._given.size, dtype=np.bool_)
        for numbers in self._runs():
            numbers = numbers[~counted[numbers]]
            counted[numbers] = True
            _, there, words = self._as_they_were(numbers)
            self._num_rows += int(np.count_nonzero(there & self._wanted(self._layout.last(words))))
            yield True

    def _runs(self) -> Iterator[NDArray[np.int64]]:
        """Yield the numbers of all rows, as many at a time as a part has, in the order in which they lie."""
        return self._memory.runs(self._given.size, max(1, PART_BYTES // (4 * self._layout.width)))
