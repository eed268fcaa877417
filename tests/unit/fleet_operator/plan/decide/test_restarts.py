"""What follows a failure: which pods are deleted and created again, and what the job says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_operator.api import Role
from fleet_operator.build import replica_ports
from fleet_operator.plan.model import CreatePod
from tests.support import jobs
from tests.support.plans import Story, at, ended, pending, pserver, trainer

LEAVING = "PodTerminating: digits-trainer-1 is being deleted; its name is in use until it is gone"
LOST = "digits-trainer-1 found that a parameter server had lost its state (exit code 90)"


def test_a_failed_trainer_is_reported_deleted_and_created_again():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    failed = ended(
        trainer(1), 1, message="Traceback (most recent call last):\nValueError: no such file: x.csv"
    )
    sentence = "digits-trainer-1 failed with exit code 1: ValueError: no such file: x.csv"
    restarting = f"Restarting True ReplicaRestarting: {sentence}; the replica is restarted"
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
        "PodsCreated True PodsCreated: the pods of all replicas exist",
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
        f"Restarting True JobRestarting: {LOST}; all replicas restart",
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
        "PodsCreated True PodsCreated: the pods of all replicas exist",
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


def test_a_pod_that_a_user_deleted_is_replaced_under_a_higher_attempt_and_not_counted():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    lines = story.sees(pserver(0), pserver(1), trainer(0), departed=(trainer(1),), after=5)
    assert lines[0] == "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 0"
    assert lines[-2:] == [
        "tell Warning ReplicaDisrupted: digits-trainer-1 was deleted",
        "look again after 1 s",
    ]
    assert "create digits-trainer-1 0.1" in story.sees(pserver(0), pserver(1), trainer(0), after=6)


def test_the_reason_of_an_eviction_is_told_even_if_the_pod_is_first_seen_with_it_when_it_is_gone():
    late = "Exceeded the PodsReady timeout default/digits"
    evicted = replace(trainer(1), disruption="WorkloadEvictedDueToPodsReadyTimeout", disruption_message=late)
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    lines = story.sees(pserver(0), pserver(1), trainer(0), departed=(evicted,), after=5)
    assert lines[0] == "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 0"
    cause = f"digits-trainer-1 was disrupted (WorkloadEvictedDueToPodsReadyTimeout: {late})"
    assert f"tell Warning ReplicaDisrupted: {cause}" in lines


def test_a_trainer_whose_servers_have_completed_can_only_start_with_them():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    pods = (ended(pserver(0)), ended(pserver(1)), ended(trainer(0)))
    assert (
        story.sees(*pods, trainer(1), after=1)[0] == "Running pservers 2/2 trainers 2/2 restarts 0 failures 0"
    )
    lines = story.sees(*pods, ended(trainer(1), 1), after=2)
    sentence = "digits-trainer-1 failed with exit code 1; all replicas restart"
    assert f"Restarting True JobRestarting: {sentence}" in lines


@pytest.mark.parametrize(
    ("others", "patience"),
    [
        pytest.param((pserver(0), pserver(1), trainer(0)), None, id="that-run"),
        pytest.param((pserver(0), pserver(1), ended(trainer(0))), None, id="that-run-or-have-completed"),
        pytest.param((pserver(0), pserver(1), pending(trainer(0))), "3600", id="that-start"),
    ],
)
def test_who_is_started_again_waits_for_the_start_of_others_only_if_one_has_still_to_start(others, patience):
    story = Story(startupPolicy={"order": "AnyOrder"})
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
    servers = [pserver(index, assigned_ports=told, created_at=at(0)) for index in range(2)]
    trainers = [trainer(index, assigned_ports=told, created_at=at(0)) for index in range(2)]
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
    trainers = [trainer(index, assigned_ports=(20501, 20601)) for index in range(2)]
    story.sees(*trainers)
    story.sees(trainers[0], ended(trainers[1], 1), after=10)
    story.sees(after=15)
    env = created_env(story)["digits-trainer-0"]
    assert env["MASTER_PORT"] == str(replica_ports(story.job, Role.TRAINER, 0).first) != "20501"
