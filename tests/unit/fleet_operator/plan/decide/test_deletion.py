"""Pods that are being deleted: their names are taken until they are gone, and some never go by themselves."""

from dataclasses import replace
from typing import Any

import pytest

from fleet_operator.plan.decide.deletion import given_up_at, may_be_forced
from tests.support.plans import Story, at, ended, pserver, trainer


@pytest.mark.parametrize(
    ("grace_ends", "node_lost", "expected"),
    [
        pytest.param(0, None, 30, id="a-node-gets-half-a-minute-beyond-the-grace-period"),
        pytest.param(3600, 300, 360, id="a-lost-node-gets-a-minute-whatever-the-grace-period"),
        pytest.param(310, 300, 340, id="and-no-more-than-any-other"),
    ],
)
def test_given_up_at(grace_ends, node_lost, expected):
    assert given_up_at(at(grace_ends), None if node_lost is None else at(node_lost)) == at(expected)


def test_a_name_that_is_still_taken_is_told_and_waited_for():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1))
    going = ended(trainer(1, deleted_at=at(40)), 1)
    taken = "PodTerminating: digits-trainer-1 is being deleted; its name is in use until it is gone"
    restarting = "Restarting True ReplicaRestarting: digits-trainer-1 failed with exit code 1"
    assert story.sees(pserver(0), pserver(1), trainer(0), going, after=10) == [
        "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 1",
        f"PodsCreated False {taken}",
        f"Running False {taken}",
        f"{restarting}; the replica is restarted",
        "look again after 60 s",
    ]


def test_a_pod_whose_node_is_gone_is_deleted_without_its_word():
    story = Story()
    pods = (pserver(0), pserver(1), trainer(0))
    story.sees(*pods, trainer(1))
    lost = trainer(1, deleted_at=at(40), disruption="DeletionByTaintManager", version="7")
    assert story.sees(*pods, lost, after=50)[-1] == "look again after 20 s"
    lines = story.sees(*pods, lost, after=70)
    assert lines[0] == "Running pservers 2/2 trainers 2/2 restarts 0 failures 0", (
        "until it is known to have ended"
    )
    assert "delete digits-trainer-1 0.0 within 0 s at version 7" in lines
    assert story.sees(*pods, after=71)[0] == "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 0"


def test_a_pod_that_a_deleted_job_of_this_name_left_on_a_lost_node_is_not_waited_for_for_ever():
    story = Story()
    left = trainer(0, owned=False, deleted_at=at(40), not_ready_reason="NodeNotReady")
    left_over = ("Pod/digits-trainer-0",)
    assert story.sees(left, service=False, left_over=left_over, after=50)[-1] == "look again after 20 s"
    lines = story.sees(left, service=False, left_over=left_over, after=70)
    assert "delete digits-trainer-0 0.0 within 0 s" in lines


def test_a_pod_of_somebody_else_is_left_to_them_however_long_it_takes():
    story = Story()
    lines = story.sees(trainer(0, owned=False, deleted_at=at(0)), service=False, after=600)
    assert not [line for line in lines if line.startswith("delete")]


def test_a_pod_that_completes_while_it_is_being_deleted_has_completed():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    going = replace(ended(trainer(1)), deleted_at=at(40))
    story.sees(pserver(0), pserver(1), trainer(0), going, after=11)
    assert story.sees(pserver(0), pserver(1), trainer(0), after=12)[0] == (
        "Running pservers 2/2 trainers 2/2 restarts 0 failures 0"
    )


def test_a_finished_job_does_not_leave_a_pod_of_a_lost_node_for_ever():
    story = Story()
    done = (ended(pserver(0)), ended(trainer(0)), ended(trainer(1)))
    lost = pserver(1, deleted_at=at(5), ready=False, not_ready_reason="NodeNotReady")
    story.sees(*done, lost)
    assert "delete digits-pserver-1 0.0 within 0 s" in story.sees(*done, lost, after=40)


FORCE = (
    "its node has not confirmed its end; if it is certain that it is not running any more:"
    " kubectl delete pod digits-trainer-1 -n default --grace-period=0 --force"
)


def test_a_pod_of_a_slow_node_is_waited_for_and_the_status_tells_how_to_force_it():
    story = Story()
    others = (pserver(0), pserver(1), trainer(0))
    story.sees(*others, ended(trainer(1), 1))
    slow = trainer(1, ready=True, deleted_at=at(30))
    taken = "PodTerminating: digits-trainer-1 is being deleted; its name is in use until it is gone"
    lines = story.sees(*others, slow, after=59)
    assert f"PodsCreated False {taken}" in lines
    assert lines[-1] == "look again after 1 s"
    lines = story.sees(*others, slow, after=60)
    assert f"PodsCreated False {taken}; {FORCE}" in lines
    assert not [line for line in lines if line.startswith(("create", "delete"))]


def test_a_pod_that_somebody_deletes_on_a_slow_node_puts_what_runs_in_doubt():
    story = Story()
    pods = (pserver(0), pserver(1), trainer(0))
    story.sees(*pods, trainer(1))
    lines = story.sees(*pods, trainer(1, deleted_at=at(10), disruption="EvictionByEvictionAPI"), after=40)
    assert f"Running True PodTerminating: digits-trainer-1 is being deleted; {FORCE}" in lines


