"""The status: what was written reads back equal, and what a later version wrote is no obstacle."""

from datetime import UTC, datetime, timedelta, timezone

from fleet_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    FleetJobStatus,
    JobState,
    ReplicaRestarts,
    Role,
    RoleStatus,
    StoredLedger,
    StoredRole,
)
from tests.support.plans import Story, trainer

NOON = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


def test_reads_back_as_it_was_written():
    status = FleetJobStatus(
        state=JobState.RUNNING,
        conditions=(
            Condition(
                type=ConditionType.RUNNING,
                status=ConditionStatus.TRUE,
                reason="ReplicasRunning",
                last_transition_time=NOON,
            ),
        ),
        start_time=NOON,
        roles=(
            RoleStatus(
                role=Role.TRAINER,
                completed_indexes="0",
            ),
        ),
        ledger=StoredLedger(
            not_before=NOON,
            roles={"trainer": StoredRole(restarts=(ReplicaRestarts(index=1, count=2, not_before=NOON),))},
        ),
    )
    assert FleetJobStatus.model_validate(status.to_manifest()) == status


def test_times_are_written_as_kubernetes_writes_them():
    moment = datetime(2026, 11, 21, 13, 0, 0, 999_999, tzinfo=timezone(timedelta(hours=1)))
    assert FleetJobStatus(start_time=moment).to_manifest()["startTime"] == "2026-11-21T12:00:00Z"


def test_what_is_unknown_is_left_out():
    assert FleetJobStatus().to_manifest() == {
        "conditions": [],
        "columns": {},
        "restarts": 0,
        "failures": 0,
        "disruptions": 0,
        "jobRestarts": 0,
        "roles": [],
    }


def test_a_role_that_is_not_told_of_has_nothing():
    assert FleetJobStatus().role(Role.PSERVER) == RoleStatus(role=Role.PSERVER)


def test_only_two_states_are_final():
    assert {state for state in JobState if state.final} == {JobState.SUCCEEDED, JobState.FAILED}
    assert not FleetJobStatus().finished


def test_what_a_later_build_remembers_is_written_back_as_it_was():
    ledger = {
        "queueSince": "2026-11-21T12:00:00Z",
        "quotaBackOff": {"times": 1, "by": "team-a"},
        "roles": {
            "trainer": {"created": "0", "since": 3, "restarts": [{"index": 0, "count": 1, "why": "x"}]},
            "evaluator": {"created": "0-1"},
        },
    }
    story = Story()
    story.job = story.job.with_status(FleetJobStatus.model_validate({"ledger": ledger}))
    story.sees(trainer(0, attempt="0.1"))
    assert story.job.status.to_manifest()["ledger"] == ledger
