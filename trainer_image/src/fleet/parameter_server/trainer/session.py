"""What a mode's half has of the servers: it sends gradients, and awaits and adopts values.

The training thread calls; per server one thread receives and one sends. What arrives lands in the
`ParameterStore`; what fails is kept until the training thread asks next.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from fleet.errors import DeadlineExceededError, FleetError
from fleet.parameter_server.trainer.agreement import in_step
from fleet.parameter_server.trainer.awaited import AwaitedValues
from fleet.parameter_server.trainer.barriers import Barriers
from fleet.parameter_server.trainer.local_tables import LocalTables
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.trainer.rows import TrainerRows
from fleet.parameter_server.trainer.server_connection import ServerConnection
from fleet.parameter_server.trainer.waits import LOOK_SECONDS, Waits
from fleet.parameter_server.waiting import WaitLog
from fleet.plan.blocks import PlannedBlock
from fleet.plan.job import TrainerPlan
from fleet.process import progress
from fleet.process.finite import NO_ROWS, OfRows
from fleet.wire import Kind
from fleet.wire.messages import pack_hyper, pack_numbers

__all__ = ["Session"]


class _Waiting:
    """What a session offers to threads of a mode's own."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def fail(self, error: FleetError) -> None:
        """Keep an error until the training thread asks next; the first one counts."""
        self._waits.fail(error)

    def check(self) -> None:
        """Raise the failure that a thread of this session has found, if there is one."""
        self._waits.check()

    def wake(self) -> None:
        """Let who waits look again."""
        self._waits.wake()

    def wait_until(self, done: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Wait for something that another thread brings about; raises as `Waits.wait_until` does."""
        progress.count("wait_seconds", self._waits.wait_until(done, describe))


class Session(_Waiting):
    """One trainer's steps; see `fleet.parameter_server.modes.Session`.

    Parameters
    ----------
    plan : TrainerPlan
    store : ParameterStore
        Where values land.
    values : AwaitedValues
    barriers : Barriers
    waits : Waits
    rows : TrainerRows
        The tables that live on the servers.
    local_rows : LocalTables, optional
        This trainer's copies of their rows, where it steps them itself.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        store: ParameterStore,
        values: AwaitedValues,
        barriers: Barriers,
        waits: Waits,
        rows: TrainerRows,
        local_rows: LocalTables | None = None,
    ) -> None:
        super().__init__(waits)
        self.plan = plan
        self.store = store
        self.step = 0
        """The number of steps made, from the job's beginning."""
        self.connections: list[ServerConnection] = []
        """One per server, once the trainer has joined."""
        self._values = values
        self._barriers = barriers
        self.rows = rows
        self.local_rows = local_rows
        self._sending = 0
        """The step whose frames are being enqueued."""
        self._turn = threading.RLock()
        """Held for the frames of a whole step, so that nothing else comes between them."""

    def advance(self) -> None:
        """Count a step as made."""
        self.step += 1

    def expect_values(self) -> None:
        """Register the expected answers, one per block, before the request is sent."""
        self._values.expect(self.step)

    def begin_step(self, hyper_parameters: Sequence[dict[str, Any]]) -> None:
        """Announce a step with its hyper-parameters, before its first gradient."""
        self._begin_step(self.step, hyper_parameters)

    def send_gradient(self, block: PlannedBlock, payload: memoryview) -> None:
        """Enqueue a gradient; its memory must not change until the servers have it."""
        self.connections[block.server].transport.submit(Kind.GRAD, self._sending, block.id, payload)

    def end_step(self, absent: Iterable[PlannedBlock]) -> None:
        """Announce that nothing more comes, and for which blocks nothing came."""
        by_server: dict[int, list[int]] = {}
        for block in absent:
            by_server.setdefault(block.server, []).append(block.id)
        for connection in _holders(self.connections):
            numbers = pack_numbers(by_server.get(connection.server, ()))
            connection.send(Kind.STEP_END, numbers, step=self._sending)

    def send_step(
        self,
        step: int,
        hyper_parameters: Sequence[dict[str, Any]],
        gradients: Mapping[int, memoryview],
        of_rows: OfRows = NO_ROWS,
    ) -> None:
        """Enqueue a whole step at once, gradients by block and table; a thread of the mode's own may."""
        with self._turn:
            self._begin_step(step, hyper_parameters)
            for block in self.plan.blocks:
                if block.id in gradients:
                    self.send_gradient(block, gradients[block.id])
            if self.rows:
                self.rows.send(of_rows, step)
            self.end_step([block for block in self.plan.blocks if block.id not in gradients])

    def flush(self) -> None:
        """Wait until the servers have what was enqueued: its memory may change then."""
        log = WaitLog()
        marks = [(connection, connection.send(Kind.CONFIRM)) for connection in _holders(self.connections)]
        for connection, mark in marks:
            while not connection.stream.wait_until_taken(mark, LOOK_SECONDS):
                self.check()
                what = f"{connection.endpoint} to take gradients"
                waited = log.note(connection.endpoint, lambda: f"waiting for {what}")  # noqa: B023
                if waited >= self._waits.settings.stalled_seconds:
                    raise DeadlineExceededError(f"waited {waited:.0f} s for {what}")

    def request_values(self) -> None:
        """Expect values, and ask for that of each block: of this step where trainers are in step."""
        self.check()
        with self._turn:
            self._values.expect(self.step, present=True, exactly=in_step(self.plan))
            for connection in _holders(self.connections):
                connection.send(Kind.PULL, step=self.step)

    @property
    def values_arrived(self) -> bool:
        """Whether all the values expected have landed."""
        return self._values.all_landed

    def wait_for_values(self, *, background: bool = False) -> None:
        """Wait until they have; see `AwaitedValues.wait`."""
        self._values.wait(background=background)

    def wait_for_some(self, blocks: Collection[int]) -> None:
        """Wait until the values of these blocks have landed."""
        self._values.wait_for(blocks)

    def adopt_values(self, names: Iterable[str] | None = None) -> None:
        """Make the values that have landed the parameters: all of them, or those of these names."""
        self.store.adopt(self._values.unchanged, names)

    def wait_for_ends(self) -> None:
        """Wait until no other trainer makes a step any more: it calls this, has completed or is given up."""
        self._barriers.wait_for_ends()

    def _begin_step(self, step: int, hyper_parameters: Sequence[dict[str, Any]]) -> None:
        self.check()
        self._sending = step
        payload = pack_hyper(hyper_parameters)
        for connection in _holders(self.connections):
            connection.send(Kind.HYPER, payload, step=step)


def _holders(connections: Sequence[ServerConnection]) -> list[ServerConnection]:
    """Return the connections with servers that have some of the model."""
    return [connection for connection in connections if connection.holds]
