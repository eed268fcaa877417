"""One life of a replica on this machine: what was built, how far it is, and what a plan sees of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleet_operator.cluster.local_env import main_container
from fleet_operator.cluster.observe import job_key
from fleet_operator.plan.model import Attempt, ObservedPod, PodPhase

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from pathlib import Path

    from fleet_operator.api import Role

GRACE_SECONDS = 30
"""terminationGracePeriodSeconds where the pod has none."""


@dataclass(frozen=True, slots=True)
class LocalPod:
    """One life of a replica on this machine."""

    manifest: Mapping[str, Any]
    uid: str
    role: Role
    index: int
    attempt: Attempt
    host: str
    log: Path
    termination_log: Path
    created_at: datetime
    probed_port: int | None = None  # it is ready once it listens there; None: as soon as it runs
    log_start: int = 0  # where this life begins in the log
    phase: PodPhase = PodPhase.PENDING
    ready: bool = False
    pid: int | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    deleted_at: datetime | None = None
    exit_code: int | None = None
    reason: str | None = None
    message: str | None = None

    @property
    def name(self) -> str:
        """The pod's name."""
        return str(self.manifest["metadata"]["name"])

    @property
    def replica(self) -> str:
        """The replica's name within its job, such as trainer-1."""
        return f"{self.role.value}-{self.index}"

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def grace_seconds(self) -> int:
        """How long its process may take to end after SIGTERM."""
        seconds = self.manifest["spec"].get("terminationGracePeriodSeconds")
        return GRACE_SECONDS if seconds is None else int(seconds)

    def observed(self) -> ObservedPod:
        """Return what a plan sees of it."""
        _, container = main_container(self.manifest["spec"])
        return ObservedPod(
            name=self.name,
            uid=self.uid,
            role=self.role,
            index=self.index,
            attempt=self.attempt,
            phase=self.phase,
            ready=self.ready,
            deleted_at=self.deleted_at,
            created_at=self.created_at,
            started_at=self.started_at,
            finished_at=self.finished_at,
            container=container["name"],
            exit_code=self.exit_code,
            reason=self.reason,
            message=self.message,
            node="localhost",
            key=job_key(self.manifest),
        )
