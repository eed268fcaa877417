"""The status of a job: everything that the operator reports about it or stores for itself.

A plan is made from the spec, from the objects in the cluster and from the status; nothing else is stored. As
in Kubernetes, times have whole seconds, so that a status does not change when it is written and read again.
"""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from pydantic.config import JsonDict

from fleet_operator.api.base import StatusModel, Timestamp
from fleet_operator.api.ledger import StoredLedger
from fleet_operator.api.names import Role

__all__ = [
    "Columns",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "FleetJobStatus",
    "JobProgress",
    "JobState",
    "LastFailure",
    "RoleStatus",
    "TableStatistics",
]


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
        """True if a job in this state has finished."""
        return self in (JobState.SUCCEEDED, JobState.FAILED)


class ConditionType(StrEnum):
    """The types of conditions. Complete and Failed, as in batch/v1 Job, are never both True."""

    PODS_CREATED = "PodsCreated"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


_EXPLAINED_BY = {
    JobState.PENDING: ConditionType.RUNNING,
    JobState.RUNNING: ConditionType.RUNNING,
    JobState.RESTARTING: ConditionType.RESTARTING,
    JobState.SUSPENDED: ConditionType.SUSPENDED,
    JobState.SUCCEEDED: ConditionType.COMPLETE,
    JobState.FAILED: ConditionType.FAILED,
}


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


_INT64: JsonDict = {"minimum": 0, "format": "int64"}


