"""Local steps, as in GEO mode: a trainer updates its parameters and its copies of rows itself.

Nothing is sent during a backward pass, so the script may change gradients until the step. The trainer uses a
server's row until it first updates the row itself. The trainer's copy of the row then starts from the
looked-up value or, if trainers also store the table, from the value of the weight. From then on, the trainer
reads the copy. Other trainers' changes reach the copy with the next exchange after the trainer has updated
the row again.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fleet.checkpoint import OwnRows
from fleet.nn.embedding import Touched
from fleet.parameter_server.modes import TrainerMode
from fleet.parameter_server.trainer.gradients import hyper_parameters_of
from fleet.parameter_server.trainer.own_optimizer import Scaling, StepGuard
from fleet.parameter_server.trainer.rows import TrainerRows, write_rows
from fleet.plan.tables import TablePlan
from fleet.process.finite import NO_ROWS, FiniteCheck, OfRows
from fleet.tables.geo import GeoRows
from fleet.wire import HyperParameters
from fleet.wire.rows import most_rows
from fleet.without_dynamo import step_directly

__all__ = ["LocalSteps", "LocalTables"]


class LocalSteps:
    """Updates parameters with the user's own optimizer; has the same interface as `GradientFlow`.

    Parameters
    ----------
    optimizer : Optimizer
        The user's optimizer.
    mode : TrainerMode
        The trainer side of the mode, which exchanges changes after steps.
    finite : FiniteCheck
        The check of the gradients of rows.
    tables : LocalTables, optional
        The tables, if any. Rows are updated by the rules of the tables instead of the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: TrainerMode,
        finite: FiniteCheck,
        tables: "LocalTables | None" = None,
    ) -> None:
        self._optimizer = optimizer
        self._mode = mode
        self._finite = finite
        self._tables = tables
        self.guard = StepGuard(optimizer)

    def attach(self) -> None:
        """Make the user's optimizer reject calls of ``step()`` from the script."""
        self.guard.attach()

    def detach(self) -> None:
        """Let the user's optimizer accept calls of ``step()`` again."""
        self.guard.detach()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do nothing, because backward passes only accumulate gradients."""
        yield

    def step(self, scaling: Scaling | None = None) -> None:
        """Update the parameters with the current gradients, and exchange changes if an exchange is due.

        Parameters
        ----------
        scaling : Scaling, optional
            See `GradientFlow.step`.

        Raises
        ------
        FleetError
            A gradient of a row is not finite and the strategy's action is ``stop``, or a server failed.
        """
        tables = self._tables
        if scaling is not None:
            groups = self._optimizer.param_groups
            grads = [each.grad for group in groups for each in group["params"] if each.grad is not None]
            grads += tables.rows.gradient_tensors() if tables is not None else []
            scaling.undo({id(grad): grad for grad in grads}.values())  # a shared gradient only once
        of_rows = tables.rows.gradients() if tables is not None else NO_ROWS
        if scaling is not None:
            steps = not scaling.found_inf
        else:
            steps = tables is None or self._finite.lets_step({}, of_rows)
        if steps:
            # The script's optimizer also has the weights of tables, whose rows their own rules step.
            with _without_gradients(tables.weights if tables is not None else ()), self.guard.allowed():
                step_directly(self._optimizer)  # the optimizer's hooks run around this whole method
            if tables is not None:
                tables.step(of_rows, hyper_parameters_of(self._optimizer))
        if tables is not None:
            tables.rows.forget_gradients()
        self._mode.finish(())

    def check_nothing_in_flight(self, what: str) -> None:
        """Do nothing, because gradients are not sent."""

    def check_earlier(self) -> None:
        """Do nothing, because gradients are not sent."""


class LocalTables:
    """The rows that a trainer updates itself; implements `fleet.nn.RowSource` and `LocalRows`.

    Parameters
    ----------
    plans : sequence of TablePlan
    num_trainers : int
    rows : TrainerRows
        The tables on the servers.

    Raises
    ------
    ConfigurationError
        See `GeoRows`.
    """

    def __init__(self, plans: Sequence[TablePlan], num_trainers: int, rows: TrainerRows) -> None:
        self.rows = rows
        self._plans = {plan.name: plan for plan in plans}
        self._num_trainers = num_trainers
        self._before = OwnRows()
        """The state of rows in the checkpoint from which training began."""
        self._steps = 0
        """The number of row steps, including those before the loaded checkpoint."""
        self.begin()

    def begin(self) -> None:
        """Drop all copies of rows; a row has the server's value until this trainer updates it."""
        self._steps = 0
        self._tables = {name: GeoRows(plan.config, self._num_trainers) for name, plan in self._plans.items()}
        self.resume(self._before)

    def resume(self, before: OwnRows) -> None:
        """Load row state from a checkpoint; rows that have been updated keep their state."""
        self._before, self._steps = before, max(self._steps, before.steps)
        for name, rows in before.tables.items():
            self._tables[name].resume(rows)

    def state(self) -> OwnRows:
        """Return the row state of all tables whose rule has state."""
        keeping = {name for name, plan in self._plans.items() if plan.config.rule.slots}
        tables = {name: self._tables[name].state() for name in keeping}
        return OwnRows(self._steps, {name: rows for name, rows in tables.items() if rows.ids.size})

    def fetch(self, name: str, ids: NDArray[np.int64]) -> Tensor:
        """Return rows: this trainer's copy of a row or, if there is none, the server's row."""
        own = self._tables[name].has(ids)
        if not own.any():
            return self.rows.fetch(name, ids)
        copies = self._tables[name].look_up(ids[own])
        if own.all():
            return copies
        rows = copies.new_empty(ids.size, copies.shape[1])
        rows[torch.from_numpy(own)] = copies
        rows[torch.from_numpy(~own)] = self.rows.fetch(name, ids[~own])
        return rows

    def prefetch(self, name: str, ids: NDArray[np.int64]) -> None:
        """Request the rows of the next batch, except those that this trainer has a copy of."""
        self.rows.prefetch(name, ids[~self._tables[name].has(ids)])

    def touched(self, name: str, touched: Touched) -> None:
        """Record the rows of a look-up that received a gradient."""
        self.rows.touched(name, touched)

    @property
    def weights(self) -> list[Parameter]:
        """The weights of the tables that trainers also store."""
        return [plan.own for plan in self._plans.values() if plan.own is not None]

    def step(self, gradients: OfRows, hyper_parameters: HyperParameters) -> None:
        """Update the rows that received gradients, using each table's rule."""
        self._steps += 1
        for name, (ids, gradient) in gradients.items():
            plan, table = self._plans[name], self._tables[name]
            if (new := ids[~table.has(ids)]).size:
                if plan.own is not None:
                    values = plan.own.detach()[torch.from_numpy(new).to(plan.own.device)].cpu()
                else:
                    values = self.rows.values_seen(name, new)
                table.learn(new, values)
            table.update(ids, gradient.clone(), self._steps, plan.options(hyper_parameters))
            if plan.own is not None:
                write_rows(plan.own, ids, table.look_up(ids))

    @property
    def must_leave(self) -> bool:
        """True if the changes must be sent now, because another step may make them too many for one frame."""
        return any(
            table.most_leaving > most_rows(self._plans[name].row_bytes)
            for name, table in self._tables.items()
        )

    def leaving(self) -> OfRows:
        """Return, by table, the changes since the last call."""
        changed = {name: table.leaving(self._steps) for name, table in self._tables.items()}
        return {name: (change.ids, change.values) for name, change in changed.items() if change.ids.size}

    def arrived(self) -> None:
        """Add the other trainers' changes to the copies, based on the rows received from the servers."""
        for plan, ids, rows in self.rows.replies.take_changed_rows():
            table = self._tables[plan.name]
            table.arrived(ids, rows, self._steps)
            if plan.own is not None:
                write_rows(plan.own, ids, table.look_up(ids))

    def end(self) -> None:
        """Replace the copies with the servers' final rows."""
        self.begin()
        self.rows.take_all()


@contextlib.contextmanager
def _without_gradients(weights: Iterable[Parameter]) -> Iterator[None]:
    """Hide the gradients of table weights from the user's optimizer, within the block."""
    kept = [(weight, weight.grad) for weight in weights]
    for weight, _ in kept:
        weight.grad = None
    try:
        yield
    finally:
        for weight, grad in kept:
            weight.grad = grad
