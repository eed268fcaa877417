"""A trainer's session with its servers: joining, data connections, and training steps.

A trainer first joins every server, and receives the list of blocks that each server holds. Then it creates
the objects of its session once, from the final plan.

The training thread calls the session; one more thread, of the event loop, sends to and receives from all
servers. Values land in the `ParameterStore`. A failure is kept until the training thread makes its next call.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch.nn import Parameter

from fleet.errors import DeadlineExceededError, FleetError
from fleet.parameter_server.certificates import Certificates, certificates_of
from fleet.parameter_server.control.client import ControlClient, read_placement
from fleet.parameter_server.control.guard import prover_of
from fleet.parameter_server.control.heartbeat import Heartbeat
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import agreement
from fleet.parameter_server.trainer.calls import ServerCalls
from fleet.parameter_server.trainer.local_steps import LocalTables
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.trainer.replies import LOOK_SECONDS, Replies
from fleet.parameter_server.trainer.rows import TrainerRows
from fleet.parameter_server.trainer.server_connection import ServerConnection
from fleet.parameter_server.transport.event_loop import EventLoop
from fleet.parameter_server.waits import WaitLog, wait_for_ports
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode
from fleet.plan.job import TrainerPlan
from fleet.process import progress
from fleet.process.finite import NO_ROWS, OfRows
from fleet.wire import HyperParameters, Identity, Kind, job_hash
from fleet.wire.messages import pack_hyper, pack_numbers

if TYPE_CHECKING:
    from fleet.parameter_server.control.proto import control_pb2
    from fleet.role_maker import JobIdentity

__all__ = ["Session", "join"]

_WORKERS: Final = 2
"""The number of threads that copy and convert large values and rows."""


def join(
    plan: TrainerPlan,
    parameters: Mapping[str, Parameter],
    job: "JobIdentity",
    settings: Settings,
    facts: Mapping[str, str],
    *,
    guarded: bool = False,
    look: Callable[[], None] = lambda: None,
    completed: Callable[[Collection[int]], None] = lambda _: None,
) -> "Session":
    """Join every server and load the servers' values.

    Parameters
    ----------
    plan : TrainerPlan
        The plan with the blocks of the program. The session's plan has the blocks (or pieces) on the servers.
    parameters : mapping of name to Parameter
        The parameters of the module.
    job : JobIdentity
        The name, uid and key of the job, and the start count of this process.
    settings : Settings
    facts : mapping of str to str
        Facts on which the servers must agree with this process, in addition to the plan's agreement.
    guarded : bool
        Whether the script's writes to parameters are errors.
    look : callable
        See `wait_for_ports`.
    completed : callable
        Called before joining with the trainers that have completed, which may include this one; an exception
        ends the start.

    Raises
    ------
    ConfigurationError
        A server refuses the trainer; the message gives its reason.
    PeerLostError
        A server does not answer in time.
    """
    deadline = time.monotonic() + settings.starting_seconds
    if plan.wait_port:
        wait_for_ports(plan.endpoints, settings.starting_seconds, look)
    certificates = certificates_of(settings)
    controls = [
        ControlClient(
            endpoint,
            plan.trainer_id,
            job.attempt,
            settings.retry_times,
            prover_of(job.key, server),
            certificates,
        )
        for server, endpoint in enumerate(plan.endpoints)
    ]
    try:
        if job.life:
            completed(agreement.completed_before(controls, job, settings.deadline_seconds))
        facts = {**plan.agreement, **settings.agreement, **facts}
        joined = agreement.join(controls, job, facts, settings.deadline_seconds, deadline)
        plan = plan.placed([read_placement(reply.placement) for reply in joined])
        store = ParameterStore(plan.blocks, parameters, guarded=guarded)
        agreement.warn_of_other_values(plan, joined, store.checksums())
        session = Session(plan, store, job, settings, controls, joined, certificates)
    except BaseException:
        for control in controls:
            control.close()
        raise
    try:
        session.start(joined)
    except BaseException:
        session.close()
        raise
    return session


class Session(Replies):
    """A trainer's session; implements `fleet.parameter_server.modes.Session`.

    Parameters
    ----------
    plan : TrainerPlan
        The plan with the blocks that servers hold.
    store : ParameterStore
        The memory in which values land.
    job : JobIdentity
    settings : Settings
    controls : sequence of ControlClient
        The control channel of each server.
    joined : sequence of JoinReply
        The reply of each server.
    certificates : Certificates or None
        The certificates for TLS over TCP.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        store: ParameterStore,
        job: "JobIdentity",
        settings: Settings,
        controls: Sequence[ControlClient],
        joined: "Sequence[control_pb2.JoinReply]",
        certificates: Certificates | None,
    ) -> None:
        super().__init__(plan, settings, store)
        self.restored = ""
        """The random name of the checkpoint that the servers have loaded; empty if there is none."""
        self.calls = ServerCalls(controls, self)
        self._heartbeat = Heartbeat(
            controls,
            [reply.incarnation for reply in joined],
            settings,
            self.fail,
            self._look_for_silence,
            self._clock,
        )
        self._loop = EventLoop(_WORKERS)
        identity = Identity(job_hash(job.name, job.uid), plan.trainer_id, job.attempt)
        self.connections = [
            ServerConnection(
                server, reply, identity, job.key, certificates, self, self._heartbeat, self._loop
            )
            for server, reply in enumerate(joined)
        ]
        self._holders = [connection for connection in self.connections if connection.holds]
        """The connections to servers that have a part of the model."""
        self.rows = TrainerRows([connection.stream for connection in self.connections], self)
        self.local_rows: LocalTables | None = None
        """This trainer's copies of rows, if it updates rows itself."""
        if plan.mode is DistributedMode.GEO and plan.tables:
            self.local_rows = LocalTables(plan.tables, plan.trainers, self.rows)
        self._shows_tables = bool(plan.tables) and plan.trainer_id == 0
        """Whether this trainer reports the sizes of tables for the whole job, as trainer 0 does."""
        self._sending = 0
        """The step whose frames are being sent."""
        self._hyper: tuple[HyperParameters, bytes] = (), pack_hyper(())
        """The hyper-parameters of the latest step and their encoding, which is reused until they change."""
        self._turn = threading.RLock()
        """Held while a mode sends a whole step, so that frames of different steps do not mix."""

    def start(self, joined: "Sequence[control_pb2.JoinReply]") -> None:
        """Connect to the servers and load their values; raise the same errors as `join`."""
        if self._shows_tables:
            progress.show_tables(self._heartbeat.tables.total)
        self._loop.start()
        for connection in self.connections:
            connection.connect()
        self._heartbeat.start()
        self.pull(*agreement.loaded_and_steps(self.plan, joined, self.calls, self.settings.deadline_seconds))

    def agree(self) -> "list[control_pb2.LoadReply]":
        """Make all servers load the same checkpoint; see `agreement.agree`."""
        return agreement.agree(self.calls.ask_all, self.plan.endpoints, self.settings.deadline_seconds)

    def pull(self, restored: Sequence[str], steps: Sequence[int]) -> None:
        """Load the servers' values. Call this only between two steps.

        Parameters
        ----------
        restored : sequence of str
            The checkpoint that each server has loaded.
        steps : sequence of int
            The number of steps that each server has made.

        Raises
        ------
        StateLostError
            The servers have loaded different checkpoints, or are at different steps.
        """
        agreement.check_equal(self.plan.endpoints, restored)
        self.restored = restored[0]
        self.step = agreement.next_step(self.plan, steps)
        self.take_values()

    def take_values(self) -> None:
        """Overwrite the parameters with the servers' values."""
        self.store.forget()
        self.request_values()
        self.wait_for_values()
        self.adopt_values()
        self.rows.take_all()

    def complete(self) -> frozenset[int]:
        """Report this trainer's completion; return the trainers that all servers report as completed."""
        self.check()
        if self._shows_tables:
            self._heartbeat.beat()  # the last chance to receive the sizes: the servers are about to end
        for connection in self.connections:
            connection.stream.send(Kind.COMPLETE)
        self.wait_until(
            lambda: all(connection.has_ended for connection in self.connections),
            lambda: "the parameter servers to record that this trainer has completed",
        )
        self.close()
        return frozenset.intersection(
            *(connection.completed_trainers or frozenset() for connection in self.connections)
        )

    def close(self) -> None:
        """End the session immediately; waiting threads and later calls raise an error."""
        # This comes first, so that threads that wait or reconnect end with this reason instead of the loss of
        # their connection.
        self.fail(
            FleetError(
                "the session with the parameter servers has ended; anything that is on the servers, such as "
                "optimizer state, must be requested before fleet.stop_worker()"
            )
        )
        self._heartbeat.stop()
        for connection in self.connections:
            connection.close()
        self._loop.close()
        self.calls.close()

    def advance(self) -> None:
        """Count a completed step."""
        self.step += 1

    def begin_step(self, hyper_parameters: Sequence[dict[str, Any]], step: int | None = None) -> None:
        """Announce a step, by default the current one, before its first gradient."""
        self.check()
        self._sending = step = self.step if step is None else step
        if self._hyper[0] != tuple(hyper_parameters):
            copied = tuple(dict(group) for group in hyper_parameters)
            self._hyper = copied, pack_hyper(copied)
        for connection in self._holders:
            # Held back, because gradients or the end of the step follow at once: small frames leave in one
            # call of the kernel.
            connection.stream.send(Kind.HYPER, self._hyper[1], step=step, more=True)

    def send_gradient(self, block: PlannedBlock, payload: memoryview) -> None:
        """Enqueue a gradient. Its memory must not change until the servers have received it."""
        self.connections[block.server].transport.submit(Kind.GRAD, self._sending, block.id, payload)

    def end_step(self, absent: Iterable[PlannedBlock]) -> None:
        """Announce the end of a step, in which there is no gradient for the `absent` blocks."""
        by_server: dict[int, list[int]] = {}
        for block in absent:
            by_server.setdefault(block.server, []).append(block.id)
        for connection in self._holders:
            numbers = by_server.get(connection.server)
            payload = pack_numbers(numbers) if numbers else b""
            connection.stream.send(Kind.STEP_END, payload, step=self._sending)

    def send_step(
        self,
        step: int,
        hyper_parameters: Sequence[dict[str, Any]],
        gradients: Mapping[int, memoryview],
        of_rows: OfRows = NO_ROWS,
    ) -> None:
        """Enqueue a whole step: its gradients by block and by table. Threads of the mode may call this."""
        with self._turn:
            self.begin_step(hyper_parameters, step)
            for block in self.plan.blocks:
                if block.id in gradients:
                    self.send_gradient(block, gradients[block.id])
            if self.rows:
                self.rows.send(of_rows, step)
            self.end_step([block for block in self.plan.blocks if block.id not in gradients])

    def flush(self) -> None:
        """Wait until the servers have received all enqueued data; its memory may be overwritten then."""
        log = WaitLog()
        for connection, mark in [(each, each.stream.send(Kind.CONFIRM)) for each in self._holders]:
            what = f"{connection.endpoint} to receive gradients"
            while not connection.stream.wait_until_taken(mark, LOOK_SECONDS):
                self.check()
                waited = log.note(connection.endpoint, lambda: f"waiting for {what}")  # noqa: B023
                if waited >= self.settings.stalled_seconds:
                    raise DeadlineExceededError(f"waited {waited:.0f} s for {what}")

    def request_values(self) -> None:
        """Request each block's value; in modes with a common step, the value as of this trainer's step."""
        self.check()
        with self._turn:
            self.expect_values(present=True, exactly=self.plan.has_common_step)
            for connection in self._holders:
                connection.stream.send(Kind.PULL, step=self.step)

    def adopt_values(self, names: Iterable[str] | None = None) -> None:
        """Copy arrived values into all or the given parameters."""
        self.store.adopt(self.unchanged, names)

    def wait_for_ends(self) -> None:
        """Wait until no other trainer will run another step; see `ServerCalls.wait_for_ends`."""
        self.calls.wait_for_ends()

    def servers_wait_for(self) -> str:
        """Describe what the servers wait for, as of the latest heartbeats, or return an empty string."""
        return self._heartbeat.waiting_for()

    def _look_for_silence(self) -> None:
        now = self._clock.now()
        for connection in self.connections:
            if connection.watchdog.look(now):
                self._heartbeat.heard(connection.server)
