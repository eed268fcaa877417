"""Which servers have stepped the rows whose gradients a trainer has sent, and which rows they have told."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.trainer.waits import Waits
from fleet.plan.tables import TablePlan
from fleet.process import progress
from fleet.wire import Header
from fleet.wire.rows import read_row_gradient

__all__ = ["RowSteps"]


class RowSteps:
    """The steps of tables, of which one at a time is under way.

    Parameters
    ----------
    plans : mapping of number to TablePlan
    endpoints : sequence of str
        The servers'.
    waits : Waits
    """

    def __init__(self, plans: Mapping[int, TablePlan], endpoints: Sequence[str], waits: Waits) -> None:
        self._plans = plans
        self._endpoints = endpoints
        self._waits = waits
        self._open: set[tuple[int, int]] = set()
        """The servers and tables whose step is awaited."""
        self._made = 0
        """How many steps these have made then."""
        self._told: list[tuple[TablePlan, NDArray[np.int64], Tensor]] = []

    def begin(self, step: int) -> None:
        """Await a step of every table from every server, before its gradients are sent."""
        with self._waits.changed:
            self._open = {
                (server, number) for server in range(len(self._endpoints)) for number in self._plans
            }
            self._made = step + 1

    @property
    def settled(self) -> bool:
        """Whether every server has stepped the rows whose gradients were sent last."""
        return not self._open

    def wait(self, *, background: bool = False) -> None:
        """Wait until they have.

        Parameters
        ----------
        background : bool
            Whether training goes on meanwhile, so that this is no time for which it waits.

        Raises
        ------
        FleetError
            A server reported an error, came back without its state, or vanished.
        """
        waited = self._waits.wait_until(lambda: not self._open, self._describe)
        progress.count("wait_seconds", 0.0 if background else waited)

    def take_told(self) -> list[tuple[TablePlan, NDArray[np.int64], Tensor]]:
        """Return the rows that servers have told since the last call, by table, in turn."""
        with self._waits.changed:
            told, self._told = self._told, []
        return told

    def landed(self, server: int, header: Header, payload: memoryview) -> None:
        """Take a server's word that a table has made its step; called by its receiving thread.

        Raises
        ------
        RemoteProtocolError
            Nobody awaits it, or it tells of rows that the table does not have.
        """
        with self._waits.changed:
            if header.step != self._made or (server, header.block) not in self._open:
                raise RemoteProtocolError(
                    f"the server tells that table {header.block} has made {header.step} steps, which nobody "
                    f"awaits; expected {self._made} steps of one of {sorted(self._open)}"
                )
            self._take(self._plans[header.block], payload)
            self._open.discard((server, header.block))
            if not self._open:
                self._waits.changed.notify_all()

    def _take(self, plan: TablePlan, payload: memoryview) -> None:
        ids, rows = read_row_gradient(payload, plan.config.dimension)
        if plan.own is not None and ids.size and not 0 <= int(ids[0]) <= int(ids[-1]) < len(plan.own):
            raise RemoteProtocolError(
                f"the server tells of rows {ids[0]} to {ids[-1]} of table {plan.number}, expected 0 to "
                f"{len(plan.own) - 1}"
            )
        if ids.size:
            self._told.append((plan, ids, torch.from_numpy(rows)))

    def _describe(self) -> str:
        open_ = sorted(self._open)
        servers = ", ".join(dict.fromkeys(self._endpoints[server] for server, _ in open_))
        tables = ", ".join(dict.fromkeys(self._plans[number].name for _, number in open_))
        return f"step {self._made - 1} of table {tables} from {servers}"
