"""Pure functions that summarize FleetJobs written by any version of the operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fleet_operator.api import ConditionType, FleetJobStatus, JobState, TableStatistics

if TYPE_CHECKING:
    from collections.abc import Mapping

ABSENT = "-"
"""The placeholder of an empty table cell."""

UNSEEN = "no operator has processed it yet; is one running? (kubectl get deployments -A | grep fleet)"


@dataclass(frozen=True, slots=True)
class Summary:
    """The data of a job that the ``fleetjob`` command displays."""

    namespace: str
    name: str
    mode: str
    status: FleetJobStatus
    created: datetime | None
    backoff_limit: int | None
    generation: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Summary:
        """Parse a job, treating an invalid status as missing."""
        metadata, spec = manifest["metadata"], manifest.get("spec") or {}
        try:
            status = FleetJobStatus.model_validate(manifest.get("status") or {})
        except ValidationError:
            status = FleetJobStatus()
        created = metadata.get("creationTimestamp")
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            mode=spec.get("mode", ABSENT),
            status=status,
            created=datetime.fromisoformat(created) if created else None,
            backoff_limit=(spec.get("runPolicy") or {}).get("backoffLimit"),
            generation=metadata.get("generation", 0),
            raw=manifest,
        )

    @property
    def state(self) -> str:
        """The job's state in one word."""
        return str((self.raw.get("status") or {}).get("state") or JobState.PENDING)

    @property
    def sentence(self) -> str:
        """A sentence that explains the job's state."""
        told = self.status.explanation
        if told is None:
            return "" if (self.raw.get("status") or {}).get("state") else UNSEEN
        waits = self.status.condition(ConditionType.RUNNING)
        if self.status.state is JobState.RESTARTING and waits is not None and waits.message:
            return f"{told.message}; {waits.message}"
        return told.message

    @property
    def progress(self) -> str:
        """The training progress in short, such as 42%."""
        return self.status.progress.summary if self.status.progress is not None else ABSENT

    def age(self, now: datetime) -> str:
        """Return the time since the job was created."""
        return ABSENT if self.created is None else age((now - self.created).total_seconds())

    def line(self) -> str:
        """Return one line with all displayed values that can change."""
        status = self.status
        columns = status.columns
        counts = [f"pservers {columns.pservers}"] if columns.pservers else []
        counts += [f"trainers {columns.trainers}"] if columns.trainers else []
        counts += [self.progress] if status.progress is not None else []
        if status.progress is not None and status.progress.loss is not None:
            counts.append(f"loss {status.progress.loss:.4g}")
        counts += [f"restarts {status.restarts}"] if status.restarts else []
        said = f": {self.sentence}" if self.sentence else ""
        return f"{self.name} {self.state} {' '.join(counts)}".rstrip() + said


def details(job: Summary, now: datetime) -> list[str]:
    """Return all details of the job, one per line."""
    status = job.status
    lines = [f"{job.name} ({job.mode}) in {job.namespace}: {job.state}"]
    lines += [f"  {job.sentence}"] if job.sentence else []
    told: dict[str, str] = {}
    if (progress := status.progress) is not None:
        parts = [progress.summary]
        if progress.step is not None and progress.total_steps is not None:
            parts.append(f"step {progress.step} of {progress.total_steps}")
        parts += [f"loss {progress.loss:.6g}"] if progress.loss is not None else []
        parts += [f"about {age(progress.eta_seconds)} left"] if progress.eta_seconds is not None else []
        told["progress"] = ", ".join(parts)
        tables = [_table(table) for table in progress.tables or ()]
        told |= {"tables": "; ".join(tables)} if tables else {}
    for role in status.roles:
        counts = {"active": role.active, "ready": role.ready, "completed": role.succeeded}
        shown = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        told[f"{role.role}s"] = f"{role.replicas} wanted" + (f", {shown}" if shown else "")
    limit = "" if job.backoff_limit is None else f" of {job.backoff_limit} allowed"
    told["restarts"] = f"{status.restarts} ({status.failures} failures{limit})"
    if (failure := status.last_failure) is not None:
        told["last failure"] = failure.message
    told["age"] = job.age(now)
    width = max(map(len, told))
    lines += [f"  {name:{width}}  {value}" for name, value in told.items()]
    if status.observed_generation not in (None, job.generation):
        lines.append("  the operator has not processed the latest change of the spec yet")
    return lines


def _table(table: TableStatistics) -> str:
    told = f"{table.name} {table.rows} rows in {size(table.bytes)}"
    told += f", {table.rows_on_disk} on disk" if table.rows_on_disk else ""
    return told + (f", {table.hit_percentage}% of ids found" if table.hit_percentage is not None else "")


def age(seconds: float) -> str:
    """Format a duration in one of kubectl's units: 45s, 12m, 5h, 3d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def size(num_bytes: int) -> str:
    """Format a number of bytes: 512 B, 12.5 MB, 3.2 GB."""
    for unit, exponent in (("GB", 9), ("MB", 6), ("kB", 3)):
        if num_bytes >= 10**exponent:
            return f"{num_bytes / 10**exponent:.1f} {unit}"
    return f"{num_bytes} B"
