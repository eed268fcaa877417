"""The servers' replies to a trainer: values of blocks, rows of tables, and confirmations of table updates.

The training thread, or a thread of the mode, registers a reply before sending the request, and then waits for
the reply. The thread of the event loop, or of its pool, records the reply. The first failure in any thread
ends every wait.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import DeadlineExceededError, FleetError, RemoteProtocolError
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.trainer.server_connection import ServerConnection
from fleet.parameter_server.transport.arena import copy_bytes
from fleet.parameter_server.transport.connection import SMALL_BYTES, End, Frame, Work
from fleet.parameter_server.waits import WaitLog
from fleet.plan.job import TrainerPlan
from fleet.plan.tables import TablePlan
from fleet.process import progress
from fleet.process.resources import WatchClock
from fleet.wire import Header, Kind
from fleet.wire.messages import read_error, read_numbers
from fleet.wire.rows import MOST_LOOK_UPS, read_row_gradient, read_rows

__all__ = ["LOOK_SECONDS", "ChangedRows", "LookUp", "Replies"]

LOOK_SECONDS: Final = 1.0
"""The interval at which a wait checks for failures."""

ChangedRows = tuple[TablePlan, NDArray[np.int64], Tensor]
"""Changed rows of a table: the table, the ids, and the current row of each id."""


@dataclass(slots=True, eq=False)
class LookUp:
    """A request for rows, with the rows that have arrived so far.

    Attributes
    ----------
    table : TablePlan
    rows : float32[n, dimension]
        A row for each id; complete once `pending` is 0.
    pending : int
        The number of unanswered requests.
    """

    table: TablePlan
    rows: Tensor
    pending: int


class Replies:
    """The replies that a session expects, with the state that the session's threads share.

    Parameters
    ----------
    plan : TrainerPlan
    settings : Settings
    store : ParameterStore
        The memory in which values land.
    """

    def __init__(self, plan: TrainerPlan, settings: Settings, store: ParameterStore) -> None:
        self.plan = plan
        """The blocks, tables, trainers and servers of the job."""
        self.settings = settings
        self.store = store
        self.step = 0
        """The number of steps made since the job began."""
        self.unchanged: set[int] = set()
        """Blocks whose values the last step left unchanged, because no trainer had a gradient for them."""
        self._in_step = plan.has_common_step
        self._clock = WatchClock(settings.glance_seconds)
        self._changed = threading.Condition()
        """Guards the attributes below; notified when a reply has arrived or a failure has occurred."""
        self._failure: FleetError | None = None
        self._blocks = {block.id: block for block in plan.blocks}
        self._missing: set[int] = set()
        """Blocks whose expected values have not arrived."""
        self._expected_at = 0
        """The step at which the missing values were requested; `step` may have advanced since then."""
        self._steps = range(0)
        """The steps to which the expected values may belong."""
        self._wanted: frozenset[int] = frozenset()
        """Blocks whose values the training thread needs before those of other blocks."""
        self._tables = {table.number: table for table in plan.tables}
        self._row_bytes = {table.number: table.row_bytes for table in plan.tables}
        self._look_ups: list[deque[tuple[LookUp, NDArray[np.int64]]]] = [deque() for _ in plan.endpoints]
        """The unanswered row requests to each server, in order, with the positions of their rows."""
        self._most_look_ups = min(settings.look_ups_at_once, MOST_LOOK_UPS)
        self._stepping: set[tuple[int, int]] = set()
        """The pairs of a server and a table whose update the server has not confirmed."""
        self._table_steps = 0
        """The number of steps that the tables will have made once the step is confirmed."""
        self._changed_rows: list[ChangedRows] = []

    def fail(self, error: FleetError) -> None:
        """Record an error for the training thread. Only the first error is kept."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error that a thread has recorded, if there is one."""
        if self._failure is not None:
            raise self._failure

    def wake(self) -> None:
        """Wake all threads in `wait_until`, which check their conditions again."""
        with self._changed:
            self._changed.notify_all()

    def wait_until(
        self, done: Callable[[], bool], describe: Callable[[], str], *, background: bool = False
    ) -> None:
        """Wait for a condition that another thread makes true.

        Parameters
        ----------
        done : callable
            Returns whether the wait is over.
        describe : callable
            Returns a description of the wait, for messages.
        background : bool
            Whether training continues meanwhile, so that the time does not count as waiting time.

        Raises
        ------
        DeadlineExceededError
            The wait has lasted too long.
        FleetError
            Another thread has recorded a failure.
        """
        began = time.monotonic()
        with self._changed:
            # Most waits last for milliseconds; only longer waits are logged and limited.
            if not self._changed.wait_for(lambda: self._failure is not None or done(), LOOK_SECONDS):
                self._wait_long(done, describe)
            # If a reply and a failure arrive at the same time, the reply counts.
            if not done():
                self.check()
        if not background:
            progress.count("wait_seconds", time.monotonic() - began)

    def _wait_long(self, done: Callable[[], bool], describe: Callable[[], str]) -> None:
        log = WaitLog(self._clock.now)
        limit_seconds = self.settings.stalled_seconds + self.settings.silent_seconds
        while not done():
            self.check()
            waited = log.note("step", lambda: f"waiting for {describe()}")
            if waited >= limit_seconds:
                raise DeadlineExceededError(f"waited {waited:.0f} s for {describe()}")
            self._changed.wait(LOOK_SECONDS)  # last: the reply may have arrived meanwhile

    def receive(
        self, connection: ServerConnection, event: Frame | End, *, in_pool: bool = False
    ) -> Work | None:
        """Handle a frame or the end of a data connection; return any long work, which the pool then runs."""
        if isinstance(event, End):
            connection.ended(event.error)
            self.wake()
            return None
        header, payload = event
        kind, num_bytes = header.kind, header.payload_bytes
        if kind is Kind.PARAM:  # already in its receive buffer, unless it has to be copied or converted
            copied = header.shared and not self._in_step
            long = copied or header.block in connection.codec.converted
            num_bytes = connection.codec.block_bytes[header.block] if long else 0
        if num_bytes > SMALL_BYTES and not in_pool:
            return partial(self.receive, connection, event, in_pool=True)
        match kind:
            case Kind.PARAM | Kind.UNCHANGED:
                shared = connection.transport.poll(header)
                if shared is not None:
                    self._take_shared(header.block, shared)
                self.value_landed(header.block, header.step, changed=kind is Kind.PARAM)
            case Kind.ROWS:
                self.rows_landed(connection.server, header, memoryview(payload))
            case Kind.STEPPED:
                self.table_stepped(connection.server, header, memoryview(payload))
            case Kind.COMPLETE:
                connection.completed_trainers = frozenset(read_numbers(bytes(payload)))
                connection.stream.send(Kind.GOODBYE)
            case Kind.ERROR:
                raise read_error(bytes(payload))
        return None

    def _take_shared(self, block: int, value: memoryview) -> None:
        """Use a value directly from the server's memory if that is safe, otherwise copy it.

        In sync mode, the value stays unchanged until this trainer has sent the next gradient, and is adopted
        before that. In any other mode, the server may change the value as soon as its frame is acknowledged.
        """
        if self._in_step:
            self.store.land_elsewhere(block, value)
        else:
            copy_bytes(value, self.store.landing(block))

    def expect_values(self, *, present: bool = False, exactly: bool = False) -> None:
        """Register the expected replies, one for each block, before sending the request.

        Parameters
        ----------
        present : bool
            Whether the current values are requested. If not, a value must belong to this step or a later one.
        exactly : bool
            Whether the values of exactly this step are requested.
        """
        with self._changed:
            self._missing, self._expected_at = set(self._blocks), self.step
            first = 0 if present and not exactly else self.step
            self._steps = range(first, self.step + 1 if exactly else sys.maxsize)
            self.unchanged = set()

    def value_landed(self, block: int, step: int, *, changed: bool) -> None:
        """Record that a block's value has arrived or has not changed.

        Raises
        ------
        RemoteProtocolError
            The value was not expected.
        """
        with self._changed:
            if block not in self._missing or step not in self._steps:
                sent = self._blocks[block]
                raise RemoteProtocolError(
                    f"parameter server {sent.endpoint} sent {sent.name} of step {step}, which was not "
                    f"requested at step {self._expected_at}"
                )
            self._missing.remove(block)
            if not changed:
                self.unchanged.add(block)
            if not self._missing or block in self._wanted:
                self._changed.notify_all()

    @property
    def values_arrived(self) -> bool:
        """True if all expected values have arrived."""
        with self._changed:
            return not self._missing

    @property
    def nothing_changed(self) -> bool:
        """True if the last step did not change any block."""
        with self._changed:
            return len(self.unchanged) == len(self._blocks)

    def wait_for_values(self, *, background: bool = False) -> None:
        """Wait for all expected values; see `wait_until`."""
        self.wait_until(lambda: not self._missing, self._describe_values, background=background)

    def wait_for_some(self, blocks: Collection[int]) -> None:
        """Wait for the values of these blocks; see `wait_until`."""
        # Set before the wait: a value that lands first is seen by its first check, a later one notifies it.
        self._wanted = frozenset(blocks)
        try:
            self.wait_until(lambda: self._missing.isdisjoint(self._wanted), self._describe_values)
        finally:
            self._wanted = frozenset()

    def servers_wait_for(self) -> str:
        """Describe what the servers wait for; return an empty string if they do not wait."""
        return ""

    def _describe_values(self) -> str:
        """Describe which servers and block a step waits for, and what these servers wait for."""
        blocks = [self._blocks[block] for block in sorted(self._missing)]
        servers = ", ".join(sorted({block.endpoint for block in blocks}))
        because = self.servers_wait_for()
        reason = f" ({because})" if because else ""
        return f"{blocks[0].name} of step {self._expected_at} from {servers}{reason}"

    def expect_rows(self, server: int, look_up: LookUp, at: NDArray[np.int64]) -> None:
        """Register a request for rows before sending it; wait while the server has too many open requests.

        Parameters
        ----------
        server : int
        look_up : LookUp
        at : int64[n]
            The positions of the requested rows among the rows of the look-up.
        """
        pending = self._look_ups[server]
        if len(pending) >= self._most_look_ups:
            endpoint = self.plan.endpoints[server]
            self.wait_until(
                lambda: len(pending) < self._most_look_ups,
                lambda: f"answers to {self._most_look_ups} look-ups from {endpoint}",
            )
        pending.append((look_up, at))

    def rows_landed(self, server: int, header: Header, payload: memoryview) -> None:
        """Store the rows that answer the oldest request to a server.

        Raises
        ------
        RemoteProtocolError
            These rows were not requested.
        """
        pending = self._look_ups[server]
        count = len(payload) // self._row_bytes[header.block]
        look_up, at = pending[0] if pending else (None, np.zeros(0, dtype=np.int64))
        if look_up is None or (look_up.table.number, at.size) != (header.block, count):
            expected = f"{at.size} of table {look_up.table.number}" if look_up is not None else "none"
            raise RemoteProtocolError(
                f"parameter server {self.plan.endpoints[server]} sent {count} rows of table {header.block}, "
                f"expected {expected}"
            )
        rows = read_rows(payload, look_up.table.config.dimension)
        # Without the lock: the training thread reads the rows once `pending` is 0, which it becomes under the
        # lock.
        if count == len(look_up.rows):  # one server has all rows, in the order of the ids
            look_up.rows = torch.from_numpy(rows)
        else:
            look_up.rows.numpy()[at] = rows
        with self._changed:
            was_full = len(pending) >= self._most_look_ups
            pending.popleft()
            look_up.pending -= 1
            if was_full or not look_up.pending:
                self._changed.notify_all()

    def wait_for_rows(self, look_up: LookUp) -> Tensor:
        """Wait for the rows of a look-up and return them: float32[n, dimension]. See `wait_until`."""
        self.wait_until(lambda: not look_up.pending, lambda: self._describe_rows(look_up))
        return look_up.rows

    def _describe_rows(self, look_up: LookUp) -> str:
        busy = zip(self.plan.endpoints, self._look_ups, strict=True)
        return f"rows of table {look_up.table.name} from {', '.join(each for each, some in busy if some)}"

    def expect_table_steps(self, step: int) -> None:
        """Register the confirmation expected from each server for each table, before sending gradients."""
        with self._changed:
            servers = range(len(self.plan.endpoints))
            self._stepping = {(server, number) for server in servers for number in self._tables}
            self._table_steps = step + 1

    def table_stepped(self, server: int, header: Header, payload: memoryview) -> None:
        """Record that a server has updated a table, and store the changed rows.

        Raises
        ------
        RemoteProtocolError
            The confirmation was not expected, or the table does not have these rows.
        """
        with self._changed:
            if header.step != self._table_steps or (server, header.block) not in self._stepping:
                raise RemoteProtocolError(
                    f"parameter server {self.plan.endpoints[server]} reports {header.step} steps of table "
                    f"{header.block}, expected {self._table_steps} steps of one of {sorted(self._stepping)}"
                )
            table = self._tables[header.block]
            ids, rows = read_row_gradient(payload, table.config.dimension)
            # The ids ascend, so the first and the last one suffice. Others would be written outside the
            # weight.
            if table.own is not None and ids.size and not 0 <= int(ids[0]) <= int(ids[-1]) < len(table.own):
                raise RemoteProtocolError(
                    f"parameter server {self.plan.endpoints[server]} sent rows {ids[0]} to {ids[-1]} of "
                    f"table {table.number}, expected 0 to {len(table.own) - 1}"
                )
            if ids.size:
                self._changed_rows.append((table, ids, torch.from_numpy(rows)))
            self._stepping.discard((server, header.block))
            if not self._stepping:
                self._changed.notify_all()

    @property
    def tables_stepped(self) -> bool:
        """True if every server has updated the tables."""
        return not self._stepping

    def wait_for_tables(self, *, background: bool = False) -> None:
        """Wait until every server has updated the tables; see `wait_until`."""
        self.wait_until(lambda: not self._stepping, self._describe_tables, background=background)

    def take_changed_rows(self) -> list[ChangedRows]:
        """Return, in order, the changed rows that have arrived since the last call."""
        with self._changed:
            rows, self._changed_rows = self._changed_rows, []
        return rows

    def _describe_tables(self) -> str:
        stepping = sorted(self._stepping)
        servers = ", ".join(dict.fromkeys(self.plan.endpoints[server] for server, _ in stepping))
        tables = ", ".join(dict.fromkeys(self._tables[number].name for _, number in stepping))
        return f"step {self._table_steps - 1} of table {tables} from {servers}"
