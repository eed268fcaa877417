"""Builds the status that reports a decision: conditions, counts and restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import (
    Columns,
    Condition,
    ConditionStatus,
    ConditionType,
    FleetJobStatus,
    JobState,
    Role,
    RoleStatus,
    StoredLedger,
    StoredRole,
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

__all__ = ["ConditionChange", "build_status", "conditions", "only_counts_differ"]

_TERMINAL = {JobState.SUCCEEDED: ConditionType.COMPLETE, JobState.FAILED: ConditionType.FAILED}

ConditionChange = tuple[bool, str, str]  # whether a condition holds, its reason, its message

_MESSAGE_CHARACTERS = 32_768
"""The limit of a condition's message in the API; a webhook's refusal, for example, may be longer."""

_ON_THE_WAY = frozenset({"Creating", "GangWaiting", "PodsCreated", "Starting"})
"""Reasons that normally follow each other quickly, so that a status write can skip all but the last."""


def conditions(
    before: FleetJobStatus,
    changes: Mapping[ConditionType, ConditionChange],
    *,
    generation: int,
    now: datetime,
) -> tuple[Condition, ...]:
    """Return the conditions of the next status.

    Parameters
    ----------
    before : FleetJobStatus
        The last status. Conditions that are not in `changes` stay; those of other writers come last.
    changes : mapping
        The conditions that are known now.
    generation : int
        The job's observed generation.
    now : datetime
        The time of changes.
    """
    result = []
    for kind in ConditionType:
        old = before.condition(kind)
        if kind not in changes:
            result += [old] if old is not None else []
            continue
        holds, reason, message = changes[kind]
        status = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
        same = old is not None and old.status is status
        result.append(
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=_bounded(message),
                last_transition_time=old.last_transition_time if old and same else stamp(now),
                observed_generation=generation,
            )
        )
    result += [each for each in before.conditions if each.type not in tuple(ConditionType)]
    return tuple(result)


def _bounded(message: str) -> str:
    fits = len(message) <= _MESSAGE_CHARACTERS
    return message if fits else f"{message[: _MESSAGE_CHARACTERS - 1]}…"


def build_status(
    context: Context,
    state: JobState,
    changes: Mapping[ConditionType, ConditionChange],
    *,
    last_failure: LastFailure | None = None,
    start: datetime | None = None,
    completion: datetime | None = None,
) -> FleetJobStatus:
    """Return a job's next status, keeping fields that this version of the operator does not know.

    Parameters
    ----------
    context : Context
        The job's state, with the ledger for the next status.
    state : JobState
        The job's state.
    changes : mapping
        The conditions that are known now; the others are kept.
    last_failure : LastFailure, optional
        A new failure; else the previous one is kept.
    start, completion : datetime, optional
        When the job started and ended, if it has.
    """
    job, ledger, before = context.job, context.ledger, context.job.status
    roles = tuple(_role_status(context, role) for role in job.roles)
    others = tuple(each for each in before.roles if each.role not in tuple(Role))
    up = {role: f"{_up(context, role)}/{job.replicas(role)}" for role in job.roles}
    progress = progress_of(context, state)
    return FleetJobStatus(
        observed_generation=job.metadata.generation,
        state=state,
        conditions=conditions(before, changes, generation=job.metadata.generation, now=context.now),
        terminal_state=_TERMINAL.get(state),
        start_time=start,
        completion_time=completion,
        trainer_replicas=next(each.active for each in roles if each.role == Role.TRAINER),
        selector=f"{LABEL_JOB_NAME}={job.name},{LABEL_ROLE}={Role.TRAINER.value}",
        restarts=ledger.restarts,
        job_restarts=ledger.job_restarts,
        failures=ledger.failures,
        disruptions=ledger.disruptions,
        last_failure=last_failure or before.last_failure,
        progress=progress,
        roles=roles + others,
        columns=Columns(
            pservers=up.get(Role.PSERVER),
            trainers=up[Role.TRAINER],
            progress=progress.summary if progress is not None else None,
            **before.columns.extras,
        ),
        ledger=ledger.stored(before.ledger),
        **before.extras,
    )


def only_counts_differ(one: FleetJobStatus, other: FleetJobStatus) -> bool:
    """Return whether two statuses differ only in values whose write can be delayed, such as counts."""
    return _without_counts(one) == _without_counts(other)


def _without_counts(status: FleetJobStatus) -> FleetJobStatus:
    return status.model_copy(
        update={
            "columns": Columns(),
            "trainer_replicas": None,
            "progress": None,
            "ledger": _what_stays_known(status.ledger),
            "roles": tuple(_what_stays(each) for each in status.roles),
            "conditions": tuple(
                each.model_copy(update={"message": ""})
                for each in status.conditions
                if each.reason not in _ON_THE_WAY
            ),
        }
    )


def _what_stays(role: RoleStatus) -> RoleStatus:
    """Return the parts of a role's status whose changes must be written immediately, such as completions."""
    return RoleStatus(role=role.role, completed_indexes=role.completed_indexes)


def _what_stays_known(ledger: StoredLedger) -> StoredLedger:
    """Return the parts of a ledger whose changes must be written immediately, such as restarts."""
    roles = {role: StoredRole(restarts=own.restarts) for role, own in ledger.roles.items() if own.restarts}
    return ledger.model_copy(update={"roles": roles})


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
        completed_indexes=format_indexes(own.completed),
        **context.job.status.role(role).extras,
    )


def _up(context: Context, role: Role) -> int:
    """Return how many of a role's replicas have completed, or are ready (servers) or running (trainers)."""
    if role is Role.PSERVER:
        return context.ready_or_completed(role)
    return sum(context.replicas.runs(each) for each in context.replicas.wanted if each.role is role)
