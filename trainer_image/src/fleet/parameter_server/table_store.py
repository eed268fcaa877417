"""The tables of a server. Only update records change their rows.

As in `DenseStore`, only `apply` changes a row. A row that was never updated can also be read, and has its
initial value.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError, RemoteProtocolError
from fleet.parameter_server.store import FailedStep, Origin
from fleet.plan.tables import TablePlan
from fleet.process import progress
from fleet.tables import RowGradients, Table, TableRows
from fleet.tables.ids import SHARDS, shard_of
from fleet.tables.rows import part, warm_start
from fleet.tables.rules import steps_every_row
from fleet.tables.snapshot import Snapshot
from fleet.tables.storage import IN_MEMORY
from fleet.wire import HyperParameters
from fleet.wire.rows import most_rows

__all__ = ["RowCopy", "RowPut", "RowUpdate", "TableStore", "append_ids"]

_MOST_ARRAYS: Final = 64
"""The maximum length of a list of pending id arrays; a longer list is merged into one array."""


@dataclass(slots=True)
class RowUpdate:
    """A record that updates rows of a table with the gradients of one or more trainers.

    Attributes
    ----------
    table : int
        The table's number.
    gradient : RowGradients
        The gradient of this server's rows, with distinct ids; in sync mode the mean over the trainers. It may
        be overwritten. If the table's rule updates every row, the store extends the gradient to every row.
    hyper_parameters : tuple of mappings
        The hyper-parameters of the step, by param group.
    origins : tuple of Origin
        The origins of the summed gradients, in the order of the sum.
    sequence : int
        The sequence number, which the store assigns; 0 until then.
    keeps : bool
        Whether the store sets `before`.
    before : float32[n, dimension], optional
        The previous values of the rows, in the order of the gradient's ids; set when the update is applied.
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
    """A record that replaces all rows of a table with those of a checkpoint.

    Attributes
    ----------
    table : int
    rows : Table
        This server's rows. The store takes ownership of them.
    updates : int
        The number of updates that the table has received.
    sequence : int
        See `RowUpdate`.
    """

    table: int
    rows: Table
    updates: int
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class RowCopy:
    """A snapshot of a table, which is read while updates continue.

    Attributes
    ----------
    table : int
    updates : int
        The number of updates that the table had received.
    snapshot : Snapshot
    lock : Lock
        Held while a part is copied.
    """

    table: int
    updates: int
    snapshot: Snapshot
    lock: threading.Lock

    def parts(self) -> Iterator[TableRows]:
        """Yield all rows in parts; the lock is held only while a part is read."""
        parts = self.snapshot.parts()
        while True:
            with self.lock:
                part = next(parts, None)
            if part is None:
                return
            yield part

    def count(self) -> None:
        """Count the rows before reading them; the lock is held only while a part is counted."""
        counting = True
        while counting:
            with self.lock:
                counting = self.snapshot.count_on()

    def close(self) -> None:
        """Release the snapshot, so that updates no longer copy rows that have not been read from it."""
        with self.lock:
            self.snapshot.close()


@dataclass(slots=True)
class _Entry:
    """A table with its lock and its counters."""

    plan: TablePlan
    table: Table
    updates: int = 0
    """The number of updates, including empty ones; the same on every server."""
    every_id: NDArray[np.int64] | None = None
    """All ids of the table on this server, ascending; None until an update has changed every row."""
    every_row: tuple[HyperParameters, bool] = (), False
    """The hyper-parameters last checked by `TableStore.update_bytes`, and whether they change every row."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards the rows."""


