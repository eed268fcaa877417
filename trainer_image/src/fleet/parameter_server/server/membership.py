"""A server's view of the job's trainers: their admission, absence and loss.

This module has no clock and does no I/O: the caller passes the time in seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fleet.errors import AlreadyJoinedError, ConfigurationError, PeerLostError, RemoteProtocolError
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.facts import INITIAL_STATE
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.waits import name_trainers
from fleet.plan import describe_difference
from fleet.wire import Identity, job_hash

if TYPE_CHECKING:
    from fleet.role_maker import JobIdentity

__all__ = [
    "LOST",
    "NOT_JOINED",
    "SILENT",
    "Absence",
    "Membership",
    "check_agreement",
    "check_identity",
    "check_job",
    "describe_absences",
    "loss_of",
    "loss_of_missed",
]

NOT_JOINED: Final = "has not joined"
LOST: Final = "lost its connection"
SILENT: Final = "was heard last"

_AWAITED: Final = {
    NOT_JOINED: "{} to join",
    LOST: "{} to connect again",
    SILENT: "a sign of life of {}",
}
"""A description of what the server waits for, by the reason for an absence."""
_MOST_AT_FIRST: Final = 1 << 24
"""The highest attempt allowed at a first join: more than half a year of restarts, one per second."""
_SPARE: Final = 1000
"""The attempts allowed beyond one restart per second, because the clock stops while the server is frozen."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A live trainer that is absent: it has not joined, has lost its connection, or sends no heartbeats."""

    trainer: int
    since: float
    reason: str
    deadline: float
    """The time at which the server treats the trainer as lost."""


@dataclass(slots=True)
class _Member:
    attempt: int = -1
    heard: float = 0.0
    lost: float | None = None
    """The time at which the data connection ended; None if it is open or has never been opened."""
    connected: bool = False
    """Whether the trainer has ever opened a data connection."""
    completed: bool = False
    gone: bool = False
    """Whether the server treats the trainer as lost."""
    first: tuple[int, float] | None = None
    """The attempt and time of the first join."""

    @property
    def joined(self) -> bool:
        return self.attempt >= 0

    @property
    def live(self) -> bool:
        return not self.completed and not self.gone


