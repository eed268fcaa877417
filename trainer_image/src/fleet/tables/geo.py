"""Tables in GEO mode: each trainer updates its own copies of rows and exchanges the changes.

As with dense parameters, a trainer sends the servers 1/N of its change since the last agreed values, and
treats that part as agreed; the servers add it. When the servers' rows arrive, the trainer adds the other
trainers' changes: ``w += ps - old; old = ps``. The agreed value of a row starts as the value that the trainer
first looked up.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.config import Float32, TableConfig
from fleet.tables.gradients import RowGradients
from fleet.tables.index import MISSING, RowIndex, find_among
from fleet.tables.rows import TableRows, join, rows_at
from fleet.tables.rules import Rows, Slot
from fleet.tables.storage import IN_MEMORY
from fleet.tables.table import Table

__all__ = ["Added", "GeoRows", "server_config"]

_MIN_PENDING: Final = 1 << 16
"""The number of pending ids up to which they are never merged."""
_NO_STATE: Final = TableRows(np.zeros(0, dtype=np.int64), torch.empty(0, 0, dtype=torch.float32), {})


class Added:
    """The row rule on servers in GEO mode, which adds the trainers' changes to the values."""

    slots: ClassVar[tuple[Slot, ...]] = ()

    def defaults(self) -> Mapping[str, Any]:
        """Return an empty mapping, because the rule has no options."""
        return {}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Add to each row its change, which is passed as the gradient; see `RowRule.step`."""
        del options, step
        rows.value.add_(rows.gradient)


class GeoRows:
    """A trainer's copies of the rows that it has updated.

    Parameters
    ----------
    config : TableConfig
        The table's configuration, with the rule by which the trainer updates rows.
    num_trainers : int

    Raises
    ------
    ConfigurationError
        As for `server_config`.
    """

    def __init__(self, config: TableConfig, num_trainers: int) -> None:
        served = server_config(config)
        self._num_trainers = num_trainers
        self._local = Table(
            replace(config, storage=IN_MEMORY)
        )  # a directory on the servers does not exist here
        # The rows that the trainer has. The tables cannot tell: they read any other id as its first value.
        self._own = RowIndex()
        self._agreed = Table(replace(served, row_type=Float32(), storage=IN_MEMORY))
        self._touched: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        """Ids updated since the last exchange: distinct ids first, then an array for each later update."""
        self._largest = 0
        """The number of ids in the largest update."""
        self._restored = _NO_STATE
        """State from a checkpoint, for rows that the trainer has not copied yet."""

    def has(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return, for each id, whether the trainer has a copy of its row; bool[n]."""
        own: NDArray[np.bool_] = self._own.find(ids) != MISSING
        return own

    def learn(self, ids: NDArray[np.int64], values: Tensor) -> None:
        """Add copies of rows, given the servers' values as float32[n, dim]."""
        self._own.add(ids)
        self._agreed.load(TableRows(ids, values, {}))
        known, at = find_among(ids, self._restored.ids)
        # In two parts, because `load` initializes the state that it is not given.
        for some, state in ((known, rows_at(self._restored, at).state), (~known, {})):
            if some.any():
                self._local.load(TableRows(ids[some], values[torch.from_numpy(some)], state))

    def resume(self, restored: TableRows) -> None:
        """Keep the rows' state from a checkpoint until the trainer copies these rows."""
        self._restored = restored

    def state(self) -> TableRows:
        """Return the optimizer state of all rows that have state, without the values, sorted by id."""
        others = rows_at(self._restored, np.flatnonzero(~self.has(self._restored.ids)))
        parts = [_without_values(each) for each in (self._local.rows(), others) if each.ids.size]
        return join(parts) if parts else _NO_STATE

    def look_up(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the trainer's values of the ids' rows as float32[n, dimension]."""
        return self._local.look_up(ids)

    def update(
        self, ids: NDArray[np.int64], gradient: Tensor, step: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """Update this trainer's copies of rows with its rule; see `Table.update`."""
        self._own.find_or_add(ids)
        self._local.update(ids, gradient, step, options)
        self._touched.append(ids)
        self._largest = max(self._largest, ids.size)
        # Merging sorts all pending ids, so it is not done at each update.
        if sum(each.size for each in self._touched[1:]) > max(_MIN_PENDING, self._touched[0].size):
            self._touched = [self._all_touched()]

    @property
    def most_leaving(self) -> int:
        """The maximum number of rows to send after one more update, assuming that batches do not grow."""
        return sum(each.size for each in self._touched) + self._largest

    def leaving(self, step: int) -> RowGradients:
        """Return, for the servers, the changes of all rows updated since the last call, sorted by id.

        Parameters
        ----------
        step : int
            Steps of the trainer so far.
        """
        ids, self._touched = self._all_touched(), [np.zeros(0, dtype=np.int64)]
        change = (self._local.look_up(ids) - self._agreed.look_up(ids)) / self._num_trainers
        # A copy, because an update may overwrite its gradient, and the caller sends the change.
        self._agreed.update(ids, change.clone(), step)
        return RowGradients(ids, change)

    def arrived(self, ids: NDArray[np.int64], values: Tensor, step: int) -> None:
        """Apply other trainers' changes to the copies; later changes are measured from the servers' values.

        Parameters
        ----------
        ids : int64[n]
            Distinct.
        values : float32[n, dimension]
            The servers' rows.
        step : int
            Steps of the trainer so far.
        """
        by_others = values - self._agreed.look_up(ids)
        self._local.update(ids, by_others, step, rule=Added())
        self._agreed.load(TableRows(ids, values, {}))

    def _all_touched(self) -> NDArray[np.int64]:
        """Return the sorted distinct ids of rows updated since the last exchange."""
        return np.unique(np.concatenate(self._touched))


def _without_values(rows: TableRows) -> TableRows:
    return TableRows(rows.ids, torch.empty(rows.ids.size, 0, dtype=torch.float32), rows.state)


def server_config(config: TableConfig) -> TableConfig:
    """Return the servers' configuration of a table; its rule adds the changes that trainers send.

    Raises
    ------
    ConfigurationError
        The table has admission or eviction, which depend on the updates of all trainers, or a rule that steps
        rows that the trainer does not have.
    """
    if config.admission is not None or config.eviction:
        raise ConfigurationError(
            f"table {config.name}: admission and eviction depend on all updates, which no process sees in "
            "GEO mode; expected a table without them, or another mode"
        )
    if config.steps_every_row:
        raise ConfigurationError(
            f"table {config.name}: {type(config.rule).__name__} steps every row in each update with these "
            "options, and in GEO mode a trainer has only rows that it has looked up; expected SGD, Adagrad, "
            "or Adam with lazy_mode=True, without a regularizer, or another mode"
        )
    return replace(config, rule=Added(), options={})
