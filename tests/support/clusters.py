"""An in-memory cluster, for tests of code that uses clusters."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from fleet_operator.build import ClusterHosts
from fleet_operator.cluster import ConflictError, Key
from fleet_operator.plan.model import Observed

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob, FleetJobStatus
    from fleet_operator.build import Hosts
    from fleet_operator.plan.model import Action, Event


@dataclass
class FakeClock:
    """A clock that tests advance."""

    seconds: float = 0.0

    def now(self) -> datetime:
        """Return the time of day."""
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        """Return the seconds since the clock was created."""
        return self.seconds


@dataclass
class FakeCluster:
    """An in-memory cluster that records all actions, and fails those that a test selects."""

    jobs: dict[Key, FleetJob] = field(default_factory=dict)
    observed: Observed | None = field(default_factory=Observed)
    done: list[object] = field(default_factory=list)  # statuses, actions and events, in order
    conflict: bool = False
    refuse: Exception | None = None
    unanswered: Exception | None = None  # raised by a status write that may have succeeded

    def add(self, job: FleetJob) -> Key:
        """Add a job to the cluster."""
        key = Key(job.metadata.namespace, job.metadata.name)
        self.jobs[key] = job
        return key

    def job(self, key: Key) -> FleetJob | None:
        """Return the job with the given key, or None."""
        return self.jobs.get(key)

    def observe(self, job: FleetJob) -> Observed | None:
        """Return the observed objects that the test has set."""
        return self.observed

    def hosts(self, job: FleetJob) -> Hosts:
        """Return the DNS names of a job's replicas."""
        return ClusterHosts(job)

    async def write_status(self, job: FleetJob, status: FleetJobStatus) -> FleetJob:
        """Record a job's new status."""
        if self.unanswered is not None:
            raise self.unanswered
        if self.conflict:
            raise ConflictError("changed meanwhile")
        self.done.append(status)
        written = job.model_copy(update={"status": status})
        self.add(written)
        return written

    async def apply(self, job: FleetJob, action: Action) -> None:
        """Record an action, or fail it if the test has requested that."""
        if self.refuse is not None:
            raise self.refuse
        self.done.append(action)

    async def record(self, job: FleetJob, event: Event) -> None:
        """Record an event on a job."""
        self.done.append(event)
