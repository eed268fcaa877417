"""The status of a job: the operator's report about the job, and everything it remembers about the job.

A plan is made from the spec, from the objects in the cluster and from the status; nothing else is stored.
Times have whole seconds, as in Kubernetes, so that a status that is written and read again is equal.
"""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel

from fleet_operator.api.names import Role

__all__ = [
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "FleetJobStatus",
    "JobProgress",
    "JobState",
    "LastFailure",
    "QuotaBackOff",
    "ReplicaRestarts",
    "RoleStatus",
    "TableStatistics",
]


def _timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(microsecond=0).strftime("%Y-%m-%dT%H:%M:%SZ")


Timestamp = Annotated[datetime, PlainSerializer(_timestamp, return_type=str)]


class JobState(StrEnum):
    """The state of a job in one word."""

    PENDING = "Pending"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """Whether the state is final."""
        return self in (JobState.SUCCEEDED, JobState.FAILED)


class ConditionType(StrEnum):
    """The types of conditions. At most one of the last two is ever True."""

    PODS_CREATED = "PodsCreated"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


_EXPLAINED_BY = {
    JobState.PENDING: ConditionType.RUNNING,
    JobState.RUNNING: ConditionType.RUNNING,
    JobState.RESTARTING: ConditionType.RESTARTING,
    JobState.SUSPENDED: ConditionType.SUSPENDED,
    JobState.SUCCEEDED: ConditionType.SUCCEEDED,
    JobState.FAILED: ConditionType.FAILED,
}


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class StatusModel(BaseModel):
    """A part of the status: frozen, and keeping fields that a newer build of the operator wrote."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="allow", frozen=True)

    @property
    def extras(self) -> dict[str, Any]:
        """The fields that this build does not know. It writes them back unchanged."""
        return dict(self.model_extra or {})


class Condition(StatusModel):
    """One condition, as Kubernetes defines them."""

    type: str = Field(description=f"{', '.join(ConditionType)}, or somebody else's.")
    status: ConditionStatus
    reason: str = Field(description="One word, for programs.")
    message: str = Field(default="", description="One sentence, for people.")
    last_transition_time: Timestamp = Field(description="When the status of this condition last changed.")
    observed_generation: int | None = None


class ReplicaRestarts(StatusModel):
    """How often one replica was restarted by itself."""

    index: int
    count: int
    not_before: Timestamp | None = Field(default=None, description="Back-off: its next pod waits for this.")
    failures_in_a_row: int | None = Field(
        default=None,
        description="Its own failures, by which its pauses grow; forgotten once it has run for 10 minutes.",
    )
    unseen: bool | None = Field(
        default=None, description="Whether the pod before was gone without anyone having seen its end."
    )


class RoleStatus(StatusModel):
    """The replicas of one role."""

    role: str
    replicas: int = Field(default=0, description="How many are wanted.")
    active: int = Field(default=0, description="How many have a pod that has not ended.")
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    restarts: tuple[ReplicaRestarts, ...] = Field(default=(), description="Those that were started again.")
    created_indexes: str = Field(
        default="", description="Replicas whose present pod has been seen, such as 0-2,4."
    )
    completed_indexes: str = Field(
        default="",
        description="Replicas that ended well, such as 0-2,4. They do not run again in this life of the job.",
    )
    refused_indexes: str = Field(
        default="",
        description="Replicas whose last pod a node refused with UnexpectedAdmissionError, such as 0-2,4:"
        " if the next is refused too, that is a failure.",
    )
    incident_indexes: str = Field(
        default="",
        description="Replicas that have failed since incidentStart, such as 0-2,4: one that fails again"
        " counts again.",
    )


class LastFailure(StatusModel):
    """The most recent failure."""

    pod: str | None = None
    container: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    termination_message: str | None = Field(default=None, description="What the container said as it ended.")
    message: str = Field(default="", description="What happened, in one sentence.")
    time: Timestamp | None = None


class QuotaBackOff(StatusModel):
    """The back-off of a job without a gang that a quota keeps from creating all of its pods."""

    refused_since: Timestamp | None = Field(
        default=None, description="Since when pods are refused while the job holds others."
    )
    not_before: Timestamp | None = Field(
        default=None, description="The job has given its pods back: new ones wait for this."
    )
    times: int = Field(default=0, description="How often it has done so without having had all since.")


class TableStatistics(StatusModel):
    """An embedding table, summed over all parameter servers."""

    name: str
    rows: int = Field(description="Rows that have been updated; the others cost nothing.")
    bytes: int = Field(description="Memory that rows, their optimizer state and the index take.")
    rows_on_disk: int | None = Field(default=None, description="Rows that lie on the servers' disks.")
    hit_percentage: int | None = Field(
        default=None, description="Of the ids that trainers have asked for, how many had a row."
    )
    shard_skew: float | None = Field(
        default=None, description="How many times the mean's rows the fullest virtual shard has."
    )


class JobProgress(StatusModel):
    """The progress of the training, as trainer 0 reports it, or else its runtime's step."""

    summary: str = Field(description="In a word: 42%, or step 120 where nobody said of how many.")
    percentage: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    eta_seconds: int | None = Field(default=None, description="How much longer it takes at its present pace.")
    time: Timestamp | None = Field(default=None, description="When it was reported.")
    tables: tuple[TableStatistics, ...] | None = Field(
        default=None, description="The embedding tables, the largest ten where there are more."
    )