class Condition(StatusModel):
    """A condition, as metav1.Condition defines it."""

    type: str = Field(
        description=f"{', '.join(ConditionType)}, or that of another writer, which the operator keeps.",
        json_schema_extra={
            "maxLength": 316,
            "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
            r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
        },
    )
    status: ConditionStatus = Field(description="Whether the condition holds.")
    reason: str = Field(
        description="Why, in one word for programs.",
        json_schema_extra={
            "minLength": 1,
            "maxLength": 1024,
            "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        },
    )
    message: str = Field(
        default="", description="Why, in one sentence for people.", json_schema_extra={"maxLength": 32768}
    )
    last_transition_time: Timestamp = Field(description="When the status of this condition last changed.")
    observed_generation: int | None = Field(
        default=None, description="The generation of the job for which it was set.", json_schema_extra=_INT64
    )


class RoleStatus(StatusModel):
    """The replicas of one role."""

    role: str = Field(description="The role: pserver or trainer.")
    replicas: int = Field(default=0, description="How many are wanted.")
    active: int = Field(default=0, description="How many have a pod that has not ended.")
    ready: int = Field(default=0, description="How many have a pod that is ready.")
    succeeded: int = Field(default=0, description="How many have completed in this life of the job.")
    failed: int = Field(default=0, description="How many have a pod that has failed and is not replaced yet.")
    completed_indexes: str = Field(
        default="",
        description="Replicas that have completed, such as 0-2,4. They do not run again in this "
        "life of the job.",
    )


class LastFailure(StatusModel):
    """The most recent failure."""

    pod: str | None = Field(default=None, description="The replica's pod.")
    container: str | None = Field(default=None, description="The container that ended.")
    exit_code: int | None = Field(default=None, description="Its exit code.")
    reason: str | None = Field(
        default=None, description="The reason of the container or pod, such as OOMKilled or Evicted."
    )
    termination_message: str | None = Field(default=None, description="The container's termination message.")
    message: str = Field(default="", description="What happened, in one sentence.")
    time: Timestamp | None = Field(default=None, description="When the container ended.")


class TableStatistics(StatusModel):
    """The statistics of an embedding table, summed over all parameter servers."""

    name: str = Field(description="The table's name.")
    rows: int = Field(description="Rows that have been updated; other rows use no memory.")
    bytes: int = Field(description="Memory used by rows, their optimizer state and the index.")
    rows_on_disk: int | None = Field(default=None, description="Rows on the servers' disks.")
    hit_percentage: int | None = Field(
        default=None, description="The percentage of requested ids that had a row."
    )
    shard_skew: float | None = Field(
        default=None, description="Rows of the fullest virtual shard, divided by the mean over all shards."
    )


class JobProgress(StatusModel):
    """The training progress that trainer 0 reports, or else its runtime's own step count."""

    percentage: int | None = Field(default=None, description="Steps made, as a percentage of totalSteps.")
    step: int | None = Field(default=None, description="The number of steps made.")
    total_steps: int | None = Field(
        default=None, description="The steps that the script will make, if known."
    )
    loss: float | None = Field(default=None, description="The loss that the script last reported.")
    eta_seconds: int | None = Field(default=None, description="The remaining time at the current pace.")
    time: Timestamp | None = Field(default=None, description="When it was reported.")
    tables: tuple[TableStatistics, ...] | None = Field(
        default=None, description="The embedding tables; if there are more than ten, the ten largest."
    )

    @property
    def summary(self) -> str:
        """The progress in short: 42%, or step 120 if the total is unknown."""
        return f"step {self.step}" if self.percentage is None else f"{self.percentage}%"


class Columns(StatusModel):
    """The texts that kubectl get shows in its columns; programs should read roles and progress instead."""

    pservers: str | None = Field(default=None, description="Ready or completed, of those wanted: 2/2.")
    trainers: str | None = Field(default=None, description="Running or completed, of those wanted: 2/2.")
    progress: str | None = Field(
        default=None, description="In a word: 42%, or step 120 if the total is not known."
    )


class FleetJobStatus(StatusModel):
    """The current state of a job."""

    observed_generation: int | None = Field(
        default=None,
        description="The generation of the job that this status describes.",
        json_schema_extra=_INT64,
    )
    state: Annotated[JobState, WithJsonSchema({"type": "string"})] | None = Field(
        default=None, description=f"In one word: {', '.join(JobState)}."
    )
    terminal_state: str | None = Field(
        default=None,
        description="The type of the condition with the result of a finished job: Complete or Failed.",
    )
    conditions: tuple[Condition, ...] = Field(
        default=(), description="Conditions of the job, the operator's and those of other writers."
    )
    start_time: Timestamp | None = Field(
        default=None, description="When the job started, or was last resumed."
    )
    completion_time: Timestamp | None = Field(default=None, description="When the job finished.")
    trainer_replicas: int | None = Field(default=None, description="Trainers that have a pod now.")
    selector: str | None = Field(default=None, description="Selects the trainers' pods, for autoscalers.")
    restarts: int = Field(default=0, description="Restarts of single replicas and of the whole job.")
    job_restarts: int = Field(
        default=0, description="The number of restarts of all replicas, after a failure or on request."
    )
    failures: int = Field(default=0, description="Failures that count against runPolicy.backoffLimit.")
    disruptions: int = Field(
        default=0, description="Disruptions that count against failurePolicy.disruptionLimit."
    )
    last_failure: LastFailure | None = Field(default=None, description="The most recent failure.")
    progress: JobProgress | None = Field(
        default=None,
        description="The progress of the training, as trainer 0 reports it, or else its runtime's step.",
    )
    roles: tuple[RoleStatus, ...] = Field(default=(), description="The replicas of each role.")
    columns: Columns = Field(
        default=Columns(),
        description="The texts of the columns of kubectl get; programs read roles and progress.",
    )
    ledger: Annotated[StoredLedger, WithJsonSchema({"type": "object", "additionalProperties": True})] = Field(
        default=StoredLedger(),
        description="The operator's memory of the job. Its contents are not part of the API: no other program"
        " should read or write them.",
    )

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of the given type, or None if there is none."""
        return next((each for each in self.conditions if each.type == kind), None)

    def is_true(self, kind: str) -> bool:
        """Return whether the condition of the given type exists and is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status is ConditionStatus.TRUE

    def role(self, role: Role) -> RoleStatus:
        """Return the status of a role, or an empty status if there is none."""
        return next((each for each in self.roles if each.role == role), RoleStatus(role=role))

    @property
    def finished(self) -> bool:
        """True if the job has succeeded or failed."""
        return self.state is not None and self.state.final

    @property
    def explanation(self) -> Condition | None:
        """The condition whose reason and message explain the job's state."""
        return None if self.state is None else self.condition(_EXPLAINED_BY[self.state])

    def to_manifest(self) -> dict[str, Any]:
        """Return the status as the API server expects it: in camelCase, without null values."""
        document = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"ledger"})
        ledger = self.ledger.to_manifest()
        return {**document, "ledger": ledger} if ledger else document
