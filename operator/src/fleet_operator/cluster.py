"""What the engine asks of a cluster, be it an API server or this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob, FleetJobStatus
    from fleet_operator.build import Hosts
    from fleet_operator.plan.model import Action, Event, Observed

KEY_BYTES = 32
"""Of the key that a life of a job gets: 256 random bits."""


class Key(NamedTuple):
    """The name of a job in a queue."""

    namespace: str
    name: str

    @classmethod
    def of(cls, job: FleetJob) -> Key:
        """Return a job's key."""
        return cls(job.metadata.namespace, job.metadata.name)

    def __str__(self) -> str:
        """Return ``namespace/name``, as logs show it."""
        return f"{self.namespace}/{self.name}"


class ClusterError(OperatorError):
    """The cluster did not do what it was asked to; the message says why. The next pass asks again."""

    transient = False
    """Whether it says nothing about what was asked: the next time may go well with nothing changed."""

    retry_after_seconds = 0.0
    """How long the cluster asks to be left alone."""


class ConflictError(ClusterError):
    """The plan is stale, because what it was decided on has changed since: look again."""


class Cluster(Protocol):
    """Reads come from memory and never wait; several writes of one job may be under way at the same time."""

    def job(self, key: Key) -> FleetJob | None:
        """Return the newest known version of a job, or None if it is gone."""

    def observe(self, job: FleetJob) -> Observed | None:
        """Return what is there for `job`, or None while that, or an own write, has not been seen yet."""

    def hosts(self, job: FleetJob) -> Hosts:
        """Return where each replica of `job` is reached."""

    async def write_status(self, job: FleetJob, status: FleetJobStatus) -> FleetJob:
        """Replace the job's status; ConflictError if `job` is not its newest version."""

    async def apply(self, job: FleetJob, action: Action) -> None:
        """Carry one action out. An action that has been carried out already is no error."""

    async def record(self, job: FleetJob, event: Event) -> None:
        """Tell people. A failure to tell is logged, never raised."""
