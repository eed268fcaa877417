"""What a person says about failures: the action for all of them, and rules for some."""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictInt, StringConstraints

from fleet_operator.api.base import Model
from fleet_operator.api.role import Role

__all__ = ["FailureAction", "FailurePolicy", "FailureRule", "RuleAction"]

ExitCode = Annotated[StrictInt, Field(ge=1, le=255)]
Reason = Annotated[str, StringConstraints(min_length=1, max_length=63)]


class FailureAction(StrEnum):
    """What a failed replica leads to."""

    RESTART_REPLICA = "RestartReplica"
    RESTART_JOB = "RestartJob"
    FAIL_JOB = "FailJob"


class RuleAction(StrEnum):
    """What a failure that a rule matches leads to."""

    RESTART_REPLICA = "RestartReplica"
    RESTART_JOB = "RestartJob"
    FAIL_JOB = "FailJob"
    IGNORE = "Ignore"


class FailureRule(Model):
    """An exception for some failures: those to which all apply that it names."""

    role: Role | None = Field(default=None, description="Only replicas of this role.")
    on_exit_codes: Annotated[tuple[ExitCode, ...], Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="Only these exit codes of the main container."
    )
    on_reason: Annotated[tuple[Reason, ...], Field(min_length=1, max_length=16)] | None = Field(
        default=None,
        description="Only these reasons of a pod or container, such as OOMKilled, StartError, Evicted.",
    )
    action: RuleAction = Field(
        description="What follows. Ignore: the replica is started again, and it counts as no failure."
    )


class FailurePolicy(Model):
    """What happens when a replica fails."""

    action: FailureAction | None = Field(
        default=None, description="Default: RestartReplica in mode ParameterServer, RestartJob in Collective."
    )
    rules: Annotated[tuple[FailureRule, ...], Field(max_length=20)] = Field(
        default=(), description="Exceptions from action. The first rule that matches a failure decides."
    )
