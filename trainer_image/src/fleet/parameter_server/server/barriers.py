"""Barriers and reductions of small arrays over a job's trainers, which one of the servers coordinates."""

import threading
from typing import Final

from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.control.reduction import Contribution, Reductions
from fleet.parameter_server.server.membership import Membership

__all__ = ["Barriers"]

# Each waiting call occupies a thread of the control service, also when its trainer is gone.
_TURN_SECONDS: Final = 1.0
_ARRIVAL: Final = Contribution("sum", "<f4", (0,), b"")  # a barrier is a reduction of nothing


class Barriers:
    """Barriers and reductions over all trainers that have not completed.

    Parameters
    ----------
    membership : Membership
        The membership, whose live trainers each barrier and reduction waits for.
    changed : threading.Condition
        Guards the membership; callers of `admit` and `release` hold it.
    """

    def __init__(self, membership: Membership, changed: threading.Condition) -> None:
        self._membership = membership
        self._changed = changed
        self._barriers, self._reductions = Reductions(), Reductions()
        self._ending: set[int] = set()
        """Trainers that have made their last step and wait until all others have, too."""

    def admit(self, trainer: int) -> None:
        """Reset the state of a trainer that joins."""
        self._barriers.admit(trainer)
        self._reductions.admit(trainer)
        self._ending.discard(trainer)

    def release(self) -> None:
        """Complete each barrier and reduction to which all trainers have contributed."""
        self._barriers.release(self._training)
        self._reductions.release(self._training)
        self._changed.notify_all()

    def barrier(self, trainer: int, attempt: int, passed: int) -> control_pb2.BarrierReply:
        """Record a trainer's arrival at its next barrier, and wait up to a second for the others.

        Raises
        ------
        AlreadyJoinedError
            The trainer has not joined, or was replaced.
        """
        with self._changed:
            number = self._meet(self._barriers, trainer, attempt, passed, _ARRIVAL)
            if self._barriers.passed >= number:
                return control_pb2.BarrierReply(passed=True)
            missing = self._barriers.missing(self._training)
            return control_pb2.BarrierReply(passed=False, missing_trainers=missing)

    def reduce(self, trainer: int, attempt: int, passed: int, given: Contribution) -> control_pb2.ReduceReply:
        """Add a trainer's contribution to its next reduction, and wait up to a second for the others.

        Raises
        ------
        ConfigurationError
            The trainer has not joined or was replaced, or another trainer's contribution has a different
            form.
        """
        with self._changed:
            number = self._meet(self._reductions, trainer, attempt, passed, given)
            if self._reductions.passed >= number:
                return control_pb2.ReduceReply(done=True, data=self._reductions.result)
            missing = self._reductions.missing(self._training)
            return control_pb2.ReduceReply(done=False, missing_trainers=missing)

    def end(self, trainer: int, attempt: int) -> control_pb2.BarrierReply:
        """Record that a trainer has run its last step, and wait up to a second for the others.

        Raises
        ------
        AlreadyJoinedError
            The trainer has not joined, or was replaced.
        """
        with self._changed:
            self._membership.check_joined(trainer, attempt)
            self._ending.add(trainer)
            self.release()
            self._changed.wait_for(lambda: not self._training, _TURN_SECONDS)
            return control_pb2.BarrierReply(passed=not self._training, missing_trainers=self._training)

    @property
    def _training(self) -> list[int]:
        """The trainers that may still run steps or arrive at barriers."""
        return [trainer for trainer in self._membership.live if trainer not in self._ending]

    def _meet(
        self, barriers: Reductions, trainer: int, attempt: int, passed: int, given: Contribution
    ) -> int:
        """Record a contribution, wait up to a second for the others, and return the reduction's number."""
        self._membership.check_joined(trainer, attempt)
        number = barriers.contribute(trainer, passed, given, self._training)
        self._changed.notify_all()
        self._changed.wait_for(lambda: barriers.passed >= number, _TURN_SECONDS)
        return number
