"""A parameter server: owns its shard of the model, and serves it until every trainer has completed.

Threads: gRPC's own for control; those that accept data connections; per trainer one that receives and one
that sends. The thread that called `serve` watches over all of them: it is the one that says who is missing,
and that gives up.
"""

import contextlib
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fleet.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FleetError,
    PeerLostError,
    RemoteProtocolError,
)
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.control.service import ControlService
from fleet.parameter_server.elastic import elastic_facts
from fleet.parameter_server.modes import NormExchange, NormPart, mode_of_server
from fleet.parameter_server.naming import describe_blocks, name_trainers
from fleet.parameter_server.optimizer_state import initial_state_fact
from fleet.parameter_server.pieces import lead_bytes
from fleet.parameter_server.server.admission import check_agreement, check_identity, check_job
from fleet.parameter_server.server.barriers import Barriers
from fleet.parameter_server.server.checkpoints import ServerCheckpoints
from fleet.parameter_server.server.keeper import Keeper
from fleet.parameter_server.server.membership import (
    SILENT,
    Absence,
    Membership,
    describe_absences,
    loss_of,
    loss_of_missed,
)
from fleet.parameter_server.server.overrun import Overrun
from fleet.parameter_server.server.pacing import Pacing
from fleet.parameter_server.server.siblings import Siblings
from fleet.parameter_server.server.trainer_session import TrainerSession, send_answers
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.connection import BrokenConnectionError
from fleet.parameter_server.transport.data_ports import DataPorts
from fleet.parameter_server.transport.handshake import accept
from fleet.parameter_server.transport.sockets import reachable_address
from fleet.parameter_server.waiting import WaitLog, split_endpoint, wait_for_all
from fleet.process import progress
from fleet.process.clock import WatchClock
from fleet.process.half_open import HalfOpen
from fleet.transpiler.lowering import ServerPlan
from fleet.wire import Hello, Identity, job_hash

if TYPE_CHECKING:
    from torch import Tensor

    from fleet.role_maker import JobIdentity

__all__ = ["Server"]

_LOOK_SECONDS: Final = 0.5
_FLUSH_SECONDS: Final = 10.0
_MESSAGE_BYTES: Final = 256 << 20
"""How large a message of the control service may be; two of the largest block where that is more."""
_log = logging.getLogger(__name__)


