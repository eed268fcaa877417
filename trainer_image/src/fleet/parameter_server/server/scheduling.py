"""Scheduling on a server: pacing of trainers, work for the thread pool, and trainers that join late.

Pacing. A piece is updated when every trainer's gradient of it has arrived. Streams that share a server's link
drift apart by as much as their buffers hold. Values are then sent back late, and the link is idle in one
direction at the end of a step. So the server briefly stops reading from a trainer that is far ahead, and the
other trainers get its share of the link.

The pool. In sync mode, the event loop's thread lets the pool sum a large gradient and update its block, and
receives the next gradient meanwhile. So one trainer keeps several cores busy, and many trainers use no more
threads than there are cores. The loop's thread does this work for a small gradient itself, because waking
another thread would take longer. In modes without a barrier, the pool applies a large gradient and its
connection waits meanwhile, because the buffer cannot receive the next gradient before that.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["LEAST_BYTES", "Overrun", "Pacing", "receive_bytes"]

LEAST_BYTES: Final = 1 << 16
"""The smallest size in bytes of a gradient that the pool processes, rather than the event loop's thread."""
# Bytes that the kernel has received cannot be held back; with its automatic tuning, they may be megabytes.
_RECEIVE_BYTES: Final = 1 << 19
# Pacing guesses which trainers are sending; a wrong guess costs at most this time.
_PATIENCE_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.02
_GAP_SECONDS: Final = 0.05
"""The time after its last frame at which a trainer no longer counts as sending; it may be computing."""
_FRAME_SECONDS: Final = 1.0
"""The duration of a frame after which the trainer no longer counts as sending, because it is blocked."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sender:
    step: int = -1
    taken_bytes: int = 0
    """The number of bytes of the current step that have been received."""
    until: float | None = None
    """The time until which the current frame may wait; None if it does not wait."""
    began: float | None = None
    """The time at which the current frame began; None between two frames."""
    last: float = 0.0
    """The time at which the last frame was received."""

    def is_sending(self, now: float) -> bool:
        return now - self.last < _GAP_SECONDS if self.began is None else now - self.began < _FRAME_SECONDS


class Pacing:
    """Flow control that keeps a trainer from getting too far ahead of the slowest one within a step.

    Parameters
    ----------
    lead_bytes : int
        The largest lead of a trainer over the slowest one that is sending.
    clock : callable
        Returns seconds of a monotonic clock.
    patience_seconds : float
        The longest delay of a frame.
    """

    def __init__(
        self,
        lead_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._lead_bytes = lead_bytes
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._senders: dict[int, _Sender] = {}
        self._lock = threading.Lock()
        self._resumes: dict[int, Callable[[], None]] = {}
        """For each waiting trainer, the function that resumes its connection."""

    def begin(self, trainer: int, step: int, resume: Callable[[], None]) -> float:
        """Allow a trainer's next frame unless the trainer is too far ahead.

        Parameters
        ----------
        trainer, step : int
        resume : callable
            Called once when the trainer may no longer be too far ahead.

        Returns
        -------
        float
            0 if the frame may be received; otherwise the seconds after which to try again, if nothing resumes
            the trainer before.
        """
        with self._lock:
            sender = self._senders.setdefault(trainer, _Sender())
            if sender.step != step:
                sender.step, sender.taken_bytes, sender.began = step, 0, None
            now = self._clock()
            # A frame that was let in and then had to wait for a receive buffer comes here again, and is not
            # held a second time.
            if sender.began is None and self.is_ahead(trainer):
                if sender.until is None:
                    sender.until = now + self._patience_seconds
                if now < sender.until:
                    self._resumes[trainer] = resume
                    # A trainer that stops sending does not resume the others, so they try again after a short
                    # time.
                    return min(_LOOK_SECONDS, sender.until - now)
            sender.began, sender.until = now, None
            return 0.0

    def took(self, trainer: int, payload_bytes: int) -> None:
        """Record that a frame has been received completely."""
        with self._lock:
            sender = self._senders.get(trainer)  # none if an earlier process of the trainer has just ended
            if sender is not None:
                sender.taken_bytes += payload_bytes
                sender.began, sender.last = None, self._clock()
                self._resume_all()

    def ended(self, trainer: int) -> None:
        """Record that a trainer has sent its whole step or has disconnected."""
        with self._lock:
            self._senders.pop(trainer, None)
            self._resumes.pop(trainer, None)
            self._resume_all()

    def _resume_all(self) -> None:
        while self._resumes:
            self._resumes.popitem()[1]()

    def is_ahead(self, trainer: int) -> bool:
        """Return whether a trainer is too far ahead of a slower one that is sending the same step."""
        own, now = self._senders[trainer], self._clock()
        others = [
            other.taken_bytes
            for number, other in self._senders.items()
            if number != trainer and other.step == own.step and other.is_sending(now)
        ]
        return own.taken_bytes - min(others, default=own.taken_bytes) > self._lead_bytes


def receive_bytes(lead_bytes: int | None) -> int | None:
    """Return the size of a socket's receive buffer, which a trainer can fill despite pacing.

    Parameters
    ----------
    lead_bytes : int or None
        The result of `fleet.parameter_server.pieces.lead_bytes`.

    Returns
    -------
    int or None
        The size in bytes; None for the system's default.
    """
    return None if lead_bytes is None else _RECEIVE_BYTES


class Overrun:
    """Detects late trainers that run steps after the others have completed.

    A trainer that has trained from the beginning may legitimately make the last steps alone, because its
    share of the data may be larger. A trainer that joined late does so by accident, because its loop started
    at the first epoch.

    Parameters
    ----------
    step_of : callable
        Returns the next step of a trainer.
    num_trainers : int
        The initial number of trainers; others join late.
    """

    def __init__(self, step_of: Callable[[int], int], num_trainers: int) -> None:
        self._step_of = step_of
        self._num_trainers = num_trainers
        self.late: set[int] = set()
        """The trainers that joined late."""
        self._warned: set[int] = set()
        self._end = -1
        """The highest step at which a trainer has completed; -1 before any has."""

    def joined(self, trainer: int, *, again: bool) -> None:
        """Record that a trainer has joined; `again` is True if it had joined before."""
        if again or trainer >= self._num_trainers:
            self.late.add(trainer)

    def begins(self, trainer: int) -> None:
        """Log a warning when a late trainer begins its first step after the others have completed."""
        if (
            trainer not in self.late
            or trainer in self._warned
            or not 0 <= self._end <= self._step_of(trainer)
        ):
            return
        self._warned.add(trainer)
        _log.warning(
            "trainer %d joined late, and continues after the others completed at step %d, with its own data "
            "only. A loop over fleet.epochs() or fleet.steps() begins at the job's current step, and ends "
            "with the others",
            trainer,
            self._end,
        )

    def completed(self, trainer: int, step: int) -> None:
        """Log the step at which a trainer completed, and how many steps it ran after the others."""
        _log.info("trainer %d has completed, at step %d", trainer, step)
        if past := self.steps(trainer):
            _log.warning("trainer %d has made %d steps after the others completed", trainer, past)
        self._end = max(self._end, step)

    def steps(self, trainer: int) -> int:
        """Return how many steps a trainer has run after the others completed."""
        if trainer not in self.late or self._end < 0:
            return 0
        return max(0, self._step_of(trainer) - self._end)
