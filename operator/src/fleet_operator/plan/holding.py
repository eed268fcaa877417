"""What becomes of a job that this version does not accept, or not understand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import ConditionType, JobState
from fleet_operator.api.status import STRICT
from fleet_operator.plan.acceptance import listed
from fleet_operator.plan.conditions import conditions
from fleet_operator.plan.model import Plan
from fleet_operator.plan.telling import news

if TYPE_CHECKING:
    from datetime import datetime

    from fleet_operator.api import FleetJob

__all__ = ["hold_back"]


def hold_back(job: FleetJob, now: datetime, why: str | None = None) -> Plan:
    """Leave a job and its pods as they are: nothing is created or deleted, and the status says why.

    Parameters
    ----------
    job : FleetJob
        The job, with its problems.
    now : datetime
        The time.
    why : str, optional
        What else is in the way.
    """
    before = job.status
    sentence = (
        f"{listed(job)}{f' ({why})' if why else ''}; this version of the operator leaves the job and its"
        " pods as they are: correct the job, or run the version of the operator that the definition of"
        " FleetJobs belongs to"
    )
    told = dict.fromkeys([ConditionType.ACCEPTED], (False, "NotAccepted", sentence))
    if before.state is None:
        told |= dict.fromkeys(
            [ConditionType.PODS_CREATED, ConditionType.RUNNING], (False, "NotAccepted", sentence)
        )
    status = before.model_copy(
        update={
            "observed_generation": job.metadata.generation,
            "state": before.state or JobState.PENDING,
            "field_validation": STRICT if before.is_strict else before.field_validation,
            "conditions": conditions(before, told, generation=job.metadata.generation, now=now),
        }
    )
    return Plan(status=status, events=news(before, status), urgent=status != before)
