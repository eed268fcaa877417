"""The work queue, which selects the next job to reconcile; pure, without tasks, locks or a clock.

Invariants
----------
- A key is queued at most once, so a thousand events of a job lead to one pass.
- A key is never processed twice at the same time. A change during a pass leads to another pass after it, so
  nothing is lost.
- The delay of a failing key doubles with each failure. Each key has its own delay, so one broken job never
  slows others. An event shortens the delay, unless the cluster requested it.
- A resting key is processed after its rest only if there were events meanwhile.
- Keys with priority do not starve the others.

Every method gets the current time as an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

K = TypeVar("K", bound="Hashable")

AHEAD_IN_A_ROW = 8
"""How many keys with priority may overtake an older key without priority."""


class WorkQueue(Generic[K]):
    """A queue of keys, each of which is processed by at most one worker at a time.

    Parameters
    ----------
    backoff_seconds : float
        The delay after a key's first failure. Each further failure doubles it.
    backoff_limit_seconds : float
        The maximum delay.
    ahead : callable, optional
        Whether a new key has priority over those for which this is false.
    others_at_once : int, optional
        How many keys without priority may be processed at the same time; unlimited if absent.
    """

    def __init__(
        self,
        *,
        backoff_seconds: float = 0.1,
        backoff_limit_seconds: float = 60.0,
        ahead: Callable[[K], bool] = lambda _: False,
        others_at_once: int | None = None,
    ) -> None:
        self._ready = ReadyKeys[K](ahead, others_at_once)
        self._delays = Delays[K]()
        self._backoff = Backoff[K](backoff_seconds, backoff_limit_seconds)
        self._running: set[K] = set()
        self._changed: set[K] = set()  # keys that were added while they were being processed
        self._held: set[K] = set()  # keys with a delay that the cluster requested: no event shortens it
        self._resting: dict[K, float] = {}  # the end of each key's rest, possibly in the past

    def __len__(self) -> int:
        """Return the number of ready keys, including delayed keys that were due at the last `take`."""
        return len(self._ready)

    def add(self, key: K) -> None:
        """Queue `key`; a key that is already queued keeps its position."""
        if key in self._running:
            self._changed.add(key)
        elif key in self._resting:
            self.add_at(key, self._resting[key])
        elif key not in self._held:
            self._ready.add(key)

    def add_at(self, key: K, moment: float) -> None:
        """Queue `key` at `moment`, unless it is already due earlier."""
        if key not in self._held:
            self._delays.put(key, moment)

    def take(self, now: float) -> K | None:
        """Return the next key or None; the caller must pass the key to `done` or `failed` afterwards.

        This cancels the key's delay, because its pass determines the next one.
        """
        for key in self._delays.pop(now):
            self._held.discard(key)
            self._resting.pop(key, None)
            self.add(key)
        taken = self._ready.pop()
        if taken is not None:
            self._delays.discard(taken)
            self._running.add(taken)
        return taken

    def done(self, key: K, *, rests_until: float | None = None) -> None:
        """Record a successful pass over `key`, and reset its failure count.

        The key rests until the given moment: one pass then processes all events up to it.
        """
        self._backoff.forget(key)
        if rests_until is not None:
            self._resting[key] = rests_until
        self._give_back(key)

    def failed(self, key: K, now: float, *, at_least: float = 0.0) -> float:
        """Record a failed pass over `key`; return the seconds until its retry.

        The key waits for `at_least` seconds regardless of events, because the cluster requested that delay.
        """
        delay = max(self._backoff.failed(key), at_least)
        if at_least > 0:  # the next pass covers all changes until then
            self._changed.discard(key)
            self._delays.discard(key)
        self._give_back(key)
        self.add_at(key, now + delay)
        # Only now, because add_at() ignores a held key.
        if at_least > 0:
            self._held.add(key)
        return delay

    def next_due(self) -> float | None:
        """Return the earliest time at which a delayed key becomes due, or None."""
        return self._delays.first()

    def _give_back(self, key: K) -> None:
        self._running.remove(key)
        self._ready.back(key)
        if key in self._changed:
            self._changed.remove(key)
            self.add(key)


class Delays(Generic[K]):
    """Delayed keys, and the times at which they become due."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # may hold entries replaced in _due
        self._sequence = 0

    def put(self, key: K, moment: float) -> None:
        """Make `key` due at `moment`, unless it is already due earlier."""
        if (due := self._due.get(key)) is not None and due <= moment:
            return
        self._due[key] = moment
        self._sequence += 1
        heapq.heappush(self._heap, (moment, self._sequence, key))

    def discard(self, key: K) -> None:
        """Cancel the delay of `key`, if there is one."""
        self._due.pop(key, None)

    def first(self) -> float | None:
        """Return the earliest due time, or None if there are no delayed keys."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> Iterator[K]:
        """Remove and yield the due keys, earliest first."""
        while (due := self.first()) is not None and due <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            yield key


class Backoff(Generic[K]):
    """Exponential backoff per key.

    Parameters
    ----------
    first_seconds : float
        The delay after the first failure. Each further failure doubles it.
    limit_seconds : float
        The maximum delay.
    """

    def __init__(self, first_seconds: float, limit_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._limit_seconds = limit_seconds
        self._failures: dict[K, int] = {}

    def failed(self, key: K) -> float:
        """Count a failure of `key`; return the seconds until its retry."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # 2.0 ** 1024 overflows, and no limit needs more doublings than this.
        return min(self._first_seconds * 2.0 ** min(failures, 64), self._limit_seconds)

    def forget(self, key: K) -> None:
        """Reset the failure count of `key`."""
        self._failures.pop(key, None)


class ReadyKeys(Generic[K]):
    """The keys ready for processing, ordered by priority and without duplicates.

    Parameters
    ----------
    ahead : callable
        Whether a new key has priority over those for which this is false.
    others_at_once : int or None
        How many keys without priority may be processed at the same time; unlimited if None.
    """

    def __init__(self, ahead: Callable[[K], bool], others_at_once: int | None) -> None:
        self._ahead = ahead
        self._others_at_once = others_at_once
        self._first: deque[K] = deque()  # keys with priority
        self._others: deque[K] = deque()
        self._waiting: set[K] = set()  # the keys in both queues
        self._others_out: set[K] = set()
        self._in_a_row = 0  # keys with priority taken since the last one without

    def __len__(self) -> int:
        """Return the number of ready keys."""
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Append `key` to its priority's keys; a key that is already queued keeps its position."""
        if key not in self._waiting:
            self._waiting.add(key)
            (self._first if self._ahead(key) else self._others).append(key)

    def pop(self) -> K | None:
        """Remove and return the next key, or None if no ready key may be processed now."""
        has_room = self._others_at_once is None or len(self._others_out) < self._others_at_once
        its_turn = self._others and has_room and self._in_a_row >= AHEAD_IN_A_ROW
        if self._first and not its_turn:
            self._in_a_row += 1
            key = self._first.popleft()
        elif self._others and has_room:
            self._in_a_row = 0
            key = self._others.popleft()
            self._others_out.add(key)
        else:
            return None
        self._waiting.remove(key)
        return key

    def back(self, key: K) -> None:
        """Record that a key returned by `pop` is no longer being processed."""
        self._others_out.discard(key)
