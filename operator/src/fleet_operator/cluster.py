"""The interface between the engine and a cluster, which is an API server or this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob, FleetJobStatus
    from fleet_operator.build import Hosts
    from fleet_operator.plan.model import Action, Event, Observed

KEY_BYTES = 32
"""The number of random bytes in the key that a job gets for each of its lives."""


class Key(NamedTuple):
    """The namespace and name of a job, used as its key in queues and caches."""

    namespace: str
    name: str

    @classmethod
    def of(cls, job: FleetJob) -> Key:
        """Return the key of a job."""
        return cls(job.metadata.namespace, job.metadata.name)

    def __str__(self) -> str:
        """Return ``namespace/name``, the form used in logs."""
        return f"{self.namespace}/{self.name}"


class ClusterError(OperatorError):
    """A request to the cluster failed for the reason in the message; the next pass retries it."""

    transient = False
    """Whether the cause is unrelated to the request, so that the same request may succeed later."""

    retry_after_seconds = 0.0
    """How long the cluster asks clients to wait before they retry."""


class ConflictError(ClusterError):
    """The plan is outdated, because an object on which it is based has changed."""


class Cluster(Protocol):
    """The engine's interface to a cluster: reads never block, and writes may run concurrently."""

    def job(self, key: Key) -> FleetJob | None:
        """Return the newest known version of a job, or None if the job is gone."""

    def observe(self, job: FleetJob) -> Observed | None:
        """Return the objects of `job`, or None while the cache is incomplete or older than our own writes."""

    def hosts(self, job: FleetJob) -> Hosts:
        """Return the mapping from the replicas of `job` to their hosts."""

    async def write_status(self, job: FleetJob, status: FleetJobStatus) -> FleetJob:
        """Replace the job's status; raise ConflictError if `job` is out of date."""

    async def apply(self, job: FleetJob, action: Action) -> None:
        """Execute an action, which is safe to repeat."""

    async def record(self, job: FleetJob, event: Event) -> None:
        """Record a Kubernetes event; log failures instead of raising them."""
