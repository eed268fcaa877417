"""Node loss: when a pod on a silent node is given up, and what is told meanwhile."""

from datetime import timedelta
from typing import Any

import pytest

from fleet_operator.plan.observe.pods import UNREACHABLE_PATIENCE, is_on_silent_node, lost_at, patience
from tests.support import jobs
from tests.support.plans import Story, at, ended, pserver, trainer

UNREACHABLE = "node.kubernetes.io/unreachable"
SILENT: dict[str, Any] = {"not_ready_reason": "NodeNotReady", "not_ready_since": at(0), "node": "gpu-7"}


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        pytest.param(trainer(**SILENT), True, id="silent"),
        pytest.param(trainer(not_ready_reason="ContainersNotReady"), False, id="a-probe-that-fails"),
        pytest.param(ended(trainer(**SILENT), 1), False, id="it-had-ended-before"),
    ],
)
def test_is_on_silent_node(pod, expected):
    assert is_on_silent_node(pod) is expected


@pytest.mark.parametrize(
    ("tolerations", "expected"),
    [
        pytest.param([], UNREACHABLE_PATIENCE, id="as-kubernetes-does-by-default"),
        pytest.param(
            [{"operator": "Exists"}], UNREACHABLE_PATIENCE, id="tolerating-everything-is-not-waiting-for-ever"
        ),
        pytest.param([{"key": UNREACHABLE, "tolerationSeconds": 20}], timedelta(seconds=20), id="named"),
        pytest.param(
            [
                {"key": UNREACHABLE, "tolerationSeconds": 20},
                {"key": "node.kubernetes.io/not-ready", "tolerationSeconds": 10},
            ],
            timedelta(seconds=10),
            id="the-shortest-counts",
        ),
        pytest.param([{"key": UNREACHABLE, "operator": "Exists"}], None, id="for-ever-if-asked-by-name"),
    ],
)
def test_patience(tolerations, expected):
    assert patience(tolerations) == expected


def test_a_pod_that_is_being_deleted_is_given_up_with_its_grace_period_instead():
    assert lost_at(trainer(**SILENT), []) == at(300)
    assert lost_at(trainer(**SILENT, deleted_at=at(30)), []) is None


def test_a_silent_node_is_told_then_its_pod_is_replaced_without_being_counted():
    story = Story(scheduling={"tolerations": [{"operator": "Exists"}]})
    others = (pserver(0), pserver(1), trainer(0))
    story.sees(*others, trainer(1))
    told = (
        "NodeNotReady: digits-trainer-1 is on node gpu-7, which is silent since 10:00:00 UTC;"
        " the job waits for it until 10:05:00 UTC"
    )
    lines = story.sees(*others, trainer(1, **SILENT), after=40)
    assert lines[0] == "Running pservers 2/2 trainers 2/2 restarts 0 failures 0"
    assert lines[2:] == [f"Running True {told}", f"tell Warning {told}", "look again after 260 s"]
    lines = story.sees(*others, trainer(1, **SILENT), after=300)
    assert lines[0] == "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 0"
    assert "delete digits-trainer-1 0.0" in lines
    lost = "digits-trainer-1 is lost: its node gpu-7 has been silent since 10:00:00 UTC"
    assert f"tell Warning ReplicaDisrupted: {lost}" in lines
    # Its kubelet cannot confirm the end, so the name is freed without it.
    gone = trainer(1, **SILENT, deleted_at=at(330))
    assert "delete digits-trainer-1 0.0 within 0 s" in story.sees(*others, gone, after=360)
    assert "create digits-trainer-1 0.1" in story.sees(*others, after=361)


def test_a_node_that_answers_again_in_time_changes_nothing():
    story = Story()
    others = (pserver(0), pserver(1), trainer(0))
    story.sees(*others, trainer(1, **SILENT), after=40)
    lines = story.sees(*others, trainer(1), after=60)
    assert lines[2] == "Running True ReplicasRunning: all 4 replicas run or have completed"
    assert lines[3:] == []


def test_a_collective_job_restarts_as_a_whole_when_a_node_is_lost():
    story = Story(jobs.collective_manifest())
    story.sees(trainer(0), trainer(1, **SILENT), after=300)
    assert (story.job.status.job_restarts, story.job.status.failures) == (1, 0)


@pytest.mark.parametrize("action", ["RestartReplica", "RestartJob", "FailJob"])
def test_peers_that_give_up_first_are_not_counted_and_the_silent_one_goes_with_them(action):
    story = Story(failurePolicy={"action": action}, runPolicy={"backoffLimit": 0})
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    lines = story.sees(
        pserver(0), pserver(1, **SILENT), ended(trainer(0), 91), ended(trainer(1), 91), after=60
    )
    assert lines[0] == "Restarting pservers 0/2 trainers 0/2 restarts 1 failures 0"
    assert "delete digits-pserver-1 0.0" in lines
    lost = "digits-pserver-1 is lost: its node gpu-7 has been silent since 10:00:00 UTC"
    assert f"tell Warning ReplicaDisrupted: {lost}" in lines


def test_a_silent_trainer_is_replaced_with_the_one_that_gave_it_up_and_the_others_go_on():
    story = Story(runPolicy={"backoffLimit": 0})
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    lines = story.sees(pserver(0), pserver(1), ended(trainer(0), 91), trainer(1, **SILENT), after=60)
    assert lines[0] == "Restarting pservers 2/2 trainers 0/2 restarts 2 failures 0"
    deleted = [line for line in lines if line.startswith("delete ")]
    assert deleted == ["delete digits-trainer-0 0.0", "delete digits-trainer-1 0.0"]


@pytest.mark.parametrize(
    "code", [pytest.param(91, id="as-the-runtime-says"), pytest.param(1, id="as-nccl-does")]
)
@pytest.mark.parametrize("action", ["RestartJob", "FailJob"])
def test_a_collective_job_is_not_counted_for_the_node_that_its_peers_miss(action, code):
    story = Story(jobs.collective_manifest(failurePolicy={"action": action}, runPolicy={"backoffLimit": 0}))
    story.sees(trainer(0), trainer(1))
    lines = story.sees(ended(trainer(0), code), trainer(1, **SILENT), after=60)
    assert lines[0] == "Restarting trainers 0/2 restarts 1 failures 0"
    assert "delete digits-trainer-1 0.0" in lines


def test_a_trainer_that_fails_by_itself_counts_though_a_node_is_silent():
    story = Story(runPolicy={"backoffLimit": 0})
    story.sees(pserver(0), pserver(1), ended(trainer(0), 1), trainer(1, **SILENT), after=60)
    assert (story.job.status.state, story.job.status.failures) == ("Failed", 1)
