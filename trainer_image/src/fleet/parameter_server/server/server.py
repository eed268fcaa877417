"""A parameter server: stores a shard of the model and serves it until every trainer has completed.

Threads: gRPC's own for control calls; one per listener that accepts data connections, and one for each
handshake; one that serves the data connections of all trainers; and a pool with one thread per core, at least
two, which sums large gradients and updates their blocks. The thread that called `serve` is the watchdog: it
logs what the server waits for, and enforces the deadlines.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from fleet.errors import ConfigurationError, FleetError, RemoteProtocolError
from fleet.parameter_server.certificates import certificates_of
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.control.service import ControlService, pack_placement
from fleet.parameter_server.facts import elastic_facts, initial_state_fact
from fleet.parameter_server.modes import NormPart, ServerMode, mode_of_server
from fleet.parameter_server.modes.mode import check_half
from fleet.parameter_server.pieces import lead_bytes
from fleet.parameter_server.server.barriers import Barriers
from fleet.parameter_server.server.membership import Membership, check_job, loss_of_missed
from fleet.parameter_server.server.peer_servers import PeerServers
from fleet.parameter_server.server.scheduling import receive_bytes
from fleet.parameter_server.server.shard_checkpointer import ShardCheckpointer
from fleet.parameter_server.server.shard_loader import ShardLoader
from fleet.parameter_server.server.trainers import Serving, Trainers
from fleet.parameter_server.server.watchdog import Watchdog
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.handshake import DataPorts
from fleet.parameter_server.transport.sockets import reachable_address
from fleet.parameter_server.waits import describe_blocks, split_endpoint
from fleet.plan.job import ServerPlan
from fleet.process import progress
from fleet.process.resources import WatchClock
from fleet.tables.kernels import library

if TYPE_CHECKING:
    from torch import Tensor

    from fleet.role_maker import JobIdentity

__all__ = ["Server"]

_LOOK_SECONDS: Final = 0.5
_MESSAGE_BYTES: Final = 256 << 20
"""The size limit of a control message, unless twice the size of the largest block is larger."""
_log = logging.getLogger(__name__)


class Server:
    """A parameter server, with its shard, its trainers and its control service.

    Parameters
    ----------
    plan : ServerPlan
        The blocks and tables of the server.
    parameters : mapping of name to Tensor
        The parameters of this process's module, with the initial values.
    job : JobIdentity
        The job whose trainers may join.
    settings : Settings
    state : mapping of name to state, optional
        The initial state of this process's own optimizer for the parameters.
    """

    def __init__(
        self,
        plan: ServerPlan,
        parameters: "Mapping[str, Tensor]",
        job: "JobIdentity",
        settings: Settings,
        state: "Mapping[str, Mapping[str, Any]] | None" = None,
    ) -> None:
        self._job = job
        self._settings = settings
        self._serving = Serving()
        self._peers = PeerServers(plan, job, settings, self._serving.fail)
        kind = mode_of_server(plan)
        self._shard = Shard(
            plan,
            parameters,
            state,
            rule=kind.rule,
            share=settings.transport != "tcp",
            fused=settings.fused,
            send_norm_part=self._peers.send,
        )
        half = kind.make_server(self._shard, plan.trainers)
        self._mode = check_half(half, ServerMode, kind)  # type: ignore[type-abstract]
        clock, changed = WatchClock(settings.glance_seconds), self._serving.changed
        membership = Membership(plan.trainers, settings, clock.now())
        self.loader = ShardLoader(self._shard, self._mode, job)
        self.checkpoints = ShardCheckpointer(
            self._shard, self._mode, self.loader, membership, changed, settings.checkpoint_dir
        )
        self.barriers = Barriers(membership, changed)
        self._trainers = Trainers(
            self._shard,
            self._mode,
            job,
            {
                **plan.agreement,
                **settings.agreement,
                **elastic_facts(kind, plan.trainers, settings.max_trainers),
            },
            initial_state_fact(state or {}),
            settings,
            self._serving,
            membership,
            clock,
            self.loader,
            self.barriers,
        )
        self._watchdog = Watchdog(
            plan, settings, self._mode, self._trainers, clock, survives_loss=kind.survives_loss
        )
        self._ports: DataPorts | None = None
        self._control: ControlService | None = None

    def start(self) -> None:
        """Start accepting trainers.

        Raises
        ------
        ConfigurationError
            The endpoint cannot be bound, or the certificates are unusable.
        """
        plan, settings = self._shard.plan, self._settings
        host, port = split_endpoint(plan.endpoint)
        address, certificates = reachable_address(host, by_all=bool(self._job.key)), certificates_of(settings)
        self._ports = DataPorts(
            address,
            settings,
            self._trainers.session_of,
            self._job.key,
            receive_bytes=receive_bytes(lead_bytes(plan, settings)),
            certificates=certificates,
        )
        # Before the control service, whose replies to joins name the data port. The loop that serves data
        # connections may start last, because its calls are queued until then.
        self._ports.start()
        self._control = ControlService(
            address,
            port,
            self,
            settings.max_trainers or plan.trainers,
            key=self._job.key,
            server=plan.server,
            most_bytes=max(_MESSAGE_BYTES, 2 * max(self._shard.block_bytes.values(), default=0)),
            stalled_seconds=settings.deadline_seconds,
            certificates=certificates,
        )
        self._control.start()
        self._trainers.start()
        progress.holds(sum(self._shard.block_bytes.values()))
        if len(self._shard.tables):
            progress.show_tables(self._shard.tables.statistics)
            if library() is None:
                _log.info(
                    "NumPy looks up rows of tables and torch adds them, because no kernels.so was compiled "
                    "for this machine"
                )
        _log.info(
            "parameter server %s serves %s in mode %s; %s",
            plan.endpoint,
            describe_blocks(plan.blocks),
            plan.agreement["mode"],
            self._watchdog.describe(),
        )

    def serve(self) -> None:
        """Serve until every trainer has completed or another thread calls `close`.

        Raises
        ------
        PeerLostError
            A trainer, or a server that this one needs, is lost. The other trainers have completed or, if the
            mode cannot continue without the lost trainer, have received this error.
        FleetError
            A step failed on this server, perhaps in the user's optimizer. Every trainer has received this
            error.
        """
        membership, serving = self._trainers.membership, self._serving
        try:
            while True:
                with serving.changed:
                    missed, completed = membership.missed, membership.completed
                    if serving.is_closing or not membership.live:
                        break
                    serving.check()
                    lost = self._watchdog.look()
                    if not lost:
                        serving.changed.wait(_LOOK_SECONDS)
                for trainer, error in lost:  # without the lock, because giving up updates blocks and sends
                    self._trainers.give_up(trainer, error)
        except FleetError as error:
            self._trainers.dismiss(error)
            self.close()
            raise
        if serving.is_closing:
            return
        self._trainers.dismiss(None)
        self.close()
        if missed:
            raise loss_of_missed(missed, completed)
        _log.info("every trainer has completed, at step %d", self._mode.step)

    def close(self) -> None:
        """Stop serving immediately. May be called repeatedly."""
        self._serving.close()
        if self._control is not None:
            self._control.refuse()  # first: a server that answers calls counts as alive
        if self._ports is not None:
            self._ports.close()
        self._trainers.close()
        self._peers.close()
        if self._control is not None:
            self._control.stop()
            self._control = None

    @property
    def completed_attempts(self) -> Mapping[int, int]:
        """The attempt in which each trainer completed; empty while any trainer is live."""
        membership = self._trainers.membership
        return {} if membership.live else {each: membership.attempt(each) for each in membership.completed}

    # The interface for the control service, `ControlBackend`.

    def join(self, request: control_pb2.JoinRequest) -> control_pb2.JoinReply:
        """Admit a trainer of this job; reject it if its agreement differs from this server's."""
        restored, step = self._trainers.join(request)
        return control_pb2.JoinReply(
            incarnation=self._serving.incarnation,
            data_port=self._ports.port if self._ports is not None else 0,
            step=step,
            restored=restored,
            data_socket=self._ports.name if self._ports is not None else "",
            placement=pack_placement(self._shard.plan.placement, self._shard.initial_checksums),
        )

    def completed_trainers(self, request: control_pb2.CompletedRequest) -> tuple[int, ...]:
        """Return the trainers that have completed; a restarted trainer calls this before it joins."""
        check_job(request, self._job)
        with self._serving.changed:
            return self._trainers.membership.completed if request.life == self._job.life else ()

    def heartbeat(self, trainer: int, attempt: int) -> control_pb2.HeartbeatReply:
        """Record a trainer's heartbeat, and return what the current step waits for."""
        try:
            missing = self._mode.missing()
        except FleetError as error:  # a step failed here, which must not fail the heartbeat
            missing = None
            self._serving.fail(error)
        return control_pb2.HeartbeatReply(
            incarnation=self._serving.incarnation,
            waiting_for=missing.describe(self._shard.plan.endpoints) if missing else "",
            steps_past=self._trainers.heard(trainer, attempt),
            tables=self._table_statistics() if trainer == 0 else (),
        )

    def norm(self, request: control_pb2.NormRequest) -> None:
        """Add another server's part of a norm. Once the norm is complete, update its blocks."""
        check_job(request, self._job)
        if request.fingerprint != self._shard.plan.fingerprint:
            raise ConfigurationError(
                f"parameter server {self._shard.plan.endpoint} does not run the same training as server "
                f"{request.server}; run the same script with the same settings in every role"
            )
        part = NormPart(request.step, request.key, request.server, dict(request.sums))
        try:
            self._trainers.answer(self._mode.norm(part))
        except RemoteProtocolError as error:
            raise ConfigurationError(str(error)) from error
        except FleetError as error:  # a failure of this server, which no trainer's connection reports
            self._serving.fail(error)

    def stats(self) -> control_pb2.StatsReply:
        """Return the server's progress and traffic statistics."""
        counters = progress.snapshot()["counters"]
        membership = self._trainers.membership
        with self._serving.changed:
            live, completed = len(membership.live), len(membership.completed)
        restored, step = self.loader.position()
        return control_pb2.StatsReply(
            incarnation=self._serving.incarnation,
            step=step,
            trainers_live=live,
            trainers_completed=completed,
            bytes_received=int(counters.get("bytes_received", 0)),
            bytes_sent=int(counters.get("bytes_sent", 0)),
            restored=restored,
        )

    def optimizer_state(self) -> Iterator[tuple[int, Mapping[str, object]]]:
        """Yield each block's optimizer state."""
        return self._shard.store.state()

    def values(self) -> "Iterator[tuple[int, Tensor]]":
        """Yield each block's value."""
        yield from self._shard.store.values()  # copies all values first: sending may be slow

    def _table_statistics(self) -> "list[control_pb2.TableStatistics]":
        return [
            control_pb2.TableStatistics(
                name=table["name"],
                rows=table["rows"],
                bytes=table["bytes"],
                rows_on_disk=table["rowsOnDisk"],
                looked_up=table["lookedUp"],
                found=table["found"],
                rows_of_fullest_shard=table["rowsOfFullestShard"],
            )
            for table in self._shard.tables.statistics()
        ]
