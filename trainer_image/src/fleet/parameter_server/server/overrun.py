"""Trainers that were started again and train past the others, whose steps nobody else shares.

A share of the data may be longer than another one, so a trainer that was there all the time may well make the
last steps alone. One that was started again does it by accident, if its loop began with the first epoch.
"""

import logging
from collections.abc import Callable

__all__ = ["Overrun"]

_log = logging.getLogger(__name__)


class Overrun:
    """Counts the steps that trainers make past those that have completed.

    Parameters
    ----------
    step_of : callable
        Returns the step that a trainer makes next.
    num_trainers : int
        How many there were from the beginning; one that joins beside them joins late.
    """

    def __init__(self, step_of: Callable[[int], int], num_trainers: int) -> None:
        self._step_of = step_of
        self._num_trainers = num_trainers
        self._late: set[int] = set()
        self._told: set[int] = set()
        self._end = -1
        """The step at which the trainer that went furthest has completed; -1 before any has."""

    def joined(self, trainer: int, *, again: bool) -> None:
        """Take note of a trainer that joins."""
        if again or trainer >= self._num_trainers:
            self._late.add(trainer)

    def begins(self, trainer: int) -> None:
        """Say it when a trainer begins its first step past the others."""
        if trainer not in self._late or trainer in self._told or not 0 <= self._end <= self._step_of(trainer):
            return
        self._told.add(trainer)
        _log.warning(
            "trainer %d, which joined late, trains past the others: they have completed at step %d, and what "
            "follows is on its data alone. A loop over fleet.epochs() or fleet.steps() goes on where the "
            "training is, and ends with the others",
            trainer,
            self._end,
        )

    def completed(self, trainer: int, step: int) -> None:
        """Say that a trainer has completed, at which step, and how many steps it went past the others."""
        _log.info("trainer %d has completed, at step %d", trainer, step)
        if past := self.steps(trainer):
            _log.warning("trainer %d has made %d steps past the others", trainer, past)
        self._end = max(self._end, step)

    def steps(self, trainer: int) -> int:
        """Return how many steps a trainer that joined late has made past the others."""
        if trainer not in self._late or self._end < 0:
            return 0
        return max(0, self._step_of(trainer) - self._end)
