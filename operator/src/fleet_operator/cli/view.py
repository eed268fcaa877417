"""The displayed state of a run, updated by the local cluster and by progress reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import JobState, Mode, Role
from fleet_operator.cli.lines import consequence, describe_exit, names
from fleet_operator.cli.replica import ReplicaView
from fleet_operator.plan.model import PodPhase
from fleet_operator.plan.observe.progress import Progress, parse_progress

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from fleet_operator.api import FleetJob, FleetJobStatus
    from fleet_operator.local.pod import LocalPod
    from fleet_operator.plan.model import Event


class JobView:
    """The displayed state of a job and its replicas; a listener of the local cluster.

    Parameters
    ----------
    job : FleetJob
        The job at its start.
    say : callable
        Called with each line to show.
    """

    def __init__(self, job: FleetJob, say: Callable[[str], None]) -> None:
        self._say = say
        self.job = job
        self.interrupted = False
        self.replicas = {
            (role, index): ReplicaView(role, index, uses_fleet=job.spec.mode is Mode.PARAMETER_SERVER)
            for role in job.roles
            for index in range(job.replicas(role))
        }
        self._failures: list[LocalPod] = []  # pods that failed, without a planned consequence yet

    @property
    def status(self) -> FleetJobStatus:
        """The job's status."""
        return self.job.status

    @property
    def state(self) -> str:
        """The job's state in one word: Stopped if the run was stopped before the job finished."""
        state = self.status.state or JobState.PENDING
        if state.final or not self.interrupted:
            return state.value
        alive = any(each.pod is not None and not each.pod.ended for each in self.replicas.values())
        return "Stopping" if alive else "Stopped"

    @property
    def metrics(self) -> dict[str, float]:
        """The trainers' metrics by name, each from the lowest-indexed trainer that reports it."""
        merged: dict[str, float] = {}
        for replica in reversed(self.replicas.values()):
            if replica.role is Role.TRAINER and replica.progress is not None:
                merged |= replica.progress.metrics
        return merged

    def pod_changed(self, pod: LocalPod) -> None:
        """Record a change of a pod, and display it."""
        replica = self.replicas[pod.role, pod.index]
        before, replica.pod = replica.pod, pod
        if before is None or before.uid != pod.uid:
            self._new_life(replica, before, pod)
        elif pod.ended and not before.ended:
            self._ended(replica, pod)
        elif before.phase is PodPhase.PENDING and pod.phase is PodPhase.RUNNING:
            again = f" again (attempt {pod.attempt})" if replica.restarts else ""
            self._say(f"{replica.name} has started{again}: process {pod.pid}, address {pod.host}")
            replica.started_at = replica.started_at or pod.started_at
        elif pod.ready and not before.ready:
            self._say(f"{replica.name} is ready")

    def progressed(
        self, replica: ReplicaView, uid: str, progress: Progress, now: datetime | None = None
    ) -> None:
        """Store a replica's progress, unless the replica has already ended."""
        if replica.pod is not None and replica.pod.uid == uid and not replica.pod.ended:
            replica.hear(progress, now)

    def waiting(self, now: datetime) -> list[str]:
        """Return a line for each thing that replicas are waiting for, with the replicas' names."""
        groups = dict[tuple[Role, str], list[ReplicaView]]()
        for replica in self.replicas.values():
            if (what := replica.waiting(now)) is not None:
                groups.setdefault((replica.role, what), []).append(replica)
        return [f"{names(replicas)}: {what}" for (_, what), replicas in groups.items()]

    def status_written(self, before: FleetJob, after: FleetJob) -> None:
        """Record a new status, and display the consequences of failures."""
        self.job = after
        for pod in self._failures[:]:
            if (then := consequence(before, after, pod.role, pod.index)) is not None:
                self._failures.remove(pod)
                self.replicas[pod.role, pod.index].restarting = "restarting" in then
                self._say(f"{describe_exit(pod, self.job)}; {then}")
        if after.status.state is not before.status.state and after.status.state is not None:
            self._say(f"the job is {after.status.state.value}")

    def recorded(self, event: Event) -> None:
        """Display an event, unless this view already displays the same information."""
        if event.reason in ("ActionRefused", "JobRestarting"):
            self._say(event.message)

    def tell_failures(self, older_than: datetime | None = None) -> None:
        """Display failures whose consequence is not known yet, optionally only those before `older_than`."""
        for pod in self._failures[:]:
            if older_than is None or (pod.finished_at is not None and pod.finished_at < older_than):
                self._failures.remove(pod)
                self._say(describe_exit(pod, self.job))

    def _new_life(self, replica: ReplicaView, before: LocalPod | None, pod: LocalPod) -> None:
        replica.begin()
        if before is not None:
            replica.earlier.append(before)
        if before is not None and before.attempt.job != pod.attempt.job:
            replica.progress = None  # the whole job restarts, so the curve starts over

    def _ended(self, replica: ReplicaView, pod: LocalPod) -> None:
        if pod.exit_code is not None:
            replica.exit_codes.append(pod.exit_code)
        if pod.exit_code == 0:
            if (last := parse_progress(pod.message or "")) is not None:
                replica.progress = last.after(replica.progress)
            self._say(f"{replica.name} has finished")
        elif pod.deleted_at is not None or self.interrupted:
            replica.stopped = True
            self._say(f"{replica.name} was stopped (exit code {pod.exit_code})")
        else:
            self._failures.append(pod)
