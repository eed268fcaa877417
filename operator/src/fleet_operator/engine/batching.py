"""How long news of a job, and its status, may wait, so that one pass and one write answer several of them.

Between its creation and the moment at which it runs each pod tells of itself several times: it has a node, it
is initialized, its containers have begun. In a burst of jobs most passes would be made for such news, and it
is the writes of statuses that take the API server's time from the creation of pods.
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
"""How long news may wait while all pods are there and not all of them run."""

COUNTS = timedelta(seconds=0.5)
"""How long a write may wait when only counts have changed. With its way there it takes less than a second."""

QUIET = timedelta(seconds=2)
"""How long it may wait when no more replicas run than before: pods that are there mostly run soon."""

FIRST = timedelta(seconds=0.75)
"""How long a job may have pods and no status yet: where it runs by then, one write tells of both."""

MOST_OBJECTS = 32
"""How many objects may be made before the first status, so that it is not late because of them."""


def debounce(status: FleetJobStatus) -> timedelta | None:
    """Return how long a job may be left alone, by the status that the last pass decided on; None: not at all.

    Before all pods are there the next of them may wait for the last news, and once the job runs people wait
    for it to end.
    """
    comes_up = status.state in (JobState.PENDING, JobState.RESTARTING)
    return COMING_UP if comes_up and status.is_true(ConditionType.PODS_CREATED) else None


class StatusBatching:
    """Knows since when which statuses have been waiting."""

    def __init__(self) -> None:
        # Since when a status waits, and since when it tells of another number of replicas that run.
        self._waiting: dict[Key, tuple[float, float | None]] = {}

    def wait(self, key: Key, job: FleetJob, plan: Plan, now: float) -> timedelta | None:
        """Return how long the status of a plan may wait from now on, or None if it may wait no longer.

        Parameters
        ----------
        key : Key
        job : FleetJob
            With the status that was last written.
        plan : Plan
        now : float
            Seconds of a clock that only grows.
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
        """Let a status wait no longer: what it waited for has not come to pass."""
        self._waiting[key] = (float("-inf"), None)

    def forget(self, key: Key) -> None:
        """Know nothing of a job any more, or that its status has been written."""
        self._waiting.pop(key, None)


def _only_counts(plan: Plan) -> bool:
    return not (plan.urgent or plan.actions or plan.events)


def _only_begins(job: FleetJob, plan: Plan) -> bool:
    """Whether a job's first plan does nothing that needs to be remembered, and tells nobody anything."""
    creates = all(isinstance(action, CreatePod | CreateService) for action in plan.actions)
    few = len(plan.actions) <= MOST_OBJECTS
    # Where it may change, the status remembers how many trainers the pods were told of.
    number_is_fixed = job.spec.trainer.max_replicas is None
    return creates and few and number_is_fixed and plan.status.state is JobState.PENDING and not plan.events


def _tell_of_as_many(one: FleetJobStatus, other: FleetJobStatus) -> bool:
    """Whether two statuses tell of as many replicas that do their part."""
    return (_up(one.pservers), _up(one.trainers)) == (_up(other.pservers), _up(other.trainers))


def _up(told: str | None) -> str:
    """Return how many do their part of those that are wanted, as in ``1/2``."""
    return (told or "0").partition("/")[0]
