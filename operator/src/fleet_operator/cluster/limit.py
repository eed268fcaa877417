"""How fast the API server may be written to: a token bucket, so that a burst of jobs is no attack on it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class TokenBucket:
    """Lets a burst through at once and what follows at a steady rate, in the order in which it came.

    Parameters
    ----------
    per_second : float
        How many may pass in a second for long.
    burst : int
        How many may pass at once after a quiet time.
    monotonic : callable
        Seconds that only grow.
    """

    def __init__(
        self, per_second: float, burst: int, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        if per_second <= 0 or burst < 1:
            raise ValueError(f"expected a positive rate and burst, found {per_second:g} and {burst}")
        self._per_second = per_second
        self._burst = burst
        self._monotonic = monotonic
        self._tokens = float(burst)  # below zero: so many wait
        self._counted_at = monotonic()

    async def take(self) -> None:
        """Wait for one's turn. Whoever is cancelled meanwhile leaves their turn unused."""
        if (wait := self.reserve()) > 0:
            await asyncio.sleep(wait)

    def reserve(self) -> float:
        """Take the next token; return the seconds until it is there."""
        now = self._monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._counted_at) * self._per_second)
        self._counted_at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_second)
