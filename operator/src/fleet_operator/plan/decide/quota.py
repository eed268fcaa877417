"""Back-off under a quota: a job releases its pods if a quota refuses the rest of them.

Two jobs that share a quota could each hold half of their pods and wait for each other forever. So if a quota
refuses some pods of a job, the job releases its other pods, waits, and requests all of them again. The
holding and waiting times vary by job and attempt, so that jobs do not act in lockstep. The waiting times
grow.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING

from fleet_operator.api import Gang, Mode, QuotaBackOff, Role, SyncMode
from fleet_operator.plan.formats import is_ahead, stamp

if TYPE_CHECKING:
    from datetime import datetime

    from fleet_operator.plan.observe.context import Context

__all__ = ["PATIENCE", "gives_back_at", "is_pausing", "with_pods_given_back", "with_quota"]

PATIENCE = timedelta(seconds=20)
"""The minimum time for which a job holds its pods while a quota refuses others, and the minimum pause."""

AGAIN = timedelta(seconds=5)
"""How often a job that holds pods requests the missing ones: another job may have released its pods."""

LONGEST = timedelta(minutes=10)
"""The maximum pause before a job requests its released pods again."""


def with_quota(context: Context) -> Context:
    """Record in the ledger since when a quota has been refusing some of a job's pods.

    The ledger must be that of the next status, because it determines which pods the job holds.
    """
    ledger, known = context.ledger, context.ledger.quota
    if known is None and not context.observed.over_quota:
        return context
    if _has_had_all(context):
        return context.with_ledger(replace(ledger, quota=None))
    known = known or QuotaBackOff()
    holds = context.observed.over_quota and _may_give_back(context)
    since = (known.refused_since or stamp(context.now)) if holds else None
    return context.with_ledger(replace(ledger, quota=known.model_copy(update={"refused_since": since})))


def gives_back_at(context: Context) -> datetime | None:
    """Return when a job releases its pods; None if no quota refuses pods or the job has no pods."""
    known = context.ledger.quota
    if known is None or known.refused_since is None:
        return None
    return known.refused_since + PATIENCE * (1 + _share(context))


def with_pods_given_back(context: Context) -> Context:
    """Return the context after the job has released its pods, as after a restart.

    Nothing was trained since the latest restart. A training run that began earlier, before pods vanished
    unobserved, is therefore still the current one.
    """
    ledger = context.ledger
    times = ledger.quota.times if ledger.quota is not None else 0
    pause = min(PATIENCE * 2 ** min(times, 16), LONGEST / 2) * (1 + _share(context))
    quota = QuotaBackOff(times=times + 1, not_before=stamp(context.now + pause))
    unseen = ledger.unseen_restarts + 1 if ledger.unseen_restarts else 0
    return context.with_ledger(replace(ledger.with_new_life(), quota=quota, unseen_restarts=unseen))


def is_pausing(context: Context) -> bool:
    """Return whether a job has released its pods and is waiting before it requests them again."""
    quota = context.ledger.quota
    if quota is None or quota.not_before is None:
        return False
    return is_ahead(context.now, quota.not_before, at_most=LONGEST)


def _has_had_all(context: Context) -> bool:
    """Return whether the job has had enough pods to run since its latest restart."""
    replicas, ledger = context.replicas, context.ledger
    had = [
        each
        for each in replicas.wanted
        if each.index in ledger.roles[each.role].created
        or ledger.has_completed(each)
        or ledger.is_replaced(each)
    ]
    trainers = sum(each.role is Role.TRAINER for each in had)
    all_servers = len(had) - trainers == context.job.replicas(Role.PSERVER)
    return all_servers and trainers >= context.job.least_trainers


def _may_give_back(context: Context) -> bool:
    """Return whether a job has pods that cannot train without its missing pods.

    Only Sync and mode Collective wait for every trainer. Otherwise the existing trainers train.
    """
    job, replicas = context.job, context.replicas
    if job.gang is not Gang.NONE or not replicas.present:
        return False
    trainers = [each for each in replicas.wanted if each.role is Role.TRAINER]
    if any(context.ledger.has_completed(each) for each in trainers):
        return False
    together = job.spec.mode is Mode.COLLECTIVE or job.spec.sync_mode is SyncMode.SYNC
    return together or not any(replicas.has_started(each) for each in trainers)


def _share(context: Context) -> float:
    """Return a pseudo-random number from 0 to 1 that changes with each restart of a job.

    The number is derived from a cryptographic hash. With CRC-32, the checksums of two jobs would always
    differ by the same bits, so two jobs that request their pods at the same time once would do so after every
    restart.
    """
    seed = f"{context.job.metadata.uid} {context.ledger.job_restarts}"
    return int.from_bytes(blake2b(seed.encode(), digest_size=4).digest(), "big") / 2**32