class TableStore:
    """All tables of one server. Thread-safe.

    Parameters
    ----------
    plans : iterable of TablePlan
    failed : FailedStep
        The failure of the server, shared with its `DenseStore`; no update is applied after a failure.
    shards : sequence of int
        The virtual shards that the server holds.
    """

    def __init__(
        self, plans: Iterable[TablePlan], failed: FailedStep, shards: Sequence[int] = range(SHARDS)
    ) -> None:
        self.failed = failed
        self._shards = shards
        self._entries: dict[int, _Entry] = {}
        self._sequence = itertools.count(1)
        for plan in plans:
            table = Table(plan.config)
            if plan.own is not None:
                table.load(_rows_of(plan.own, shards))
            elif plan.warm_start is not None:
                table.load(part(warm_start(plan.config, *plan.warm_start()), shards))
            self._entries[plan.number] = _Entry(plan, table)
        self.names: Mapping[int, str] = {
            number: entry.plan.config.name for number, entry in self._entries.items()
        }
        """The tables' names, by number."""
        self.row_bytes = {number: entry.plan.row_bytes for number, entry in self._entries.items()}
        """The size of a row on the wire in bytes, by table."""
        self.on_disk = frozenset(
            number for number, entry in self._entries.items() if entry.plan.config.storage != IN_MEMORY
        )
        """The tables whose rows may be on a disk."""

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self._entries)

    def held_by_trainers(self, table: int) -> bool:
        """Return whether trainers store a copy of the table, so that they need every changed row."""
        return self._entries[table].plan.own is not None

    def check_reportable(self, table: int, count: int) -> None:
        """Raise an error if trainers also store the table and `count` changed rows exceed one frame.

        Raises
        ------
        ConfigurationError
            There are too many rows; the message gives both numbers and a remedy.
        """
        most = most_rows(self.row_bytes[table])
        if self.held_by_trainers(table) and count > most:
            raise ConfigurationError(
                f"trainers also hold table {self.names[table]}, and {count} of its rows on one server "
                f"changed in one step, expected at most {most}; use smaller batches, more parameter servers, "
                "or fleet.nn.DistributedEmbedding in place of sparse=True"
            )

    def statistics(self) -> list[dict[str, Any]]:
        """Return the statistics of each table, for progress and metrics, as JSON-ready data.

        This takes no lock, because the heartbeat calls it and must not wait for a save that holds the lock.
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
                "shardSkew": entry.table.statistics.skew(len(self._shards)),
            }
            for entry in self._entries.values()
        ]

    def describe(self) -> str:
        """Return a phrase such as ``table users`` or ``tables users, items``."""
        names = list(self.names.values())
        return f"table{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def apply(self, update: RowUpdate | RowPut) -> None:
        """Apply an update to its rows, and assign a sequence number to the update.

        Raises
        ------
        ConfigurationError
            The update is refused, and no row has changed.
        FleetError
            This update or an earlier one failed. Rows may be partly changed: `failed` has the reason, and the
            server ends.
        """
        entry = self._entries[update.table]
        with entry.lock:
            if self.failed.error is not None:
                raise self.failed.error
            update.sequence = next(self._sequence)
            if isinstance(update, RowPut):
                entry.table, entry.updates = update.rows, update.updates
                return
            entry.updates += 1
            options = entry.plan.options(update.hyper_parameters)
            config = entry.table.config
            if steps_every_row(config.rule, {**config.options_at(entry.updates), **options}):
                update.gradient = self._of_every_row(entry, update.gradient)
            if not update.gradient.ids.size:
                return
            progress.count("rows_stepped", update.gradient.ids.size)
            try:
                update.before = entry.table.update(
                    update.gradient.ids, update.gradient.values, entry.updates, options, keeps=update.keeps
                )
            except ConfigurationError:
                raise
            except BaseException as error:
                raise self.failed.note(error) from error

    def update_bytes(self, table: int, num_bytes: int, hyper_parameters: HyperParameters) -> int:
        """Return the size of the rows that a gradient of `num_bytes` changes, without taking a lock."""
        # The event loop's thread calls this, and must not wait for an update that holds the lock.
        entry = self._entries[table]
        config = entry.plan.config
        if not hyper_parameters or config.num_embeddings is None or not hasattr(config.rule, "every_row"):
            return num_bytes
        known, every_row = entry.every_row
        if hyper_parameters != known:
            of_rule = {**config.rule.defaults(), **config.options, **entry.plan.options(hyper_parameters)}
            every_row = steps_every_row(config.rule, of_rule)
            entry.every_row = hyper_parameters, every_row
        if not every_row:
            return num_bytes
        return config.num_embeddings * entry.plan.row_bytes * len(self._shards) // SHARDS

    def is_locked(self, table: int) -> bool:
        """Return whether a thread is using the table's rows, in which case other threads must wait."""
        # The answer may be outdated at once; see `Trainers._work_for_pool`.
        return self._entries[table].lock.locked()

    def _of_every_row(self, entry: _Entry, gradient: RowGradients) -> RowGradients:
        """Extend a gradient with zeros so that it covers all rows of the table on this server."""
        config = entry.plan.config
        if config.num_embeddings is None:
            raise ConfigurationError(
                f"table {config.name}: its optimizer steps every row in each update since an option has "
                "changed, and the table has no num_embeddings; expected one"
            )
        if entry.every_id is None:
            ids = np.arange(config.num_embeddings, dtype=np.int64)
            entry.every_id = ids[np.isin(shard_of(ids), np.array(self._shards))]
        self.check_reportable(entry.plan.number, entry.every_id.size)
        values = gradient.values.new_zeros(entry.every_id.size, config.dimension)
        values[torch.from_numpy(np.searchsorted(entry.every_id, gradient.ids))] = gradient.values
        return RowGradients(entry.every_id, values)

    def check(self, table: int, ids: NDArray[np.int64]) -> None:
        """Raise RemoteProtocolError if any of the sorted ids is out of the table's range."""
        config = self._entries[table].plan.config
        limit = config.num_embeddings
        if limit is not None and ids.size and not 0 <= int(ids[0]) <= int(ids[-1]) < limit:
            raise RemoteProtocolError(
                f"ids {ids[0]} to {ids[-1]} of table {config.name}, expected 0 to {limit - 1}"
            )

    def rows(self, table: int, ids: NDArray[np.int64]) -> Tensor:
        """Return a copy of the rows that a look-up requests, and count the look-up."""
        entry = self._entries[table]
        with entry.lock:
            return entry.table.look_up(ids)

    def read(self, table: int, ids: NDArray[np.int64]) -> Tensor:
        """Return a consistent copy of rows, float32[n, dimension], without counting a look-up."""
        entry = self._entries[table]
        with entry.lock:
            return entry.table.look_up(ids, counted=False)

    def snapshot(self, since: Mapping[int, int] | None = None) -> list[RowCopy]:
        """Return a snapshot of each table. Read each snapshot to its end, or close it.

        Parameters
        ----------
        since : mapping of int to int, optional
            For each table, a number of updates: the snapshot then has only the rows that changed after them.
            It has all rows if the number is missing, or if the rows removed since then are unknown.
        """
        copies = []
        for number, entry in self._entries.items():
            with entry.lock:
                of = (since or {}).get(number)
                snapshot = entry.table.snapshot(of if entry.table.removed.knows(of) else None)
                copies.append(RowCopy(number, entry.updates, snapshot, entry.lock))
        return copies


def _rows_of(weight: Tensor, shards: Sequence[int]) -> TableRows:
    """Return the rows of a module's weight that are in the given virtual shards."""
    ids = np.arange(len(weight), dtype=np.int64)
    ids = ids[np.isin(shard_of(ids), np.array(shards))]
    return TableRows(ids, weight.detach()[torch.from_numpy(ids).to(weight.device)].cpu(), {})


def append_ids(pending: list[NDArray[np.int64]], ids: NDArray[np.int64]) -> None:
    """Append ids to a list of pending ids; merge the list without duplicates if it is long."""
    pending.append(ids)
    if len(pending) > _MOST_ARRAYS:
        pending[:] = [np.unique(np.concatenate(pending))]
