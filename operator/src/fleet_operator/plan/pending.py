"""runPolicy.pendingDeadlineSeconds: how long a job may wait for all of its replicas to run."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from fleet_operator.api import ConditionStatus, ConditionType

if TYPE_CHECKING:
    from fleet_operator.api import FleetJobStatus

__all__ = ["not_running_since", "pending_deadline", "pending_since"]


def not_running_since(status: FleetJobStatus) -> datetime | None:
    """Return since when not all replicas of a job run, whatever was restarted meanwhile; None as below."""
    running, resumed = status.condition(ConditionType.RUNNING), status.condition(ConditionType.SUSPENDED)
    if running is None or running.status is not ConditionStatus.FALSE:
        return None
    if resumed is None:
        return running.last_transition_time
    return max(running.last_transition_time, resumed.last_transition_time)


def pending_since(status: FleetJobStatus) -> datetime | None:
    """Return since when not all replicas of a job run, by its status; None if they do, or if it has none.

    A job that was resumed waits from then on. After a restart it waits anew, from the end of the pause before
    it on: its pods have to find nodes again.
    """
    running, suspended = (
        status.condition(ConditionType.RUNNING),
        status.condition(ConditionType.SUSPENDED),
    )
    if running is None or running.status is not ConditionStatus.FALSE:
        return None
    if suspended is not None and suspended.status is ConditionStatus.TRUE:
        return None
    resumed = None if suspended is None else suspended.last_transition_time
    pauses = (each.not_before for role in status.roles for each in role.restarts)
    later = (each for each in (resumed, status.not_before, *pauses) if each is not None)
    return max((running.last_transition_time, *later))


def pending_deadline(since: datetime | None, seconds: int | None) -> datetime | None:
    """Return when all replicas must run, or None if they have all the time there is."""
    return None if since is None or seconds is None else since + timedelta(seconds=seconds)
