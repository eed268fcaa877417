"""Trainers that a server does not hear: since when, why, and when one has vanished for good.

Pure: the time is handed in, in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fleet.errors import PeerLostError
from fleet.parameter_server.naming import name_trainers
from fleet.parameter_server.settings import Settings

__all__ = [
    "LOST",
    "NOT_JOINED",
    "SILENT",
    "Absence",
    "Patience",
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


@dataclass(frozen=True, slots=True)
class Absence:
    """A trainer that the server does not hear."""

    trainer: int
    since: float
    reason: str
    deadline: float
    """When it has vanished for good."""


class Patience:
    """For how long a server waits for whom.

    Parameters
    ----------
    settings : Settings
    started : float
        When it began to accept joins.
    """

    def __init__(self, settings: Settings, started: float) -> None:
        self._settings = settings
        self._started = started

    def absence(
        self, trainer: int, first_join: float | None, now: float, *, heard: float | None, lost: float | None
    ) -> Absence | None:
        """Return the absence of a trainer; None while it is heard.

        Parameters
        ----------
        trainer : int
        first_join : float, optional
            When the first of all trainers joined.
        now : float
        heard : float, optional
            When it gave its last sign of life; None for one that has never joined.
        lost : float, optional
            When its data connection ended, where it has no other.
        """
        settings, deadline = self._settings, self._settings.deadline_seconds
        if heard is None:
            if first_join is None:  # images are pulled, queues are waited for: not the peers' failure
                return Absence(trainer, self._started, NOT_JOINED, self._started + settings.stalled_seconds)
            # The others of an elastic job train without it.
            seconds = deadline if settings.max_trainers else settings.starting_seconds
            return Absence(trainer, first_join, NOT_JOINED, first_join + seconds)
        if lost is not None:
            return Absence(trainer, lost, LOST, lost + deadline)
        silent_since = heard + settings.silent_seconds
        return Absence(trainer, heard, SILENT, silent_since + deadline) if now >= silent_since else None


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
