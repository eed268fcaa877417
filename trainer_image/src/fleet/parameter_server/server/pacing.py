"""Pacing: trainers that send the same step keep close to each other.

A piece is stepped when every trainer's gradient of it is there. Streams that share a server's link drift
apart, by as much as their buffers hold and more, and then values go back late: at the end of a step the link
is idle in one direction. So what a trainer far ahead has sent is left in its socket for a moment, and the
others get its part of the link.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["Pacing", "receive_bytes"]

_RECEIVE_BYTES: Final = 1 << 19
_PATIENCE_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.02
_GAP_SECONDS: Final = 0.05
"""Who has sent nothing for so long since its last frame is not sending: it computes, say."""
_FRAME_SECONDS: Final = 1.0
"""How long a frame may be under way before its sender counts as held up."""


@dataclass(slots=True)
class _Sender:
    step: int = -1
    taken_bytes: int = 0
    """How much of the step has been taken."""
    began: float | None = None
    """When the frame that is being taken began; None between two frames."""
    last: float = 0.0
    """When the last frame was taken."""

    def is_sending(self, now: float) -> bool:
        return now - self.last < _GAP_SECONDS if self.began is None else now - self.began < _FRAME_SECONDS


class Pacing:
    """How far each trainer's gradients have come. Each trainer is told of by a thread of its own.

    Parameters
    ----------
    lead_bytes : int or None
        By how much a trainer may be ahead of the last one that is sending; None: by anything.
    clock : callable
        Seconds of a monotonic clock.
    patience_seconds : float
        How long a frame is held up at most.
    """

    def __init__(
        self,
        lead_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._lead_bytes = lead_bytes
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._senders: dict[int, _Sender] = {}
        self._changed = threading.Condition()

    def begin(self, trainer: int, step: int) -> None:
        """Wait a while as long as a trainer is too far ahead; then its frame is taken."""
        if self._lead_bytes is None:
            return
        with self._changed:
            sender = self._senders.setdefault(trainer, _Sender())
            if sender.step != step:
                sender.step, sender.taken_bytes = step, 0
            until = self._clock() + self._patience_seconds
            while self.is_ahead(trainer) and self._clock() < until:
                self._changed.wait(_LOOK_SECONDS)
            sender.began = self._clock()

    def took(self, trainer: int, payload_bytes: int) -> None:
        """Note that the frame has been taken."""
        with self._changed:
            sender = self._senders.get(trainer)  # none where an earlier life of it has just ended
            if sender is not None:
                sender.taken_bytes += payload_bytes
                sender.began, sender.last = None, self._clock()
                self._changed.notify_all()

    def ended(self, trainer: int) -> None:
        """Note that a trainer sends no more for its step, or not at all."""
        with self._changed:
            self._senders.pop(trainer, None)
            self._changed.notify_all()

    def is_ahead(self, trainer: int) -> bool:
        """Whether a trainer has sent more than it should before others that send the same step."""
        own, now = self._senders[trainer], self._clock()
        others = [
            other.taken_bytes
            for number, other in self._senders.items()
            if number != trainer and other.step == own.step and other.is_sending(now)
        ]
        return self._lead_bytes is not None and own.taken_bytes - min(others, default=own.taken_bytes) > (
            self._lead_bytes
        )


def receive_bytes(lead_bytes: int | None) -> int | None:
    """Return the size of the kernel's receive buffers, which a trainer fills all the same.

    Parameters
    ----------
    lead_bytes : int or None
        As of `Pacing`.

    Returns
    -------
    int or None
        None: whatever the system gives.
    """
    return None if lead_bytes is None else _RECEIVE_BYTES
