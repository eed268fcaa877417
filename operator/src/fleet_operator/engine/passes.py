"""A pass over one job: its clock, its outcome, and the observer that counts it."""

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


class Result(StrEnum):
    """How a pass ended."""

    GONE = "gone"  # there is no such job any more
    WAITING = "waiting"  # an own write has not been seen yet
    DONE = "done"
    CONFLICT = "conflict"  # the snapshot was stale: nothing was done
    FAILED = "failed"  # an action was refused: the next pass tries again


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a pass ended.

    Attributes
    ----------
    result : Result
        How it ended.
    after : timedelta, optional
        When to look again even if nothing happens. After a failure, too: what is due then does not wait for
        the next try.
    debounce : timedelta, optional
        How long news may wait until then.
    at_least : timedelta, optional
        How long the cluster asks to be left alone after a failure. Nothing shortens that.
    """

    result: Result
    after: timedelta | None = None
    debounce: timedelta | None = None
    at_least: timedelta | None = None


class Observer:
    """Hears of every pass and does nothing; metrics override what they count."""

    def passed(self, key: Key, result: Result, seconds: float) -> None:
        """Note that a pass over one job has ended, with `result`, after `seconds`."""

    def status_written(self, before: FleetJob, after: FleetJob) -> None:
        """Note that a job's status has been replaced."""

    def applied(self, job: FleetJob, action: Action) -> None:
        """Note that an action has been carried out."""

    def queued(self, depth: int) -> None:
        """Note how many keys wait for a worker now."""

    def waited(self, seconds: float) -> None:
        """Note how long a key has waited for a worker, from the first news of it."""
