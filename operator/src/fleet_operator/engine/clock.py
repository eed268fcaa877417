"""Time comes in as an argument, so that a test owns it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Two readings of one clock: what people see, and what never jumps."""

    def now(self) -> datetime:
        """Return the time of day, with its zone: what plans and statuses are made of."""

    def monotonic(self) -> float:
        """Return seconds that only grow: what delays are measured with."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        """Return the time of day in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds since some moment in the past."""
        return time.monotonic()