FORCE_ALL = (
    "their nodes have not confirmed their end; if it is certain that they are not running any more:"
    " kubectl delete pod digits-trainer-0 digits-trainer-1 -n default --grace-period=0 --force"
)


@pytest.mark.parametrize(
    ("slow", "told"),
    [
        pytest.param((1,), f"digits-trainer-1 is being deleted; {FORCE}", id="one"),
        pytest.param((0, 1), f"digits-trainer-0 (and 1 more) is being deleted; {FORCE_ALL}", id="several"),
    ],
)
def test_a_suspended_job_tells_which_pods_are_still_there_and_how_to_force_them(slow, told):
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.edit(suspend=True)
    held = "Suspended True Suspended: spec.suspend is true: "
    going = [trainer(each, ready=True, deleted_at=at(30)) for each in slow]
    passing = pserver(0, deleted_at=at(50))
    assert f"{held}no pod of this job runs until it is false" in story.sees(*going, passing, after=59)
    lines = story.sees(*going, passing, after=60)
    assert f"{held}{told}" in lines
    assert not [line for line in lines if line.startswith(("create", "delete", "tell"))]
    assert f"{held}no pod of this job runs until it is false" in story.sees(after=70)


def test_a_pod_that_a_finalizer_keeps_is_not_said_to_go_by_force():
    story = Story()
    others = (pserver(0), pserver(1), trainer(0))
    story.sees(*others, ended(trainer(1), 1))
    kept = trainer(1, ready=True, deleted_at=at(30), finalizers=("example.com/kept",))
    lines = story.sees(*others, kept, after=60)
    sentence = (
        "digits-trainer-1 is being deleted; its name is in use until example.com/kept is removed from its"
        " finalizers"
    )
    assert f"PodsCreated False PodTerminating: {sentence}" in lines


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        pytest.param(pserver(0), False, id="a-node-that-is-slow-may-run-it-still"),
        pytest.param(
            pserver(0, ready=False, not_ready_reason="ContainersNotReady"), False, id="its-kubelet-speaks"
        ),
        pytest.param(pserver(0, ready=False, not_ready_reason="NodeNotReady"), True, id="its-node-is-silent"),
        pytest.param(pserver(0, disruption="EvictionByEvictionAPI"), False, id="a-node-is-drained"),
        pytest.param(pserver(0, disruption="DeletionByPodGC"), True, id="its-node-is-gone"),
        pytest.param(pserver(0, disruption="DeletionByTaintManager"), False, id="a-person-set-the-taint"),
        pytest.param(
            pserver(0, ready=False, disruption="DeletionByTaintManager"), True, id="a-silent-node-is-tainted"
        ),
        pytest.param(ended(pserver(0)), True, id="nothing-of-it-runs-any-more"),
    ],
)
def test_may_be_forced(pod, expected):
    assert may_be_forced(pod) is expected


HOUR = 3600
SILENT: dict[str, Any] = {"ready": False, "not_ready_reason": "NodeNotReady", "not_ready_since": at(0)}
FOREVER = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}


def test_a_lost_node_is_not_waited_for_as_long_as_its_pods_grace_period():
    story = Story(pserver={"replicas": 1}, trainer={"replicas": 2})
    others = (pserver(0), trainer(0))
    story.sees(*others, trainer(1))
    assert "delete digits-trainer-1 0.0" in story.sees(*others, trainer(1, **SILENT), after=300)
    gone = trainer(1, **SILENT, deleted_at=at(300 + HOUR), version="7")
    assert story.sees(*others, gone, after=310)[-1] == "look again after 50 s"
    assert "delete digits-trainer-1 0.0 within 0 s at version 7" in story.sees(*others, gone, after=360)
    assert "create digits-trainer-1 0.1" in story.sees(*others, after=361)


def test_a_pod_whose_node_is_lost_while_it_is_being_deleted_is_waited_for_as_long_as_the_node():
    story = Story(scheduling={"tolerations": [{**FOREVER, "tolerationSeconds": 20}]})
    others = (pserver(0), pserver(1), trainer(0))
    story.sees(*others, trainer(1))
    evicted: dict[str, Any] = {"disruption": "DeletionByTaintManager", "deleted_at": at(10 + HOUR)}
    assert story.sees(*others, trainer(1, **SILENT, **evicted), after=60)[-1] == "look again after 20 s"
    lines = story.sees(*others, trainer(1, **SILENT, **evicted), after=80)
    assert "delete digits-trainer-1 0.0 within 0 s" in lines


@pytest.mark.parametrize(
    ("tolerations", "pod"),
    [
        pytest.param([], {"ready": True}, id="a-node-that-is-slow"),
        pytest.param(
            [],
            {"not_ready_reason": "ContainersNotReady", "disruption": "DeletionByTaintManager"},
            id="a-node-that-speaks-and-was-tainted-by-a-person",
        ),
        pytest.param([FOREVER], SILENT, id="a-silent-node-that-is-waited-for-for-ever"),
    ],
)
def test_the_grace_period_is_kept_where_nobody_knows_the_node_to_be_lost(tolerations, pod):
    story = Story(scheduling={"tolerations": tolerations})
    others = (pserver(0), pserver(1), trainer(0))
    story.sees(*others, ended(trainer(1), 1))
    lines = story.sees(*others, trainer(1, **pod, deleted_at=at(HOUR)), after=1800)
    assert not [line for line in lines if line.startswith("delete")]
    assert lines[-1] == f"look again after {HOUR + 30 - 1800} s"
