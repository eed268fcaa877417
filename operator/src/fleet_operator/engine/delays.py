"""How long keys wait: until a moment, or after a failure, longer each time. The moment is an argument."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

__all__ = ["Backoff", "Delays"]

K = TypeVar("K", bound="Hashable")


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
