"""A trainer's look-ups: ids go to the servers that hold them, and rows come back in turn.

Nobody has to wait at once for what was asked for. A look-up is cut into parts, and only so many of them are
unanswered by one server: what a server has to keep for a trainer that does not take it is bounded.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.trainer.waits import Waits
from fleet.plan.tables import TablePlan
from fleet.process import progress
from fleet.tables import Placement
from fleet.wire import Header, Kind
from fleet.wire.rows import MOST_LOOK_UPS, PART_BYTES, pack_ids, read_rows

if TYPE_CHECKING:
    from fleet.parameter_server.transport.stream import ResumableStream

__all__ = ["LookUp", "LookUps", "placement_of"]


@dataclass(slots=True, eq=False)
class LookUp:
    """Rows that were asked for.

    Attributes
    ----------
    table : TablePlan
    rows : float32[n, dimension]
        By id asked for; filled by the answers, or the one answer's.
    awaited : int
        How many parts are not answered.
    """

    table: TablePlan
    rows: Tensor
    awaited: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a look-up, which one server has not answered."""

    of: LookUp
    at: NDArray[np.int64]
    """Where its rows belong in those of the look-up."""


class LookUps:
    """The look-ups of one trainer. Several threads may ask.

    Parameters
    ----------
    streams : list of ResumableStream
        One to each server, once the trainer has joined.
    endpoints : sequence of str
        The servers'.
    waits : Waits
        Its settings say how many parts may be unanswered by one server.
    """

    def __init__(self, streams: "Sequence[ResumableStream]", endpoints: Sequence[str], waits: Waits) -> None:
        self._streams = streams
        self._endpoints = endpoints
        self._waits = waits
        self._most = min(waits.settings.look_ups_at_once, MOST_LOOK_UPS)
        self._asked: list[deque[_Part]] = [deque() for _ in endpoints]
        """By server, what it has not answered, in turn."""
        self._asking = threading.Lock()
        """Held while parts are sent: they are answered in this order."""

    def ask(self, table: TablePlan, ids: NDArray[np.int64], step: int) -> LookUp:
        """Ask the servers for rows; waits only while too much is unanswered.

        Parameters
        ----------
        table : TablePlan
        ids : int64[n]
            Ascending, each once.
        step : int
            The step that needs the rows.

        Raises
        ------
        FleetError
            A server does not answer in time.
        """
        self._waits.check()
        most = max(1, PART_BYTES // table.row_bytes)
        parts = [
            (server, at[begin : begin + most])
            for server, at in placement_of(len(self._endpoints)).positions(ids).items()
            for begin in range(0, at.size, most)
        ]
        rows = torch.empty(ids.size, table.config.dimension, dtype=torch.float32)
        asked = LookUp(table, rows, len(parts))
        with self._asking:
            for server, at in parts:
                self._wait_for_room(server)
                self._asked[server].append(_Part(asked, at))
                self._streams[server].send(Kind.LOOK_UP, pack_ids(ids[at]), step=step, block=table.number)
        progress.count("rows_looked_up", ids.size)
        return asked

    def wait(self, asked: LookUp) -> Tensor:
        """Wait for the rows of a look-up; float32[n, dimension].

        Raises
        ------
        FleetError
            A server refuses, or does not answer in time.
        """
        waited = self._waits.wait_until(
            lambda: not asked.awaited, lambda: f"rows of table {asked.table.name} from {self._silent()}"
        )
        progress.count("wait_seconds", waited)
        return asked.rows

    def landed(self, server: int, header: Header, payload: memoryview, row_bytes: Mapping[int, int]) -> None:
        """Take a part's rows; called by the server's receiving thread.

        Raises
        ------
        RemoteProtocolError
            Nobody has asked for these.
        """
        found = len(payload) // row_bytes[header.block]
        part = self._asked[server][0] if self._asked[server] else None
        if part is None or (part.of.table.number, part.at.size) != (header.block, found):
            expected = f"{part.at.size} of table {part.of.table.number}" if part is not None else "none"
            raise RemoteProtocolError(
                f"the server sent {found} rows of table {header.block}, expected {expected}"
            )
        rows = torch.from_numpy(read_rows(payload, part.of.table.config.dimension))
        if len(rows) == len(part.of.rows):  # one server has all of them, in the order in which they are asked
            part.of.rows = rows
        else:
            part.of.rows[torch.from_numpy(part.at)] = rows
        with self._waits.changed:
            self._asked[server].popleft()
            part.of.awaited -= 1
            self._waits.changed.notify_all()

    def _wait_for_room(self, server: int) -> None:
        waited = self._waits.wait_until(
            lambda: len(self._asked[server]) < self._most,
            lambda: f"answers to {self._most} look-ups from {self._endpoints[server]}",
        )
        progress.count("wait_seconds", waited)

    def _silent(self) -> str:
        return ", ".join(self._endpoints[server] for server, asked in enumerate(self._asked) if asked)


@cache
def placement_of(num_servers: int) -> Placement:
    """Return which of so many servers holds which shards."""
    return Placement.over(num_servers)
