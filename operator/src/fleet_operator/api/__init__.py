"""FleetJob as frozen types: defaults, validation and names."""

from fleet_operator.api.failure_policy import FailureAction, FailureRule, RuleAction
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
from fleet_operator.api.parse import parse_job
from fleet_operator.api.role import Role
from fleet_operator.api.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    FleetJobStatus,
    JobProgress,
    JobState,
    LastFailure,
    ReplicaRestarts,
    RoleStatus,
)

__all__ = [
    "CleanPodPolicy",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "FailureAction",
    "FailureRule",
    "FleetJob",
    "FleetJobSpec",
    "FleetJobStatus",
    "JobProgress",
    "JobState",
    "LastFailure",
    "Mode",
    "ObjectMeta",
    "PodTemplate",
    "ReplicaRestarts",
    "Role",
    "RoleStatus",
    "RuleAction",
    "StartupPolicy",
    "SuccessPolicy",
    "SyncMode",
    "parse_job",
]
