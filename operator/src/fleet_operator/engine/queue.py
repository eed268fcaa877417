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

from typing import TYPE_CHECKING, Generic, TypeVar

from fleet_operator.engine.delays import Backoff, Delays
from fleet_operator.engine.ready import ReadyKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

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
