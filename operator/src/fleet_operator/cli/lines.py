"""Formats sentences and times for the output of the commands."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fleet_operator.api import JobState
from fleet_operator.plan.decide.failures import failure_sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fleet_operator.api import FleetJob, Role
    from fleet_operator.cli.replica import ReplicaView
    from fleet_operator.local.pod import LocalPod


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def describe_exit(pod: LocalPod, job: FleetJob) -> str:
    """Return a sentence about how a failed pod ended, including the reason if it is known."""
    return failure_sentence(replace(pod.observed(), name=pod.replica), job)


def consequence(before: FleetJob, after: FleetJob, role: Role, index: int) -> str | None:
    """Return what the operator did about a replica's failure, or None if the status does not show it yet."""
    limit = after.spec.run_policy.backoff_limit
    counted = after.status.failures > before.status.failures  # a disruption is not a failure
    count = f" ({after.status.failures} of {limit})" if counted else ""
    if after.status.state is JobState.FAILED:
        return "the job fails"
    if after.status.job_restarts > before.status.job_restarts:
        return f"restarting the whole job{count}"
    if _restarts(after, role, index) > _restarts(before, role, index):
        return f"restarting{count}"
    if after.status.state is JobState.SUCCEEDED:
        return "the job has succeeded without it"
    return None


def _restarts(job: FleetJob, role: Role, index: int) -> int:
    return sum(each.count for each in job.status.ledger.role(role).restarts if each.index == index)


def describe_progress(replicas: Iterable[ReplicaView]) -> str:
    """Return a line with the progress of each replica that reports any; empty if there is none."""
    parts = []
    for replica in replicas:
        progress = replica.progress
        if progress is None or progress.step is None:
            continue
        total = "" if progress.total_steps is None else f"/{progress.total_steps}"
        loss = "" if progress.loss is None else f", loss {progress.loss:.4g}"
        rate = "" if progress.samples_per_second is None else f", {progress.samples_per_second:.0f} samples/s"
        parts.append(f"{replica.name} step {progress.step}{total}{loss}{rate}")
    return "; ".join(parts)


def names(replicas: Sequence[ReplicaView]) -> str:
    """Return the names of one role's replicas, such as "trainer-1" or "trainers 0-3 and 7"."""
    if len(replicas) == 1:
        return replicas[0].name
    spans = list[list[int]]()
    for index in sorted(replica.index for replica in replicas):
        if spans and index == spans[-1][-1] + 1:
            spans[-1][1:] = [index]
        else:
            spans.append([index])
    told = ["-".join(map(str, span)) for span in spans]
    return f"{replicas[0].role.value}s {' and '.join(filter(None, (', '.join(told[:-1]), told[-1])))}"


def clock(seconds: float) -> str:
    """Format a duration like a clock, such as 0:07, 2:05 or 1:02:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """Format a duration with units, such as 7.3 s, 2 min 05 s or 1 h 02 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
