"""The clock, results and observer of passes over jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datetime import timedelta

    from fleet_operator.api import FleetJob
    from fleet_operator.cluster import Key
    from fleet_operator.plan.model import Action


class Clock(Protocol):
    """A clock with the time of day and monotonic time."""

    def now(self) -> datetime:
        """Return the current time with its time zone; used for plans and statuses."""

    def monotonic(self) -> float:
        """Return the monotonic time in seconds; used for delays."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        """Return the current time in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return the monotonic time in seconds."""
        return time.monotonic()


class Result(StrEnum):
    """The result of a pass."""

    GONE = "gone"  # the job is gone
    WAITING = "waiting"  # one of our writes has not been observed yet
    DONE = "done"
    CONFLICT = "conflict"  # the snapshot was stale: the next pass plans again
    FAILED = "failed"  # the pass failed, or an action was refused: the next pass tries again


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a pass and the time of the next one.

    Attributes
    ----------
    result : Result
        How it ended.
    after : timedelta, optional
        When the next pass is due even without events. After a failure, the pass may be due before the retry.
    debounce : timedelta, optional
        How long events may wait.
    at_least : timedelta, optional
        The delay that the cluster requires after a failure. Events do not shorten it.
    """

    result: Result
    after: timedelta | None = None
    debounce: timedelta | None = None
    at_least: timedelta | None = None


class Observer:
    """Hooks that are called during passes and do nothing by default; the metrics override them."""

    def passed(self, key: Key, result: Result, seconds: float) -> None:
        """Observe the end of a pass over a job, with its result and duration."""

    def status_written(self, before: FleetJob, after: FleetJob) -> None:
        """Observe a write of a job's status."""

    def applied(self, job: FleetJob, action: Action) -> None:
        """Observe a completed action."""

    def queued(self, depth: int) -> None:
        """Observe the number of keys waiting for a worker."""

    def waited(self, seconds: float) -> None:
        """Observe how long a key has waited for a worker since its first event."""
