"""For how long something has failed that is tried again and again, so that somebody can be told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Failing:
    """One thing that is tried again and again.

    Parameters
    ----------
    monotonic : callable
        Seconds that only grow.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since: float | None = None

    def tried(self, *, went_well: bool) -> None:
        """Note how a try has ended."""
        if went_well:
            self._since = None
        elif self._since is None:
            self._since = self._monotonic()

    @property
    def seconds(self) -> float:
        """For how long no try has gone well, from the first that did not; 0 if the last one did."""
        return 0.0 if self._since is None else self._monotonic() - self._since
