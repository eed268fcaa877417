"""A job as it runs on this machine."""

from __future__ import annotations

import pytest

from fleet_operator.api import FailureAction, StartupOrder, parse_job
from fleet_operator.cli.local_job import prepare
from tests.support.local import job_manifest


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        pytest.param({}, StartupOrder.ANY_ORDER, id="replicas-start-together-where-nothing-is-said"),
        pytest.param(
            {"startupPolicy": {"order": "InOrder"}}, StartupOrder.IN_ORDER, id="an-order-that-is-said-is-kept"
        ),
    ],
)
def test_the_order_in_which_replicas_start(spec, policy):
    job = parse_job(job_manifest("pass", **spec))
    assert prepare(job).spec.startup_policy.order is policy
    assert job.spec.startup_policy.order is StartupOrder.IN_ORDER, "a cluster's default stays"


def test_without_restarts_the_first_failure_fails_the_job_whatever_its_policy_says():
    rules = [
        {
            "name": "codes-restartjob",
            "onExitCodes": {"operator": "In", "values": [42]},
            "action": "RestartJob",
        }
    ]
    job = parse_job(job_manifest("pass", failurePolicy={"action": "RestartJob", "rules": rules}))
    policy = prepare(job, no_restart=True).spec.failure_policy
    assert (policy.action, policy.rules) == (FailureAction.FAIL_JOB, ())
    assert prepare(job).spec.failure_policy == job.spec.failure_policy
