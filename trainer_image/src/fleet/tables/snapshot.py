"""A table as of one moment, given out by virtual shard while updates go on.

What an update is about to change is set aside first, until its shard has been given out. So a snapshot takes
the memory of the rows that change meanwhile, and of one shard.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.tables.index import MISSING
from fleet.tables.layout import Layout
from fleet.tables.memory import RowMemory
from fleet.tables.saved import TableRows
from fleet.tables.shards import SHARDS, shard_of

__all__ = ["Snapshot"]


class Snapshot:
    """What a table holds as of one moment. Not to be called by another thread while its table is.

    `Table.snapshot` makes one. Once it has given out every shard, or is closed, updates set nothing aside.

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
    num_rows : int
        How many rows it gives out.
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
        self._waiting = np.ones(SHARDS, dtype=np.bool_)
        self._before = RowMemory(layout.width + 1)
        """Rows as they were; the last word is 1 where there was one."""
        self.num_rows = self._count()

    @property
    def dimension(self) -> int:
        """Elements of a row."""
        return self._layout.dimension

    @property
    def is_done(self) -> bool:
        """Whether nothing is to be set aside any more."""
        return not self._waiting.any()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows take that were set aside."""
        return self._before.nbytes

    def close(self) -> None:
        """Let go what was set aside; shards that were not given out are lost."""
        self._waiting[:] = False
        self._before = RowMemory(self._layout.width + 1)

    def parts(self) -> Iterator[TableRows]:
        """Yield the rows of each virtual shard, by ascending id, without policies. To be called once."""
        for shard in range(SHARDS):
            yield self._part(shard)
        self.close()

    def keep(self, ids: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Set aside what is about to change.

        Parameters
        ----------
        ids : int64[n]
            None of them twice.
        rows : int64[n]
            `MISSING` where there is none.
        """
        fresh = self._waiting[shard_of(ids)]
        fresh[fresh] = self._before.find(ids[fresh]) == MISSING
        ids, rows = ids[fresh], rows[fresh]
        existed = rows != MISSING
        words = torch.zeros(ids.size, self._layout.width + 1)
        words[torch.from_numpy(existed), :-1] = self._memory.read(rows[existed])
        words[:, -1] = torch.from_numpy(existed)
        self._before.write(self._before.add(ids), words)

    def _part(self, shard: int) -> TableRows:
        chosen = np.array([shard])
        [(_, ids, rows)] = self._memory.of_shards(chosen)
        [(_, ids_before, rows_before)] = self._before.of_shards(chosen)
        unchanged = self._before.find(ids) == MISSING
        before = self._before.read(rows_before)
        existed = before[:, -1] > 0.0
        words = torch.cat([self._memory.read(rows[unchanged]), before[existed, :-1]])
        ids = np.concatenate([ids[unchanged], ids_before[existed.numpy()]])
        self._before.remove(ids_before)
        self._waiting[shard] = False
        order = np.argsort(ids)
        order = order[self._wanted(words)[order]]
        return self._layout.table_rows(ids[order], words[torch.from_numpy(order)])

    def _wanted(self, words: Tensor) -> NDArray[np.bool_]:
        last = self._layout.last(words)
        return np.ones(last.size, dtype=np.bool_) if self.since is None else last > self.since

    def _count(self) -> int:
        if self.since is None:
            return len(self._memory)
        rows = (rows for _, _, rows in self._memory.of_shards(np.arange(SHARDS)))
        return sum(int(np.count_nonzero(self._wanted(self._memory.read(each)))) for each in rows)
