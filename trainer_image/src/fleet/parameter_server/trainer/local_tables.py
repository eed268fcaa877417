"""Tables that a trainer steps by itself, as in GEO: its own copies of the rows that it has stepped.

A row that it has not stepped is the servers'. Its own copy begins with what it has looked up, or with what
its weight holds where trainers hold the table too; from then on it reads the copy, and what others make of
the row reaches it with the next exchange after it has stepped it again.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from fleet.checkpoint import OwnRows
from fleet.nn.table import Touched
from fleet.parameter_server.trainer.rows import TrainerRows, write_rows
from fleet.plan.tables import TablePlan
from fleet.process.finite import OfRows
from fleet.tables.geo import GeoRows
from fleet.wire import HyperParameters
from fleet.wire.rows import most_rows

__all__ = ["LocalTables"]


class LocalTables:
    """A `fleet.nn.RowSource`, and what `modes.LocalRows` says.

    Parameters
    ----------
    plans : sequence of TablePlan
    num_trainers : int
    rows : TrainerRows
        The tables on the servers.

    Raises
    ------
    ConfigurationError
        A table's rules need to see each gradient.
    """

    def __init__(self, plans: Sequence[TablePlan], num_trainers: int, rows: TrainerRows) -> None:
        self._plans = {plan.name: plan for plan in plans}
        self._num_trainers = num_trainers
        self._rows = rows
        self.gathered = rows.gathered
        """The gradients that have come since the last step."""
        self._before = OwnRows()
        """What the checkpoint has with which training began."""
        self._steps = 0
        """How often rows were stepped, those of the checkpoint included with which training began."""
        self.begin()

    def begin(self) -> None:
        """Have no copies: rows are the servers' until they are stepped."""
        self._steps = 0
        self._tables = {name: GeoRows(plan.config, self._num_trainers) for name, plan in self._plans.items()}
        self.resume(self._before)

    def resume(self, before: OwnRows) -> None:
        """Go on with the state that rows have in a checkpoint; those that have been stepped keep theirs."""
        self._before, self._steps = before, max(self._steps, before.steps)
        for name, rows in before.tables.items():
            self._tables[name].resume(rows)

    def state(self) -> OwnRows:
        """Return the state of the rows of tables whose rules keep any."""
        keeping = {name for name, plan in self._plans.items() if plan.config.rule.slots}
        tables = {name: self._tables[name].state() for name in keeping}
        return OwnRows(self._steps, {name: rows for name, rows in tables.items() if rows.ids.size})

    def look_up(self, name: str, ids: NDArray[np.int64]) -> Tensor:
        """Return rows: this trainer's copies, else the servers'; as of `fleet.nn.RowSource`."""
        own = self._tables[name].has(ids)
        if not own.any():
            return self._rows.look_up(name, ids)
        copies = self._tables[name].look_up(ids[own])
        if own.all():
            return copies
        rows = copies.new_empty(ids.size, copies.shape[1])
        rows[torch.from_numpy(own)] = copies
        rows[torch.from_numpy(~own)] = self._rows.look_up(name, ids[~own])
        return rows

    def prefetch(self, name: str, ids: NDArray[np.int64]) -> None:
        """Ask for rows that the next batch needs, and of which there is no copy."""
        self._rows.prefetch(name, ids[~self._tables[name].has(ids)])

    def touched(self, name: str, touched: Touched) -> None:
        """Take note of rows that have a gradient."""
        self._rows.touched(name, touched)

    @property
    def weights(self) -> list[Parameter]:
        """The weights of tables that trainers hold too."""
        return [plan.own for plan in self._plans.values() if plan.own is not None]

    def step(self, gradients: OfRows, hyper_parameters: HyperParameters) -> None:
        """Step the rows that have a gradient, by each table's rule."""
        self._steps += 1
        for name, (ids, gradient) in gradients.items():
            plan, table = self._plans[name], self._tables[name]
            if (new := ids[~table.has(ids)]).size:
                table.learn(new, self._seen(plan, new))
            table.update(ids, gradient.clone(), self._steps, plan.options(hyper_parameters))
            if plan.own is not None:
                write_rows(plan.own, ids, table.look_up(ids))

    @property
    def must_leave(self) -> bool:
        """Whether what has changed may be more than one exchange takes after another step."""
        return any(
            table.most_leaving > most_rows(self._plans[name].row_bytes)
            for name, table in self._tables.items()
        )

    def leaving(self) -> OfRows:
        """Return what has changed since the last call, by table."""
        changed = {name: table.leaving(self._steps) for name, table in self._tables.items()}
        return {name: (change.ids, change.values) for name, change in changed.items() if change.ids.size}

    def arrived(self) -> None:
        """Add what others have changed of the rows that servers have told."""
        for plan, ids, rows in self._rows.steps.take_told():
            table = self._tables[plan.name]
            table.arrived(ids, rows, self._steps)
            if plan.own is not None:
                write_rows(plan.own, ids, table.look_up(ids))

    def end(self) -> None:
        """End with the servers' rows."""
        self.begin()
        self._rows.take_all()

    def _seen(self, plan: TablePlan, ids: NDArray[np.int64]) -> Tensor:
        """Return what this trainer has seen rows as that it has no copy of; float32[n, dimension]."""
        if plan.own is not None:
            return plan.own.detach()[torch.from_numpy(ids).to(plan.own.device)].cpu()
        return self.gathered.seen(plan.name, ids)
