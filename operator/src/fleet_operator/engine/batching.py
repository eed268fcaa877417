"""Delays a job's passes and status writes, so that one pass or write covers several changes.

Each pod changes several times between its creation and its start: it gets a node, it is initialized, and its
containers start. In a burst of jobs, most passes would handle such events, and status writes would compete
with pod creations for the API server.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from fleet_operator.api import ConditionType, JobState
from fleet_operator.plan.model import CreatePod, CreateService

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob, FleetJobStatus
    from fleet_operator.cluster import Key
    from fleet_operator.plan.model import Plan

__all__ = ["COMING_UP", "COUNTS", "FIRST", "QUIET", "StatusBatching", "debounce"]

COMING_UP = timedelta(seconds=0.1)
"""How long events may wait while all pods exist, but not all of them are running."""

COUNTS = timedelta(seconds=0.5)
"""How long a write may wait once the number of running replicas has changed, if nothing is urgent."""

QUIET = timedelta(seconds=2)
"""How long a write may wait if the number of running replicas is unchanged, because pods may soon start."""

FIRST = timedelta(seconds=0.75)
"""How long a job with pods may lack a status, so that one write can report that they exist and run."""

MOST_OBJECTS = 32
"""The maximum number of objects created before the first status, because creating more would delay it."""


def debounce(status: FleetJobStatus) -> timedelta | None:
    """Return how long events may wait after a job's last pass, or None if they must not wait.

    Before all pods exist, the next creation may depend on the latest event. Once the job runs, its end should
    be reported without delay.
    """
    comes_up = status.state in (JobState.PENDING, JobState.RESTARTING)
    return COMING_UP if comes_up and status.is_true(ConditionType.PODS_CREATED) else None


class StatusBatching:
    """Tracks how long each job's status has been waiting to be written."""

    def __init__(self) -> None:
        # When a status began to wait, and when its number of running replicas began to differ.
        self._waiting: dict[Key, tuple[float, float | None]] = {}

    def wait(self, key: Key, job: FleetJob, plan: Plan, now: float) -> timedelta | None:
        """Return how much longer a plan's status may wait, or None if it must be written now.

        Parameters
        ----------
        key : Key
        job : FleetJob
            The job with its last written status.
        plan : Plan
        now : float
            Seconds of a monotonic clock.
        """
        begins = job.status.state is None
        if plan.status == job.status or not (_only_begins(job, plan) if begins else _only_counts(plan)):
            self.forget(key)
            return None
        since, since_counts = self._waiting.get(key, (now, None))
        if _tell_of_as_many(job.status, plan.status):
            since_counts = None
        elif since_counts is None:
            since_counts = now
        self._waiting[key] = (since, since_counts)
        left = (FIRST if begins else QUIET).total_seconds() - (now - since)
        if since_counts is not None:
            left = min(left, COUNTS.total_seconds() - (now - since_counts))
        return timedelta(seconds=left) if left > 0 else None

    def hurry(self, key: Key) -> None:
        """Stop delaying a job's status write, because a pass over the job failed."""
        self._waiting[key] = (float("-inf"), None)

    def forget(self, key: Key) -> None:
        """Forget a job that was deleted or whose status has been written."""
        self._waiting.pop(key, None)


def _only_counts(plan: Plan) -> bool:
    return not (plan.urgent or plan.actions or plan.events)


def _only_begins(job: FleetJob, plan: Plan) -> bool:
    """Return whether a job's first plan only creates objects, so that its status can be written later."""
    creates = all(isinstance(action, CreatePod | CreateService) for action in plan.actions)
    few = len(plan.actions) <= MOST_OBJECTS
    # If the number of trainers may change, the status must record the one in the pods' environment.
    number_is_fixed = job.spec.trainer.max_replicas is None
    return creates and few and number_is_fixed and plan.status.state is JobState.PENDING and not plan.events


def _tell_of_as_many(one: FleetJobStatus, other: FleetJobStatus) -> bool:
    """Return whether two statuses have the same counts of running or completed replicas."""
    return _ups(one) == _ups(other)


def _ups(status: FleetJobStatus) -> tuple[str, ...]:
    """Return each role's count of running or completed replicas, as in the columns of kubectl."""
    columns = status.columns
    return tuple((column or "0").partition("/")[0] for column in (columns.pservers, columns.trainers))
