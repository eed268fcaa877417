"""The end of a job, and what is left to do after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import CleanPodPolicy, ConditionType, JobState
from fleet_operator.api.names import service_name
from fleet_operator.plan.advice import advised
from fleet_operator.plan.cleanup import EXIT_PATIENCE, cleanup_at, to_clean
from fleet_operator.plan.extras import remove
from fleet_operator.plan.model import DeleteJob, DeleteService, Plan
from fleet_operator.plan.pods import is_active
from fleet_operator.plan.status import build_status
from fleet_operator.plan.step import ALL_CREATED, deletions
from fleet_operator.plan.telling import tell
from fleet_operator.plan.times import is_ahead, stamp
from fleet_operator.plan.ttl import expiry

if TYPE_CHECKING:
    from datetime import datetime

    from fleet_operator.api import FleetJobStatus, LastFailure
    from fleet_operator.plan.model import Action, Event
    from fleet_operator.plan.situation import Situation
    from fleet_operator.plan.status import Told

__all__ = ["clean_up", "end_job"]


def end_job(
    situation: Situation,
    state: JobState,
    reason: str,
    sentence: str,
    *,
    last_failure: LastFailure | None = None,
    events: tuple[Event, ...] = (),
) -> Plan:
    """End a job, and clean up at once what may be cleaned up at once.

    Parameters
    ----------
    situation : Situation
        The moment, with the ledger as it is to be remembered.
    state : JobState
        Succeeded or Failed.
    reason, sentence : str
        Why, for programs and for people.
    last_failure : LastFailure, optional
        What has ended it, where a replica has.
    events : tuple of Event
        What is to be told beside the end itself.
    """
    before = situation.job.status
    ending = ConditionType.SUCCEEDED if state is JobState.SUCCEEDED else ConditionType.FAILED
    told: dict[ConditionType, Told] = {
        ConditionType.PODS_CREATED: (False, reason, sentence) if situation.replicas.missing else ALL_CREATED,
        ConditionType.RUNNING: (False, reason, sentence),
        ending: (True, reason, advised(reason, sentence)),
    }
    if before.is_true(ConditionType.RESTARTING):
        told[ConditionType.RESTARTING] = (False, reason, sentence)
    start = before.start_time or stamp(situation.now)
    completion = stamp(situation.now)
    status = build_status(
        situation, state, told, last_failure=last_failure, start=start, completion=completion
    )
    return clean_up(situation, status, events)


def clean_up(situation: Situation, status: FleetJobStatus, events: tuple[Event, ...] = ()) -> Plan:
    """Remove what cleanPodPolicy does not leave, and the job itself when its time to live is over.

    Pods of older attempts were to go before the job ended, so they go whatever the policy says. So do those
    of trainers that came too late and have not begun to run: they would find no servers.
    """
    job, now = situation.job, situation.now
    completion = status.completion_time or stamp(now)
    policy = job.spec.run_policy
    end_of_life = expiry(completion, policy.ttl_seconds_after_finished)
    if end_of_life is not None and now >= end_of_life:
        return tell(situation, status, (DeleteJob(job.metadata.uid),), events, ())
    pods = (*situation.replicas.present.values(), *situation.replicas.ended_late)
    any_active = any(is_active(pod) for pod in pods)
    due = cleanup_at(status.state or JobState.FAILED, completion, any_active=any_active)
    looks: list[datetime | None] = [end_of_life]
    actions: tuple[Action, ...] = ()
    if not is_ahead(now, due, at_most=EXIT_PATIENCE):
        cleaned = to_clean(policy.clean_pod_policy, pods)
        if policy.clean_pod_policy is CleanPodPolicy.ALL and situation.observed.service:
            actions = (DeleteService(service_name(job.name)),)
    else:
        cleaned = ()
        looks.append(due)
    leaving, further_looks = deletions(situation, (*situation.replicas.past, *cleaned))
    surplus = remove((each for each in situation.extras if each.after_end), situation.observed)
    return tell(situation, status, (*leaving, *surplus, *actions), events, (*looks, *further_looks))
