"""Tables in GEO mode: a trainer steps rows by itself, and exchanges those that it has touched.

As of dense parameters, a trainer sends the N-th part of what it has changed since it agreed with the servers,
and counts it as agreed; servers add it. When the servers' rows arrive, what the others have changed is added:
``w += ps - old; old = ps``. A row that a trainer touches first is agreed at the value that it has seen.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.ascending import find_among
from fleet.tables.config import TableConfig
from fleet.tables.index import MISSING, RowIndex
from fleet.tables.merging import RowGradients
from fleet.tables.row_types import Float32
from fleet.tables.rules import Rows, Slot
from fleet.tables.saved import TableRows, join, rows_at
from fleet.tables.storage import IN_MEMORY
from fleet.tables.table import Table

__all__ = ["Added", "GeoRows", "server_config"]

_LEAST: Final = 1 << 16
"""So many ids of updates are kept as they came, at least."""
_NO_STATE: Final = TableRows(np.zeros(0, dtype=np.int64), torch.empty(0, 0, dtype=torch.float32), {})


class Added:
    """The rule of the servers' table: adds what a trainer has changed."""

    slots: ClassVar[tuple[Slot, ...]] = ()

    def defaults(self) -> Mapping[str, Any]:
        """Return no options."""
        return {}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Add the gradient, which is a change."""
        del options, step
        rows.value.add_(rows.gradient)


class GeoRows:
    """A trainer's own copy of the rows of a table that it has touched.

    Parameters
    ----------
    config : TableConfig
        With the rule by which the trainer steps.
    num_trainers : int

    Raises
    ------
    ConfigurationError
        There is a rule of admission or eviction: these would decide otherwise on each trainer.
    """

    def __init__(self, config: TableConfig, num_trainers: int) -> None:
        served = server_config(config)
        self._num_trainers = num_trainers
        self._local = Table(replace(config, storage=IN_MEMORY))  # the servers' directory is not here
        self._own = RowIndex()
        self._agreed = Table(replace(served, row_type=Float32(), storage=IN_MEMORY))
        self._touched: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        """Ids since the last exchange: each once in the first array, and those of the updates after it."""
        self._largest = 0
        """How many ids an update has had at most."""
        self._before = _NO_STATE
        """The state with which rows begin that are touched first, where it is not a fresh one."""

    def has(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which ids the trainer has touched; bool[n]."""
        own: NDArray[np.bool_] = self._own.find(ids) != MISSING
        return own

    def learn(self, ids: NDArray[np.int64], values: Tensor) -> None:
        """Agree on rows that were not touched before, at values that the servers gave: float32[n, dim]."""
        self._own.add(ids)
        self._agreed.load(TableRows(ids, values, {}))
        known, at = find_among(ids, self._before.ids)
        for some, state in ((known, rows_at(self._before, at).state), (~known, {})):
            if some.any():
                self._local.load(TableRows(ids[some], values[torch.from_numpy(some)], state))

    def resume(self, before: TableRows) -> None:
        """Have rows that are touched from now on begin with a state that was saved, where there is one."""
        self._before = before

    def state(self) -> TableRows:
        """Return the state of all rows that have any, by ascending id, without values."""
        others = rows_at(self._before, np.flatnonzero(~self.has(self._before.ids)))
        parts = [_without_values(each) for each in (self._local.rows(), others) if each.ids.size]
        return join(parts) if parts else _NO_STATE

    def look_up(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the trainer's values of ids; float32[n, dimension]."""
        return self._local.look_up(ids)

    def update(
        self, ids: NDArray[np.int64], gradient: Tensor, step: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """Step rows by the trainer's rule; as `Table.update`."""
        self._own.find_or_add(ids)
        self._local.update(ids, gradient, step, options)
        self._touched.append(ids)
        self._largest = max(self._largest, ids.size)
        # Not at each update: it would sort everything that has come before.
        if sum(each.size for each in self._touched[1:]) > max(_LEAST, self._touched[0].size):
            self._touched = [self._all_touched()]

    @property
    def most_leaving(self) -> int:
        """How many rows an exchange after the next update has at most, if no batch is larger than so far."""
        return sum(each.size for each in self._touched) + self._largest

    def leaving(self, step: int) -> RowGradients:
        """Return what is to be added to the servers' rows: of the ids touched since the last call, ascending.

        Parameters
        ----------
        step : int
            How many steps the trainer has made.
        """
        ids, self._touched = self._all_touched(), [np.zeros(0, dtype=np.int64)]
        change = (self._local.look_up(ids) - self._agreed.look_up(ids)) / self._num_trainers
        self._agreed.update(ids, change.clone(), step)
        return RowGradients(ids, change)

    def arrived(self, ids: NDArray[np.int64], values: Tensor, step: int) -> None:
        """Add what others have changed, and agree with the servers.

        Parameters
        ----------
        ids : int64[n]
            None of them twice.
        values : float32[n, dimension]
            The servers' rows.
        step : int
            How many steps the trainer has made.
        """
        by_others = values - self._agreed.look_up(ids)
        self._local.update(ids, by_others, step, rule=Added())
        self._agreed.load(TableRows(ids, values, {}))

    def _all_touched(self) -> NDArray[np.int64]:
        """Return the ids touched since the last exchange, ascending, each once."""
        return np.unique(np.concatenate(self._touched))


def _without_values(rows: TableRows) -> TableRows:
    return TableRows(rows.ids, torch.empty(rows.ids.size, 0, dtype=torch.float32), rows.state)


def server_config(config: TableConfig) -> TableConfig:
    """Return what the servers' table is: the trainers' rows, to which changes are added.

    Raises
    ------
    ConfigurationError
        There is a rule of admission or eviction: these would decide otherwise on each trainer.
    """
    if config.admission is not None or config.eviction:
        raise ConfigurationError(
            f"table {config.name}: rules of admission and eviction follow from all updates, which in GEO "
            "nobody has; expected none of them, or another mode"
        )
    return replace(config, rule=Added(), options={})
