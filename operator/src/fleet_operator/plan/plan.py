"""Decides a job's next step by the first policy that applies.

Each decision is a function below. The first decision in the order of `DECISIONS` that returns a plan wins.
The rules of each policy are in its own module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fleet_operator.api import ConditionType, Gang, JobState, LastFailure, Role
from fleet_operator.plan.decide.failure_policy import (
    FailJob,
    FailReason,
    RestartJob,
    bounded,
    is_counted_disruption,
    judge,
    next_pause,
)
from fleet_operator.plan.decide.failures import (
    VANISHED,
    failure_events,
    find_failures,
    is_deactivated,
    loses_parameters,
)
from fleet_operator.plan.decide.quota import gives_back_at, with_pods_given_back, with_quota
from fleet_operator.plan.decide.run_policy import (
    deadline,
    is_satisfied,
    pending_deadline,
    pending_since,
    success_sentence,
)
from fleet_operator.plan.formats import some, stamp
from fleet_operator.plan.model import Event, Plan
from fleet_operator.plan.observe.context import context_of, is_resized, is_unseen
from fleet_operator.plan.observe.progress import trainers_with_non_finite
from fleet_operator.plan.steps import clean_up, end_job, hold, step, why_pending
from fleet_operator.plan.tell.events import scaled_sentence
from fleet_operator.plan.tell.reasons import given_back_sentence
from fleet_operator.plan.tell.status import build_status

if TYPE_CHECKING:
    from datetime import datetime

    from fleet_operator.api import FleetJob
    from fleet_operator.build import Hosts
    from fleet_operator.plan.model import Observed
    from fleet_operator.plan.observe.attempts import Ledger
    from fleet_operator.plan.observe.context import Context

__all__ = ["plan"]


def plan(job: FleetJob, observed: Observed, now: datetime, hosts: Hosts) -> Plan:
    """Decide a job's next step; a pure function without a clock, API calls or logging.

    Parameters
    ----------
    job : FleetJob
        The job; its status is the operator's entire memory of it.
    observed : Observed
        Its objects in the cluster.
    now : datetime
        The time, with a time zone.
    hosts : Hosts
        Maps each replica to its host.

    Returns
    -------
    Plan
        The status, to be written before anything else (except a job's first), the actions in order, the
        events, and when the next pass is due even without events.
    """
    context = context_of(job, observed, now, hosts)
    for decide in DECISIONS:
        if (decided := decide(context)) is not None:
            return decided
    return step(context)


def being_deleted(context: Context) -> Plan | None:
    """Do nothing for a job that is being deleted; its objects are deleted with it."""
    if context.job.metadata.deletion_timestamp is None:
        return None
    return Plan(status=context.job.status, urgent=False)


def managed_elsewhere(context: Context) -> Plan | None:
    """Do nothing for a job that another controller manages."""
    return Plan(status=context.job.status, urgent=False) if context.job.managed_elsewhere else None


def finished(context: Context) -> Plan | None:
    """Clean up after a finished job; succeeded and failed are final states."""
    before = context.job.status
    if before.state is None or not before.finished:
        return None
    status = build_status(
        context, before.state, {}, start=before.start_time, completion=before.completion_time
    )
    return clean_up(context, status)


def succeeded(context: Context) -> Plan | None:
    """End a job as succeeded once the trainers that successPolicy requires have completed."""
    policy, wanted = context.job.spec.success_policy.type, context.job.replicas(Role.TRAINER)
    resized = is_resized(before=context.job.status.role(Role.TRAINER).replicas, wanted=wanted)
    if resized and not context.job.elastic:
        return None
    replicas = context.replicas
    number = sum(each.role is Role.TRAINER for each in replicas.wanted)
    completed = context.completed(Role.TRAINER)
    if not is_satisfied(policy, replicas=number, succeeded=completed):
        return None
    late = [each.index for each in replicas.late]
    non_finite = trainers_with_non_finite({**replicas.departed, **replicas.present}.values())
    sentence = success_sentence(
        policy, replicas=number, succeeded=completed, late=late, non_finite=non_finite
    )
    return end_job(context, JobState.SUCCEEDED, "TrainersCompleted", sentence)


def rejected(context: Context) -> Plan | None:
    """Fail a job if the API server permanently refuses one of its objects."""
    if context.observed.rejected is None:
        return None
    sentence = f"the API server refuses an object of this job: {context.observed.rejected}"
    return end_job(context, JobState.FAILED, FailReason.POD_REJECTED, sentence)


def overdue(context: Context) -> Plan | None:
    """Fail a job that exceeds activeDeadlineSeconds, excluding its time in Kueue's queue."""
    if context.ledger.queued_since is not None:
        return None
    seconds = context.job.spec.run_policy.active_deadline_seconds
    end = deadline(context.job.status.start_time, seconds)
    if end is None or context.now < end:
        return None
    sentence = f"the job has not finished within runPolicy.activeDeadlineSeconds, {seconds} s"
    return end_job(context, JobState.FAILED, FailReason.DEADLINE_EXCEEDED, sentence)


def suspended(context: Context) -> Plan | None:
    """Keep a suspended job without pods; once resumed, it restarts from its checkpoint, if any."""
    if not context.job.spec.suspend:
        return None
    ledger = context.ledger.with_new_life() if context.ledger.has_begun else context.ledger
    if ledger.deactivated is not None:  # a suspension ends this: once resumed, the job queues again
        ledger = replace(ledger, deactivated=None, queued_since=None)
    return hold(context.with_ledger(ledger))


def resized(context: Context) -> Plan | None:
    """Restart a job if its desired number of trainers changes, because existing pods have the old number.

    Its PodGroup and pods that have not been observed yet also have the old number. But if no pod has been
    observed, the change is not reported as a restart. In an elastic job, the replicas need not agree on the
    number.
    """
    job, ledger = context.job, context.ledger
    if job.elastic:
        return None
    before, wanted = job.status.role(Role.TRAINER).replicas, job.replicas(Role.TRAINER)
    if not is_resized(before=before, wanted=wanted):
        return None
    context = context.with_ledger(ledger.with_new_life())
    if not ledger.has_begun:
        return step(context)
    sentence = scaled_sentence(before=before, wanted=wanted)
    return step(context, {ConditionType.RESTARTING: (True, "Scaled", sentence)})


def failed(context: Context) -> Plan | None:
    """Apply failurePolicy to failed replicas: fail the job, or restart the job or the replicas.

    The consequence of a failure does not replace that failure in the status, because the time of the original
    failure determines which failures belong to the same incident. A restart of the whole job ends the
    incident for all replicas.
    """
    failures = find_failures(context)
    if not failures:
        return None
    job, ledger = context.job, context.ledger
    lost = loses_parameters(context, failures)
    verdict = judge(
        job.failure_action,
        failures,
        rules=job.spec.failure_policy.rules,
        counted_before=ledger.failures,
        limit=job.spec.run_policy.backoff_limit,
        incident=ledger.failed_in_incident(context.now),
        together=job.starts_together or bool(context.completed(Role.PSERVER)) or lost,
        group=job.gang is Gang.KUEUE or lost,
    )
    if any(is_counted_disruption(job.spec.failure_policy.rules, each) for each in failures):
        ledger = ledger.with_disruption(context.now)
        limit = job.spec.failure_policy.disruption_limit
        verdict = bounded(verdict, disruptions=ledger.disruptions, limit=limit)
    cause = verdict.cause.record
    vanished = VANISHED if cause.reason == VANISHED else None
    last_failure = None if all(each.follows for each in failures) and job.status.last_failure else cause
    events = failure_events(failures)
    failed_now = {*verdict.own, *(each.replica for each in failures if each.follows and each.by_peer)}
    if verdict.own and isinstance(verdict, RestartJob):  # all replicas restart, so their next failures count
        failed_now |= set(context.replicas.wanted)
    ledger = ledger.with_failures(verdict.counted, failed_now, context.now).with_refused(
        (each.replica for each in failures if each.unadmitted),
        ran=filter(context.replicas.has_run, context.replicas.wanted),
    )
    if isinstance(verdict, FailJob):
        context = context.with_ledger(ledger)
        return end_job(
            context,
            JobState.FAILED,
            verdict.reason,
            verdict.sentence,
            last_failure=last_failure,
            events=events,
        )
    if isinstance(verdict, RestartJob):
        unseen = all(VANISHED in failure.reasons for failure in failures)
        fails = any(each.prolongs_pause for each in failures)
        ledger = _job_restarted(context, ledger, fails=fails, unseen=unseen)
        if is_deactivated(context):  # new pods would form a new group, which Kueue would admit in spite of it
            now = stamp(context.now)
            ledger = replace(ledger, deactivated=now, queued_since=ledger.queued_since or now)
        why = "its parameters are lost, so " if lost else ""
        restarting = (True, vanished or "JobRestarting", f"{cause.message}; {why}all replicas restart")
    else:
        failing = {each.replica for each in failures if each.prolongs_pause}
        for replica in verdict.replicas:
            ran = context.replicas.time_run(replica, context.now)
            before = ledger.failures_in_a_row_of(replica)
            in_a_row, pause = next_pause(before, fails=replica in failing, ran=ran)
            ledger = ledger.with_replica_restart(
                replica,
                stamp(context.now + pause),
                failures_in_a_row=in_a_row,
                unseen=is_unseen(context, replica),
            )
        restarting = (True, vanished or "ReplicaRestarting", f"{cause.message}; the replica is restarted")
    context = context.with_ledger(ledger)
    return step(context, {ConditionType.RESTARTING: restarting}, last_failure=last_failure, events=events)


def stranded(context: Context) -> Plan | None:
    """Restart the whole job if restarted trainers would find no servers, because the servers have succeeded.

    Their failures were reported and counted when they were observed, before the servers' end.
    """
    if not context.replicas.stranded:
        return None
    ledger = _job_restarted(context, context.ledger, fails=True)
    names = some([context.replicas.name_of(each) for each in context.replicas.stranded])
    sentence = f"{names} must be restarted, but parameter servers have completed; all replicas restart"
    context, events = context.with_ledger(ledger), (Event("Warning", "JobRestarting", sentence),)
    return step(context, {ConditionType.RESTARTING: (True, "JobRestarting", sentence)}, events=events)


def _job_restarted(context: Context, ledger: Ledger, *, fails: bool, unseen: bool = False) -> Ledger:
    """Return the ledger after a restart of the job, with a pause that grows with its failures."""
    times = (context.replicas.time_run(each, context.now) for each in context.replicas.wanted)
    longest = max((each for each in times if each is not None), default=None)
    in_a_row, pause = next_pause(ledger.failures_in_a_row, fails=fails, ran=longest)
    not_before = stamp(context.now + pause)
    return ledger.with_job_restart(not_before, failures_in_a_row=in_a_row, unseen=unseen)


def stuck(context: Context) -> Plan | None:
    """Fail a job if its replicas are not all running within pendingDeadlineSeconds.

    An elastic job needs only its servers and enough trainers. This uses the observed state, not the status.
    """
    seconds = context.job.spec.run_policy.pending_deadline_seconds
    end = pending_deadline(pending_since(context.job.status), seconds)
    if end is None or context.now < end or context.all_up or context.enough_up:
        return None
    reason, why, pod = why_pending(context)
    sentence = f"not all replicas ran within runPolicy.pendingDeadlineSeconds, {seconds} s: {why}"
    failure = LastFailure(pod=pod, reason=reason, message=sentence, time=stamp(context.now))
    return end_job(
        context, JobState.FAILED, FailReason.PENDING_DEADLINE_EXCEEDED, sentence, last_failure=failure
    )


def short_of_quota(context: Context) -> Plan | None:
    """Delete a job's pods if a quota refuses the others, so that another job can run.

    This is neither a restart nor a failure, because none of the pods has trained.
    """
    context = with_quota(context)
    due = gives_back_at(context)
    if due is None or context.now < due:
        return None
    held = [pod.name for pod in context.replicas.present.values()]
    context = with_pods_given_back(context)
    sentence = f"{some(held)}: {given_back_sentence(context)}"
    return step(context, events=(Event("Warning", "QuotaBackOff", sentence),))


DECISIONS = (
    being_deleted,
    managed_elsewhere,
    finished,
    succeeded,
    rejected,
    overdue,
    suspended,
    resized,
    failed,
    stranded,
    stuck,
    short_of_quota,
)
