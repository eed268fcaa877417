"""Which trainers a server counts on, and which it has lost. Pure: the time is handed in, in seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from fleet.errors import AlreadyJoinedError, ConfigurationError, PeerLostError
from fleet.parameter_server.naming import name_trainers
from fleet.parameter_server.settings import Settings

__all__ = [
    "LOST",
    "NOT_JOINED",
    "SILENT",
    "Absence",
    "Membership",
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
"""What the server waits for, by the reason of an absence."""
_MOST_AT_FIRST: Final = 1 << 24
"""More than half a year of restarts, one a second: what a replica may have behind it when it comes."""
_SPARE: Final = 1000
"""How many more than one restart a second are let pass: a server that was frozen has counted fewer."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A trainer that the server does not hear."""

    trainer: int
    since: float
    reason: str
    deadline: float
    """When it has vanished for good."""


@dataclass(slots=True)
class _Member:
    attempt: int = -1
    heard: float = 0.0
    lost: float | None = None
    """When the data connection ended; None while there is one, or none yet."""
    connected: bool = False
    """Whether there has been a data connection."""
    completed: bool = False
    gone: bool = False
    """Whether it vanished for good, and the others went on."""
    first: tuple[int, float] | None = None
    """The attempt under which it joined here first, and when."""

    @property
    def joined(self) -> bool:
        return self.attempt >= 0

    @property
    def live(self) -> bool:
        return not self.completed and not self.gone


class Membership:
    """The trainers of one job as one server knows them.

    In an elastic job (`Settings.max_trainers`) trainers beyond those that the server was started for count
    from their first join on, and its end is a good one if any trainer has completed: nobody here can tell
    one that was taken away from one that was lost.

    Parameters
    ----------
    num_trainers : int
        How many trainers the server was started for.
    settings : Settings
    started : float
        When the server began to accept joins.
    """

    def __init__(self, num_trainers: int, settings: Settings, started: float) -> None:
        self._members = {trainer: _Member() for trainer in range(num_trainers)}
        self._most = settings.max_trainers or num_trainers
        self._settings = settings
        self._started = started
        self._first_join: float | None = None

    @property
    def completed(self) -> tuple[int, ...]:
        """The trainers that have finished."""
        return tuple(trainer for trainer, member in self._in_order() if member.completed)

    @property
    def joined(self) -> tuple[int, ...]:
        """Return the trainers that have been here."""
        return tuple(number for number, member in self._in_order() if member.joined)

    @property
    def live(self) -> tuple[int, ...]:
        """The trainers that have not finished and are not given up, whether they are heard or not."""
        return tuple(trainer for trainer, member in self._in_order() if member.live)

    @property
    def gone(self) -> tuple[int, ...]:
        """The trainers that were given up and have not come back."""
        return tuple(trainer for trainer, member in self._in_order() if member.gone)

    @property
    def missed(self) -> tuple[int, ...]:
        """The trainers without which the training has not ended well."""
        forgiven = self._settings.max_trainers is not None and self.completed
        return () if forgiven else self.gone

    def attempt(self, trainer: int) -> int:
        """Return the attempt under which a trainer joined last; -1 before its first join."""
        member = self._members.get(trainer)
        return -1 if member is None else member.attempt

    def admit(self, trainer: int, attempt: int, now: float) -> None:
        """Let a trainer join.

        Raises
        ------
        ConfigurationError
            There is no such trainer in this job.
        AlreadyJoinedError
            Another process is this trainer.
        PeerLostError
            Every trainer that the server counted on is done or given up: it is about to end.
        """
        elastic = self._settings.max_trainers is not None
        if not 0 <= trainer < self._most:
            number = "at most FLEET_MAX_TRAINERS" if elastic else "PADDLE_TRAINERS_NUM"
            raise ConfigurationError(
                f"trainer id {trainer} is out of range; expected 0 to {self._most - 1}, "
                f"as the job has {self._most} trainers (PADDLE_TRAINER_ID, {number})"
            )
        if elastic and not self.live:
            raise PeerLostError(f"trainer {trainer} came after every other one had left the training")
        member = self._members.get(trainer, _Member())
        self._check_issued(trainer, attempt, member.first, now)
        if attempt < member.attempt:
            raise AlreadyJoinedError(
                f"trainer {trainer} joined with attempt {attempt}, but a process of attempt "
                f"{member.attempt} has taken its place; expected a higher one (FLEET_RESTARTS)"
            )
        silent = now - member.heard >= self._settings.silent_seconds
        lives = member.connected and member.lost is None and not silent and not member.completed
        if attempt == member.attempt and lives:
            raise AlreadyJoinedError(
                f"trainer {trainer} joined already, as another process that lives, with the same attempt "
                f"{attempt}; give each trainer an id of its own (PADDLE_TRAINER_ID)"
            )
        first = member.first or (attempt, now)
        self._members[trainer] = _Member(attempt=attempt, heard=now, first=first)
        if self._first_join is None:
            self._first_join = now

    def check_joined(self, trainer: int, attempt: int) -> None:
        """Check that who speaks is a trainer of this job, and the present life of it.

        Raises
        ------
        AlreadyJoinedError
            It has not joined, or was replaced.
        """
        if self.attempt(trainer) != attempt:
            raise AlreadyJoinedError(
                f"trainer {trainer} with attempt {attempt} has not joined, or was replaced"
            )

    def heard(self, trainer: int, now: float) -> None:
        """Note a sign of life."""
        self._members[trainer].heard = now

    def connected(self, trainer: int, now: float) -> None:
        """Note that a trainer has a data connection, its first one or another."""
        member = self._members[trainer]
        member.connected, member.lost, member.heard = True, None, now

    def lost(self, trainer: int, now: float) -> None:
        """Note that a trainer's data connection ended before it had completed."""
        self._members[trainer].lost = now

    def complete(self, trainer: int) -> None:
        """Note that a trainer has finished."""
        self._members[trainer].completed, self._members[trainer].gone = True, False

    def give_up(self, trainer: int) -> None:
        """Count on a trainer no more, unless it joins again."""
        self._members[trainer].gone = True

    def attempts_completed(self) -> Mapping[int, int]:
        """Return under which attempt each of the trainers that have finished joined last."""
        return {trainer: self.attempt(trainer) for trainer in self.completed}

    def absences(self, now: float) -> Sequence[Absence]:
        """Return the live trainers that are not heard."""
        return [
            absence
            for trainer, member in self._in_order()
            if member.live and (absence := self._absence(trainer, member, now)) is not None
        ]

    def _check_issued(self, trainer: int, attempt: int, first: tuple[int, float] | None, now: float) -> None:
        """Check that a replica can have been started so often: a restart takes a second at least.

        It is counted from the first join, so that no join makes room for another with a higher attempt.
        """
        most = _MOST_AT_FIRST if first is None else first[0] + int(now - first[1]) + _SPARE
        if attempt > most:
            raise ConfigurationError(
                f"trainer {trainer} came with attempt {attempt}, expected {most} at most: no replica can "
                "have been started so often by now; FLEET_RESTARTS counts the starts of this replica before "
                "this one, and whoever starts it must count them up one by one"
            )

    def _in_order(self) -> list[tuple[int, _Member]]:
        return sorted(self._members.items(), key=itemgetter(0))

    def _absence(self, trainer: int, member: _Member, now: float) -> Absence | None:
        deadline = self._settings.deadline_seconds
        if not member.joined:
            if self._first_join is None:  # images are pulled, queues are waited for: not the peers' failure
                until = self._started + self._settings.stalled_seconds
                return Absence(trainer, self._started, NOT_JOINED, until)
            # The others of an elastic job train without it.
            patience = deadline if self._settings.max_trainers else self._settings.starting_seconds
            return Absence(trainer, self._first_join, NOT_JOINED, self._first_join + patience)
        if member.lost is not None:
            return Absence(trainer, member.lost, LOST, member.lost + deadline)
        silent_since = member.heard + self._settings.silent_seconds
        if now >= silent_since:
            return Absence(trainer, member.heard, SILENT, silent_since + deadline)
        return None


