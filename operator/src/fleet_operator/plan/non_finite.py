"""Which trainers end with weights that are no numbers: a job may succeed with such, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import Role
from fleet_operator.plan.pods import has_succeeded
from fleet_operator.plan.progress import parse_progress

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet_operator.plan.model import ObservedPod

__all__ = ["trainers_with_non_finite"]


def trainers_with_non_finite(pods: Iterable[ObservedPod]) -> list[int]:
    """Return the indexes of the trainers whose last words tell of NaN or infinity in their weights.

    Parameters
    ----------
    pods : iterable of ObservedPod
        The last pod of each replica. What one says that has not succeeded does not count.
    """
    told = {
        pod.index: parse_progress(pod.message or "")
        for pod in pods
        if pod.role is Role.TRAINER and has_succeeded(pod)
    }
    return sorted(index for index, progress in told.items() if progress is not None and progress.non_finite)
