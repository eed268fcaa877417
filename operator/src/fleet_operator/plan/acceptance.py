"""What is wrong with a job that another version has let in: whether it runs all the same, and how it is told.

A job that has begun runs on, whatever today's rules say of it. Which one is held back instead says
`fleet_operator.api.stored`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import ConditionType

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob
    from fleet_operator.plan.conditions import Told

__all__ = ["accepted", "listed"]


def accepted(job: FleetJob) -> dict[ConditionType, Told]:
    """Return what is told of a job that runs; of one with which all is and was well that is nothing."""
    if job.problems and not job.status.finished:
        sentence = (
            f"the job runs on, though this version of the operator would refuse it: {listed(job)}; correct"
            " this before the job is created again"
        )
        return {ConditionType.ACCEPTED: (True, "AcceptedBefore", sentence)}
    if job.status.finished or job.status.condition(ConditionType.ACCEPTED) is None:
        return {}
    return {ConditionType.ACCEPTED: (True, "Accepted", "this version of the operator has no objections")}


def listed(job: FleetJob) -> str:
    """Return a job's problems in one line."""
    return "; ".join(str(problem) for problem in job.problems)
