"""Failure policy: what the failed replicas of one moment lead to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from fleet_operator.api import FailureAction
from fleet_operator.plan.failure import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleet_operator.plan.failure import Failure
    from fleet_operator.plan.ledger import Replica

__all__ = ["FailJob", "FailReason", "RestartJob", "RestartReplicas", "Verdict", "judge"]


class FailReason(StrEnum):
    """Why a job has failed, in a word."""

    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    BAD_CONFIGURATION = "BadConfiguration"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    POD_REJECTED = "PodRejected"
    REPLICA_FAILED = "ReplicaFailed"


@dataclass(frozen=True, slots=True)
class FailJob:
    """The job has failed."""

    counted: int
    cause: Failure
    reason: FailReason
    sentence: str


@dataclass(frozen=True, slots=True)
class RestartJob:
    """All replicas start anew."""

    counted: int  # failures to count against the limit
    cause: Failure


@dataclass(frozen=True, slots=True)
class RestartReplicas:
    """The replicas that failed start again, the others go on."""

    counted: int
    cause: Failure
    replicas: tuple[Replica, ...]


Verdict = FailJob | RestartJob | RestartReplicas


def judge(
    action: FailureAction,
    failures: Sequence[Failure],
    *,
    counted_before: int,
    limit: int,
    together: bool,
) -> Verdict:
    """Decide what failures lead to.

    Parameters
    ----------
    action : FailureAction
        The job's policy.
    failures : sequence of Failure
        At least one, all seen at the same moment.
    counted_before, limit : int
        Failures counted so far, and runPolicy.backoffLimit.
    together : bool
        Whether replicas can only be started all together: in mode Collective, and once a parameter server
        has completed, because a trainer that starts again would find no server.

    Notes
    -----
    A wrong configuration is found before any work and stays wrong however often it is tried, so it fails the
    job at once under every policy. A disruption is nobody's failure: what it ended is replaced under every
    policy, and it never counts. The restart of a whole job counts once, however many replicas had failed.
    """
    own = [failure for failure in failures if failure.counts]
    cause = next(iter(own), failures[0])
    for failure in own:
        if failure.kind is Kind.BAD_CONFIGURATION:
            hint = "; trying again would not help, correct the job and create it again"
            return FailJob(len(own), failure, FailReason.BAD_CONFIGURATION, f"{failure.told.message}{hint}")
    if own and action is FailureAction.FAIL_JOB:
        sentence = f"{cause.told.message}; failurePolicy FailJob allows no restart"
        return FailJob(len(own), cause, FailReason.REPLICA_FAILED, sentence)
    whole = (
        together
        or action is FailureAction.RESTART_JOB
        or any(failure.kind is Kind.STATE_LOST for failure in own)
    )
    counted = min(1, len(own)) if whole else len(own)
    if counted and counted_before + counted > limit:
        sentence = (
            f"{cause.told.message}; this is failure {counted_before + counted},"
            f" and runPolicy.backoffLimit is {limit}"
        )
        return FailJob(counted, cause, FailReason.BACKOFF_LIMIT_EXCEEDED, sentence)
    if whole:
        return RestartJob(counted, cause)
    return RestartReplicas(counted, cause, tuple(failure.replica for failure in failures))
