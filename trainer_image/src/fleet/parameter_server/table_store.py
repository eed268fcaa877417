"""What a server keeps of tables, and the one way in which their rows change: the store beside the dense one.

As of blocks, nothing changes a row but `apply`, and what comes is an update record. Rows are read by id, and
what was never updated is read too.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError, RemoteProtocolError
from fleet.parameter_server.failed_step import FailedStep
from fleet.parameter_server.store import Origin
from fleet.plan.tables import TablePlan
from fleet.process import progress
from fleet.tables import RowGradients, Table, TableRows
from fleet.tables.rows import part, warm_start
from fleet.tables.shards import SHARDS, shard_of
from fleet.tables.snapshot import Snapshot
from fleet.wire import HyperParameters
from fleet.wire.rows import most_rows

__all__ = ["RowCopy", "RowPut", "RowUpdate", "TableStore"]


@dataclass(slots=True)
class RowUpdate:
    """What trainers have sent for rows of a table.

    Attributes
    ----------
    table : int
        Its number.
    gradient : RowGradients
        Of this server's rows, each id once; in sync mode the mean over the trainers. May be overwritten.
    hyper_parameters : tuple of mappings
        Those of the step, by param group.
    origins : tuple of Origin
        Whose gradients it is made of, in the order of their sum.
    sequence : int
        The number that the store gives it; 0 before.
    keeps : bool
        Whether the store is to say what its rows were.
    before : float32[n, dimension], optional
        That, by the gradient's ids, once it is applied.
    """

    table: int
    gradient: RowGradients
    hyper_parameters: HyperParameters
    origins: tuple[Origin, ...]
    sequence: int = 0
    keeps: bool = False
    before: Tensor | None = None


@dataclass(slots=True)
class RowPut:
    """Rows that take the place of all of a table: a checkpoint's.

    Attributes
    ----------
    table : int
    rows : Table
        This server's; the store's own from now on.
    updates : int
        How many updates the table has had.
    sequence : int
        As of `RowUpdate`.
    """

    table: int
    rows: Table
    updates: int
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class RowCopy:
    """A table as of one moment, to be read once while updates go on.

    Attributes
    ----------
    table : int
    updates : int
        How many updates the table has had.
    snapshot : Snapshot
    lock : Lock
        Held while a part is copied.
    """

    table: int
    updates: int
    snapshot: Snapshot
    lock: threading.Lock

    def parts(self) -> Iterator[TableRows]:
        """Yield all rows, some at a time."""
        parts = self.snapshot.parts()
        while True:
            with self.lock:
                part = next(parts, None)
            if part is None:
                return
            yield part

    def count(self) -> None:
        """Count its rows, some at a time, before they are read."""
        counting = True
        while counting:
            with self.lock:
                counting = self.snapshot.count_on()

    def close(self) -> None:
        """Let go what is not read yet: updates set nothing aside any more."""
        with self.lock:
            self.snapshot.close()


@dataclass(slots=True)
class _Entry:
    """One table."""

    plan: TablePlan
    table: Table
    updates: int = 0
    """How many there have been, empty ones included: so many on every server."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever reads or changes rows."""

    def begin(self, shards: Sequence[int]) -> None:
        """Take the rows of some virtual shards that are there from the beginning, if there are any."""
        if self.plan.own is not None:
            self.table.load(_rows_of(self.plan.own, shards))
        elif self.plan.warm_start is not None:
            self.table.load(part(warm_start(self.plan.config, *self.plan.warm_start()), shards))


