"""Completes a plan with its events, the urgency of its status write and the time of the next pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import ConditionType, JobState, Role
from fleet_operator.build import one_machine_sentence, overwritten_sentence, unlaunched_sentence
from fleet_operator.plan.formats import format_indexes, until
from fleet_operator.plan.model import Event, Plan
from fleet_operator.plan.observe.context import is_resized
from fleet_operator.plan.tell.status import only_counts_differ

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from fleet_operator.api import FleetJobStatus
    from fleet_operator.plan.model import Action
    from fleet_operator.plan.observe.context import Context

__all__ = ["joined_sentence", "news", "noted_sentence", "scaled_sentence", "tell", "too_late_sentence"]

# The type and the reason of the event when a condition becomes True.
_BECOMES_TRUE: dict[str, tuple[str, str]] = {
    ConditionType.RUNNING: ("Normal", "Started"),
    ConditionType.SUSPENDED: ("Normal", "Suspended"),
    ConditionType.COMPLETE: ("Normal", "Succeeded"),
    ConditionType.FAILED: ("Warning", "Failed"),
}

# Reasons that lead to a warning when they are first reported.
_WARNINGS: dict[str, tuple[str, ...]] = {
    ConditionType.PODS_CREATED: ("NameTaken", "FeatureDisabled"),
    ConditionType.RUNNING: ("NodeNotReady",),
}


def tell(
    context: Context,
    status: FleetJobStatus,
    actions: Iterable[Action],
    events: tuple[Event, ...],
    looks: Iterable[datetime | None],
) -> Plan:
    """Return a plan with its events, the urgency of its status write, and the time of the next pass.

    Parameters
    ----------
    context : Context
        The job's state.
    status : FleetJobStatus
        The job's next status. Its new conditions also become events.
    actions : iterable of Action
        The actions, in the order of execution.
    events : tuple of Event
        Additional events.
    looks : iterable of datetime or None
        The times at which another pass is needed; the earliest one is used.
    """
    before, actions = context.job.status, tuple(actions)
    return Plan(
        status=status,
        actions=actions,
        events=(*_warnings(context), *_scaled(context, status), *events, *news(before, status)),
        requeue_after=until(context.now, *looks),
        urgent=bool(actions) or not (status == before or only_counts_differ(before, status)),
    )


def _warnings(context: Context) -> tuple[Event, ...]:
    """Return warnings about probable mistakes in a new job's templates."""
    job = context.job
    if job.status.state is not None:
        return ()
    said = {
        "VariablesOverwritten": overwritten_sentence(job),
        "NoLauncher": unlaunched_sentence(job),
        "LaunchedAlone": one_machine_sentence(job),
    }
    return tuple(Event("Warning", reason, sentence) for reason, sentence in said.items() if sentence)


def _scaled(context: Context, after: FleetJobStatus) -> tuple[Event, ...]:
    """Return the event about a change in the number of trainers, if any."""
    before, wanted = (status.role(Role.TRAINER).replicas for status in (context.job.status, after))
    if after.finished or not is_resized(before=before, wanted=wanted):
        return ()
    if context.job.elastic and context.replicas.present:
        say = joined_sentence
    else:
        say = scaled_sentence if after.state is JobState.RESTARTING else noted_sentence
    return (Event("Normal", "Scaled", say(before=before, wanted=wanted)),)


def news(before: FleetJobStatus, after: FleetJobStatus) -> tuple[Event, ...]:
    """Return the events for conditions that are new in a status."""
    events = []
    for condition in after.conditions:
        old = before.condition(condition.type)
        if (
            condition.type in _BECOMES_TRUE
            and after.is_true(condition.type)
            and not before.is_true(condition.type)
        ):
            events.append(Event(*_BECOMES_TRUE[condition.type], condition.message))
        elif condition.reason == "Resumed" and before.is_true(condition.type):
            events.append(Event("Normal", "Resumed", condition.message))
        elif condition.reason in _WARNINGS.get(condition.type, ()) and (
            old is None or old.reason != condition.reason
        ):
            events.append(Event("Warning", condition.reason, condition.message))
    return tuple(events)


def scaled_sentence(*, before: int, wanted: int) -> str:
    """Return a sentence about a new number of trainers, for a job whose replicas all restart."""
    return f"trainer.replicas has changed from {before} to {wanted}: all replicas restart with the new number"


def noted_sentence(*, before: int, wanted: int) -> str:
    """Return a sentence about a new number of trainers, for a job without pods."""
    return f"trainer.replicas has changed from {before} to {wanted}: the job starts with the new number"


def joined_sentence(*, before: int, wanted: int) -> str:
    """Return a sentence about trainers that join or leave an elastic job."""
    changed = range(min(before, wanted), max(before, wanted))
    verb = "join" if wanted > before else "leave"
    who = (
        f"trainer {changed[0]} {verb}s" if len(changed) == 1 else f"trainers {format_indexes(changed)} {verb}"
    )
    return f"trainer.replicas has changed from {before} to {wanted}: {who} while the others continue"


def too_late_sentence(*, asked: int, had: int) -> str:
    """Return a clause on why an elastic job has fewer trainers than desired, or "" if it has enough."""
    if asked <= had:
        return ""
    return f"; trainer.replicas is {asked}, but no trainer is added after a trainer has completed"