class Membership:
    """The trainers of a job and their states, from one server's view.

    In an elastic job (`Settings.max_trainers`), a trainer beyond the initial number counts from its first
    join. An elastic job succeeds if any trainer has completed, because a server cannot distinguish a trainer
    that was removed by scaling down from one that was lost.

    Parameters
    ----------
    num_trainers : int
        The number of trainers that the server was started for.
    settings : Settings
    started : float
        The time at which the server began to accept joins.
    """

    def __init__(self, num_trainers: int, settings: Settings, started: float) -> None:
        self._members = {trainer: _Member() for trainer in range(num_trainers)}
        """The members by index, in ascending order."""
        self._most = settings.max_trainers or num_trainers
        self._settings = settings
        self._started = started
        self._first_join: float | None = None

    @property
    def completed(self) -> tuple[int, ...]:
        """The trainers that have completed."""
        return tuple(trainer for trainer, member in self._members.items() if member.completed)

    @property
    def joined(self) -> tuple[int, ...]:
        """The trainers that have joined at least once."""
        return tuple(number for number, member in self._members.items() if member.joined)

    @property
    def live(self) -> tuple[int, ...]:
        """The trainers that are neither completed nor lost; they may be absent."""
        return tuple(trainer for trainer, member in self._members.items() if member.live)

    @property
    def gone(self) -> tuple[int, ...]:
        """The lost trainers that have not rejoined."""
        return tuple(trainer for trainer, member in self._members.items() if member.gone)

    @property
    def missed(self) -> tuple[int, ...]:
        """The lost trainers whose loss makes the training run fail."""
        forgiven = self._settings.max_trainers is not None and self.completed
        return () if forgiven else self.gone

    def attempt(self, trainer: int) -> int:
        """Return the attempt of a trainer's latest join, or -1 if it has never joined."""
        member = self._members.get(trainer)
        return -1 if member is None else member.attempt

    def admit(self, trainer: int, attempt: int, now: float) -> None:
        """Admit a trainer that joins.

        Raises
        ------
        ConfigurationError
            The job has no such trainer.
        AlreadyJoinedError
            Another process has joined as this trainer.
        PeerLostError
            Every trainer has completed or been lost, so the server is about to end.
        """
        elastic = self._settings.max_trainers is not None
        if not 0 <= trainer < self._most:
            number = "at most FLEET_MAX_TRAINERS" if elastic else "PADDLE_TRAINERS_NUM"
            raise ConfigurationError(
                f"trainer id {trainer} is out of range; expected 0 to {self._most - 1}, "
                f"as the job has {self._most} trainers (PADDLE_TRAINER_ID, {number})"
            )
        if elastic and not self.live:
            raise PeerLostError(f"trainer {trainer} joined after every other trainer had left the job")
        member = self._members.get(trainer, _Member())
        _check_plausible(trainer, attempt, member.first, now)
        if attempt < member.attempt:
            raise AlreadyJoinedError(
                f"trainer {trainer} joined with attempt {attempt}, but its attempt {member.attempt} has "
                "already joined; expected a higher attempt (FLEET_RESTARTS)"
            )
        # gRPC repeats a join if its reply was lost, before the trainer has connected. Once it has, a second
        # process with the same attempt may not join while the first one is alive.
        silent = now - member.heard >= self._settings.silent_seconds
        lives = member.connected and member.lost is None and not silent and not member.completed
        if attempt == member.attempt and lives:
            raise AlreadyJoinedError(
                f"another process that is still alive has already joined as trainer {trainer}, with the same "
                f"attempt {attempt}; give each trainer its own id (PADDLE_TRAINER_ID)"
            )
        first = member.first or (attempt, now)
        joined = _Member(attempt=attempt, heard=now, first=first)
        self._members = dict(sorted({**self._members, trainer: joined}.items()))
        if self._first_join is None:
            self._first_join = now

    def check_joined(self, trainer: int, attempt: int) -> None:
        """Raise an error unless the given attempt is the trainer's latest join.

        Raises
        ------
        AlreadyJoinedError
            The trainer has not joined, or was replaced.
        """
        if self.attempt(trainer) != attempt:
            raise AlreadyJoinedError(
                f"trainer {trainer} with attempt {attempt} has not joined, or was replaced"
            )

    def heard(self, trainer: int, now: float) -> None:
        """Record that a trainer has shown a sign of life."""
        self._members[trainer].heard = now

    def connected(self, trainer: int, now: float) -> None:
        """Record that a trainer has opened a data connection."""
        member = self._members[trainer]
        member.connected, member.lost, member.heard = True, None, now

    def lost(self, trainer: int, now: float) -> None:
        """Record that a trainer's data connection ended before the trainer completed."""
        self._members[trainer].lost = now

    def complete(self, trainer: int) -> None:
        """Record that a trainer has completed."""
        self._members[trainer].completed, self._members[trainer].gone = True, False

    def give_up(self, trainer: int) -> None:
        """Treat a trainer as lost: do not wait for it unless it rejoins."""
        self._members[trainer].gone = True

    def absences(self, now: float) -> list[Absence]:
        """Return the absence of each live trainer that is absent."""
        found = [
            self._absence(trainer, member, now) for trainer, member in self._members.items() if member.live
        ]
        return [absence for absence in found if absence is not None]

    def vanished(self, now: float) -> set[int]:
        """Return the live trainers whose absence exceeds the deadline."""
        return {absence.trainer for absence in self.absences(now) if now >= absence.deadline}

    def _absence(self, trainer: int, member: _Member, now: float) -> Absence | None:
        settings, deadline = self._settings, self._settings.deadline_seconds
        if not member.joined:
            if self._first_join is None:
                # Until the first trainer joins, pods may be pulling images or pending, which is no trainer's
                # failure.
                return Absence(trainer, self._started, NOT_JOINED, self._started + settings.stalled_seconds)
            # An elastic job trains without the trainers that have not joined yet.
            seconds = deadline if settings.max_trainers else settings.starting_seconds
            return Absence(trainer, self._first_join, NOT_JOINED, self._first_join + seconds)
        if member.lost is not None:
            return Absence(trainer, member.lost, LOST, member.lost + deadline)
        silent_since = member.heard + settings.silent_seconds
        if now < silent_since:
            return None
        return Absence(trainer, member.heard, SILENT, silent_since + deadline)


def describe_absences(absences: Sequence[Absence]) -> str:
    """Describe absent trainers in a message, as in ``waiting for trainers 0 and 1 to join``."""
    awaited = [
        what.format(name_trainers(trainers))
        for reason, what in _AWAITED.items()
        if (trainers := [absence.trainer for absence in absences if absence.reason == reason])
    ]
    return f"waiting for {' and '.join(awaited)}"