class FleetJobStatus(StatusModel):
    """The present state of a job."""

    observed_generation: int | None = Field(default=None, description="The generation this was decided on.")
    state: Annotated[JobState, WithJsonSchema({"type": "string"})] | None = Field(
        default=None, description=f"{', '.join(JobState)}."
    )
    conditions: tuple[Condition, ...] = ()
    pservers: str | None = Field(default=None, description="Ready or completed, of those wanted: 2/2.")
    trainers: str | None = Field(default=None, description="Running or completed, of those wanted: 2/2.")
    trainer_replicas: int | None = Field(default=None, description="Trainers that have a pod now.")
    selector: str | None = Field(default=None, description="Selects the trainers' pods, for autoscalers.")
    restarts: int = Field(default=0, description="Restarts of single replicas and of the whole job.")
    failures: int = Field(default=0, description="Those that count against runPolicy.backoffLimit.")
    incident_start: Timestamp | None = Field(
        default=None,
        description="When the last failure was counted. Failures of other replicas within 60 s of it count as"
        " the same one.",
    )
    job_restarts: int = Field(default=0, description="How often all replicas were started anew.")
    unseen_restarts: int | None = Field(
        default=None, description="Its latest restarts in a row after pods had vanished, their ends unseen."
    )
    not_before: Timestamp | None = Field(default=None, description="Back-off: new pods wait for this.")
    failures_in_a_row: int | None = Field(
        default=None,
        description="Failures that have restarted the whole job, by which its pauses grow; forgotten once a"
        " replica has run for 10 minutes.",
    )
    quota_back_off: QuotaBackOff | None = Field(
        default=None, description="While a quota keeps a job without a gang from having all of its pods."
    )
    start_time: Timestamp | None = None
    completion_time: Timestamp | None = None
    last_failure: LastFailure | None = None
    progress: JobProgress | None = None
    roles: tuple[RoleStatus, ...] = ()

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of this type, if there is one."""
        return next((each for each in self.conditions if each.type == kind), None)

    def is_true(self, kind: str) -> bool:
        """Return whether the condition of this type exists and is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status is ConditionStatus.TRUE

    def role(self, role: Role) -> RoleStatus:
        """Return the status of one role, or an empty one if nothing is known about it."""
        return next((each for each in self.roles if each.role == role), RoleStatus(role=role))

    @property
    def finished(self) -> bool:
        """Whether the job has succeeded or failed."""
        return self.state is not None and self.state.final

    @property
    def explanation(self) -> Condition | None:
        """The condition whose reason and message explain the job's state."""
        return None if self.state is None else self.condition(_EXPLAINED_BY[self.state])

    def to_manifest(self) -> dict[str, Any]:
        """Return the status as the API server expects it: in camelCase, without unset values."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
