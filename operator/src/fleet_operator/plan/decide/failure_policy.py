"""Implements failurePolicy: the reaction to a set of failures, and the pause before a restart.

The first rule of failurePolicy.rules that matches a failure decides about it. The pause before a restart is a
second after a disruption or a first failure, and a minute after many failures. It grows with consecutive
failures of one replica or of the whole job, but not with disruptions. After a run of `HEALTHY`, earlier
failures are forgotten, as in the kubelet's CrashLoopBackOff.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from fleet_operator.api import ExitCodeOperator, FailureAction, RuleAction
from fleet_operator.plan.decide.failures import Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fleet_operator.api import FailureRule
    from fleet_operator.plan.decide.failures import Failure
    from fleet_operator.plan.observe.attempts import Replica

__all__ = [
    "HEALTHY",
    "LONGEST",
    "FailJob",
    "FailReason",
    "RestartJob",
    "RestartReplicas",
    "Verdict",
    "backoff",
    "bounded",
    "first_match",
    "is_counted_disruption",
    "judge",
    "next_pause",
]

_MUST_BE_NAMED = (Kind.DISRUPTION, Kind.BAD_CONFIGURATION, Kind.PERMANENT, Kind.REPEATED)

LONGEST = timedelta(seconds=60)
HEALTHY = timedelta(minutes=10)
"""The run time after which earlier failures no longer prolong the pause, as for the kubelet."""

_SAME = {RuleAction(each): each for each in FailureAction}


class FailReason(StrEnum):
    """The reason why a job failed."""

    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    BAD_CONFIGURATION = "BadConfiguration"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DISRUPTION_LIMIT_EXCEEDED = "DisruptionLimitExceeded"
    PENDING_DEADLINE_EXCEEDED = "PendingDeadlineExceeded"
    PERMANENT_ERROR = "PermanentError"
    POD_REJECTED = "PodRejected"
    REPLICA_FAILED = "ReplicaFailed"


@dataclass(frozen=True, slots=True)
class FailJob:
    """The verdict that the job has failed."""

    counted: int  # how many failures count against the limit: one or none
    cause: Failure
    reason: FailReason
    sentence: str
    own: tuple[Replica, ...] = ()  # replicas whose own failures count, alone or within an incident


@dataclass(frozen=True, slots=True)
class RestartJob:
    """The verdict that all replicas must restart."""

    counted: int
    cause: Failure
    own: tuple[Replica, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartReplicas:
    """The verdict that the failed replicas must restart while the others continue."""

    counted: int
    cause: Failure
    replicas: tuple[Replica, ...]
    own: tuple[Replica, ...] = ()


Verdict = FailJob | RestartJob | RestartReplicas


_HOPELESS = {
    Kind.BAD_CONFIGURATION: FailReason.BAD_CONFIGURATION,
    Kind.PERMANENT: FailReason.PERMANENT_ERROR,
    Kind.REPEATED: FailReason.PERMANENT_ERROR,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The reaction to a single failure."""

    failure: Failure
    action: FailureAction
    counts: bool
    rule: FailureRule | None = None  # the rule that requires it


def judge(
    action: FailureAction,
    failures: Sequence[Failure],
    *,
    rules: Sequence[FailureRule] = (),
    counted_before: int,
    limit: int,
    incident: Collection[Replica] | None = None,
    together: bool,
    group: bool = False,
) -> Verdict:
    """Return the verdict on the observed failures: fail the job, restart it, or restart single replicas.

    Parameters
    ----------
    action : FailureAction
        The job's policy.
    failures : sequence of Failure
        At least one failure; all failures were observed at the same time.
    rules : sequence of FailureRule
        The job's exceptions from the policy.
    counted_before, limit : int
        The failures counted so far, and runPolicy.backoffLimit.
    incident : collection of Replica, optional
        The replicas that have failed in the current incident, if there is one.
    together : bool
        Whether replicas can only be restarted all together. This holds in mode Collective, under Kueue, once
        a server has completed, because a restarted trainer would find no server, and if a server has lost
        parameters that trainers still need.
    group : bool
        Whether `together` includes replicas that gave up waiting for peers that have not run yet.

    Notes
    -----
    The first rule that matches a failure determines the reaction. If no rule matches, a configuration error
    fails the job, because it is found before any work and retries fail the same way. So does a script that
    cannot run. A disruption is not a failure: it never counts, and the pods that it ended are replaced under
    every policy. Of several reactions the most severe one is used. Failures at the same time count once. In
    a current incident they count only if one of the replicas has failed in it before. A replica that gave up
    waiting for peers that have not run yet is restarted alone, even if replicas restart together, because
    these peers are still pulling their images and would have to start over.
    """
    answers = [_answer(action, rules, failure) for failure in failures]
    failed = [answer.failure for answer in answers if answer.counts]
    own = tuple(failure.replica for failure in failed)
    counted = int(bool(own) and (incident is None or not set(own).isdisjoint(incident)))
    for answer in answers:
        if answer.action is FailureAction.FAIL_JOB:
            return _failed(answer, counted, own)
    together = together and (group or not all(each.kind is Kind.STARTING for each in failures))
    whole = together or any(answer.action is FailureAction.RESTART_JOB for answer in answers)
    cause = min(failed, key=lambda each: each.by_peer, default=failures[0])
    if counted and counted_before + counted > limit:
        sentence = (
            f"{cause.record.message}; this is failure {counted_before + counted},"
            f" and runPolicy.backoffLimit is {limit}"
        )
        return FailJob(counted, cause, FailReason.BACKOFF_LIMIT_EXCEEDED, sentence, own)
    if whole:
        return RestartJob(counted, cause, own)
    return RestartReplicas(counted, cause, tuple(failure.replica for failure in failures), own)


