"""Which ids have lost their rows since the last snapshot of a whole table."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.id_numbers import IdNumbers
from fleet.tables.index import MISSING
from fleet.tables.memory import RowMemory

__all__ = ["RemovedIds"]

_LEAST: Final = 1 << 16
"""So many ids are remembered at least, however few rows the table had."""


class RemovedIds:
    """Ids with the step at which their rows went; nothing is remembered before a snapshot of the whole.

    Once they are more than the rows of that snapshot, all are forgotten: what has changed since would be no
    smaller than a new one of the whole, and ids that come and go would fill the memory.
    """

    def __init__(self) -> None:
        self._steps = IdNumbers()
        self._base: int | None = None
        """The step of the last snapshot of the whole table."""
        self._most = 0
        """How many ids are remembered at most."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the ids take."""
        return self._steps.nbytes

    def begin(self, step: int, num_rows: int) -> None:
        """Forget all ids: a snapshot of the whole table, which has so many rows, is made at this step."""
        self._steps, self._base, self._most = IdNumbers(), step, max(_LEAST, num_rows)

    def add(self, ids: NDArray[np.int64], step: int) -> None:
        """Remember ids that have lost their rows."""
        if self._base is None:
            return
        self._steps.put(ids, step)
        if len(self._steps) > self._most:
            self._steps, self._base = IdNumbers(), None

    def knows(self, since: int | None) -> bool:
        """Whether all ids are remembered that have lost their rows after a step."""
        return since is not None and self._base is not None and since >= self._base

    def since(self, since: int, memory: RowMemory, table: str) -> NDArray[np.int64]:
        """Return the ids that have lost their rows after a step and have none now, ascending.

        Raises
        ------
        ConfigurationError
            The last snapshot of the whole table is later, or there is none.
        """
        if not self.knows(since):
            latest = "none is known" if self._base is None else f"the last one is of step {self._base}"
            raise ConfigurationError(
                f"table {table}: a snapshot since step {since} needs one of the whole table that is not "
                f"newer, and {latest}; expected Table.snapshot() without a step first"
            )
        ids, steps = self._steps.items()
        ids = ids[steps > since]
        gone: NDArray[np.int64] = ids[memory.find(ids) == MISSING]
        return gone
