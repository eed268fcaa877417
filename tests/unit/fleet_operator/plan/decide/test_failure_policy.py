"""failurePolicy: which rule a failure falls under, and what the failures of a moment lead to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_operator.api import FailureAction, FailureRule, LastFailure, Role, RuleAction
from fleet_operator.plan.decide.failure_policy import (
    FailJob,
    FailReason,
    RestartJob,
    RestartReplicas,
    Verdict,
    first_match,
    judge,
)
from fleet_operator.plan.decide.failures import Failure, Kind
from fleet_operator.plan.observe.attempts import Replica

NOT_42 = {"operator": "NotIn", "values": [42]}
GPU = "step 7\nRuntimeError: CUDA error: uncorrectable ECC error encountered"


def rule(**fields: object) -> FailureRule:
    return FailureRule.model_validate({"name": "rule", **fields, "action": RuleAction.FAIL_JOB})


def failure(
    role: Role = Role.TRAINER,
    kind: Kind = Kind.ORDINARY,
    exit_code: int | None = 1,
    reasons: tuple[str, ...] = ("Error",),
    by_main: bool = True,
    message: str = "",
) -> Failure:
    told = LastFailure(exit_code=exit_code)
    return Failure(Replica(role, 0), kind, told, frozenset(reasons), by_main, message)


@pytest.mark.parametrize(
    ("rules", "failed", "expected"),
    [
        pytest.param([], failure(), None, id="no-rule-matches-nothing"),
        pytest.param([rule(onExitCodes={"operator": "In", "values": [1]})], failure(), 0, id="an-exit-code"),
        pytest.param(
            [rule(onExitCodes={"operator": "In", "values": [2, 3]})], failure(), None, id="another-exit-code"
        ),
        pytest.param(
            [rule(onExitCodes={"operator": "In", "values": [1]})],
            failure(exit_code=None),
            None,
            id="no-exit-code-at-all",
        ),
        pytest.param(
            [rule(onExitCodes={"operator": "In", "values": [1]})],
            failure(by_main=False),
            None,
            id="only-the-main-containers-codes-count",
        ),
        pytest.param([rule(onReasons=["OOMKilled"])], failure(reasons=("OOMKilled",)), 0, id="a-reason"),
        pytest.param([rule(onReasons=["OOMKilled"])], failure(), None, id="another-reason"),
        pytest.param([rule(role="trainer")], failure(), 0, id="a-role"),
        pytest.param([rule(role="trainer")], failure(Role.PSERVER), None, id="the-other-role"),
        pytest.param(
            [rule(role="pserver", onExitCodes={"operator": "In", "values": [1]})],
            failure(),
            None,
            id="all-that-a-rule-names-must-apply",
        ),
        pytest.param(
            [
                rule(onExitCodes={"operator": "In", "values": [7]}),
                rule(onExitCodes={"operator": "In", "values": [1]}),
                rule(role="trainer"),
            ],
            failure(),
            1,
            id="the-first-that-matches-decides",
        ),
        pytest.param(
            [rule(role="trainer")], failure(kind=Kind.DISRUPTION), None, id="a-role-is-not-about-disruptions"
        ),
        pytest.param(
            [rule(onReasons=["Evicted"])],
            failure(kind=Kind.DISRUPTION, reasons=("Evicted",)),
            0,
            id="a-disruption-that-is-named",
        ),
        pytest.param(
            [rule(onExitCodes={"operator": "In", "values": [2]})],
            failure(kind=Kind.BAD_CONFIGURATION, exit_code=2),
            0,
            id="a-refused-configuration-that-is-named",
        ),
        pytest.param([rule(onExitCodes=NOT_42)], failure(), 0, id="any-exit-code-but-one"),
        pytest.param(
            [rule(onExitCodes=NOT_42)], failure(exit_code=42), None, id="the-exit-code-that-is-left-out"
        ),
        pytest.param(
            [rule(onExitCodes=NOT_42)], failure(exit_code=None), None, id="no-exit-code-is-no-other"
        ),
        pytest.param(
            [rule(onExitCodes=NOT_42)],
            failure(kind=Kind.DISRUPTION, exit_code=143),
            None,
            id="what-is-left-out-names-no-disruption",
        ),
        pytest.param([rule(onMessagePatterns=["ECC"])], failure(message=GPU), 0, id="a-text-in-the-message"),
        pytest.param(
            [rule(onMessagePatterns=["OOM", "CUDA*ECC*"])],
            failure(message=GPU),
            0,
            id="one-of-several-patterns",
        ),
        pytest.param(
            [rule(onMessagePatterns=["ECC*CUDA"])], failure(message=GPU), None, id="the-parts-in-their-order"
        ),
        pytest.param(
            [rule(onMessagePatterns=["step*ECC"])],
            failure(message=GPU),
            None,
            id="within-one-line-of-the-message",
        ),
        pytest.param(
            [rule(onMessagePatterns=["."])],
            failure(message="no dot"),
            None,
            id="a-pattern-is-no-regular-expression",
        ),
        pytest.param([rule(onMessagePatterns=["ECC"])], failure(), None, id="no-message-at-all"),
    ],
)
def test_first_match(rules, failed, expected):
    assert first_match(rules, failed) is (None if expected is None else rules[expected])


RESTART_REPLICA, RESTART_JOB, FAIL_JOB = FailureAction
TRAINERS = (Replica(Role.TRAINER, 0), Replica(Role.TRAINER, 1))


def failure_of(kind: Kind = Kind.ORDINARY, index: int = 0) -> Failure:
    return Failure(Replica(Role.TRAINER, index), kind, LastFailure(message=f"trainer {index} failed"))


def gave_up(index: int) -> Failure:
    told = LastFailure(message=f"trainer {index} gave up a peer", exit_code=91)
    return Failure(Replica(Role.TRAINER, index), Kind.ORDINARY, told)


def verdict_of(
    action: FailureAction,
    *failures: Failure,
    rules: tuple[FailureRule, ...] = (),
    before: int = 0,
    limit: int = 6,
    incident: tuple[Replica, ...] | None = None,
    together: bool = False,
) -> Verdict:
    return judge(
        action,
        failures,
        rules=rules,
        counted_before=before,
        limit=limit,
        incident=incident,
        together=together,
    )


@pytest.mark.parametrize(
    ("action", "failures", "expected"),
    [
        pytest.param(
            RESTART_REPLICA,
            [failure_of(index=0), failure_of(index=1)],
            RestartReplicas(1, failure_of(index=0), TRAINERS, own=TRAINERS),
            id="replicas-that-fail-at-once-restart-and-count-once",
        ),
        pytest.param(
            RESTART_REPLICA,
            [gave_up(0), gave_up(1)],
            RestartReplicas(1, gave_up(0), TRAINERS, own=TRAINERS),
            id="replicas-that-give-each-other-up-count-once",
        ),
        pytest.param(
            RESTART_REPLICA,
            [gave_up(0), failure_of(index=1)],
            RestartReplicas(1, failure_of(index=1), TRAINERS, own=TRAINERS),
            id="who-gives-up-a-replica-that-failed-does-not-count-beside-it",
        ),
        pytest.param(
            RESTART_JOB,
            [failure_of(index=0), failure_of(index=1)],
            RestartJob(1, failure_of(index=0), own=TRAINERS),
            id="a-restart-of-the-job-counts-once-however-many-failed",
        ),
        pytest.param(
            RESTART_REPLICA,
            [failure_of(index=0), failure_of(Kind.STATE_LOST, 1)],
            RestartJob(1, failure_of(index=0), own=TRAINERS),
            id="lost-state-turns-the-restart-of-a-replica-into-one-of-the-job",
        ),
        pytest.param(
            RESTART_REPLICA,
            [failure_of(Kind.DISRUPTION)],
            RestartReplicas(0, failure_of(Kind.DISRUPTION), TRAINERS[:1]),
            id="a-disruption-does-not-count",
        ),
        pytest.param(
            FAIL_JOB,
            [failure_of(Kind.DISRUPTION)],
            RestartReplicas(0, failure_of(Kind.DISRUPTION), TRAINERS[:1]),
            id="a-disruption-is-no-failure-for-FailJob-either",
        ),
        pytest.param(
            RESTART_REPLICA,
            [failure_of(Kind.DISRUPTION, 0), failure_of(index=1)],
            RestartReplicas(1, failure_of(index=1), TRAINERS, own=TRAINERS[1:]),
            id="the-failure-is-the-cause-not-the-disruption-beside-it",
        ),
        pytest.param(
            FAIL_JOB,
            [failure_of()],
            FailJob(
                1,
                failure_of(),
                FailReason.REPLICA_FAILED,
                "trainer 0 failed; failurePolicy FailJob allows no restart",
                own=TRAINERS[:1],
            ),
            id="FailJob-fails-the-job",
        ),
        pytest.param(
            RESTART_JOB,
            [failure_of(Kind.BAD_CONFIGURATION)],
            FailJob(
                1,
                failure_of(Kind.BAD_CONFIGURATION),
                FailReason.BAD_CONFIGURATION,
                "trainer 0 failed; a retry would fail again; correct the job and create it again",
                own=TRAINERS[:1],
            ),
            id="a-wrong-configuration-is-not-tried-again",
        ),
    ],
)
def test_judge(action, failures, expected):
    assert verdict_of(action, *failures) == expected


@pytest.mark.parametrize(
    ("failures", "before", "limit", "expected"),
    [
        pytest.param([failure_of()], 5, 6, RestartReplicas, id="the-last-allowed-failure-restarts"),
        pytest.param([failure_of()], 6, 6, FailJob, id="one-more-fails-the-job"),
        pytest.param(
            [failure_of(), failure_of(index=1)], 5, 6, RestartReplicas, id="two-at-once-count-as-one"
        ),
        pytest.param([failure_of()], 0, 0, FailJob, id="a-limit-of-zero-allows-none"),
        pytest.param(
            [failure_of(Kind.DISRUPTION)], 6, 6, RestartReplicas, id="a-disruption-passes-a-used-up-limit"
        ),
    ],
)
def test_backoff_limit(failures, before, limit, expected):
    assert isinstance(verdict_of(RESTART_REPLICA, *failures, before=before, limit=limit), expected)


@pytest.mark.parametrize(
    ("incident", "failures", "counted"),
    [
        pytest.param(None, [failure_of()], 1, id="the-first-failure-of-an-incident-counts"),
        pytest.param((), [failure_of()], 0, id="another-replicas-failure-belongs-to-the-incident-that-lasts"),
        pytest.param(TRAINERS[:1], [failure_of()], 1, id="the-same-replica-counts-again"),
        pytest.param(
            TRAINERS[:1], [failure_of(), failure_of(index=1)], 1, id="beside-another-it-counts-once"
        ),
        pytest.param(TRAINERS[:1], [failure_of(Kind.DISRUPTION)], 0, id="a-disruption-does-not-count-again"),
    ],
)
def test_incidents(incident, failures, counted):
    assert verdict_of(RESTART_REPLICA, *failures, incident=incident).counted == counted
    assert verdict_of(RESTART_JOB, *failures, incident=incident).counted == counted
    job_fails = isinstance(verdict_of(RESTART_REPLICA, *failures, incident=incident, limit=0), FailJob)
    assert job_fails is (counted > 0), "what does not count fails no job"


RESTART_ALONE = FailureRule(name="alone", role=Role.TRAINER, action=RuleAction.RESTART_REPLICA)


IGNORE = FailureRule(name="ignored", role=Role.TRAINER, action=RuleAction.IGNORE)


@pytest.mark.parametrize(
    ("action", "rule", "failures", "expected"),
    [
        pytest.param(
            FAIL_JOB,
            RESTART_ALONE,
            [failure_of()],
            RestartReplicas(1, failure_of(), TRAINERS[:1], own=TRAINERS[:1]),
            id="a-rule-wins-over-the-policy",
        ),
        pytest.param(
            FAIL_JOB,
            IGNORE,
            [failure_of(), failure_of(index=1)],
            RestartReplicas(0, failure_of(), TRAINERS),
            id="ignored-failures-restart-and-do-not-count",
        ),
        pytest.param(
            RESTART_REPLICA,
            IGNORE,
            [failure_of(Kind.STATE_LOST)],
            RestartJob(0, failure_of(Kind.STATE_LOST)),
            id="no-rule-lets-a-trainer-go-on-from-initial-values",
        ),
        pytest.param(
            RESTART_REPLICA,
            FailureRule(name="never", role=Role.TRAINER, action=RuleAction.FAIL_JOB),
            [failure_of()],
            FailJob(
                1,
                failure_of(),
                FailReason.REPLICA_FAILED,
                "trainer 0 failed; rule never of failurePolicy has the action FailJob",
                own=TRAINERS[:1],
            ),
            id="the-rule-that-failed-the-job-is-named",
        ),
        pytest.param(
            FAIL_JOB,
            RESTART_ALONE,
            [failure_of(Kind.BAD_CONFIGURATION)],
            FailJob(
                1,
                failure_of(Kind.BAD_CONFIGURATION),
                FailReason.BAD_CONFIGURATION,
                "trainer 0 failed; a retry would fail again; correct the job and create it again",
                own=TRAINERS[:1],
            ),
            id="a-role-alone-is-no-reason-to-try-a-wrong-configuration-again",
        ),
    ],
)
def test_rules(action, rule, failures, expected):
    assert verdict_of(action, *failures, rules=(rule,)) == expected


def test_of_several_failures_the_gravest_action_is_taken():
    rules = (
        FailureRule.model_validate(
            {
                "name": "codes-restartjob",
                "onExitCodes": {"operator": "In", "values": [3]},
                "action": "RestartJob",
            }
        ),
        FailureRule.model_validate(
            {"name": "codes-failjob", "onExitCodes": {"operator": "In", "values": [4]}, "action": "FailJob"}
        ),
    )
    three, four = (
        replace(failure_of(index=code), record=LastFailure(exit_code=code, message="")) for code in (3, 4)
    )
    assert isinstance(verdict_of(RESTART_REPLICA, failure_of(), three, rules=rules), RestartJob)
    assert isinstance(verdict_of(RESTART_REPLICA, failure_of(), three, four, rules=rules), FailJob)


def test_replicas_that_cannot_start_alone_start_together():
    assert verdict_of(RESTART_REPLICA, failure_of(), together=True) == RestartJob(
        1, failure_of(), TRAINERS[:1]
    )
