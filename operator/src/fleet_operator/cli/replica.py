"""The state of a replica as a run displays it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleet_operator.api import Role
from fleet_operator.plan.model import PodPhase
from fleet_operator.plan.observe.progress import job_progress

if TYPE_CHECKING:
    from datetime import datetime

    from fleet_operator.api import JobProgress
    from fleet_operator.local.pod import LocalPod
    from fleet_operator.plan.observe.progress import Progress

PATIENCE_SECONDS = 5.0
"""How long after a replica's start the display begins to show what the replica is waiting for."""

SILENT_SECONDS = 60.0
"""How long a silent script is assumed to import its modules, if it is unknown whether it uses `fleet`."""

PACE_READINGS = 60
"""The number of readings, one per second, from which the pace is estimated."""

IMPORTS = "importing torch, or what else its script does before fleet.init()"


@dataclass(slots=True)
class ReplicaView:
    """The displayed state of a replica, across all its attempts."""

    role: Role
    index: int
    pod: LocalPod | None = None  # the latest attempt
    earlier: list[LocalPod] = field(default_factory=list)  # the attempts before it, as they ended
    lives: int = 0
    restarting: bool = False
    stopped: bool = False  # whether the run or the plan stopped the latest attempt
    exit_codes: list[int] = field(default_factory=list)
    started_at: datetime | None = None
    progress: Progress | None = None
    uses_fleet: bool = False  # whether the script is known to use `fleet`, and so will respond
    heard: bool = False  # whether the latest attempt has responded
    readings: deque[tuple[datetime, int]] = field(default_factory=lambda: deque(maxlen=PACE_READINGS))

    @property
    def name(self) -> str:
        """The replica's name in its job, such as trainer-1."""
        return f"{self.role.value}-{self.index}"

    @property
    def restarts(self) -> int:
        """The number of times the replica has restarted."""
        return max(0, self.lives - 1)

    @property
    def state(self) -> str:
        """The replica's state in one word."""
        pod = self.pod
        if self.restarting:
            return "Restarting"
        if pod is None:
            return "Waiting"
        if pod.phase is PodPhase.RUNNING:
            if pod.deleted_at is not None:
                return "Stopping"
            return "Starting" if not pod.ready or self._is_joining else "Running"
        if pod.phase is PodPhase.FAILED:
            return "Stopped" if self.stopped else "Failed"
        return {PodPhase.SUCCEEDED: "Succeeded"}.get(pod.phase, "Starting")

    @property
    def _is_joining(self) -> bool:
        """True if the replica is a running trainer that has not started training yet."""
        if self.role is Role.PSERVER:
            return False  # for a server, only readiness counts
        return self._waits_for is not None if self.heard else self.uses_fleet

    @property
    def _waits_for(self) -> str | None:
        return self.progress.waits_for if self.progress is not None else None

    def waiting(self, now: datetime) -> str | None:
        """Return what the replica is waiting for; None during its first seconds and if it is not waiting."""
        pod = self.pod
        if pod is None or pod.phase is not PodPhase.RUNNING or pod.deleted_at is not None:
            return None
        seconds = 0.0 if pod.started_at is None else (now - pod.started_at).total_seconds()
        if seconds < PATIENCE_SECONDS:
            return None
        if pod.ready and self.role is Role.PSERVER:
            return None
        if self.heard and self._waits_for is not None:
            return f"waiting for {self._waits_for}"
        if not pod.ready:
            return "not listening yet" if self.heard else IMPORTS
        return IMPORTS if not self.heard and (self.uses_fleet or seconds < SILENT_SECONDS) else None

    def hear(self, progress: Progress, now: datetime | None = None) -> None:
        """Store a progress report from the latest attempt."""
        self.heard = True
        self.progress = progress.after(self.progress)
        if now is not None and progress.step is not None:
            if self.readings and progress.step < self.readings[-1][1]:
                self.readings.clear()
            self.readings.append((now, progress.step))

    def begin(self) -> None:
        """Count a new attempt, and clear the state of the previous one."""
        self.lives += 1
        self.restarting = self.stopped = self.heard = False
        self.readings.clear()

    @property
    def percentage(self) -> int | None:
        """The percentage of training that the replica has completed, if the number of steps is known."""
        told = self._job_progress
        return None if told is None or self.role is not Role.TRAINER else told.percentage

    @property
    def eta_seconds(self) -> int | None:
        """The estimated seconds until the replica finishes, at the last minute's pace; None if unknown."""
        told = self._job_progress
        return None if told is None else told.eta_seconds

    @property
    def _job_progress(self) -> JobProgress | None:
        pace = None
        if self.readings:
            (earlier, before), (later, step) = self.readings[0], self.readings[-1]
            seconds = (later - earlier).total_seconds()
            pace = (step - before) / seconds if seconds > 0 else None
        return None if self.progress is None else job_progress(self.progress, steps_per_second=pace)

    def elapsed_seconds(self, now: datetime) -> float | None:
        """Return the seconds since the replica first started, up to its end; None before the start."""
        if self.started_at is None:
            return None
        finished = self.pod.finished_at if self.pod is not None else None
        return ((finished or now) - self.started_at).total_seconds()
