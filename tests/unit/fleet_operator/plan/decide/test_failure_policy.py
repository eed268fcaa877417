"""failurePolicy: which rule a failure falls under, and what the failures of a moment lead to."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import FailureAction, FailureRule, FleetJobStatus, LastFailure, Role, RuleAction
from fleet_operator.build import replica_ports
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
from fleet_operator.plan.model import CreatePod
from fleet_operator.plan.observe.attempts import Ledger, Replica
from tests.support import jobs
from tests.support.plans import Story, at, ended, pending, pserver, trainer

if TYPE_CHECKING:
    from fleet_operator.plan.model import ObservedPod


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


LEAVING = "PodTerminating: digits-trainer-1 is being deleted; its name is taken until it is gone"


LOST = "digits-trainer-1 found that a parameter server had lost its state (exit code 90)"


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
                "trainer 0 failed; trying again would not help, correct the job and create it again",
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


RESTART_ALONE = FailureRule(role=Role.TRAINER, action=RuleAction.RESTART_REPLICA)


IGNORE = FailureRule(role=Role.TRAINER, action=RuleAction.IGNORE)


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
            FailureRule(role=Role.TRAINER, action=RuleAction.FAIL_JOB),
            [failure_of()],
            FailJob(
                1,
                failure_of(),
                FailReason.REPLICA_FAILED,
                "trainer 0 failed; failurePolicy.rules[0] says FailJob",
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
                "trainer 0 failed; trying again would not help, correct the job and create it again",
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
        FailureRule.model_validate({"onExitCodes": [3], "action": "RestartJob"}),
        FailureRule.model_validate({"onExitCodes": [4], "action": "FailJob"}),
    )
    three, four = (
        replace(failure_of(index=code), told=LastFailure(exit_code=code, message="")) for code in (3, 4)
    )
    assert isinstance(verdict_of(RESTART_REPLICA, failure_of(), three, rules=rules), RestartJob)
    assert isinstance(verdict_of(RESTART_REPLICA, failure_of(), three, four, rules=rules), FailJob)


def test_replicas_that_cannot_start_alone_start_together():
    assert verdict_of(RESTART_REPLICA, failure_of(), together=True) == RestartJob(
        1, failure_of(), TRAINERS[:1]
    )


def test_a_failed_trainer_is_told_deleted_and_created_again():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    failed = ended(
        trainer(1), 1, message="Traceback (most recent call last):\nValueError: no such file: x.csv"
    )
    sentence = "digits-trainer-1 failed with exit code 1: ValueError: no such file: x.csv"
    restarting = f"Restarting True ReplicaRestarting: {sentence}; it is started again"
    assert story.sees(pserver(0), pserver(1), trainer(0), failed, after=5.7) == [
        "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 1",
        f"PodsCreated False {LEAVING}",
        f"Running False {LEAVING}",
        restarting,
        "delete digits-trainer-1 0.0",
        f"tell Warning ReplicaFailed: {sentence}",
    ]
    assert story.job.status.to_manifest()["lastFailure"] == {
        "pod": "digits-trainer-1",
        "container": "fleet",
        "exitCode": 1,
        "reason": "Error",
        "terminationMessage": "Traceback (most recent call last):\nValueError: no such file: x.csv",
        "message": sentence,
        "time": "2026-11-21T10:00:05Z",
    }
    paused = "BackOff: digits-trainer-1 is created again after a pause"
    assert story.sees(pserver(0), pserver(1), trainer(0), after=5.8) == [
        "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 1",
        f"PodsCreated False {paused}",
        f"Running False {paused}",
        restarting,
        "look again after 0.2 s",
    ]
    assert "create digits-trainer-1 0.1" in story.sees(pserver(0), pserver(1), trainer(0), after=6)
    assert story.sees(pserver(0), pserver(1), trainer(0), trainer(1, "0.1"), after=8) == [
        "Running pservers 2/2 trainers 2/2 restarts 1 failures 1",
        "PodsCreated True PodsCreated: the pods of all replicas are there",
        "Running True ReplicasRunning: all 4 replicas run or have completed",
        "Restarting False Restarted: all 4 replicas run or have completed",
        "tell Normal Started: all 4 replicas run or have completed",
    ]


def test_a_trainer_that_lost_its_servers_state_restarts_the_whole_job_once():
    story = Story()
    story.sees(pserver(0), pserver(1), ended(trainer(0)), trainer(1))
    lines = story.sees(pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1), 90), after=5)
    assert [line for line in lines if line.startswith(("delete", "Restarting "))] == [
        "Restarting pservers 0/2 trainers 0/2 restarts 1 failures 1",
        f"Restarting True JobRestarting: {LOST}; all replicas start anew",
        "delete digits-pserver-0 0.0",
        "delete digits-pserver-1 0.0",
        "delete digits-trainer-0 0.0",
        "delete digits-trainer-1 0.0",
    ]
    assert story.job.status.job_restarts == 1
    late = story.sees(ended(pserver(0), 143), ended(trainer(0), 90), after=5.5)
    assert late[0] == "Restarting pservers 0/2 trainers 0/2 restarts 1 failures 1", "older pods fail no more"
    lines = story.sees(after=7)
    assert [line for line in lines if "create " in line] == [
        "create digits-pserver-0 1.0",
        "create digits-pserver-1 1.0",
    ]
    lines = story.sees(pserver(0, "1.0"), pserver(1, "1.0"), after=9)
    assert [line for line in lines if "create " in line] == [
        "create digits-trainer-0 1.0",
        "create digits-trainer-1 1.0",
    ], "the parameters begin anew, so the trainer that had completed does too"


def test_the_job_fails_when_the_limit_is_used_up():
    story = Story(runPolicy={"backoffLimit": 1})
    story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1))
    sentence = (
        "digits-trainer-1 was ended by SIGKILL (exit code 137);"
        " this is failure 2, and runPolicy.backoffLimit is 1"
    )
    then = "; correct what its log shows, or raise the limit, and create the job again"
    pods = (pserver(0), pserver(1), trainer(0), ended(trainer(1, "0.1"), 137))
    assert story.sees(*pods, after=9) == [
        "Failed pservers 2/2 trainers 1/2 restarts 1 failures 2",
        "PodsCreated True PodsCreated: the pods of all replicas are there",
        f"Running False BackoffLimitExceeded: {sentence}",
        f"Restarting False BackoffLimitExceeded: {sentence}",
        f"Failed True BackoffLimitExceeded: {sentence}{then}",
        "delete digits-pserver-0 0.0",
        "delete digits-pserver-1 0.0",
        "delete digits-trainer-0 0.0",
        "tell Warning ReplicaFailed: digits-trainer-1 was ended by SIGKILL (exit code 137)",
        f"tell Warning Failed: {sentence}{then}",
    ]


def test_a_collective_job_restarts_as_a_whole():
    story = Story(jobs.collective_manifest())
    lines = story.sees(trainer(0), ended(trainer(1), 1))
    assert [line for line in lines if line.startswith("delete")] == [
        "delete digits-trainer-0 0.0",
        "delete digits-trainer-1 0.0",
    ]
    assert [line for line in story.sees(after=3) if line.startswith("create")] == [
        "create digits-trainer-0 1.0",
        "create digits-trainer-1 1.0",
    ]


def test_suspensions_do_not_prolong_the_pause_before_a_restart_and_failures_do():
    story = Story(failurePolicy={"action": "RestartJob"})
    for life in range(5):
        pods = [each(index, f"{life}.0") for each in (pserver, trainer) for index in (0, 1)]
        story.sees(*pods, after=10 * life)
        story.edit(suspend=True)
        story.sees(*pods, after=10 * life + 1)
        story.edit(suspend=False)
    for life, pause in ((5, 1), (6, 2), (7, 4)):
        begin = 100 * life
        pods = [each(index, f"{life}.0") for each in (pserver, trainer) for index in (0, 1)]
        story.sees(*pods[:3], ended(pods[3], 1), after=begin)
        assert story.sees(after=begin)[-1] == f"look again after {pause} s"


def test_a_pod_that_somebody_deleted_is_replaced_under_a_higher_attempt_without_being_counted():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    lines = story.sees(pserver(0), pserver(1), trainer(0), departed=(trainer(1),), after=5)
    assert lines[0] == "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 0"
    assert lines[-2:] == [
        "tell Warning ReplicaDisrupted: digits-trainer-1 was deleted",
        "look again after 1 s",
    ]
    assert "create digits-trainer-1 0.1" in story.sees(pserver(0), pserver(1), trainer(0), after=6)


def test_a_trainer_whose_servers_have_completed_can_only_start_with_them():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    pods = (ended(pserver(0)), ended(pserver(1)), ended(trainer(0)))
    assert (
        story.sees(*pods, trainer(1), after=1)[0] == "Running pservers 2/2 trainers 2/2 restarts 0 failures 0"
    )
    lines = story.sees(*pods, ended(trainer(1), 1), after=2)
    told = "digits-trainer-1 failed with exit code 1; all replicas start anew"
    assert f"Restarting True JobRestarting: {told}" in lines


@pytest.mark.parametrize(
    ("others", "patience"),
    [
        pytest.param((pserver(0), pserver(1), trainer(0)), None, id="that-run"),
        pytest.param((pserver(0), pserver(1), ended(trainer(0))), None, id="that-run-or-have-completed"),
        pytest.param((pserver(0), pserver(1), pending(trainer(0))), "3600", id="that-start"),
    ],
)
def test_who_is_started_again_waits_for_the_start_of_others_only_if_one_has_still_to_start(others, patience):
    story = Story(startupPolicy="AnyOrder")
    story.sees(*others, ended(trainer(1), 1))
    story.sees(*others, after=5)
    (created,) = (each.manifest for each in story.plan.actions if isinstance(each, CreatePod))
    env = {each["name"]: each.get("value") for each in created["spec"]["containers"][0]["env"]}
    assert (created["metadata"]["name"], env.get("FLEET_START_DEADLINE_SECONDS")) == (
        "digits-trainer-1",
        patience,
    )


def created_env(story: Story) -> dict[str, dict[str, str]]:
    """Return the environment of each pod that the last plan creates."""
    pods = (each.manifest for each in story.plan.actions if isinstance(each, CreatePod))
    return {
        pod["metadata"]["name"]: {
            each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]
        }
        for pod in pods
    }


def test_a_pod_on_its_nodes_network_listens_where_its_peers_were_told_to_call():
    """Another version of the operator, which divides the range otherwise, has told them."""
    network = {"hostNetwork": True, "portRange": {"first": 20000, "last": 20999}}
    story = Story(network=network, checkpoint={"mountPath": "/data", "claimName": "data"})
    told = (20501, 20601)
    servers = [pserver(index, told_ports=told, created_at=at(0)) for index in range(2)]
    trainers = [trainer(index, told_ports=told, created_at=at(0)) for index in range(2)]
    story.sees(*servers, *trainers)
    story.sees(servers[0], ended(servers[1], 1), *trainers, after=10)
    story.sees(servers[0], *trainers, after=15)
    env = created_env(story)["digits-pserver-1"]
    assert (env["PADDLE_PORT"], env["FLEET_METRICS_PORT"]) == ("20601", "20602")
    listed = env["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
    assert [each.rpartition(":")[2] for each in listed] == ["20501", "20601"]


def test_a_new_life_of_a_job_gets_ports_of_its_own():
    network = {"hostNetwork": True, "portRange": {"first": 20000, "last": 20999}}
    story = Story(jobs.collective_manifest(network=network))
    trainers = [trainer(index, told_ports=(20501, 20601)) for index in range(2)]
    story.sees(*trainers)
    story.sees(trainers[0], ended(trainers[1], 1), after=10)
    story.sees(after=15)
    env = created_env(story)["digits-trainer-0"]
    assert env["MASTER_PORT"] == str(replica_ports(story.job, Role.TRAINER, 0).first) != "20501"


def test_what_ends_with_an_evicted_peer_does_not_count():
    story = Story(jobs.collective_manifest(runPolicy={"backoffLimit": 0}))
    evicted = trainer(0, disruption="PreemptionByScheduler", deleted_at=at(30))
    lines = story.sees(evicted, ended(trainer(1), 1, message="connection reset by peer"))
    assert lines[0] == "Restarting trainers 0/2 restarts 1 failures 0"
    assert any(line.startswith("tell Warning ReplicaFailed: digits-trainer-1") for line in lines)


def test_replicas_of_a_starved_host_that_give_each_other_up_in_turn_are_one_failure():
    story = Story(checkpoint={"mountPath": "/data", "claimName": "data"})
    servers = [pserver(index, created_at=at(0)) for index in range(2)]
    trainers = [trainer(index, created_at=at(0)) for index in range(2)]
    story.sees(*servers, *trainers)

    def gone(pod: ObservedPod, after: float) -> ObservedPod:
        return ended(pod, 91, finished_at=at(after))

    story.sees(gone(servers[0], 300), servers[1], *trainers, after=300)
    again = pserver(0, "0.1", created_at=at(302))
    story.sees(again, servers[1], gone(trainers[0], 303), trainers[1], after=303)
    back = trainer(0, "0.1", created_at=at(305))
    story.sees(again, gone(servers[1], 310), back, gone(trainers[1], 311), after=311)
    assert story.job.status.failures == 1
    others = pserver(1, "0.1", created_at=at(313)), trainer(1, "0.1", created_at=at(313))
    story.sees(again, others[0], gone(back, 320), others[1], after=320)
    assert story.job.status.failures == 2, "it was started after the others had given up"


@pytest.mark.parametrize("ahead", [-30, -1, 0, 1, 30])
def test_who_was_there_at_a_failure_does_not_hang_on_the_clock_of_the_node_that_tells_it(ahead: float):
    story = Story(checkpoint={"mountPath": "/data", "claimName": "data"})
    servers = [pserver(index, created_at=at(0)) for index in range(2)]
    trainers = [trainer(index, created_at=at(0)) for index in range(2)]
    story.sees(*servers, *trainers)
    failed = ended(trainers[0], 1, finished_at=at(1 + ahead))
    story.sees(*servers, failed, trainers[1], after=1)
    gave_up = ended(trainers[1], 91, finished_at=at(2 + ahead))
    story.sees(*servers, gave_up, after=2)
    assert story.job.status.failures == 1, "it gave up the one that had failed"
    again = trainer(0, "0.1", created_at=at(3))
    late = ended(trainer(1, "0.1", created_at=at(4)), 91, finished_at=at(9 + ahead))
    story.sees(*servers, again, late, after=9)
    assert story.job.status.failures == 2, "it was created when the one that had failed was there again"


def test_replicas_that_give_each_other_up_for_ever_are_not_one_incident():
    story = Story(checkpoint={"mountPath": "/data", "claimName": "data"}, runPolicy={"backoffLimit": 3})
    rest = (pserver(0), pserver(1))
    pods = [trainer(index, created_at=at(0)) for index in range(2)]
    story.sees(*rest, *pods)
    for turn in range(2, 16):  # each ends 45 s after the other
        failing = turn % 2
        now = 45 * turn
        pods[failing] = ended(pods[failing], 91, finished_at=at(now))
        lines = story.sees(*rest, *pods, after=now)
        if lines[0].startswith("Failed"):
            return
        pods[failing] = trainer(failing, f"0.{turn // 2}", created_at=at(now + 1))
    pytest.fail(f"the limit of failures is never reached: {lines[0]}")


def fleet_of(trainers: int, **spec: Any) -> tuple[Story, list[ObservedPod]]:
    """Return the story of one server with so many trainers, all of which run, and their pods."""
    story = Story(pserver={"replicas": 1}, trainer={"replicas": trainers}, **spec)
    pods = [trainer(index) for index in range(trainers)]
    story.sees(pserver(0), *pods)
    return story, pods


def fail(story: Story, pods: list[ObservedPod], *indexes: int, after: float) -> None:
    """Let trainers fail by themselves at once, and each be there again in its next life.

    Another operator then goes on, which knows only what is written in the status.
    """
    failed = [ended(pod, 1) if index in indexes else pod for index, pod in enumerate(pods)]
    story.sees(pserver(0), *failed, after=after)
    for index in indexes:
        pods[index] = trainer(index, f"0.{pods[index].attempt.replica + 1}")
    story.job = story.job.with_status(FleetJobStatus.model_validate(story.job.status.to_manifest()))


@pytest.mark.parametrize("trainers", [10, 100])
@pytest.mark.parametrize(
    "apart", [pytest.param(0.0, id="at-once"), pytest.param(0.1, id="one-after-the-other-within-seconds")]
)
def test_a_blip_costs_one_failure_whatever_the_number_of_replicas(trainers, apart):
    story, pods = fleet_of(trainers, runPolicy={"backoffLimit": 1})
    if apart:
        for index in range(trainers):
            fail(story, pods, index, after=apart * index)
    else:
        fail(story, pods, *range(trainers), after=0)
    status = story.job.status
    assert (status.state, status.failures, status.restarts) == ("Restarting", 1, trainers)
    written = status.to_manifest()
    assert written["incidentStart"] == "2026-11-21T10:00:00Z"
    assert [each.get("incidentIndexes") for each in written["roles"]] == ["", f"0-{trainers - 1}"]


def test_an_incident_lasts_a_minute_from_its_first_failure_and_not_from_its_last():
    story, pods = fleet_of(5)
    counts = []
    for index, after in enumerate((0, 30, 60, 61, 90)):
        fail(story, pods, index, after=after)
        counts.append(story.job.status.failures)
    assert counts == [1, 1, 1, 2, 2]


def test_failures_61_s_apart_are_two():
    story, pods = fleet_of(2)
    fail(story, pods, 0, after=0)
    fail(story, pods, 1, after=61)
    assert story.job.status.failures == 2


def test_a_replica_that_fails_again_within_the_incident_counts_again():
    story, pods = fleet_of(3)
    fail(story, pods, 0, after=0)
    fail(story, pods, 1, after=5)
    fail(story, pods, 0, after=10)
    assert story.job.status.failures == 2
    fail(story, pods, 1, after=15)  # of the second incident, as its first failure in it
    fail(story, pods, 2, after=69)
    assert story.job.status.failures == 2
    fail(story, pods, 1, after=70)
    assert story.job.status.failures == 3


@pytest.mark.parametrize(
    "looping", [pytest.param((3,), id="one-trainer"), pytest.param(tuple(range(8)), id="all-trainers")]
)
@pytest.mark.parametrize("together", [True, False])
def test_a_crash_loop_runs_out_of_the_limit(looping, together):
    story, pods = fleet_of(8, runPolicy={"backoffLimit": 6})
    for life in range(7):
        assert story.job.status.state != "Failed", f"it has failed {life} times"
        if together:
            fail(story, pods, *looping, after=10 * life)
        else:
            for place, index in enumerate(looping):
                fail(story, pods, index, after=10 * life + 0.1 * place)
    assert (story.job.status.state, story.job.status.failures) == ("Failed", 7)


def test_each_life_of_a_job_that_starts_anew_fails_by_itself():
    story = Story(failurePolicy={"action": "RestartJob"}, runPolicy={"backoffLimit": 2})
    for life in range(3):
        pods = [pserver(0, f"{life}.0"), pserver(1, f"{life}.0")]
        trainers = [trainer(index, f"{life}.0") for index in (0, 1)]
        trainers[life % 2] = ended(trainers[life % 2], 1)
        story.sees(*pods, *trainers, after=10 * life)
        assert story.job.status.failures == life + 1
    assert story.job.status.state == "Failed"


@pytest.mark.parametrize(
    "skew",
    [
        pytest.param(0, id="clocks-that-agree"),
        pytest.param(-5, id="a-node-whose-clock-is-behind"),
        pytest.param(5, id="a-node-whose-clock-is-ahead"),
    ],
)
def test_who_gives_up_an_evicted_peer_is_not_counted_though_clocks_differ(skew):
    story = Story(checkpoint={"mountPath": "/data", "claimName": "data"})
    servers = [pserver(index, created_at=at(0)) for index in range(2)]
    young = trainer(0, created_at=at(98))  # by the API server's clock, shortly before the other is evicted
    story.sees(*servers, young, trainer(1, created_at=at(0)))
    evicted = trainer(1, disruption="EvictionByEvictionAPI", created_at=at(0))
    story.sees(*servers, young, ended(evicted, 143, finished_at=at(100 + skew)), after=100)
    gave_up = ended(young, 91, finished_at=at(120 + skew))
    story.sees(*servers, gave_up, trainer(1, "0.1", created_at=at(102)), after=120)
    assert (story.job.status.restarts, story.job.status.failures) == (2, 0)


def test_a_pod_that_is_evicted_for_its_own_limit_uses_up_the_limit_of_failures():
    story = Story(runPolicy={"backoffLimit": 2})
    others = (pserver(0), pserver(1), trainer(0))
    for life in range(3):
        assert story.job.status.state != "Failed"
        full = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi".'
        story.sees(*others, ended(trainer(1, f"0.{life}"), 137, reason="Evicted", message=full), after=life)
    assert (story.job.status.state, story.job.status.failures) == ("Failed", 3)


@pytest.mark.parametrize("policy", ["RestartReplica", "RestartJob"])
def test_a_pod_that_its_node_refuses_again_and_again_uses_up_the_limit_of_failures(policy):
    story = Story(failurePolicy={"action": policy}, runPolicy={"backoffLimit": 1})

    def is_refused(after: float) -> None:
        ledger = Ledger.of(story.job.status)
        pods = [
            each(index, str(ledger.attempt(Replica(role, index))))
            for role, each in ((Role.PSERVER, pserver), (Role.TRAINER, trainer))
            for index in (0, 1)
        ]
        story.sees(*pods[:3], ended(pods[3], None, reason="UnexpectedAdmissionError"), after=after)

    is_refused(0)
    assert story.job.status.failures == 0, "the first may be a device that was lost that moment"
    is_refused(100)
    assert story.job.status.failures == 1
    assert story.job.status.last_failure is not None
    assert story.job.status.last_failure.message.startswith(
        "digits-trainer-1 could not run (UnexpectedAdmissionError)"
    )
    is_refused(200)
    assert (story.job.status.state, story.job.status.failures) == ("Failed", 2)


def test_a_pod_that_its_node_refuses_after_one_that_ran_is_no_failure():
    story = Story(runPolicy={"backoffLimit": 0})
    others = (pserver(0), pserver(1), trainer(0))

    def refused(attempt: str) -> ObservedPod:
        return ended(trainer(1, attempt), None, reason="UnexpectedAdmissionError")

    story.sees(*others, refused("0.0"))
    story.sees(*others, trainer(1, "0.1"), after=10)
    story.sees(*others, ended(trainer(1, "0.1"), 143, disruption="PreemptionByScheduler"), after=1000)
    story.sees(*others, refused("0.2"), after=1010)
    assert (story.job.status.state, story.job.status.failures) == ("Restarting", 0)


def calls_of_a_pass_with_peers_lost(trainers: int) -> int:
    """Return how many calls it takes to plan what follows from one failure, and from that of all others."""
    story = Story(trainer={"replicas": trainers})
    servers = [pserver(0), pserver(1)]
    pods = [trainer(index, created_at=at(0)) for index in range(trainers)]
    story.sees(*servers, *pods)
    story.sees(*servers, *pods[:-1], ended(pods[-1], 1, finished_at=at(10)), after=10)
    last = trainer(trainers - 1, "0.1", created_at=at(15))
    story.sees(*servers, *pods[:-1], last, after=15)
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        lost = [ended(pod, 91, finished_at=at(20)) for pod in pods[:-1]]
        story.sees(*servers, *lost, last, after=20)
    finally:
        sys.setprofile(None)
    assert (story.job.status.restarts, story.job.status.failures) == (trainers, 1)
    return calls


def test_what_a_thousand_lost_peers_mean_is_not_looked_for_a_thousand_times():
    few, many = calls_of_a_pass_with_peers_lost(20), calls_of_a_pass_with_peers_lost(200)
    assert many < 15 * few  # 10 times as many replicas; 60 times as many calls where each looks at all others
