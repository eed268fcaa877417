"""Which trainers a server counts on, and which it has lost. Pure: the time is handed in, in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.errors import AlreadyJoinedError, ConfigurationError, PeerLostError
from fleet.parameter_server.server.absences import Absence, Patience
from fleet.parameter_server.server.attempts import check_issued
from fleet.parameter_server.settings import Settings

__all__ = ["Membership"]


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
        """In the order of their numbers."""
        self._most = settings.max_trainers or num_trainers
        self._settings = settings
        self._patience = Patience(settings, started)
        self._first_join: float | None = None

    @property
    def completed(self) -> tuple[int, ...]:
        """The trainers that have finished."""
        return tuple(trainer for trainer, member in self._members.items() if member.completed)

    @property
    def joined(self) -> tuple[int, ...]:
        """Return the trainers that have been here."""
        return tuple(number for number, member in self._members.items() if member.joined)

    @property
    def live(self) -> tuple[int, ...]:
        """The trainers that have not finished and are not given up, whether they are heard or not."""
        return tuple(trainer for trainer, member in self._members.items() if member.live)

    @property
    def gone(self) -> tuple[int, ...]:
        """The trainers that were given up and have not come back."""
        return tuple(trainer for trainer, member in self._members.items() if member.gone)

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
        check_issued(trainer, attempt, member.first, now)
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
        joined = _Member(attempt=attempt, heard=now, first=first)
        self._members = dict(sorted({**self._members, trainer: joined}.items()))
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

    def absences(self, now: float) -> Sequence[Absence]:
        """Return the live trainers that are not heard."""
        found = (
            self._patience.absence(
                trainer,
                self._first_join,
                now,
                heard=member.heard if member.joined else None,
                lost=member.lost,
            )
            for trainer, member in self._members.items()
            if member.live
        )
        return [absence for absence in found if absence is not None]