def describe_absences(absences: Sequence[Absence]) -> str:
    """Return for what of whom the server waits: ``waiting for trainers 0 and 1 to join``."""
    awaited = [
        what.format(name_trainers(trainers))
        for reason, what in _AWAITED.items()
        if (trainers := [absence.trainer for absence in absences if absence.reason == reason])
    ]
    return f"waiting for {' and '.join(awaited)}"


def loss_of(absence: Absence, now: float, *, step: int, lost_seconds: float) -> PeerLostError:
    """Return the error that a trainer's absence has become, which says which deadline is over."""
    waited = f"{now - absence.since:.0f} s"
    if absence.reason == NOT_JOINED:
        return PeerLostError(
            f"trainer {absence.trainer} has not joined within {waited}; see its log, or raise "
            "runPolicy.pendingDeadlineSeconds (FLEET_START_DEADLINE_SECONDS; without, FLAGS_rpc_deadline)"
        )
    return PeerLostError(
        f"trainer {absence.trainer} {absence.reason} {waited} ago, at step {step}; it has vanished for good, "
        f"as FLAGS_rpc_deadline is {lost_seconds * 1000:.0f} ms (a trainer that ends well calls "
        "fleet.stop_worker())"
    )


def loss_of_missed(missed: Sequence[int], completed: Sequence[int]) -> PeerLostError:
    """Return the error of a training that has ended without some trainers, and what became of the others."""
    others = "; every other trainer has completed" if completed else ", before any trainer had completed"
    return PeerLostError(f"{name_trainers(missed)} vanished for good{others}")
