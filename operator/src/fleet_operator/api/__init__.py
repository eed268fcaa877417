"""FleetJob as frozen types: defaults, validation and names."""

from fleet_operator.api.checkpoint import CheckpointScope, Retention
from fleet_operator.api.failure_policy import FailureAction, FailurePolicy, FailureRule, RuleAction
from fleet_operator.api.job import (
    CleanPodPolicy,
    FleetJob,
    FleetJobSpec,
    Mode,
    ObjectMeta,
    PodTemplate,
    StartupPolicy,
    SuccessPolicy,
    SyncMode,
)
from fleet_operator.api.parse import parse_job, read_job
from fleet_operator.api.placement import Gang
from fleet_operator.api.role import Role
from fleet_operator.api.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    FleetJobStatus,
    JobProgress,
    JobState,
    LastFailure,
    QuotaBackOff,
    ReplicaRestarts,
    RoleStatus,
    TableStatistics,
)

__all__ = [
    "CheckpointScope",
    "CleanPodPolicy",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "FailureAction",
    "FailurePolicy",
    "FailureRule",
    "FleetJob",
    "FleetJobSpec",
    "FleetJobStatus",
    "Gang",
    "JobProgress",
    "JobState",
    "LastFailure",
    "Mode",
    "ObjectMeta",
    "PodTemplate",
    "QuotaBackOff",
    "ReplicaRestarts",
    "Retention",
    "Role",
    "RoleStatus",
    "RuleAction",
    "StartupPolicy",
    "SuccessPolicy",
    "SyncMode",
    "TableStatistics",
    "parse_job",
    "read_job",
]
