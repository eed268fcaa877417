"""Scheduling of a server's work: pacing of trainers, the pool of stepping threads, and late trainers.

Pacing. A piece is stepped when every trainer's gradient of it has come. Streams that share a server's link
drift apart by as much as their buffers hold, and then values go back late: at the end of a step the link is
idle in one direction. So the gradients of a trainer that is far ahead are left in its socket for a moment,
and the others get its share of the link.

The pool. A thread that receives a large gradient hands the summing and stepping over, and receives the next
one meanwhile. So one trainer keeps several cores busy, and many trainers use no more cores than there are. A
small gradient is used by its receiving thread: waking another one would take longer. So are gradients in
shared memory, where nothing is received, and those of the modes without a barrier, whose buffer is free for
the next gradient only after this one is applied.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["LEAST_BYTES", "Overrun", "Pacing", "StepPool", "receive_bytes"]

LEAST_BYTES: Final = 1 << 16
"""The size from which a received gradient is worth waking a thread of the pool."""
_RECEIVE_BYTES: Final = 1 << 19
_PATIENCE_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.02
_GAP_SECONDS: Final = 0.05
"""A trainer that has sent nothing for so long since its last frame is not sending; it may be computing."""
_FRAME_SECONDS: Final = 1.0
"""A trainer whose frame has been under way for so long is held up itself, and does not count as sending."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sender:
    step: int = -1
    taken_bytes: int = 0
    """The bytes of the step that have been taken."""
    began: float | None = None
    """When the present frame began; None between two frames."""
    last: float = 0.0
    """When the last frame was taken."""

    def is_sending(self, now: float) -> bool:
        return now - self.last < _GAP_SECONDS if self.began is None else now - self.began < _FRAME_SECONDS


class Pacing:
    """Keeps trainers that send the same step close to each other. Each trainer's receiving thread calls.

    Parameters
    ----------
    lead_bytes : int
        The largest lead of a trainer over the last one that is sending.
    clock : callable
        Seconds of a monotonic clock.
    patience_seconds : float
        The longest time for which a frame is delayed.
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
        self._changed = threading.Condition()

    def begin(self, trainer: int, step: int) -> None:
        """Wait while a trainer is too far ahead, before its frame is taken."""
        with self._changed:
            sender = self._senders.setdefault(trainer, _Sender())
            if sender.step != step:
                sender.step, sender.taken_bytes = step, 0
            until = self._clock() + self._patience_seconds
            while self.is_ahead(trainer) and self._clock() < until:
                self._changed.wait(_LOOK_SECONDS)
            sender.began = self._clock()

    def took(self, trainer: int, payload_bytes: int) -> None:
        """Record that the frame has been taken."""
        with self._changed:
            sender = self._senders.get(trainer)  # none if an earlier process of the trainer has just ended
            if sender is not None:
                sender.taken_bytes += payload_bytes
                sender.began, sender.last = None, self._clock()
                self._changed.notify_all()

    def ended(self, trainer: int) -> None:
        """Record that a trainer has sent its whole step, or sends nothing more at all."""
        with self._changed:
            self._senders.pop(trainer, None)
            self._changed.notify_all()

    def is_ahead(self, trainer: int) -> bool:
        """Whether a trainer is too far ahead of another one that is sending the same step."""
        own, now = self._senders[trainer], self._clock()
        others = [
            other.taken_bytes
            for number, other in self._senders.items()
            if number != trainer and other.step == own.step and other.is_sending(now)
        ]
        return own.taken_bytes - min(others, default=own.taken_bytes) > self._lead_bytes


def receive_bytes(lead_bytes: int | None) -> int | None:
    """Return the size of the kernel's receive buffers, which trainers fill whatever the pacing does.

    Parameters
    ----------
    lead_bytes : int or None
        As of `lead_bytes` in `fleet.parameter_server.pieces`.

    Returns
    -------
    int or None
        None for the system's default.
    """
    return None if lead_bytes is None else _RECEIVE_BYTES


class StepPool:
    """Threads that sum and step large gradients.

    Parameters
    ----------
    num_threads : int
        The number of threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"fleet-step-{number}", daemon=True)
            for number in range(num_threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a piece of work, which must not raise."""
        self._queue.put(work)

    def close(self) -> None:
        """Let the threads end after the queued work; do not wait for them."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


class Overrun:
    """Warns of trainers that joined late and train past the others, and counts their steps.

    One trainer's share of the data may be longer, so a trainer that was there from the beginning may well
    make the last steps alone. One that joined late does so by accident, if its loop began with the first
    epoch.

    Parameters
    ----------
    step_of : callable
        Returns the step that a trainer makes next.
    num_trainers : int
        The number of trainers from the beginning; others join late.
    """

    def __init__(self, step_of: Callable[[int], int], num_trainers: int) -> None:
        self._step_of = step_of
        self._num_trainers = num_trainers
        self.late: set[int] = set()
        """The trainers that joined late."""
        self._warned: set[int] = set()
        self._end = -1
        """The step at which the trainer that went furthest has completed; -1 before any has."""

    def joined(self, trainer: int, *, again: bool) -> None:
        """Record that a trainer joins, for the first time or again."""
        if again or trainer >= self._num_trainers:
            self.late.add(trainer)

    def begins(self, trainer: int) -> None:
        """Warn if a late trainer begins its first step past the others."""
        if (
            trainer not in self.late
            or trainer in self._warned
            or not 0 <= self._end <= self._step_of(trainer)
        ):
            return
        self._warned.add(trainer)
        _log.warning(
            "trainer %d, which joined late, trains past the others: they have completed at step %d, and what "
            "follows is on its data alone. A loop over fleet.epochs() or fleet.steps() continues where the "
            "training is, and ends with the others",
            trainer,
            self._end,
        )

    def completed(self, trainer: int, step: int) -> None:
        """Log that a trainer has completed at a step, and how far past the others that is."""
        _log.info("trainer %d has completed, at step %d", trainer, step)
        if past := self.steps(trainer):
            _log.warning("trainer %d has made %d steps past the others", trainer, past)
        self._end = max(self._end, step)

    def steps(self, trainer: int) -> int:
        """Return the number of steps that a late trainer has made past the others."""
        if trainer not in self.late or self._end < 0:
            return 0
        return max(0, self._step_of(trainer) - self._end)
