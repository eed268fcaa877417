"""How long news of a job may wait after a pass, so that one pass answers several of them.

Between its creation and the moment at which it runs each pod tells of itself several times: it has a node, it
is initialized, its containers have begun. In a burst of jobs most passes would be made for such news.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from fleet_operator.api import ConditionType, JobState

if TYPE_CHECKING:
    from fleet_operator.api import FleetJobStatus

__all__ = ["COMING_UP", "rest"]

COMING_UP = timedelta(seconds=0.1)
"""How long news may wait while all pods are there and not all of them run."""


def rest(status: FleetJobStatus) -> timedelta | None:
    """Return how long a job may be left alone, by the status that the last pass decided on; None: not at all.

    Before all pods are there the next of them may wait for the last news, and once the job runs people wait
    for it to end.
    """
    comes_up = status.state in (JobState.PENDING, JobState.RESTARTING)
    return COMING_UP if comes_up and status.is_true(ConditionType.PODS_CREATED) else None
