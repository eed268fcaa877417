"""runPolicy.cleanPodPolicy: which pods a finished job leaves behind, and when the others go."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from fleet_operator.api import CleanPodPolicy, JobState
from fleet_operator.plan.pods import is_active

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet_operator.plan.model import ObservedPod

__all__ = ["EXIT_PATIENCE", "cleanup_at", "to_clean"]

EXIT_PATIENCE = timedelta(seconds=30)


def cleanup_at(state: JobState, completion: datetime, *, any_active: bool) -> datetime:
    """Return when the policy applies.

    After a success the servers have heard that every trainer has completed and are about to exit by
    themselves; so may the trainers that had no vote. After a failure nobody has anything left to do.
    """
    if state is JobState.SUCCEEDED and any_active:
        return completion + EXIT_PATIENCE
    return completion


def to_clean(policy: CleanPodPolicy, pods: Iterable[ObservedPod]) -> tuple[ObservedPod, ...]:
    """Return the pods that the policy does not leave behind."""
    if policy is CleanPodPolicy.NONE:
        return ()
    return tuple(pod for pod in pods if policy is CleanPodPolicy.ALL or is_active(pod))