class TableStore:
    """The tables of one server. Any thread may call.

    Parameters
    ----------
    plans : iterable of TablePlan
    failed : FailedStep
        The server's: why rows may be half changed, after which nothing is applied any more.
    shards : sequence of int
        The virtual shards that the server holds.
    """

    def __init__(
        self, plans: Iterable[TablePlan], failed: FailedStep, shards: Sequence[int] = range(SHARDS)
    ) -> None:
        self.failed = failed
        self._num_shards = len(shards)
        self._entries = {plan.number: _Entry(plan, Table(plan.config)) for plan in plans}
        self._sequence = itertools.count(1)
        for entry in self._entries.values():
            entry.begin(shards)
        self.row_bytes = {number: entry.plan.row_bytes for number, entry in self._entries.items()}
        """By table, the bytes of a row as it travels."""

    def __len__(self) -> int:
        """Return how many tables there are."""
        return len(self._entries)

    @property
    def names(self) -> Mapping[int, str]:
        """The tables' names."""
        return {number: entry.plan.config.name for number, entry in self._entries.items()}

    def tells(self, table: int) -> bool:
        """Whether trainers hold a table too, and so are told of the rows that change."""
        return self._entries[table].plan.own is not None

    def check_told(self, table: int, count: int) -> None:
        """Refuse more changed rows than one frame can tell trainers that hold a table too.

        Raises
        ------
        ConfigurationError
            With what would be told, and what to do.
        """
        most = most_rows(self.row_bytes[table])
        if self.tells(table) and count > most:
            raise ConfigurationError(
                f"trainers hold table {self.names[table]} too, and {count} of its rows on one server have "
                f"changed at once, expected {most} at most; use smaller batches, more parameter servers, or "
                "fleet.nn.DistributedEmbedding in place of sparse=True"
            )

    def statistics(self) -> list[dict[str, Any]]:
        """Return what progress and metrics tell of each table, as JSON-ready data.

        No lock is taken: a save may hold it for long, and who asks must not wait.
        """
        return [
            {
                "name": entry.plan.config.name,
                "rows": len(entry.table),
                "bytes": entry.table.nbytes,
                "rowsOnDisk": entry.table.statistics.on_disk,
                "lookedUp": entry.table.statistics.looked_up,
                "found": entry.table.statistics.found,
                "rowsOfFullestShard": entry.table.statistics.rows_of_fullest_shard,
                "shardSkew": entry.table.statistics.skew(self._num_shards),
            }
            for entry in self._entries.values()
        ]

    def describe(self) -> str:
        """Return ``table users`` or ``tables users, items``."""
        names = list(self.names.values())
        return f"table{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def apply(self, update: RowUpdate | RowPut) -> None:
        """Change rows, and give the update its number.

        Raises
        ------
        FleetError
            A ConfigurationError refuses the update. Any other is of this one or one before: then rows may be
            half changed, `failed` says so, and the server ends.
        """
        entry = self._entries[update.table]
        with entry.lock:
            self.failed.check()
            update.sequence = next(self._sequence)
            if isinstance(update, RowPut):
                entry.table, entry.updates = update.rows, update.updates
                return
            entry.updates += 1
            if not update.gradient.ids.size:
                return
            progress.count("rows_stepped", update.gradient.ids.size)
            options = entry.plan.options(update.hyper_parameters)
            try:
                update.before = entry.table.update(
                    update.gradient.ids, update.gradient.values, entry.updates, options, keeps=update.keeps
                )
            except ConfigurationError:
                raise
            except BaseException as error:
                raise self.failed.note(error) from error

    def check(self, table: int, ids: NDArray[np.int64]) -> None:
        """Refuse ids that the table does not have, before anything is kept of them; RemoteProtocolError."""
        config = self._entries[table].plan.config
        limit = config.num_embeddings
        if limit is not None and ids.size and not 0 <= int(ids[0]) <= int(ids[-1]) < limit:
            raise RemoteProtocolError(
                f"ids {ids[0]} to {ids[-1]} of table {config.name}, expected 0 to {limit - 1}"
            )

    def look_up(self, table: int, ids: NDArray[np.int64]) -> Tensor:
        """Return what `read` does, to a trainer that has asked for it: the table's statistics count that."""
        entry = self._entries[table]
        with entry.lock:
            return entry.table.look_up(ids)

    def read(self, table: int, ids: NDArray[np.int64]) -> Tensor:
        """Return a copy of rows, as they are between two updates: float32[n, dimension]."""
        entry = self._entries[table]
        with entry.lock:
            return entry.table.look_up(ids, counted=False)

    def snapshot(self, since: Mapping[int, int] | None = None) -> list[RowCopy]:
        """Return what every table is now, between two updates. Each must be read to the end, or closed.

        Parameters
        ----------
        since : mapping of int to int, optional
            By table, after which of its updates rows must have changed. All rows of a table are in the copy
            where it is not given, or nobody knows which rows have gone since.
        """
        copies = []
        for number, entry in self._entries.items():
            with entry.lock:
                of = (since or {}).get(number)
                snapshot = entry.table.snapshot(of if entry.table.removed.knows(of) else None)
                copies.append(RowCopy(number, entry.updates, snapshot, entry.lock))
        return copies


def _rows_of(weight: Tensor, shards: Sequence[int]) -> TableRows:
    """Return the rows of a module's weight that belong to some virtual shards, as they begin."""
    ids = np.arange(len(weight), dtype=np.int64)
    ids = ids[np.isin(shard_of(ids), np.array(shards))]
    return TableRows(ids, weight.detach()[torch.from_numpy(ids).to(weight.device)].cpu(), {})
