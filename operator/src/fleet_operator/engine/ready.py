"""Which of the keys that may be worked on comes next: the first, but some go ahead of the others."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["ReadyKeys"]

AHEAD_IN_A_ROW = 8
"""How many keys may go ahead of one that was there before them."""

K = TypeVar("K", bound="Hashable")


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
