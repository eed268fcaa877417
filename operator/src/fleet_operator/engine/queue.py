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
    from collections.abc import Callable, Hashable, Iterator

K = TypeVar("K", bound="Hashable")

AHEAD_IN_A_ROW = 8
"""How many keys may go ahead of one that was there before them."""


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
        self._ready = ReadyKeys[K](ahead, others_at_once)
        self._delays = Delays[K]()
        self._backoff = Backoff[K](backoff_seconds, backoff_limit_seconds)
        self._running: set[K] = set()
        self._changed: set[K] = set()  # keys that were added while they were being worked on
        self._held: set[K] = set()  # keys whose delay the cluster asked for: no news shortens it
        self._resting: dict[K, float] = {}  # until when news of a key has to wait; may have passed

    def __len__(self) -> int:
        """Return how many keys could be taken now, had their delays passed by the last `take`."""
        return len(self._ready)

    def add(self, key: K) -> None:
        """Let `key` be worked on as soon as possible; one that waits already stays where it is."""
        if key in self._running:
            self._changed.add(key)
        elif key in self._resting:
            self.add_at(key, self._resting[key])
        elif key not in self._held:
            self._ready.add(key)

    def add_at(self, key: K, moment: float) -> None:
        """Let `key` be worked on at `moment`, or earlier if it is due earlier already."""
        if key not in self._held:
            self._delays.put(key, moment)

    def take(self, now: float) -> K | None:
        """Hand out the next key, or None. Whoever takes a key must give it back by `done` or `failed`.

        The key's delay ends with it: the pass that follows knows best when to look again.
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
        """Give `key` back after a pass that went well: its failures are forgotten.

        It rests until the moment that is given: news of it waits, and is looked at then all at once.
        """
        self._backoff.forget(key)
        if rests_until is not None:
            self._resting[key] = rests_until
        self._give_back(key)

    def failed(self, key: K, now: float, *, at_least: float = 0.0) -> float:
        """Give `key` back after a pass that did not go well; return the seconds until the next try.

        It waits `at_least` so long, whatever happens meanwhile: the cluster asked for that.
        """
        delay = max(self._backoff.failed(key), at_least)
        if at_least > 0:  # the pass that follows sees all that has changed until then
            self._changed.discard(key)
            self._delays.discard(key)
        self._give_back(key)
        self.add_at(key, now + delay)
        if at_least > 0:
            self._held.add(key)
        return delay

    def next_due(self) -> float | None:
        """Return the moment at which the first delayed key is due, or None if there is none."""
        return self._delays.first()

    def _give_back(self, key: K) -> None:
        self._running.remove(key)
        self._ready.back(key)
        if key in self._changed:
            self._changed.remove(key)
            self.add(key)


class Delays(Generic[K]):
    """Keys that are due at a moment, each at one."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # may hold entries that _due has replaced
        self._sequence = 0

    def put(self, key: K, moment: float) -> None:
        """Have `key` due at `moment`, or earlier if it is due earlier already."""
        if (due := self._due.get(key)) is not None and due <= moment:
            return
        self._due[key] = moment
        self._sequence += 1
        heapq.heappush(self._heap, (moment, self._sequence, key))

    def discard(self, key: K) -> None:
        """Let `key` be due at no moment."""
        self._due.pop(key, None)

    def first(self) -> float | None:
        """Return the moment at which the first key is due, or None if there is none."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> Iterator[K]:
        """Return the keys that are due, in the order of their moments; they are due no more."""
        while (due := self.first()) is not None and due <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            yield key


class Backoff(Generic[K]):
    """How long each key waits after its failures in a row.

    Parameters
    ----------
    first_seconds : float
        How long after the first failure; each further one doubles it.
    limit_seconds : float
        The longest that it waits.
    """

    def __init__(self, first_seconds: float, limit_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._limit_seconds = limit_seconds
        self._failures: dict[K, int] = {}

    def failed(self, key: K) -> float:
        """Count a failure of `key`; return the seconds until its next try."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # 2.0 ** 1024 is an overflow, and no limit needs more doublings than this.
        return min(self._first_seconds * 2.0 ** min(failures, 64), self._limit_seconds)

    def forget(self, key: K) -> None:
        """Forget the failures of `key`."""
        self._failures.pop(key, None)


class ReadyKeys(Generic[K]):
    """Keys in the order in which they are handed out, each once.

    Parameters
    ----------
    ahead : callable
        Whether a key, when it is added, goes ahead of those for which this is false.
    others_at_once : int or None
        How many of those others may be out at the same time; all of them if None.
    """

    def __init__(self, ahead: Callable[[K], bool], others_at_once: int | None) -> None:
        self._ahead = ahead
        self._others_at_once = others_at_once
        self._first: deque[K] = deque()  # those that go ahead
        self._others: deque[K] = deque()
        self._waiting: set[K] = set()  # the keys in both
        self._others_out: set[K] = set()
        self._in_a_row = 0  # how many have gone ahead since one of the others was handed out

    def __len__(self) -> int:
        """Return how many keys wait."""
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Let `key` wait behind its like; one that waits already stays where it is."""
        if key not in self._waiting:
            self._waiting.add(key)
            (self._first if self._ahead(key) else self._others).append(key)

    def pop(self) -> K | None:
        """Hand out the next key, or None: no key waits, or none of the others may be out as well."""
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
        """Take note that a key that was handed out is out no more."""
        self._others_out.discard(key)
