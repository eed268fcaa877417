"""What a person sees of one replica of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleet_operator.plan.model import PodPhase

if TYPE_CHECKING:
    from datetime import datetime

    from fleet_operator.api import Role
    from fleet_operator.cluster.local_pod import LocalPod
    from fleet_operator.plan.progress import Progress


@dataclass(slots=True)
class ReplicaView:
    """One replica, through all of its lives."""

    role: Role
    index: int
    pod: LocalPod | None = None  # the newest life
    lives: int = 0
    restarting: bool = False
    exit_codes: list[int] = field(default_factory=list)
    started_at: datetime | None = None
    progress: Progress | None = None

    @property
    def name(self) -> str:
        """The replica's name within its job, such as trainer-1."""
        return f"{self.role.value}-{self.index}"

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(0, self.lives - 1)

    @property
    def state(self) -> str:
        """Its state in one word or two."""
        pod = self.pod
        if self.restarting:
            return "Restarting"
        if pod is None:
            return "Waiting"
        if pod.phase is PodPhase.RUNNING:
            if pod.deleted_at is not None:
                return "Stopping"
            return "Running" if pod.ready else "Starting"
        if pod.phase is PodPhase.FAILED:
            return f"Failed ({pod.exit_code})"
        return {PodPhase.SUCCEEDED: "Succeeded"}.get(pod.phase, "Starting")

    def elapsed_seconds(self, now: datetime) -> float | None:
        """Return how long it has been running, from its first start."""
        if self.started_at is None:
            return None
        finished = self.pod.finished_at if self.pod is not None else None
        return ((finished or now) - self.started_at).total_seconds()
