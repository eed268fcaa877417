"""Deletions of our own that no watch has told of yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["UnseenDeletions"]

UNSEEN_SECONDS = 5.0
"""How long a deletion may go unseen before the pod is believed to be there still."""


class UnseenDeletions:
    """The uids of pods that we have deleted and may see for a while as if we had not.

    Parameters
    ----------
    monotonic : callable
        Seconds that only grow.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._until: dict[str, float] = {}

    def add(self, uid: str) -> None:
        """Note that a pod was deleted just now."""
        now = self._monotonic()
        self._until = {each: until for each, until in self._until.items() if until > now}
        self._until[uid] = now + UNSEEN_SECONDS

    def __contains__(self, uid: str) -> bool:
        """Whether a pod was deleted so lately."""
        return self._until.get(uid, 0.0) > self._monotonic()
