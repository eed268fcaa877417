"""The time of one who watches over others: what passes while the watcher itself is frozen does not count."""

import threading
import time
from collections.abc import Callable

__all__ = ["WatchClock"]


class WatchClock:
    """Seconds since some moment, of which no more pass between two looks than a watcher that runs lets pass.

    A process may be stopped, starved, or paused with its container. When it goes on, the signs of life of
    its peers lie unread: they were not silent, it was deaf. Time always goes on a little, so that a machine
    on which every look is late makes a deadline longer and never endless.

    Parameters
    ----------
    most_seconds : float
        How much a longer gap between two looks counts. Whoever watches looks more often.
    clock : callable
        Seconds of a monotonic clock.
    """

    def __init__(self, most_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = self._now = clock()

    def now(self) -> float:
        """Look at the clock; each thread of the watcher's may."""
        with self._lock:
            looked = self._clock()
            self._now += min(looked - self._looked, self._most)
            self._looked = looked
            return self._now
