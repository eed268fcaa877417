"""Builds the plan of a pass: for a step of an active job, for its suspension, or for its end.

A step deletes pods of older attempts, creates missing replicas, and reports the status. After the end,
cleanPodPolicy and ttlSecondsAfterFinished determine which objects are deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import CleanPodPolicy, ConditionType, JobState, Role
from fleet_operator.api.names import service_name
from fleet_operator.plan.decide.creation import Creation, create_actions, creation_of, remove
from fleet_operator.plan.decide.deletion import deletions
from fleet_operator.plan.decide.quota import AGAIN, gives_back_at, is_pausing, with_quota
from fleet_operator.plan.decide.run_policy import (
    EXIT_PATIENCE,
    cleanup_at,
    deadline,
    expiry,
    pending_deadline,
    pending_since,
    to_clean,
)
from fleet_operator.plan.formats import is_ahead, stamp
from fleet_operator.plan.model import DeleteJob, DeleteService, Plan
from fleet_operator.plan.observe.pods import is_active
from fleet_operator.plan.tell.events import tell, too_late_sentence
from fleet_operator.plan.tell.reasons import (
    advised,
    trouble,
    why_in_doubt,
    why_not_created,
    why_not_running,
    why_unended,
)
from fleet_operator.plan.tell.status import build_status

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from fleet_operator.api import FleetJobStatus, LastFailure
    from fleet_operator.plan.model import Action, Event
    from fleet_operator.plan.observe.context import Context
    from fleet_operator.plan.tell.status import ConditionChange

__all__ = ["ALL_CREATED", "clean_up", "end_job", "hold", "step", "why_pending"]

ALL_CREATED = (True, "PodsCreated", "the pods of all replicas exist")


def step(
    context: Context,
    changes: Mapping[ConditionType, ConditionChange] | None = None,
    *,
    last_failure: LastFailure | None = None,
    events: tuple[Event, ...] = (),
) -> Plan:
    """Return a plan that brings the pods one step closer to the state in the ledger.

    Parameters
    ----------
    context : Context
        The job's state, with the ledger for the next status.
    changes : mapping, optional
        The conditions that the decision has changed.
    last_failure : LastFailure, optional
        The failure that the decision has handled, if any.
    events : tuple of Event
        The decision's events.
    """
    context = with_quota(context)
    before, policy = context.job.status, context.job.spec.run_policy
    changes = {**_conditions_of_suspension(context), **(changes or {})}
    restarting = ConditionType.RESTARTING in changes or before.is_true(ConditionType.RESTARTING)
    creation = creation_of(context)
    over = context.all_up or (context.enough_up and not _is_pausing(context, creation))
    changes |= _progress(context, creation, restarted=restarting and over)
    waiting_state = JobState.RESTARTING if restarting else JobState.PENDING
    runs = over or (context.enough_up and not restarting)
    state = JobState.RUNNING if runs else waiting_state
    start = before.start_time or stamp(context.now)
    status = build_status(context, state, changes, last_failure=last_failure, start=start)
    leaving, looks = deletions(context, context.replicas.past)
    looks += [context.ledger.not_before_of(replica) for replica in creation.backed_off]
    looks += context.silent_nodes.values()
    if (gives_back := gives_back_at(context)) is not None:
        looks += [gives_back, context.now + AGAIN]
    if is_pausing(context) and context.ledger.quota is not None:
        looks.append(context.ledger.quota.not_before)
    if context.ledger.queued_since is None:
        looks.append(deadline(start, policy.active_deadline_seconds))
    looks.append(pending_deadline(pending_since(status), policy.pending_deadline_seconds))
    surplus = remove(context.extras, context.observed)
    actions = (*leaving, *surplus, *create_actions(context, creation.due))
    return tell(context, status, actions, events, looks)


def why_pending(context: Context) -> tuple[str, str, str | None]:
    """Return the reason why some replicas are not running, a message, and the pod responsible, if any."""
    creation = creation_of(context)
    not_created = why_not_created(context, backed_off=creation.backed_off, gated=creation.gated)
    waiting = why_not_running(context, not_created)
    pod = None if waiting is not_created else trouble(context)
    return *waiting, pod.name if pod else None


def hold(context: Context) -> Plan:
    """Return a plan that deletes the pods of a suspended job."""
    sentence = "spec.suspend is true"
    pods = (*context.replicas.past, *context.replicas.present.values())
    stays = why_unended(context, pods)
    held = stays.sentence if stays is not None else "no pod of this job runs until it is false"
    changes: dict[ConditionType, ConditionChange] = {
        ConditionType.PODS_CREATED: (False, "Suspended", sentence),
        ConditionType.RUNNING: (False, "Suspended", sentence),
        ConditionType.SUSPENDED: (True, "Suspended", f"{sentence}: {held}"),
    }
    if context.job.status.is_true(ConditionType.RESTARTING):
        changes[ConditionType.RESTARTING] = (False, "Suspended", sentence)
    leaving, looks = deletions(context, pods)
    surplus = remove((each for each in context.extras if each.while_held), context.observed)
    status = build_status(context, JobState.SUSPENDED, changes)
    return tell(context, status, (*leaving, *surplus), (), looks)


def _is_pausing(context: Context, creation: Creation) -> bool:
    """Return whether a replica is between two attempts: its old pod remains, or its next pod is delayed."""
    replicas = context.replicas
    leaving = {pod.name for pod in replicas.past}
    return bool(creation.backed_off) or any(replicas.name_of(each) in leaving for each in replicas.missing)


def _progress(
    context: Context, creation: Creation, *, restarted: bool
) -> dict[ConditionType, ConditionChange]:
    """Return the conditions that show whether all pods exist and run, and whether a restart is over."""
    waiting = why_not_created(context, backed_off=creation.backed_off, gated=creation.gated)
    changes: dict[ConditionType, ConditionChange] = {}
    if waiting is None:
        changes[ConditionType.PODS_CREATED] = ALL_CREATED
    else:
        changes[ConditionType.PODS_CREATED] = (False, waiting.reason, waiting.sentence)
    if not (context.all_up or context.enough_up):
        changes[ConditionType.RUNNING] = (False, *why_not_running(context, waiting))
        return changes
    if context.all_up:
        sentence = f"all {len(context.replicas.wanted)} replicas run or have completed"
        sentence += too_late_sentence(asked=context.asked, had=context.job.replicas(Role.TRAINER))
    else:
        why = why_not_running(context, waiting).sentence
        sentence = f"the servers and at least trainer.minReplicas trainers run; not all replicas do: {why}"
    changes[ConditionType.RUNNING] = (True, *(why_in_doubt(context) or ("ReplicasRunning", sentence)))
    if restarted:
        changes[ConditionType.RESTARTING] = (False, "Restarted", sentence)
    return changes


def _conditions_of_suspension(context: Context) -> dict[ConditionType, ConditionChange]:
    if context.job.status.condition(ConditionType.SUSPENDED) is None:
        return {}
    return {ConditionType.SUSPENDED: (False, "Resumed", "spec.suspend is false")}


def end_job(
    context: Context,
    state: JobState,
    reason: str,
    sentence: str,
    *,
    last_failure: LastFailure | None = None,
    events: tuple[Event, ...] = (),
) -> Plan:
    """Return a plan that ends a job and starts its cleanup.

    Parameters
    ----------
    context : Context
        The job's state, with the ledger for the next status.
    state : JobState
        Succeeded or Failed.
    reason, sentence : str
        The machine-readable reason, and the message.
    last_failure : LastFailure, optional
        The failure that ended it, if a replica caused it.
    events : tuple of Event
        Events in addition to the event about the end.
    """
    before = context.job.status
    ending = ConditionType.COMPLETE if state is JobState.SUCCEEDED else ConditionType.FAILED
    changes: dict[ConditionType, ConditionChange] = {
        ConditionType.PODS_CREATED: (False, reason, sentence) if context.replicas.missing else ALL_CREATED,
        ConditionType.RUNNING: (False, reason, sentence),
        ending: (True, reason, advised(reason, sentence)),
    }
    if before.is_true(ConditionType.RESTARTING):
        changes[ConditionType.RESTARTING] = (False, reason, sentence)
    start = before.start_time or stamp(context.now)
    completion = stamp(context.now)
    status = build_status(
        context, state, changes, last_failure=last_failure, start=start, completion=completion
    )
    return clean_up(context, status, events)


def clean_up(context: Context, status: FleetJobStatus, events: tuple[Event, ...] = ()) -> Plan:
    """Return a plan that deletes the pods selected by cleanPodPolicy, and the job once it has expired.

    Pods of older attempts are deleted regardless of the policy. So are pods of trainers that were created too
    late and have not started, because they would find no servers.
    """
    job, now = context.job, context.now
    completion = status.completion_time or stamp(now)
    policy = job.spec.run_policy
    end_of_life = expiry(completion, policy.ttl_seconds_after_finished)
    if end_of_life is not None and now >= end_of_life:
        return tell(context, status, (DeleteJob(job.metadata.uid),), events, ())
    pods = (*context.replicas.present.values(), *context.replicas.ended_late)
    any_active = any(is_active(pod) for pod in pods)
    due = cleanup_at(status.state or JobState.FAILED, completion, any_active=any_active)
    looks: list[datetime | None] = [end_of_life]
    actions: tuple[Action, ...] = ()
    if not is_ahead(now, due, at_most=EXIT_PATIENCE):
        cleaned = to_clean(policy.clean_pod_policy, pods)
        if policy.clean_pod_policy is CleanPodPolicy.ALL and context.observed.service:
            actions = (DeleteService(service_name(job.name)),)
    else:
        cleaned = ()
        looks.append(due)
    leaving, further_looks = deletions(context, (*context.replicas.past, *cleaned))
    surplus = remove((each for each in context.extras if each.after_end), context.observed)
    return tell(context, status, (*leaving, *surplus, *actions), events, (*looks, *further_looks))
