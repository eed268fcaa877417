"""A server's watchdog, which detects absent trainers and stalled steps."""

import logging

from fleet.errors import DeadlineExceededError, PeerLostError
from fleet.parameter_server.modes import ServerMode
from fleet.parameter_server.server.membership import SILENT, describe_absences, loss_of
from fleet.parameter_server.server.trainers import Trainers
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.waits import WaitLog
from fleet.plan.job import ServerPlan
from fleet.process.resources import WatchClock

__all__ = ["Watchdog"]

_log = logging.getLogger(__name__)


class Watchdog:
    """Logs what a server waits for, and enforces its deadlines.

    Parameters
    ----------
    plan : ServerPlan
        The plan of the server.
    settings : Settings
    mode : ServerMode
    trainers : Trainers
    clock : WatchClock
    survives_loss : bool
        Whether the other trainers continue when a trainer is lost.
    """

    def __init__(
        self,
        plan: ServerPlan,
        settings: Settings,
        mode: ServerMode,
        trainers: Trainers,
        clock: WatchClock,
        *,
        survives_loss: bool,
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._mode = mode
        self._trainers = trainers
        self._clock = clock
        self._survives_loss = survives_loss
        self._absent, self._stalled = WaitLog(clock.now), WaitLog(clock.now)
        self._silent: set[int] = set()
        self._assured_at = clock.now()
        """The time of the latest call of `Trainers.assure_waiting`; initially the time of creation."""

    def describe(self) -> str:
        """Describe what the server waits for; the caller holds the membership's lock."""
        return describe_absences(self._trainers.membership.absences(self._clock.now()))

    def look(self) -> list[tuple[int, PeerLostError]]:
        """Check for absent trainers and stalled steps; the caller holds the membership's lock.

        Returns
        -------
        list of tuple of int and PeerLostError
            The lost trainers without which the others continue, each with its error.

        Raises
        ------
        PeerLostError
            A trainer is lost, and the others cannot continue without it.
        DeadlineExceededError
            A step has taken too long, although all trainers are alive.
        """
        lost = self._look_for_absent()
        self._look_for_stalled()
        if (now := self._clock.now()) - self._assured_at >= self._settings.heartbeat_seconds:
            self._assured_at = now
            self._trainers.assure_waiting()
        return lost

    def _look_for_absent(self) -> list[tuple[int, PeerLostError]]:
        now, membership = self._clock.now(), self._trainers.membership
        for trainer, session in list(self._trainers.sessions.items()):
            if session.arrivals.look():
                membership.heard(trainer, now)
        absences = membership.absences(now)
        seconds = self._settings.deadline_seconds
        lost = [
            (each.trainer, loss_of(each, now, step=self._mode.step_of(each.trainer), lost_seconds=seconds))
            for each in absences
            if now >= each.deadline
        ]
        if lost and not self._survives_loss:
            raise lost[0][1]
        silent = {absence.trainer for absence in absences if absence.reason == SILENT}
        for trainer in sorted(silent - self._silent):
            _log.warning(
                "nothing has arrived from trainer %d for %.0f s, at step %d",
                trainer,
                self._settings.silent_seconds,
                self._mode.step_of(trainer),
            )
        self._silent = silent
        subject = tuple((absence.trainer, absence.reason) for absence in absences) or None
        self._absent.note(subject, lambda: describe_absences(absences))
        return lost

    def _look_for_stalled(self) -> None:
        missing = self._mode.missing()
        if missing is None:
            self._stalled.note(None, str)
            return
        awaited = missing.describe(self._plan.endpoints)
        waited = self._stalled.note(missing, lambda: f"parameter server {self._plan.endpoint}: {awaited}")
        if waited >= self._settings.stalled_seconds:
            raise DeadlineExceededError(f"{awaited} for {waited:.0f} s, although the peer is alive")
