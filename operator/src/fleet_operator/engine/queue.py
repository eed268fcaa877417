"""The work queue: which key may be worked on now. Pure: no task, no lock, no clock of its own.

Invariants
----------
A key waits at most once (a thousand events about one job are one pass); a key is never worked on twice at
the same time (a change during a pass makes another pass after it, so nothing is lost); a key that fails
waits twice as long each time, on its own, so that one broken job never slows another; news of it may cut
that short, unless it was the cluster that asked to be left alone; a key that rests is worked on afterwards
if there was news meanwhile, and only then; and keys that go ahead of others do not keep those waiting for
ever. The moment comes in as an argument everywhere, in seconds of a clock that only grows.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

AHEAD_IN_A_ROW = 8
"""How many keys may go ahead of one that was there before them."""

K = TypeVar("K", bound="Hashable")


class WorkQueue(Generic[K]):
    """Keys to be worked on, each by one worker at a time.

    Parameters
    ----------
    backoff_seconds : float
        How long a key waits after its first failure; each further one doubles it.
    backoff_limit_seconds : float
        The longest such wait.
    ahead : callable, optional
        Whether a key, when it is added, goes ahead of those for which this is false.
    others_at_once : int, optional
        How many of those others may be worked on at the same time; all of them if absent.
    """

    def __init__(
        self,
        *,
        backoff_seconds: float = 0.1,
        backoff_limit_seconds: float = 60.0,
        ahead: Callable[[K], bool] = lambda _: False,
        others_at_once: int | None = None,
    ) -> None:
        self._backoff_seconds = backoff_seconds
        self._backoff_limit_seconds = backoff_limit_seconds
        self._ahead = ahead
        self._others_at_once = others_at_once
        self._ready: deque[K] = deque()
        self._ready_ahead: deque[K] = deque()
        self._in_a_row = 0  # how many have gone ahead since one of the others was taken
        self._queued: set[K] = set()
        self._running: set[K] = set()
        self._running_others: set[K] = set()
        self._changed: set[K] = set()  # keys that were added while they were being worked on
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # may hold entries that _due has replaced
        self._sequence = 0
        self._failures: dict[K, int] = {}
        self._held: set[K] = set()  # keys whose delay the cluster asked for: no news shortens it
        self._resting: dict[K, float] = {}  # until when news of a key has to wait; may have passed

    def __len__(self) -> int:
        """Return how many keys could be taken now, had their delays passed by the last `take`."""
        return len(self._queued)

    def add(self, key: K) -> None:
        """Let `key` be worked on as soon as possible; one that waits already stays where it is."""
        if key in self._running:
            self._changed.add(key)
        elif key in self._resting:
            self.add_at(key, self._resting[key])
        elif key not in self._queued and key not in self._held:
            self._queued.add(key)
            (self._ready_ahead if self._ahead(key) else self._ready).append(key)

    def add_at(self, key: K, moment: float) -> None:
        """Let `key` be worked on at `moment`, or earlier if it is due earlier already."""
        if key in self._held or ((due := self._due.get(key)) is not None and due <= moment):
            return
        self._due[key] = moment
        self._sequence += 1
        heapq.heappush(self._heap, (moment, self._sequence, key))

    def take(self, now: float) -> K | None:
        """Hand out the next key, or None. Whoever takes a key must give it back by `done` or `failed`.

        The key's delay ends with it: the pass that follows knows best when to look again.
        """
        self._wake(now)
        if not self._queued:
            return None
        has_room = self._others_at_once is None or len(self._running_others) < self._others_at_once
        its_turn = self._ready and has_room and self._in_a_row >= AHEAD_IN_A_ROW
        if self._ready_ahead and not its_turn:
            self._in_a_row += 1
            key = self._ready_ahead.popleft()
        elif self._ready and has_room:
            self._in_a_row = 0
            key = self._ready.popleft()
            self._running_others.add(key)
        else:
            return None
        self._queued.remove(key)
        self._due.pop(key, None)
        self._running.add(key)
        return key

    def done(self, key: K, *, rests_until: float | None = None) -> None:
        """Give `key` back after a pass that went well: its failures are forgotten.

        It rests until the moment that is given: news of it waits, and is looked at then all at once.
        """
        self._failures.pop(key, None)
        if rests_until is not None:
            self._resting[key] = rests_until
        self._give_back(key)

    def failed(self, key: K, now: float, *, at_least: float = 0.0) -> float:
        """Give `key` back after a pass that did not go well; return the seconds until the next try.

        It waits `at_least` so long, whatever happens meanwhile: the cluster asked for that.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # 2.0 ** 1024 is an overflow, and no limit needs more doublings than this.
        delay = min(self._backoff_seconds * 2.0 ** min(failures, 64), self._backoff_limit_seconds)
        delay = max(delay, at_least)
        if at_least > 0:  # the pass that follows sees all that has changed until then
            self._changed.discard(key)
            self._due.pop(key, None)
        self._give_back(key)
        self.add_at(key, now + delay)
        if at_least > 0:
            self._held.add(key)
        return delay

    def next_due(self) -> float | None:
        """Return the moment at which the first delayed key is due, or None if there is none."""
        self._drop_replaced()
        return self._heap[0][0] if self._heap else None

    def _give_back(self, key: K) -> None:
        self._running.remove(key)
        self._running_others.discard(key)
        if key in self._changed:
            self._changed.remove(key)
            self.add(key)

    def _wake(self, now: float) -> None:
        """Move the keys whose delay has passed to the ready ones."""
        while (due := self.next_due()) is not None and due <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            self._held.discard(key)
            self._resting.pop(key, None)
            self.add(key)

    def _drop_replaced(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
