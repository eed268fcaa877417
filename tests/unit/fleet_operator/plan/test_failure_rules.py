"""failurePolicy.rules: which rule a failure falls under."""

import pytest

from fleet_operator.api import FailureRule, LastFailure, Role, RuleAction
from fleet_operator.plan.failure import Failure, Kind
from fleet_operator.plan.failure_rules import first_match
from fleet_operator.plan.ledger import Replica


def rule(**fields: object) -> FailureRule:
    return FailureRule.model_validate({**fields, "action": RuleAction.FAIL_JOB})


def failure(
    role: Role = Role.TRAINER,
    kind: Kind = Kind.ORDINARY,
    exit_code: int | None = 1,
    reasons: tuple[str, ...] = ("Error",),
    by_main: bool = True,
) -> Failure:
    return Failure(Replica(role, 0), kind, LastFailure(exit_code=exit_code), frozenset(reasons), by_main)


@pytest.mark.parametrize(
    ("rules", "failed", "expected"),
    [
        pytest.param([], failure(), None, id="no-rule-matches-nothing"),
        pytest.param([rule(onExitCodes=[1])], failure(), 0, id="an-exit-code"),
        pytest.param([rule(onExitCodes=[2, 3])], failure(), None, id="another-exit-code"),
        pytest.param([rule(onExitCodes=[1])], failure(exit_code=None), None, id="no-exit-code-at-all"),
        pytest.param(
            [rule(onExitCodes=[1])], failure(by_main=False), None, id="only-the-main-containers-codes-count"
        ),
        pytest.param([rule(onReason=["OOMKilled"])], failure(reasons=("OOMKilled",)), 0, id="a-reason"),
        pytest.param([rule(onReason=["OOMKilled"])], failure(), None, id="another-reason"),
        pytest.param([rule(role="trainer")], failure(), 0, id="a-role"),
        pytest.param([rule(role="trainer")], failure(Role.PSERVER), None, id="the-other-role"),
        pytest.param(
            [rule(role="pserver", onExitCodes=[1])], failure(), None, id="all-that-a-rule-names-must-apply"
        ),
        pytest.param(
            [rule(onExitCodes=[7]), rule(onExitCodes=[1]), rule(role="trainer")],
            failure(),
            1,
            id="the-first-that-matches-decides",
        ),
        pytest.param(
            [rule(role="trainer")], failure(kind=Kind.DISRUPTION), None, id="a-role-is-not-about-disruptions"
        ),
        pytest.param(
            [rule(onReason=["Evicted"])],
            failure(kind=Kind.DISRUPTION, reasons=("Evicted",)),
            0,
            id="a-disruption-that-is-named",
        ),
        pytest.param(
            [rule(onExitCodes=[2])],
            failure(kind=Kind.BAD_CONFIGURATION, exit_code=2),
            0,
            id="a-refused-configuration-that-is-named",
        ),
    ],
)
def test_first_match(rules, failed, expected):
    assert first_match(rules, failed) == expected
