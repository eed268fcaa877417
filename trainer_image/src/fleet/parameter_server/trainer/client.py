"""A trainer among its servers: it joins, takes their values, trains through its session, and completes."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from fleet.errors import FleetError
from fleet.parameter_server.certificates import Certificates, certificates_of
from fleet.parameter_server.control.client import ControlClient, read_placement
from fleet.parameter_server.control.guard import prover_of
from fleet.parameter_server.control.heartbeat import Heartbeat
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import agreement
from fleet.parameter_server.trainer.awaited import AwaitedValues
from fleet.parameter_server.trainer.barriers import Barriers
from fleet.parameter_server.trainer.calls import ServerCalls
from fleet.parameter_server.trainer.local_tables import LocalTables
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.trainer.route import Route
from fleet.parameter_server.trainer.rows import TrainerRows
from fleet.parameter_server.trainer.server_connection import ServerConnection
from fleet.parameter_server.trainer.session import Session
from fleet.parameter_server.trainer.silence import SilenceWatchdog
from fleet.parameter_server.trainer.waits import Waits
from fleet.parameter_server.waiting import wait_for_ports
from fleet.plan.config import DistributedMode
from fleet.plan.job import TrainerPlan
from fleet.process import progress
from fleet.process.resources import WatchClock
from fleet.wire import Identity, Kind, job_hash

if TYPE_CHECKING:
    from fleet.parameter_server.control.proto import control_pb2
    from fleet.role_maker import JobIdentity

__all__ = ["Client"]


class Client:
    """One trainer's part in a job, from joining to completing.

    Parameters
    ----------
    plan : TrainerPlan
    job : JobIdentity
        Name and uid of the job, and the start count of this process.
    store : ParameterStore
        Where values land.
    settings : Settings
    facts : mapping of str to str, optional
        What the servers must have in common with this process, beside the plan's agreement.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        job: "JobIdentity",
        store: ParameterStore,
        settings: Settings,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.restored = ""
        """The random name of the checkpoint that the servers have loaded; empty when they began anew."""
        self.waits = Waits(settings, WatchClock(settings.glance_seconds))
        self.calls = ServerCalls(self.waits)
        self.barriers = Barriers(lambda: self.calls.first, settings, self.waits.check)
        """Barriers and reductions."""
        self.values = AwaitedValues(plan.blocks, self.waits)
        self.rows = TrainerRows(
            plan.tables,
            plan.endpoints,
            self.waits,
            lambda: self.session.step,
            in_step=agreement.in_step(plan),
        )
        """What tables are read through."""
        geo = plan.mode is DistributedMode.GEO and bool(plan.tables)
        local = LocalTables(plan.tables, plan.trainers, self.rows) if geo else None
        self.session = Session(plan, store, self.values, self.barriers, self.waits, self.rows, local)
        """What a mode asks for."""
        self._job = job
        self._agreement = {**plan.agreement, **settings.agreement, **(facts or {})}
        self._heartbeat: Heartbeat | None = None
        self._watchdogs: list[SilenceWatchdog] = []

    def start(
        self,
        look: Callable[[], None] = lambda: None,
        told: Callable[[Collection[int]], None] = lambda _: None,
    ) -> None:
        """Join every server, and take the values that they hold.

        Parameters
        ----------
        look : callable
            As of `wait_for_ports`.
        told : callable
            Called before that with the trainers that have completed, where this one may be among them; what
            it raises ends the start.

        Raises
        ------
        ConfigurationError
            A server refuses, with its reason.
        PeerLostError
            A server does not answer in time.
        """
        try:
            self._start(look, told)
        except BaseException:
            self.close()
            raise

    def agree(self) -> "list[control_pb2.LoadReply]":
        """Have the servers load one checkpoint; see `agreement.agree`."""
        settings = self.waits.settings
        return agreement.agree(self.calls.ask_all, self.session.plan.endpoints, settings.deadline_seconds)

    def pull(self, restored: Sequence[str], steps: Sequence[int]) -> None:
        """Take the values that the servers hold; only between a step's end and the next one's beginning.

        Parameters
        ----------
        restored : sequence of str
            The checkpoint that each server has loaded.
        steps : sequence of int
            How many steps each has made.

        Raises
        ------
        StateLostError
            The servers have loaded different checkpoints, or are at different steps.
        """
        plan = self.session.plan
        agreement.check_equal(plan.endpoints, restored)
        self.restored = restored[0]
        self.session.step = agreement.next_step(plan, steps)
        self.take_values()

    def take_values(self) -> None:
        """Take the values that the servers hold, whatever this trainer has."""
        self.session.store.forget()
        self.session.request_values()
        self.session.wait_for_values()
        self.session.adopt_values()
        self.rows.take_all()

    def complete(self) -> frozenset[int]:
        """Tell every server that this trainer has finished, wait until each knows, and return who has."""
        self.waits.check()
        if self._heartbeat is not None and self._tells_of_tables:
            self._heartbeat.beat()  # the servers are about to end, and what they hold is told afterwards
        connections = self.session.connections
        for connection in connections:
            connection.send(Kind.COMPLETE)
        self.session.wait_until(
            lambda: all(connection.has_ended for connection in connections),
            lambda: "the parameter servers to take note of the end",
        )
        self.close()
        return frozenset.intersection(
            *(connection.completed_trainers or frozenset() for connection in connections)
        )

    def close(self) -> None:
        """End the session now; whoever still waits in it, or comes later, gets an error."""
        self.waits.fail(
            FleetError(
                "the session with the parameter servers has ended; what they are asked for, optimizer state "
                "say, must be asked before fleet.stop_worker()"
            )
        )
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for (
            connection
        ) in self.session.connections:  # they stay: a thread of a mode's may be at work with them
            connection.close()
        self.calls.close()

    def _start(self, look: Callable[[], None], told: Callable[[Collection[int]], None]) -> None:
        plan, settings, job = self.session.plan, self.waits.settings, self._job
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
        self.calls.controls = controls
        if job.life:
            told(agreement.completed_before(controls, job, settings.deadline_seconds))
        replies = agreement.join(controls, job, self._agreement, settings.deadline_seconds, deadline)
        self._place(plan.placed([read_placement(reply.placement) for reply in replies]))
        agreement.warn_of_other_values(self.session.plan, replies, self.session.store.checksums())
        self._connect(replies, certificates)
        found = self._found(replies)
        self.pull([reply.restored for reply in found], [reply.step for reply in found])

    def _place(self, plan: TrainerPlan) -> None:
        """Go on with the blocks that the servers hold."""
        self.session.plan = plan
        self.session.store.place(plan.blocks)
        self.values.place(plan.blocks)

    def _found(
        self, joined: "Sequence[control_pb2.JoinReply]"
    ) -> "Sequence[control_pb2.JoinReply | control_pb2.StatsReply | control_pb2.LoadReply]":
        """Return what says of each server which checkpoint it has loaded, and how many steps it has made.

        Where trainers are in step that is asked once all have let this one join: from then on each keeps the
        values before the last step for it. At its join one may have told a step of which another has kept
        nothing when it was joined later. Where another trainer has the servers load just now, one of them may
        have done so and another not yet.
        """
        found: Sequence[control_pb2.JoinReply | control_pb2.StatsReply] = joined
        if agreement.in_step(self.session.plan):
            now = self.calls.ask_all(lambda control, seconds: control.stats(seconds))
            found = now
        if len({reply.restored for reply in (*joined, *found)}) > 1:
            return self.agree()
        return found

    def _connect(self, replies: "Sequence[control_pb2.JoinReply]", certificates: Certificates | None) -> None:
        """Open the data connection with each server, and begin to watch over them."""
        waits, plan, job = self.waits, self.session.plan, self._job
        heartbeat = self._heartbeat = Heartbeat(
            self.calls.controls,
            [reply.incarnation for reply in replies],
            waits.settings,
            waits.fail,
            self._look_for_silence,
            waits.clock,
        )
        self.values.waiting_for = heartbeat.waiting_for
        if self._tells_of_tables:
            progress.show_tables(heartbeat.tables.total)
        identity = Identity(job_hash(job.name, job.uid), plan.trainer_id, job.attempt)
        for server, reply in enumerate(replies):
            endpoint = plan.endpoints[server]
            route = Route(endpoint, reply.data_port, reply.data_socket, waits.settings, job.key, certificates)
            connection = ServerConnection(
                plan,
                route,
                server,
                identity,
                reply.incarnation,
                self.session.store,
                self.values,
                waits,
                heartbeat,
                self.rows,
            )
            self.session.connections.append(connection)
            self.rows.streams.append(connection.stream)
            connection.connect()
            watchdog = SilenceWatchdog(connection.stream, endpoint, waits.settings.silent_seconds)
            self._watchdogs.append(watchdog)
        heartbeat.start()

    @property
    def _tells_of_tables(self) -> bool:
        """Whether this is trainer 0, which tells of the whole job, and there are tables."""
        return bool(self.rows) and self.session.plan.trainer_id == 0

    def _look_for_silence(self) -> None:
        now = self.waits.clock.now()
        for server, watchdog in enumerate(list(self._watchdogs)):
            if watchdog.look(now) and self._heartbeat is not None:
                self._heartbeat.heard(server)
