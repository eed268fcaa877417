"""A trainer's part in tables that live on the servers: it looks rows up, and sends their gradients.

A look-up asks every server that holds some of the ids, and waits for all of them. Gradients are gathered as
backward passes bring them, and leave in ``step()``, one for each table and server. Then the trainer waits
until every server has made the step of every table, so that no table is ever more than a step ahead.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from fleet.errors import ConfigurationError
from fleet.nn.table import Touched, to_device
from fleet.parameter_server.trainer.ahead import Ahead, RowsAhead
from fleet.parameter_server.trainer.gathered import Gathered
from fleet.parameter_server.trainer.look_ups import LookUps, placement_of
from fleet.parameter_server.trainer.row_steps import RowSteps
from fleet.parameter_server.trainer.waits import Waits
from fleet.plan.tables import TablePlan
from fleet.process import progress
from fleet.process.finite import OfRows
from fleet.tables.index import find_among
from fleet.wire import Header, Kind
from fleet.wire.rows import PART_BYTES, most_rows, pack_row_gradient

if TYPE_CHECKING:
    from fleet.parameter_server.transport.stream import ResumableStream

__all__ = ["TrainerRows", "write_rows"]


class TrainerRows:
    """The tables of one trainer's session; a `fleet.nn.RowSource`.

    Parameters
    ----------
    plans : sequence of TablePlan
    endpoints : sequence of str
        The servers'.
    waits : Waits
    step : callable
        Returns how many steps the trainer has made.
    in_step : bool
        Whether all trainers make the same step.
    """

    def __init__(
        self,
        plans: Sequence[TablePlan],
        endpoints: Sequence[str],
        waits: Waits,
        step: Callable[[], int],
        *,
        in_step: bool,
    ) -> None:
        self.streams: list[ResumableStream] = []
        """One to each server, once the trainer has joined."""
        self._plans = {plan.number: plan for plan in plans}
        self.row_bytes = {plan.number: plan.row_bytes for plan in plans}
        """By table, the bytes of a row as it travels."""
        self._endpoints = endpoints
        self._step = step
        self._awaits_each = in_step or any(plan.own is not None for plan in plans)
        """Whether ``step()`` ends only when all servers have made it."""
        self._ahead = RowsAhead()
        self._look_ups = LookUps(self.streams, endpoints, waits)
        self.gathered = Gathered({plan.name: plan.own for plan in plans if plan.own is not None})
        """The gradients that have come since the last step."""
        self.steps = RowSteps(self._plans, endpoints, waits)
        """Those whose gradients were sent."""

    def __bool__(self) -> bool:
        """Whether there are tables."""
        return bool(self._plans)

    def look_up(self, name: str, ids: NDArray[np.int64]) -> Tensor:
        """Return the rows of ids, as they are after the steps that this trainer has made.

        Parameters
        ----------
        name : str
            The table's.
        ids : int64[n]
            Ascending, each once.

        Returns
        -------
        float32[n, dimension]

        Raises
        ------
        FleetError
            A server refuses, or does not answer in time.
        """
        step, rows, open_ = self._step(), None, np.arange(ids.size)
        for ahead in self._ahead.of(name, step):
            found, at = find_among(ids[open_], ahead.ids)
            if found.any():
                rows = (
                    ahead.asked.rows.new_empty(ids.size, ahead.asked.rows.shape[1]) if rows is None else rows
                )
                there = self._look_ups.wait(ahead.asked)
                rows[torch.from_numpy(open_[found])] = there[torch.from_numpy(at)]
                open_ = open_[~found]
        if rows is None:
            return self._look_ups.wait(self._look_ups.ask(self._plan(name), ids, step))
        if open_.size:
            asked = self._look_ups.ask(self._plan(name), ids[open_], step)
            rows[torch.from_numpy(open_)] = self._look_ups.wait(asked)
        return rows

    def prefetch(self, name: str, ids: NDArray[np.int64]) -> None:
        """Ask for rows that the next batch needs, without waiting for them.

        They are asked for as those of the next step: where trainers are in step, the word that this one is
        made brings those that it has changed.
        """
        step = self._step()
        self._ahead.keep(Ahead(step, ids, self._look_ups.ask(self._plan(name), ids, step + 1)))

    def touched(self, name: str, touched: Touched) -> None:
        """Take note of rows that have a gradient; a second backward pass adds to the same."""
        self.gathered.add(name, touched)

    def send(self, gradients: OfRows, step: int | None = None) -> None:
        """Send each table's gradient to every server, an empty one where none of its rows has one.

        Parameters
        ----------
        gradients : mapping of name to (ids, Tensor)
        step : int, optional
            Whose they are; the trainer's present one.
        """
        self.wait()
        step = self._step() if step is None else step
        self.steps.begin(step)
        for number, plan in self._plans.items():
            ids, values = gradients.get(plan.name, (np.zeros(0, dtype=np.int64), None))
            progress.count("row_gradients_sent", ids.size)
            servers = placement_of(len(self._endpoints)).positions(ids)
            for server, stream in enumerate(self.streams):
                payload = memoryview(b"")
                if server in servers and values is not None:
                    at = servers[server]
                    self._check_size(plan, at.size)
                    of_ids, of_values = ids, values.numpy()
                    if at.size < ids.size:
                        of_ids, of_values = of_ids[at], of_values.take(at, axis=0)
                    payload = pack_row_gradient(of_ids, of_values)
                stream.send(Kind.ROW_GRADIENT, payload, step=step, block=number)

    def end_step(self) -> None:
        """End a step that was sent: wait for it and adopt rows, or nothing where trainers are not in step.

        Then each server takes the trainer's gradient before its next look-up, which follows on the same
        stream; and the next step waits for this one. Rows that this trainer holds too are awaited.
        """
        if self._awaits_each:
            self.wait()
            self.adopt()

    @property
    def settled(self) -> bool:
        """Whether every server has stepped the rows whose gradients were sent last."""
        return self.steps.settled

    def wait(self, *, background: bool = False) -> None:
        """Wait until they have; see `RowSteps.wait`."""
        self.steps.wait(background=background)

    def adopt(self) -> None:
        """Make rows that servers have told those of this trainer; only the training thread may."""
        for plan, ids, rows in self.steps.take_told():
            if plan.own is not None:
                write_rows(plan.own, ids, rows)
            else:
                self._ahead.refresh(plan.name, ids, rows)

    def take_all(self) -> None:
        """Take all rows of the tables that this trainer holds too; what was fetched ahead is dropped."""
        self._ahead.forget()
        for plan in self._plans.values():
            if plan.own is not None:
                num_rows, most = len(plan.own), max(1, PART_BYTES // plan.row_bytes)
                for begin in range(0, num_rows, most):
                    ids = np.arange(begin, min(begin + most, num_rows), dtype=np.int64)
                    write_rows(plan.own, ids, self.look_up(plan.name, ids))

    def landed(self, server: int, header: Header, payload: memoryview) -> None:
        """Take what a server tells of a table; called by its receiving thread.

        Raises
        ------
        RemoteProtocolError
            Nobody has asked for it, or it tells of rows that the table does not have.
        """
        if header.kind is Kind.ROWS:
            self._look_ups.landed(server, header, payload, self.row_bytes)
        else:
            self.steps.landed(server, header, payload)

    def _plan(self, name: str) -> TablePlan:
        return next(plan for plan in self._plans.values() if plan.name == name)

    def _check_size(self, plan: TablePlan, count: int) -> None:
        if count > (most := most_rows(plan.row_bytes)):
            raise ConfigurationError(
                f"what is sent at once has gradients of {count} rows of table {plan.name} for one server, "
                f"expected {most} at most; use smaller batches, more parameter servers, or fewer steps at "
                "once: max_merge_var_num"
            )


@torch.no_grad()
def write_rows(weight: Parameter, ids: NDArray[np.int64], rows: Tensor) -> None:
    """Put rows in the place of those of a weight."""
    weight[torch.from_numpy(ids).to(weight.device)] = to_device(rows, weight.device)