class Server:
    """One parameter server of a job.

    Parameters
    ----------
    plan : ServerPlan
        What it owns.
    parameters : mapping of name to Tensor
        The module that this process built: the initial values.
    job : JobIdentity
        Whose trainers may join.
    settings : Settings
    state : mapping of name to state, optional
        What this process's own optimizer has for the parameters before the first step.
    """

    def __init__(
        self,
        plan: ServerPlan,
        parameters: "Mapping[str, Tensor]",
        job: "JobIdentity",
        settings: Settings,
        state: "Mapping[str, Mapping[str, Any]] | None" = None,
    ) -> None:
        self._plan = plan
        self._job = job
        self._job_hash = job_hash(job.name, job.uid)
        self._settings = settings
        mode = mode_of_server(plan)
        share = settings.transport != "tcp"
        self._shard = Shard(plan, parameters, state, rule=mode.rule, share=share, fused=settings.fused)
        elastic = elastic_facts(mode, plan.trainers, settings.max_trainers)
        self._agreement = {**plan.agreement, **settings.agreement, **elastic}
        self._initial = initial_state_fact(state or {})
        self._survives_loss = mode.survives_loss
        self._mode = mode.make_server(self._shard, plan.trainers)
        self._siblings = Siblings(plan, job, settings, self._fail)
        if isinstance(self._mode, NormExchange):
            self._mode.connect(self._siblings.tell)
        self._failure: FleetError | None = None
        self.keeper = Keeper(plan, self._shard, self._mode, job)
        """What of this server is saved and loaded."""
        self._incarnation = secrets.token_hex(8)
        self._clock = WatchClock(settings.glance_seconds)
        self._membership = Membership(plan.trainers, settings, self._clock.now())
        self._sessions: dict[int, TrainerSession] = {}
        self._pacing = Pacing(lead_bytes(plan, settings))
        self._changed = threading.Condition()
        self.checkpoints = ServerCheckpoints(
            self.keeper, self._shard, self._mode, self._membership, self._changed, settings.checkpoint_dir
        )
        self.barriers = Barriers(self._membership, self._changed)
        self._overrun = Overrun(self._mode.step_of, plan.trainers)
        self._admission = threading.Lock()
        self._ports: DataPorts | None = None
        self._control: ControlService | None = None
        self._silent: set[int] = set()
        self._closing = False

    def start(self) -> None:
        """Begin to accept joins.

        Raises
        ------
        ConfigurationError
            The endpoint cannot be bound.
        """
        host, port = split_endpoint(self._plan.endpoint)
        address = reachable_address(host, by_all=bool(self._job.key))
        self._ports = DataPorts(
            address,
            self._settings,
            partial(accept, find=self._session_of, half_open=HalfOpen(), key=self._job.key),
            self._pacing.receive_bytes,
        )
        self._ports.start()
        bracketed = f"[{address or '::'}]" if ":" in (address or "::") else address
        most = self._settings.max_trainers or self._plan.trainers
        self._control = ControlService(
            f"{bracketed}:{port}",
            self,
            most,
            key=self._job.key,
            server=self._plan.server,
            most_bytes=max(_MESSAGE_BYTES, 2 * max(self._shard.block_bytes.values(), default=0)),
            stalled_seconds=self._settings.deadline_seconds,
        )
        self._control.start()
        _log.info(
            "parameter server %s serves %s in mode %s; %s",
            self._plan.endpoint,
            describe_blocks(self._plan.blocks),
            self._plan.agreement["mode"],
            describe_absences(self._membership.absences(self._clock.now())),
        )

    def serve(self) -> None:
        """Serve until every trainer has completed, or somebody calls `close`.

        Raises
        ------
        PeerLostError
            A trainer vanished for good, or a server that this one needs. In a mode that cannot go on without
            it the others have been told; in one that can, they have completed.
        FleetError
            A step failed here, in the user's optimizer say. Every trainer has been told.
        """
        absent, stalled = WaitLog(self._clock.now), WaitLog(self._clock.now)
        try:
            while True:
                with self._changed:
                    missed, completed = self._membership.missed, self._membership.completed
                    if self._closing or not self._membership.live:
                        break
                    if self._failure is not None:
                        raise self._failure
                    lost = self._look_for_absent(absent)
                    self._look_for_stalled(stalled)
                    if not lost:
                        self._changed.wait(_LOOK_SECONDS)
                for trainer, error in lost:
                    self._give_up(trainer, error)
        except FleetError as error:
            self._dismiss(error)
            raise
        if self._closing:
            return
        self._wait_for_goodbyes()
        self._dismiss(None)
        if missed:
            raise loss_of_missed(missed, completed)
        _log.info("every trainer has completed, at step %d", self._mode.step)

    def close(self) -> None:
        """Stop serving now; safe to repeat."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._control is not None:
            self._control.refuse()  # first: to a trainer a server that answers calls is one that lives
        if self._ports is not None:
            self._ports.close()
        for session in list(self._sessions.values()):
            session.abandon()
        self._siblings.close()
        if self._control is not None:
            self._control.stop()
            self._control = None

    @property
    def completed_attempts(self) -> Mapping[int, int]:
        """The trainers that have finished, each with the attempt under which it did, once all are done."""
        return {} if self._membership.live else self._membership.attempts_completed()

    # What the control service asks.

    def join(self, request: control_pb2.JoinRequest) -> control_pb2.JoinReply:
        """Admit a trainer of this job that agrees with this server on everything that must be equal."""
        check_job(request, self._job)
        check_agreement(
            self._agreement, request.agreement, None if self.keeper.loader.restored else self._initial
        )
        trainer, attempt = request.trainer.id, request.trainer.attempt
        with self._admission:
            with self._changed:
                self._check_serving()
                again = self._membership.attempt(trainer) >= 0
                self._membership.admit(trainer, attempt, self._clock.now())
                old = self._sessions.pop(trainer, None)
                self.barriers.admit(trainer)
            if old is not None:
                replaced = f"trainer {trainer} was replaced by its attempt {attempt}"
                old.fail(FleetError(f"{replaced}; this process has attempt {old.identity.attempt}"), 1.0)
            self._mode.admit(trainer, attempt)
            session = TrainerSession(
                Identity(self._job_hash, trainer, attempt),
                self._mode,
                self,
                self._sessions,
                Hello(self._incarnation, len(self._plan.blocks)),
                self._shard,
                self._settings.wire_dtype,
                self._pacing,
            )
            with self._changed:
                self._check_serving()  # again: whoever ends the others would not know of this one
                self._sessions[trainer] = session
        restored, step = self.checkpoints.tell(trainer)
        self._overrun.joined(trainer, again=again)
        _log.log(
            logging.WARNING if again else logging.INFO,
            "trainer %d joined%s%s at step %d",
            trainer,
            " again" if again else "",
            f" (attempt {attempt})" if attempt else "",
            step,
        )
        initial = self._shard.initial_checksums
        differing = [block for block, found in request.checksums.items() if initial.get(block) != found]
        return control_pb2.JoinReply(
            incarnation=self._incarnation,
            data_port=self._ports.port if self._ports is not None else 0,
            step=step,
            differing_blocks=sorted(differing) if not restored else (),
            restored=restored,
            data_socket=self._ports.name if self._ports is not None else "",
        )

    def completed_trainers(self, request: control_pb2.CompletedRequest) -> tuple[int, ...]:
        """Return who has completed in this training, for a trainer of it that may have done so before."""
        check_job(request, self._job)
        with self._changed:
            return self._membership.completed if request.life == self._job.life else ()

    def heartbeat(self, trainer: int, attempt: int) -> control_pb2.HeartbeatReply:
        """Note a sign of life of a trainer that has joined."""
        try:
            missing = self._mode.missing()
        except FleetError as error:  # a step failed here: no reason to leave who lives without an answer
            missing = None
            self._fail(error)
        with self._changed:
            if self._membership.attempt(trainer) == attempt:
                self._membership.heard(trainer, self._clock.now())
        return control_pb2.HeartbeatReply(
            incarnation=self._incarnation,
            waiting_for=missing.describe(self._plan.endpoints) if missing else "",
            steps_past=self._overrun.steps(trainer),
        )

    def norm(self, request: control_pb2.NormRequest) -> None:
        """Take another server's part of a norm, and step what it was the last part of."""
        check_job(request, self._job)
        if request.fingerprint != self._plan.fingerprint:
            raise ConfigurationError(
                f"parameter server {self._plan.endpoint} does not run the same training as server "
                f"{request.server}; run one script with the same settings in every role"
            )
        if not isinstance(self._mode, NormExchange):
            raise ConfigurationError("this parameter server's training mode clips by no norm")
        part = NormPart(request.step, request.key, request.server, dict(request.sums))
        try:
            send_answers(self._sessions, self._mode.norm(part))
        except RemoteProtocolError as error:
            raise ConfigurationError(str(error)) from error
        except FleetError as error:  # this server's own failure, which no connection of a trainer reports
            self._fail(error)

    def stats(self) -> control_pb2.StatsReply:
        """Say what has been done so far."""
        counters = progress.snapshot()["counters"]
        with self._changed:
            live, completed = len(self._membership.live), len(self._membership.completed)
        return control_pb2.StatsReply(
            incarnation=self._incarnation,
            step=self._mode.step,
            trainers_live=live,
            trainers_completed=completed,
            bytes_received=int(counters.get("bytes_received", 0)),
            bytes_sent=int(counters.get("bytes_sent", 0)),
        )

    def optimizer_state(self) -> Iterator[tuple[int, Mapping[str, object]]]:
        """Iterate over the optimizers' state."""
        return self._shard.store.state()

    def values(self) -> "Iterator[tuple[int, Tensor]]":
        """Iterate over the blocks' values."""
        yield from self._shard.store.values()  # copied before the first is sent, however slowly

    # What the sessions report.

    def begins(self, trainer: int) -> None:
        """Let a trainer begin a step; see `ServerCheckpoints.begins`."""
        self.checkpoints.begins(trainer)
        self._overrun.begins(trainer)

    def connected(self, session: TrainerSession) -> None:
        """Take note that a session has a data connection, its first one or another."""
        with self._changed:
            if self._sessions.get(session.identity.trainer) is session:
                self._membership.connected(session.identity.trainer, self._clock.now())
                self._changed.notify_all()

    def completed(self, session: TrainerSession, step: int) -> None:
        """Take note that a trainer has finished, after so many steps."""
        trainer = session.identity.trainer
        with self._changed:
            session.complete({*self._membership.completed, trainer})  # first: to count it may end the session
            self._membership.complete(trainer)
            self.barriers.release()
        self._overrun.completed(trainer, step)

    def ended(self, session: TrainerSession, error: FleetError | None) -> None:
        """Take note that a session receives nothing more."""
        trainer = session.identity.trainer
        with self._changed:
            current = self._sessions.get(trainer) is session and trainer not in self._membership.completed
            if current and error is not None:
                self._membership.lost(trainer, self._clock.now())
                self._changed.notify_all()
        if not current or error is None or self._closing:
            return
        broken = isinstance(error, BrokenConnectionError)
        _log.warning(
            "trainer %d (attempt %d), at step %d: %s%s",
            trainer,
            session.identity.attempt,
            self._mode.step_of(trainer),
            error,
            "; waiting for it to come back" if broken else "",
        )
        if not broken:
            session.fail(error, 1.0)

    def _give_up(self, trainer: int, error: PeerLostError) -> None:
        """Let the others go on without a trainer; should it speak again, it must join again."""
        with self._changed:
            self._membership.give_up(trainer)
            self.barriers.release()
            session = self._sessions.pop(trainer, None)
            remaining = self._membership.live
        if session is not None:
            session.fail(error, 1.0)
        _log.error(
            "%s; %s",
            error,
            f"training goes on with {name_trainers(remaining)}" if remaining else "none is left",
        )
        send_answers(self._sessions, self._mode.complete(trainer))

    def _fail(self, error: FleetError) -> None:
        """End the serving because of an error that one of the other threads has found."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _check_serving(self) -> None:
        """Check that there are steps to join; with the lock held."""
        if self._failure is not None:
            raise self._failure

    # Data connections.

    def _session_of(self, identity: Identity) -> TrainerSession:
        """Return where a trainer's frames belong; RemoteProtocolError for one that has not joined."""
        with self._changed:
            joined = self._membership.attempt(identity.trainer)
        check_identity(identity, self._job, joined)
        session = self._sessions.get(identity.trainer)
        if session is None or session.identity != identity:
            raise RemoteProtocolError(
                f"trainer {identity.trainer} with attempt {identity.attempt} is not counted on any more; it "
                "must join again"
            )
        return session

    # Watching, with the lock held.

    def _look_for_absent(self, log: WaitLog) -> list[tuple[int, PeerLostError]]:
        """Name who is not heard; return who has vanished for good, or raise where all need it."""
        now = self._clock.now()
        for trainer, session in list(self._sessions.items()):
            if session.arrivals.look():
                self._membership.heard(trainer, now)
        absences = self._membership.absences(now)
        lost = [
            (absence.trainer, self._vanished(absence, now)) for absence in absences if now >= absence.deadline
        ]
        if lost and not self._survives_loss:
            raise lost[0][1]
        self._name_silent({absence.trainer for absence in absences if absence.reason == SILENT})
        subject = tuple((absence.trainer, absence.reason) for absence in absences) or None
        log.note(subject, lambda: describe_absences(absences))
        return lost

    def _vanished(self, absence: Absence, now: float) -> PeerLostError:
        step = self._mode.step_of(absence.trainer)
        return loss_of(absence, now, step=step, lost_seconds=self._settings.deadline_seconds)

    def _name_silent(self, silent: set[int]) -> None:
        for trainer in sorted(silent - self._silent):
            _log.warning(
                "trainer %d has given no sign of life for %.0f s, at step %d",
                trainer,
                self._settings.silent_seconds,
                self._mode.step_of(trainer),
            )
        self._silent = silent

    def _look_for_stalled(self, log: WaitLog) -> None:
        missing = self._mode.missing()
        if missing is None:
            log.note(None, str)
            return
        awaited = missing.describe(self._plan.endpoints)
        waited = log.note(missing, lambda: f"parameter server {self._plan.endpoint}: {awaited}")
        if waited >= self._settings.stalled_seconds:
            raise DeadlineExceededError(f"{awaited} for {waited:.0f} s, although it lives")

    def _wait_for_goodbyes(self) -> None:
        """Stay for trainers whose connection broke before they could learn that they may go."""
        wait_for_all(
            (session.ending.left for session in list(self._sessions.values())), self._settings.silent_seconds
        )

    def _wait_until_told(self) -> None:
        """Stay for trainers that have no connection just now, and come back to hear why the server ends.

        Whoever lives learns from a beat or two that there is a server to come back to.
        """
        with self._changed:
            now = self._clock.now()
            vanished = {each.trainer for each in self._membership.absences(now) if now >= each.deadline}
            awaited = set(self._membership.live) - vanished
        sessions = [
            session for session in list(self._sessions.values()) if session.identity.trainer in awaited
        ]
        wait_for_all(
            (session.ending.told for session in sessions), 2 * self._settings.heartbeat_seconds + 1.0
        )

    def _dismiss(self, error: FleetError | None) -> None:
        """Let the trainers go, each with the last word for it, and stop."""
        self._closing = True
        if error is not None:
            self._fail(error)

        def part(session: TrainerSession) -> None:
            with contextlib.suppress(OSError):
                if error is not None and session.identity.trainer in self._membership.live:
                    session.fail(error, 1.0)
                else:
                    session.finish(_FLUSH_SECONDS)

        sessions = list(self._sessions.values())
        with ThreadPoolExecutor(max(1, len(sessions)), thread_name_prefix="fleet-farewell") as at_once:
            list(at_once.map(part, sessions))  # one that does not read delays no other's last word
        if error is not None:
            self._wait_until_told()
        self.close()