def _answer(action: FailureAction, rules: Sequence[FailureRule], failure: Failure) -> Answer:
    """Return the reaction to one failure, from a matching rule, the kind of failure or the policy."""
    rule = first_match(rules, failure)
    counts = failure.counts
    if rule is not None:
        counts = counts and rule.action is not RuleAction.IGNORE
        action = _SAME.get(rule.action, FailureAction.RESTART_REPLICA)
    elif failure.kind in (Kind.DISRUPTION, Kind.STARTING):
        action = FailureAction.RESTART_REPLICA
    elif failure.kind in _HOPELESS:
        action = FailureAction.FAIL_JOB
    if failure.kind is Kind.STATE_LOST and action is FailureAction.RESTART_REPLICA:
        action = FailureAction.RESTART_JOB  # restarted alone, a server would continue from initial values
    if failure.follows and rule is None and action is FailureAction.FAIL_JOB:
        action = FailureAction.RESTART_JOB  # a disruption is not a failure
    return Answer(failure, action, counts, rule)


def _failed(answer: Answer, counted: int, own: tuple[Replica, ...]) -> FailJob:
    """Return the verdict that the job has failed, including why it is not restarted."""
    failure = answer.failure
    reason = _HOPELESS.get(failure.kind, FailReason.REPLICA_FAILED)
    if answer.rule is not None:
        said = f"rule {answer.rule.name} of failurePolicy has the action FailJob"
    elif failure.kind is Kind.BAD_CONFIGURATION:
        said = "a retry would fail again; correct the job and create it again"
    elif failure.kind is Kind.PERMANENT:
        said = "a retry would fail again"
    elif failure.kind is Kind.REPEATED:
        said = (
            "the same exception at the same line ended an earlier attempt of this run; a retry would not help"
        )
    else:
        said = "failurePolicy FailJob allows no restart"
    return FailJob(counted, failure, reason, f"{failure.record.message}; {said}", own)


def first_match(rules: Sequence[FailureRule], failure: Failure) -> FailureRule | None:
    """Return the first rule that a failure matches, or None.

    Exit codes are the main container's. Disruptions, configuration errors and scripts that cannot run have
    their own default reactions. A rule matches them only if it names their exit code, reason or message, and
    not by their role or by the exit codes that it excludes.
    """
    return next((rule for rule in rules if _matches(rule, failure)), None)


def _matches(rule: FailureRule, failure: Failure) -> bool:
    if rule.role not in (None, failure.replica.role):
        return False
    codes, reasons, patterns = rule.on_exit_codes, rule.on_reasons, rule.on_message_patterns
    names_code = codes is not None and codes.operator is ExitCodeOperator.IN
    if failure.kind in _MUST_BE_NAMED and not (names_code or reasons or patterns):
        return False
    if codes is not None and not codes.has(failure.exit_code):
        return False
    if reasons is not None and failure.reasons.isdisjoint(reasons):
        return False
    return patterns is None or any(_occurs(each, failure.message) for each in patterns)


def _occurs(pattern: str, message: str) -> bool:
    """Return whether a line of the message contains, in order, the parts of a pattern between asterisks.

    This takes linear time. A regular expression from a manifest could stop the operator for all jobs.
    """
    for line in message.splitlines():
        end = 0
        for part in pattern.split("*"):
            begin = line.find(part, end)
            if begin < 0:
                break
            end = begin + len(part)
        else:
            return True
    return False


def is_counted_disruption(rules: Sequence[FailureRule], failure: Failure) -> bool:
    """Return whether a failure is a disruption that counts, because no rule ignores it."""
    if failure.kind is not Kind.DISRUPTION:
        return False
    rule = first_match(rules, failure)
    return rule is None or rule.action is not RuleAction.IGNORE


def bounded(verdict: Verdict, *, disruptions: int, limit: int | None) -> Verdict:
    """Return the verdict, or FailJob if the number of disruptions exceeds its limit."""
    if limit is None or disruptions <= limit or isinstance(verdict, FailJob):
        return verdict
    sentence = (
        f"{verdict.cause.record.message}; disruption {disruptions} of the job exceeds"
        f" failurePolicy.disruptionLimit, {limit}"
    )
    reason = FailReason.DISRUPTION_LIMIT_EXCEEDED
    return FailJob(verdict.counted, verdict.cause, reason, sentence, verdict.own)


def backoff(failures: int) -> timedelta:
    """Return the pause after a number of consecutive failures: 1 s, 2 s, 4 s and so on, up to a minute.

    Delays of training are expensive, and failures are rarely caused by an overloaded service. So the pause
    starts below the kubelet's 10 s. With the default backoffLimit of 6, all pauses still add up to a minute.
    """
    return min(LONGEST, timedelta(seconds=2 ** min(failures - 1, 16)))


def next_pause(failures: int, *, fails: bool, ran: timedelta | None) -> tuple[int, timedelta]:
    """Return the updated number of consecutive failures, and the pause before the next start.

    Parameters
    ----------
    failures : int
        The number of consecutive failures before this end.
    fails : bool
        Whether this end is a failure, rather than a disruption or a consequence of another failure.
    ran : timedelta, optional
        How long the ended pod ran, if it did.
    """
    before = 0 if ran is not None and ran >= HEALTHY else failures
    return (before + 1, backoff(before + 1)) if fails else (before, backoff(1))
