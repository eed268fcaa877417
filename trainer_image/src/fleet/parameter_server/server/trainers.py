"""The trainers of one server: who joins, over which session each speaks, and who is given up."""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from fleet.errors import FleetError, PeerLostError, RemoteProtocolError
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.modes import Answer, ServerMode, Work
from fleet.parameter_server.naming import name_trainers
from fleet.parameter_server.server.admission import Admission
from fleet.parameter_server.server.barriers import Barriers
from fleet.parameter_server.server.membership import Membership
from fleet.parameter_server.server.overrun import Overrun
from fleet.parameter_server.server.serving import Serving
from fleet.parameter_server.server.shard_loader import ShardLoader
from fleet.parameter_server.server.step_pool import StepPool
from fleet.parameter_server.server.trainer_session import SessionOwner, TrainerSession
from fleet.parameter_server.transport.connection import BrokenConnectionError
from fleet.process.resources import WatchClock
from fleet.wire import Identity

__all__ = ["MakeSession", "Trainers"]

_log = logging.getLogger(__name__)

MakeSession = Callable[[Identity, SessionOwner], TrainerSession]
"""Makes the session of one start of a trainer."""


class Trainers:
    """Who takes part in the training, as this server knows; the owner of their sessions.

    Parameters
    ----------
    admission : Admission
        Who may join.
    membership : Membership
    clock : WatchClock
        The membership's.
    serving : Serving
        Guards the membership.
    mode : ServerMode
    loader : ShardLoader
    barriers : Barriers
    overrun : Overrun
    pool : StepPool
        Does what gradients make possible.
    make_session : callable
        As `MakeSession`.
    """

    def __init__(
        self,
        admission: Admission,
        membership: Membership,
        clock: WatchClock,
        serving: Serving,
        mode: ServerMode,
        loader: ShardLoader,
        barriers: Barriers,
        overrun: Overrun,
        pool: StepPool,
        make_session: MakeSession,
    ) -> None:
        self.membership = membership
        self.sessions: dict[int, TrainerSession] = {}
        """By trainer, those over which somebody may still speak."""
        self._admission = admission
        self._clock = clock
        self._serving = serving
        self._mode = mode
        self._loader = loader
        self._barriers = barriers
        self._overrun = overrun
        self.pool = pool
        self._make_session = make_session
        self._one_at_a_time = threading.Lock()
        """Held by whoever lets a trainer join."""

    def join(self, request: control_pb2.JoinRequest) -> tuple[str, int]:
        """Let a trainer join that agrees with this server on everything that must be equal.

        Returns
        -------
        tuple of str and int
            The random name of the checkpoint that is loaded, empty without one, and the trainer's next step.

        Raises
        ------
        FleetError
            It may not, or this server ends.
        """
        self._admission.check(request)
        trainer, attempt = request.trainer.id, request.trainer.attempt
        with self._one_at_a_time:
            with self._serving.changed:
                self._serving.check()
                again = self.membership.attempt(trainer) >= 0
                self.membership.admit(trainer, attempt, self._clock.now())
                old = self.sessions.pop(trainer, None)
                self._barriers.admit(trainer)
            if old is not None:
                replaced = f"trainer {trainer} was replaced by its attempt {attempt}"
                old.fail(FleetError(f"{replaced}; this process has attempt {old.identity.attempt}"), 1.0)
            self._mode.admit(trainer, attempt)
            session = self._make_session(self._admission.identity(trainer, attempt), self)
            with self._serving.changed:
                self._serving.check()  # again: whoever ends the others would not know of this one
                self.sessions[trainer] = session
        restored, step = self._loader.inform(trainer)
        self._overrun.joined(trainer, again=again)
        _log.log(
            logging.WARNING if again else logging.INFO,
            "trainer %d joined%s%s at step %d",
            trainer,
            " again" if again else "",
            f" (attempt {attempt})" if attempt else "",
            step,
        )
        return restored, step

    def heard(self, trainer: int, attempt: int) -> int:
        """Note a sign of life of a trainer that has joined; return its steps past the others."""
        with self._serving.changed:
            if self.membership.attempt(trainer) == attempt:
                self.membership.heard(trainer, self._clock.now())
        return self._overrun.steps(trainer)

    def session_of(self, identity: Identity) -> TrainerSession:
        """Return where a trainer's frames belong; RemoteProtocolError for one that has not joined."""
        with self._serving.changed:
            joined = self.membership.attempt(identity.trainer)
        self._admission.check_identity(identity, joined)
        session = self.sessions.get(identity.trainer)
        if session is None or session.identity != identity:
            raise RemoteProtocolError(
                f"trainer {identity.trainer} with attempt {identity.attempt} is not counted on any more; it "
                "must join again"
            )
        return session

    def give_up(self, trainer: int, error: PeerLostError) -> None:
        """Let the others go on without a trainer; should it speak again, it must join again."""
        with self._serving.changed:
            self.membership.give_up(trainer)
            self._barriers.release()
            session = self.sessions.pop(trainer, None)
            remaining = self.membership.live
        if session is not None:
            session.fail(error, 1.0)
        _log.error(
            "%s; %s",
            error,
            f"training goes on with {name_trainers(remaining)}" if remaining else "none is left",
        )
        self.answer(self._mode.complete(trainer))

    def answer(self, answers: Sequence[Answer]) -> None:
        """Send values to the trainers that they are meant for; to those that are gone, nothing."""
        for answer in answers:
            for trainer in answer.trainers:
                session = self.sessions.get(trainer)
                if session is not None:
                    session.send_value(answer)

    # What the sessions report.

    def begins(self, trainer: int) -> None:
        """Let a trainer begin a step; see `ShardLoader.begin_step`."""
        self._loader.begin_step(trainer)
        self._overrun.begins(trainer)

    def step_to_answer(self, trainer: int, step: int) -> AbstractContextManager[int]:
        """Give the step whose values a trainer gets that asks; see `ShardLoader.step_to_answer`."""
        return self._loader.step_to_answer(trainer, step)

    def do(self, session: TrainerSession, followed: Sequence[Answer] | Work, received_bytes: int) -> None:
        """Send what follows from a gradient that was so long, or do what it makes possible.

        That is done now or in the pool. What fails in the pool ends the session, as what fails at once does.
        """
        if not callable(followed):
            self.answer(followed)
            return
        work = followed
        if not self.pool.takes(received_bytes):
            self.answer(work())
            return

        def done() -> None:
            try:
                self.answer(work())
            except FleetError as error:
                self.ended(session, error)
            except Exception as raised:  # noqa: BLE001 - the thread goes on, and the trainer is told
                _log.exception("a gradient of trainer %d could not be used", session.identity.trainer)
                self.ended(session, FleetError(f"a gradient could not be used: {raised!r}"))

        self.pool.submit(done)

    def connected(self, session: TrainerSession) -> None:
        """Take note that a session has a data connection, its first one or another."""
        with self._serving.changed:
            if self.sessions.get(session.identity.trainer) is session:
                self.membership.connected(session.identity.trainer, self._clock.now())
                self._serving.changed.notify_all()

    def completes(self, trainer: int, step: int) -> None:
        """Take note that a trainer makes so many steps, before the others make one without it."""
        self._overrun.completed(trainer, step)

    def completed(self, session: TrainerSession) -> None:
        """Take note that a trainer has finished."""
        trainer = session.identity.trainer
        with self._serving.changed:
            session.complete({*self.membership.completed, trainer})  # first: to count it may end the session
            self.membership.complete(trainer)
            self._barriers.release()

    def ended(self, session: TrainerSession, error: FleetError | None) -> None:
        """Take note that a session receives nothing more."""
        trainer = session.identity.trainer
        with self._serving.changed:
            current = self.sessions.get(trainer) is session and trainer not in self.membership.completed
            if current and error is not None:
                self.membership.lost(trainer, self._clock.now())
                self._serving.changed.notify_all()
        if not current or error is None or self._serving.is_closing:
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