def loss_of(absence: Absence, now: float, *, step: int, lost_seconds: float) -> PeerLostError:
    """Return an error for a lost trainer, with the deadline that it has exceeded."""
    waited = f"{now - absence.since:.0f} s"
    if absence.reason == NOT_JOINED:
        return PeerLostError(
            f"trainer {absence.trainer} did not join within {waited}; see its log, or increase "
            "runPolicy.pendingDeadlineSeconds (FLEET_START_DEADLINE_SECONDS, or FLAGS_rpc_deadline if it is "
            "not set)"
        )
    return PeerLostError(
        f"trainer {absence.trainer} {absence.reason} {waited} ago, at step {step}; it has vanished for good, "
        f"as FLAGS_rpc_deadline is {lost_seconds * 1000:.0f} ms (a trainer that completes calls "
        "fleet.stop_worker())"
    )


def loss_of_missed(missed: Sequence[int], completed: Sequence[int]) -> PeerLostError:
    """Return an error for a training run that ended without some of its trainers."""
    others = "; every other trainer has completed" if completed else ", before any trainer had completed"
    return PeerLostError(f"{name_trainers(missed)} vanished for good{others}")


def _check_plausible(trainer: int, attempt: int, first: tuple[int, float] | None, now: float) -> None:
    """Reject an implausibly high attempt, which would lock out later processes of the trainer.

    A restart takes at least a second. The limit is computed from the first join, so that no join can raise it
    for later ones.
    """
    most = _MOST_AT_FIRST if first is None else first[0] + int(now - first[1]) + _SPARE
    if attempt > most:
        raise ConfigurationError(
            f"trainer {trainer} joined with attempt {attempt}, expected at most {most}: no replica can have "
            "been started so often by now; FLEET_RESTARTS is the number of earlier starts of this replica, "
            "which its launcher must increase by one at each start"
        )


def check_job(
    request: control_pb2.JoinRequest | control_pb2.CompletedRequest | control_pb2.NormRequest,
    job: "JobIdentity",
) -> None:
    """Reject a call from a replica of another job.

    Raises
    ------
    ConfigurationError
        The call comes from another job; the message names both jobs.
    """
    found, expected = (request.job_name, request.job_uid), (job.name, job.uid)
    if found != expected:
        raise ConfigurationError(
            f"a replica of job {found[0]!r} (uid {found[1]!r}) called a server of job {expected[0]!r} "
            f"(uid {expected[1]!r}); are two jobs configured with the same addresses?"
        )


def check_agreement(
    ours: Mapping[str, str], theirs: Mapping[str, str], initial: Mapping[str, str] | None
) -> None:
    """Reject a trainer whose agreement differs from the server's.

    Parameters
    ----------
    ours, theirs : mapping of str to str
        The server's facts and the trainer's.
    initial : mapping of str to str, optional
        The facts about the server's state before the first step; None if a checkpoint has replaced that
        state.

    Raises
    ------
    ConfigurationError
        The facts differ; the message names the difference.
    """
    if initial is None:
        theirs = {name: fact for name, fact in theirs.items() if name != INITIAL_STATE}
    difference = describe_difference({**ours, **(initial or {})}, theirs)
    if difference:
        raise ConfigurationError(
            f"this trainer does not run the same training as the parameter server: {difference} "
            "(here: the server; there: the trainer); run the same script with the same settings in every role"
        )


def check_identity(identity: Identity, job: "JobIdentity", joined: int) -> None:
    """Reject a greeting unless it comes from a trainer of this job that has joined.

    Parameters
    ----------
    identity : Identity
        The identity of the sender.
    job : JobIdentity
        The job of the server.
    joined : int
        The attempt of this trainer's latest join; -1 if it has not joined.

    Raises
    ------
    RemoteProtocolError
        The job or the attempt differs; the message gives the expected value.
    """
    expected = job_hash(job.name, job.uid)
    if identity.job != expected:
        raise RemoteProtocolError(
            f"a frame of job {identity.job:016x} arrived at a server of job {job.name} ({expected:016x}); "
            "are two jobs configured with the same addresses?"
        )
    if joined != identity.attempt:
        place = (
            f"expected attempt {joined}, which has joined" if joined >= 0 else "expected a join before data"
        )
        raise RemoteProtocolError(
            f"trainer {identity.trainer} with attempt {identity.attempt} has not joined here; {place}"
        )
