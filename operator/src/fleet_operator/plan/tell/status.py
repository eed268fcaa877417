"""Builds the status for a decision: the conditions with their reasons and messages, counts and attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    FleetJobStatus,
    JobState,
    Role,
    RoleStatus,
)
from fleet_operator.api.names import LABEL_JOB_NAME, LABEL_ROLE
from fleet_operator.plan.formats import format_indexes, stamp
from fleet_operator.plan.observe.pods import has_failed, is_active
from fleet_operator.plan.observe.progress import progress_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from fleet_operator.api import LastFailure
    from fleet_operator.plan.observe.context import Context

__all__ = ["Told", "build_status", "conditions", "only_counts_differ"]

Told = tuple[bool, str, str]  # whether a condition holds, its reason, its message

_ON_THE_WAY = frozenset({"Creating", "GangWaiting", "PodsCreated", "Starting"})
"""Reasons that normally follow each other quickly: one write can skip all but the last."""


def conditions(
    before: FleetJobStatus, told: Mapping[ConditionType, Told], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return the conditions of the next status.

    Parameters
    ----------
    before : FleetJobStatus
        The last status. Conditions that are not in `told` stay; those of other writers come last.
    told : mapping
        The conditions that are known now.
    generation : int
        The job's observed generation.
    now : datetime
        The time of changes.
    """
    result = []
    for kind in ConditionType:
        old = before.condition(kind)
        if kind not in told:
            result += [old] if old is not None else []
            continue
        holds, reason, message = told[kind]
        status = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
        same = old is not None and old.status is status
        result.append(
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=message,
                last_transition_time=old.last_transition_time if old and same else stamp(now),
                observed_generation=generation,
            )
        )
    result += [each for each in before.conditions if each.type not in tuple(ConditionType)]
    return tuple(result)


def build_status(
    context: Context,
    state: JobState,
    told: Mapping[ConditionType, Told],
    *,
    last_failure: LastFailure | None = None,
    start: datetime | None = None,
    completion: datetime | None = None,
) -> FleetJobStatus:
    """Return the job's next status, with the fields that this build does not know.

    Parameters
    ----------
    context : Context
        The job's state, with the ledger for the next status.
    state : JobState
        The job's state.
    told : mapping
        The conditions that are known now; the others are kept.
    last_failure : LastFailure, optional
        A new failure; else the previous one is kept.
    start, completion : datetime, optional
        When the job started and ended, if it has.
    """
    job, ledger, before = context.job, context.ledger, context.job.status
    roles = tuple(_role_status(context, role) for role in job.roles)
    others = tuple(each for each in before.roles if each.role not in tuple(Role))
    up = {role: _up(context, role) for role in job.roles}
    return FleetJobStatus(
        observed_generation=job.metadata.generation,
        state=state,
        conditions=conditions(before, told, generation=job.metadata.generation, now=context.now),
        pservers=f"{up[Role.PSERVER]}/{job.replicas(Role.PSERVER)}" if Role.PSERVER in up else None,
        trainers=f"{up[Role.TRAINER]}/{job.replicas(Role.TRAINER)}",
        trainer_replicas=next(each.active for each in roles if each.role == Role.TRAINER),
        selector=f"{LABEL_JOB_NAME}={job.name},{LABEL_ROLE}={Role.TRAINER.value}",
        restarts=ledger.restarts,
        failures=ledger.failures,
        incident_start=ledger.incident,
        job_restarts=ledger.job_restarts,
        unseen_restarts=ledger.unseen_restarts or None,
        not_before=ledger.not_before,
        failures_in_a_row=ledger.failures_in_a_row or None,
        quota_back_off=ledger.quota,
        start_time=start,
        completion_time=completion,
        last_failure=last_failure or before.last_failure,
        progress=progress_of(context, state),
        roles=roles + others,
        **before.extras,
    )


def only_counts_differ(one: FleetJobStatus, other: FleetJobStatus) -> bool:
    """Return whether two statuses differ only in counts, progress and messages, whose write may wait."""
    return _without_counts(one) == _without_counts(other)


def _without_counts(status: FleetJobStatus) -> FleetJobStatus:
    return status.model_copy(
        update={
            "pservers": None,
            "trainers": None,
            "trainer_replicas": None,
            "progress": None,
            "roles": tuple(_what_stays(each) for each in status.roles),
            "conditions": tuple(
                each.model_copy(update={"message": ""})
                for each in status.conditions
                if each.reason not in _ON_THE_WAY
            ),
        }
    )


def _what_stays(role: RoleStatus) -> RoleStatus:
    """Return the part of a role's status that must be written without delay, such as the completions."""
    return RoleStatus(role=role.role, restarts=role.restarts, completed_indexes=role.completed_indexes)


def _role_status(context: Context, role: Role) -> RoleStatus:
    own = context.ledger.roles[role]
    pods = [pod for replica, pod in context.replicas.present.items() if replica.role is role]
    return RoleStatus(
        role=role,
        replicas=context.job.replicas(role),
        active=sum(is_active(pod) for pod in pods),
        ready=sum(pod.ready for pod in pods),
        succeeded=len(context.completed(role)),
        failed=sum(has_failed(pod) for pod in pods),
        restarts=tuple(own.restarts[index] for index in sorted(own.restarts)),
        created_indexes=format_indexes(own.created),
        completed_indexes=format_indexes(own.completed),
        refused_indexes=format_indexes(own.refused),
        incident_indexes=format_indexes(own.failed),
        **context.job.status.role(role).extras,
    )


def _up(context: Context, role: Role) -> int:
    """Return the number of replicas of a role that are running or have completed."""
    if role is Role.PSERVER:
        return context.ready_or_completed(role)
    return sum(context.replicas.runs(each) for each in context.replicas.wanted if each.role is role)
