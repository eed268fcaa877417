"""Implements successPolicy, and the deadlines and the cleanup of runPolicy."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from fleet_operator.api import CleanPodPolicy, ConditionStatus, ConditionType, JobState, SuccessPolicyType
from fleet_operator.plan.formats import format_indexes
from fleet_operator.plan.observe.pods import is_active

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from fleet_operator.api import FleetJobStatus
    from fleet_operator.plan.model import ObservedPod

__all__ = [
    "EXIT_PATIENCE",
    "cleanup_at",
    "deadline",
    "expiry",
    "is_satisfied",
    "not_running_since",
    "pending_deadline",
    "pending_since",
    "success_sentence",
    "to_clean",
]

EXIT_PATIENCE = timedelta(seconds=30)


def is_satisfied(policy: SuccessPolicyType, *, replicas: int, succeeded: Collection[int]) -> bool:
    """Return whether the success of the given trainers satisfies a successPolicy; servers do not count."""
    return {
        SuccessPolicyType.ALL: len(succeeded) == replicas,
        SuccessPolicyType.ANY: len(succeeded) > 0,
        SuccessPolicyType.RANK_ZERO: 0 in succeeded,
    }[policy]


def success_sentence(
    policy: SuccessPolicyType,
    *,
    replicas: int,
    succeeded: Collection[int],
    late: Collection[int] = (),
    non_finite: Collection[int] = (),
) -> str:
    """Return a sentence that explains why the job succeeded, with remarks about late trainers and NaN.

    Parameters
    ----------
    policy : SuccessPolicyType
    replicas : int
        The number of trainers.
    succeeded : collection of int
        The trainers that have completed, by index.
    late : collection of int
        The trainers that started too late to join.
    non_finite : collection of int
        The trainers whose weights hold NaN or infinity at the end.
    """
    sentence = _success_sentence(policy, replicas=replicas, succeeded=succeeded)
    if late:
        sentence += f"; {_trainers(late)} started too late to join"
    if non_finite:
        sentence += f"; but {_trainers(non_finite)} ended with NaN or infinity in the weights"
    return sentence


def _trainers(indexes: Collection[int]) -> str:
    return f"trainers {format_indexes(indexes)}" if len(indexes) > 1 else f"trainer {min(indexes)}"


def _success_sentence(policy: SuccessPolicyType, *, replicas: int, succeeded: Collection[int]) -> str:
    if policy is SuccessPolicyType.RANK_ZERO:
        return "trainer 0 has completed, as successPolicy RankZero requires"
    if policy is SuccessPolicyType.ANY:
        return f"trainer {min(succeeded)} has completed, as successPolicy Any requires"
    return "the trainer has completed" if replicas == 1 else f"all {replicas} trainers have completed"


def deadline(start: datetime | None, seconds: int | None) -> datetime | None:
    """Return the time by which the job must finish, or None for a job without a deadline.

    The time includes restarts and waiting, but not the time in Kueue's queue. It starts over when a suspended
    job is resumed.
    """
    return None if start is None or seconds is None else start + timedelta(seconds=seconds)


def not_running_since(status: FleetJobStatus) -> datetime | None:
    """Return since when Running is False, but not from before a resumption; None if it is not False."""
    running, resumed = status.condition(ConditionType.RUNNING), status.condition(ConditionType.SUSPENDED)
    if running is None or running.status is not ConditionStatus.FALSE:
        return None
    if resumed is None:
        return running.last_transition_time
    return max(running.last_transition_time, resumed.last_transition_time)


def pending_since(status: FleetJobStatus) -> datetime | None:
    """Return since when a job has been waiting for replicas to run, or None if it is not waiting.

    For a resumed job, the time starts when it is resumed. After a restart, it starts at the end of the pause,
    because the pods have to be scheduled again. The time in Kueue's queue does not count.
    """
    if status.ledger.queued_since is not None:
        return None
    running, suspended = (
        status.condition(ConditionType.RUNNING),
        status.condition(ConditionType.SUSPENDED),
    )
    if running is None or running.status is not ConditionStatus.FALSE:
        return None
    if suspended is not None and suspended.status is ConditionStatus.TRUE:
        return None
    resumed = None if suspended is None else suspended.last_transition_time
    pauses = (each.not_before for role in status.ledger.roles.values() for each in role.restarts)
    moments = (resumed, status.ledger.not_before, status.ledger.admitted, *pauses)
    later = (each for each in moments if each is not None)
    return max((running.last_transition_time, *later))


def pending_deadline(since: datetime | None, seconds: int | None) -> datetime | None:
    """Return the time by which all replicas must run, or None for a job without a deadline."""
    return None if since is None or seconds is None else since + timedelta(seconds=seconds)


def cleanup_at(state: JobState, completion: datetime, *, any_active: bool) -> datetime:
    """Return the time from which cleanPodPolicy applies to a finished job.

    After a success, the servers know that every trainer has completed, and are about to exit by themselves.
    The same may hold for trainers that do not count. After a failure, no replica has anything left to do.
    """
    if state is JobState.SUCCEEDED and any_active:
        return completion + EXIT_PATIENCE
    return completion


def to_clean(policy: CleanPodPolicy, pods: Iterable[ObservedPod]) -> tuple[ObservedPod, ...]:
    """Return the pods that a cleanPodPolicy deletes."""
    if policy is CleanPodPolicy.NONE:
        return ()
    return tuple(pod for pod in pods if policy is CleanPodPolicy.ALL or is_active(pod))


def expiry(completion: datetime | None, seconds: int | None) -> datetime | None:
    """Return the time at which a finished job is to be deleted, or None if it is kept."""
    return None if completion is None or seconds is None else completion + timedelta(seconds=seconds)
