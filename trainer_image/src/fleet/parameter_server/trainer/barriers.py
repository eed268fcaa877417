"""A trainer's barriers and reductions with the others: the first server counts who has come."""

from collections.abc import Callable, Sequence

from fleet.errors import DeadlineExceededError
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.control.reduction import Contribution
from fleet.parameter_server.naming import name_trainers
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.waiting import WaitLog

__all__ = ["Barriers"]


class Barriers:
    """One trainer's barriers and reductions.

    Parameters
    ----------
    control : callable
        Returns the first server's control channel.
    settings : Settings
    check : callable
        Raises what the session has failed of.
    """

    def __init__(
        self, control: Callable[[], ControlClient], settings: Settings, check: Callable[[], None]
    ) -> None:
        self._control = control
        self._settings = settings
        self._check = check
        self._barriers_passed = 0
        self._reductions_passed = 0

    def barrier(self) -> None:
        """Wait until every trainer that has not completed calls this."""
        self._pass("a barrier", ending=False)
        self._barriers_passed += 1

    def wait_for_ends(self) -> None:
        """Wait until no other trainer makes a step any more: it calls this, has completed or is given up."""
        self._pass("the end of the training", ending=True)

    def reduce(self, given: Contribution, call: str = "all_reduce_worker") -> bytes:
        """Combine numbers with those of every trainer that has not completed.

        Parameters
        ----------
        given : Contribution
        call : str
            What the script has called, for messages.

        Raises
        ------
        ConfigurationError
            Another trainer gives something else.
        DeadlineExceededError
            A trainer did not call this; the message names it.
        """
        self._check()
        control, log = self._control(), WaitLog()
        while True:
            reply = control.reduce(self._reductions_passed, given, self._settings.deadline_seconds)
            if reply.done:
                break
            self._wait_for(log, f"{call} ({given.form})", reply.missing_trainers)
        self._reductions_passed += 1
        return reply.data

    def _pass(self, what: str, *, ending: bool) -> None:
        self._check()
        control, log = self._control(), WaitLog()
        while True:
            reply = control.barrier(self._barriers_passed, self._settings.deadline_seconds, ending=ending)
            if reply.passed:
                break
            self._wait_for(log, what, reply.missing_trainers)

    def _wait_for(self, log: WaitLog, what: str, trainers: Sequence[int]) -> None:
        """Say for whom a call waits; DeadlineExceededError once it has waited for too long."""
        missing = name_trainers(trainers)
        waited = log.note(what, lambda: f"{what} waits for {missing}")
        if waited >= self._settings.stalled_seconds:
            raise DeadlineExceededError(f"{what} waited {waited:.0f} s for {missing}")
        self._check()
