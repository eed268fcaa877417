"""What is kept of the numbers that a script reports one after the other: its loss curve, and a rate."""

import logging
import math
from collections import deque
from typing import Final

__all__ = ["MAX_HISTORY", "LossCurve", "SampleRate"]

MAX_HISTORY: Final = 512
RATE_WINDOW_SECONDS: Final = 10.0
_log = logging.getLogger(__name__)


class LossCurve:
    """Points of step and loss, at most 512: of a longer run every n-th; n doubles whenever it is full."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._latest: tuple[int, float] | None = None
        self._stride = 1
        self._skipped = 0
        self._warned = False

    def record(self, step: int | None, loss: float) -> None:
        """Add a point, if there is a step to which it belongs and the loss is finite."""
        if not math.isfinite(loss):
            if not self._warned:
                self._warned = True
                _log.warning("the reported loss is %s at step %s", loss, step)
            return
        if step is None:
            return
        self._latest = (step, loss)
        if self._skipped > 0:
            self._skipped -= 1
            return
        self._points.append(self._latest)
        self._skipped = self._stride - 1
        if len(self._points) == MAX_HISTORY - 1:  # one place stays free for the latest point
            self._points = self._points[::2]
            self._stride *= 2
            self._skipped = self._stride - 1

    def points(self) -> list[list[float]]:
        """Return the points that are kept, the latest among them."""
        points = list(self._points)
        if self._latest is not None and (not points or points[-1] != self._latest):
            points.append(self._latest)
        return [[step, loss] for step, loss in points]


class SampleRate:
    """How fast a count grows, over the last ten seconds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        """Note the count at a time, in seconds of a monotonic clock."""
        self._counts.append((now, count))
        while len(self._counts) > 2 and now - self._counts[1][0] >= RATE_WINDOW_SECONDS:
            self._counts.popleft()

    def per_second(self) -> float | None:
        """Return the rate; None while it is not known."""
        if len(self._counts) < 2:
            return None
        (start, before), (end, after) = self._counts[0], self._counts[-1]
        return (after - before) / (end - start) if end > start and after >= before else None
