"""Why a job does not run yet: what a person must see in ``kubectl describe``."""

from dataclasses import replace
from typing import Any

import pytest

from fleet_operator.api import ConditionType
from fleet_operator.plan.decide.failure_policy import FailReason
from fleet_operator.plan.model import ObjectRef, ObservedObject
from fleet_operator.plan.tell.reasons import ADVICE
from tests.support import jobs
from tests.support.plans import Story, at, ended, pending, pserver, trainer

STARTING = "Starting: digits-trainer-1 is being started; if this persists, see its events"


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        pytest.param(
            pending(trainer(1), "Unschedulable", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
            "Unschedulable: digits-trainer-1 is waiting, Unschedulable:"
            " 0/3 nodes are available: 3 Insufficient nvidia.com/gpu; free or add nodes, or request less",
            id="the-schedulers-own-sentence",
        ),
        pytest.param(
            pending(trainer(1), "ImagePullBackOff", 'Back-off pulling image "traner:1"'),
            'ImagePullBackOff: digits-trainer-1 is waiting, ImagePullBackOff: Back-off pulling image "traner'
            ":1\"; correct the image's name, or set imagePullSecrets",
            id="an-image-that-cannot-be-pulled",
        ),
        pytest.param(
            pending(trainer(1), "CreateContainerConfigError"),
            "CreateContainerConfigError: digits-trainer-1 is waiting, CreateContainerConfigError;"
            " create the Secret or ConfigMap that the template names",
            id="without-a-sentence",
        ),
        pytest.param(
            pending(trainer(1), "ContainerCreating"),
            STARTING,
            id="what-every-pod-passes-through-is-no-trouble",
        ),
        pytest.param(
            pending(trainer(1)),
            STARTING,
            id="nothing-known-yet",
        ),
        pytest.param(
            pending(trainer(1), "sidecar not injected", "by the mesh"),
            "PodWaiting: digits-trainer-1 is waiting, sidecar not injected: by the mesh",
            id="what-is-no-word-is-no-reason",
        ),
    ],
)
def test_a_pod_that_waits(pod, expected):
    assert Story().sees(pserver(0), pserver(1), trainer(0), pod)[:3] == [
        "Pending pservers 2/2 trainers 1/2 restarts 0 failures 0",
        "PodsCreated True PodsCreated: the pods of all replicas exist",
        f"Running False {expected}",
    ]


def test_a_pod_that_may_wait_for_certificates_names_their_secret():
    story = Story(network={"tls": {"secretName": "digits-tls"}})
    assert story.sees(pserver(0), pserver(1), trainer(0), pending(trainer(1), "ContainerCreating"))[2] == (
        f"Running False {STARTING}, for example about a missing Secret digits-tls (spec.network.tls)"
    )


def test_what_the_api_server_refuses_for_now_is_told_before_what_waits_for_it():
    quota = 'pods "digits-pserver-1" is forbidden: exceeded quota: few'
    refused = f"CreationRefused: the API server temporarily refuses the missing objects: {quota};"
    refused += " the creation is retried: free resources, or ask the owner of the limit or webhook"
    lines = Story().sees(pserver(0), refused=quota)
    assert lines[1:3] == [f"PodsCreated False {refused}", f"Running False {refused}"]
    assert "create digits-pserver-1 0.0" in lines, "it is tried again"


def test_a_server_that_cannot_be_placed_is_told_though_the_trainers_wait_for_it():
    lines = Story().sees(pserver(0), pending(pserver(1), "Unschedulable", "0/1 nodes are available"))
    gate = "trainers are created once all parameter servers are ready: digits-pserver-1 is not ready yet"
    gate += "; if this persists, see its log and its events"
    assert lines[1:3] == [
        f"PodsCreated False WaitingForParameterServers: {gate}",
        (
            "Running False Unschedulable: digits-pserver-1 is waiting, Unschedulable: 0/1 nodes are available"
            ";"
            " free or add nodes, or request less"
        ),
    ]


def test_a_server_that_is_not_there_has_no_log_to_look_at():
    gate = "PodsCreated False WaitingForParameterServers: trainers are created once all parameter servers are"
    gate += " ready: digits-pserver-0 (and 1 more) does not exist yet"
    assert Story().sees()[1] == gate


def test_every_way_to_fail_says_what_to_do():
    told_with_its_cause = {FailReason.BAD_CONFIGURATION}
    assert set(FailReason) - told_with_its_cause <= ADVICE.keys()


ALL = (pserver(0), pserver(1), trainer(0), trainer(1))


GROUP = ObjectRef("scheduling.volcano.sh/v1beta1", "PodGroup", "digits-0")


THERE: dict[str, Any] = {"objects": {GROUP: ObservedObject()}}


UNSCHEDULABLE = "2/4 tasks in gang unschedulable: 2 Insufficient nvidia.com/gpu"


def running(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("Running ")]
    return line


def test_the_pod_that_holds_the_others_up_speaks_for_the_gang():
    pods = [pending(each, "Schedulable", "the others have no place") for each in ALL[:3]]
    pods.append(pending(ALL[3], "Unschedulable", UNSCHEDULABLE))
    story = Story(podGroupPolicy={"volcano": {}}, runPolicy={"pendingDeadlineSeconds": 60})
    assert running(story.sees(*pods, **THERE)) == (
        "Running False Unschedulable: the gang digits-0 needs nodes for 4 pods together, but 4 have none;"
        f" digits-trainer-1 is waiting, Unschedulable: {UNSCHEDULABLE}; free or add nodes, or request less"
    )
    story.sees(*pods, after=60, **THERE)
    assert story.job.status.state == "Failed"
    failure = story.job.status.last_failure
    assert failure is not None
    assert (failure.pod, failure.reason) == ("digits-trainer-1", "Unschedulable")
    assert UNSCHEDULABLE in (failure.message or "")


def test_a_gang_whose_pods_only_wait_for_each_other_says_so():
    pods = [pending(each, "Undetermined", "pod group is not ready") for each in ALL]
    line = running(Story(podGroupPolicy={"volcano": {}}).sees(*pods, **THERE))
    assert line.startswith("Running False GangWaiting: the gang digits-0 needs nodes for 4 pods together")
    assert "digits-pserver-0 is waiting, Undetermined: pod group is not ready" in line


def test_a_gang_in_a_queue_says_what_its_pod_group_says():
    pods = [pending(each) for each in ALL]
    held_back = {GROUP: ObservedObject(held_back="Pending: queue resource quota insufficient")}
    line = running(Story(podGroupPolicy={"volcano": {}}).sees(*pods, objects=held_back))
    assert "GangWaiting" in line
    assert "its PodGroup is Pending: queue resource quota insufficient; see the events of its pods" in line


def test_a_scheduler_that_says_nothing_is_named():
    pods = [replace(pending(each), scheduler="volcano") for each in ALL]
    line = running(Story(podGroupPolicy={"volcano": {}}).sees(*pods, **THERE))
    assert "the scheduler volcano has not reported on them yet" in line


def test_pods_with_places_wait_for_what_they_say_themselves():
    on_nodes = [replace(pending(each, "ImagePullBackOff", "no such image"), node="gpu-1") for each in ALL]
    line = running(Story(podGroupPolicy={"volcano": {}}).sees(*on_nodes, **THERE))
    assert line.startswith("Running False ImagePullBackOff: digits-pserver-0 is waiting")


KUEUE = {"kueue": {"queueName": "research"}}


MANAGED: dict[str, Any] = {"finalizers": ("kueue.x-k8s.io/managed",)}


def test_a_group_that_kueue_has_not_admitted_says_whom_to_ask():
    gated = [
        replace(pending(each, "SchedulingGated", "blocked"), gates=("kueue.x-k8s.io/admission",))
        for each in ALL
    ]
    assert running(Story(podGroupPolicy=KUEUE).sees(*gated)) == (
        "Running False SchedulingGated: Kueue's queue research has not admitted the gang digits-11111111-0:"
        " digits-pserver-0 (and 3 more) is gated by kueue.x-k8s.io/admission: blocked;"
        " kubectl describe workload digits-11111111-0 -n default shows why"
    )


def test_kueues_own_reason_comes_first_where_the_operator_may_read_it():
    gated = [replace(pending(each, "SchedulingGated"), gates=("kueue.x-k8s.io/admission",)) for each in ALL]
    line = running(Story(podGroupPolicy=KUEUE).sees(*gated, queue_message="insufficient unused quota"))
    assert line.endswith("has not admitted the gang digits-11111111-0: insufficient unused quota")


def test_a_gate_of_somebody_else_is_not_kueues():
    gated = [replace(pending(each, "SchedulingGated", "blocked"), gates=("example.com/x",)) for each in ALL]
    line = running(Story(podGroupPolicy=KUEUE).sees(*gated))
    assert line.endswith(
        "SchedulingGated: blocked; the controller that set the pod's schedulingGates must remove them"
    )


def test_under_kueue_no_replica_is_started_again_alone_because_its_name_stays_taken():
    story = Story(podGroupPolicy=KUEUE, failurePolicy={"action": "RestartReplica"})
    managed = [replace(each, **MANAGED) for each in ALL]
    story.sees(*managed)
    story.sees(*managed[:3], ended(managed[3], 1), after=5)
    assert (story.job.status.job_restarts, story.job.status.failures) == (1, 1)
    leaving = [replace(ended(each, 143), deleted_at=at(10)) for each in managed]
    lines = story.sees(*leaving, after=12)
    assert not [line for line in lines if line.startswith("create ")]
    assert (
        "PodsCreated False PodTerminating: digits-pserver-0 (and 3 more) is being deleted; its name is in use"
        " until kueue.x-k8s.io/managed is removed from its finalizers"
    ) in lines
    lines = story.sees(after=13)
    assert "create digits-trainer-1 1.0" in lines


def test_a_collective_job_waits_for_its_queue_as_well():
    gated = [
        replace(pending(each, "SchedulingGated"), gates=("kueue.x-k8s.io/admission",)) for each in ALL[2:]
    ]
    line = running(Story(jobs.collective_manifest(podGroupPolicy=KUEUE)).sees(*gated))
    assert "digits-trainer-0 (and 1 more) is gated by kueue.x-k8s.io/admission" in line


def test_one_pod_is_one():
    one = pending(ALL[3], "Unschedulable", UNSCHEDULABLE)
    line = running(Story(podGroupPolicy={"volcano": {}}).sees(*ALL[:3], one, **THERE))
    assert "needs nodes for 4 pods together, but 1 has none; digits-trainer-1 is waiting" in line
    alone = {"volcano": {"minMember": 1}}
    line = running(Story(podGroupPolicy=alone).sees(*ALL[:3], one, **THERE))
    assert "needs a node for 1 pod, but 1 has none" in line
    gated = replace(pending(ALL[3], "SchedulingGated"), gates=("kueue.x-k8s.io/admission",))
    line = running(Story(podGroupPolicy=KUEUE).sees(*ALL[:3], gated))
    assert "digits-trainer-1 is gated by kueue.x-k8s.io/admission;" in line


QUOTA = 'pods "digits-trainer-0" is forbidden: exceeded quota: few'


def test_a_gang_whose_pods_cannot_be_created_says_so_and_its_deadline_too():
    pods = [pending(each) for each in ALL[:2]]
    story = Story(podGroupPolicy={"volcano": {}}, runPolicy={"pendingDeadlineSeconds": 60})
    refused = f"CreationRefused: the API server temporarily refuses the missing objects: {QUOTA}"
    assert running(story.sees(*pods, **THERE, refused=QUOTA)).startswith(f"Running False {refused}")
    pods[0] = pending(ALL[0], "Unschedulable", "the gang is not complete")
    story.sees(*pods, after=60, **THERE, refused=QUOTA)
    failure = story.job.status.last_failure
    assert failure is not None
    assert (failure.pod, failure.reason) == (None, "CreationRefused")
    assert QUOTA in (failure.message or "")


def test_a_gang_that_has_as_many_pods_as_it_needs_waits_for_its_scheduler_though_more_are_refused():
    trainers = {"replicas": 3, "minReplicas": 2, "maxReplicas": 4}
    story = Story(syncMode="Async", trainer=trainers, podGroupPolicy={"volcano": {}})
    pods = [pending(each) for each in ALL[:3]]
    assert "CreationRefused" in running(story.sees(*pods, **THERE, refused=QUOTA)), "one too few"
    pods.append(pending(ALL[3], "Unschedulable", UNSCHEDULABLE))
    line = running(story.sees(*pods, after=1, **THERE, refused=QUOTA))
    assert line.startswith("Running False Unschedulable: the gang digits-0 needs nodes for 4 pods together")


def test_that_a_gang_begins_to_look_for_places_can_wait():
    story = Story(podGroupPolicy={"volcano": {}})
    story.sees(**THERE)
    story.sees(*(pending(each) for each in ALL), after=1, **THERE)
    running_now = story.job.status.condition(ConditionType.RUNNING)
    assert running_now is not None
    assert running_now.reason == "GangWaiting"
    assert not story.plan.urgent
    story.sees(*(pending(each, "Unschedulable", UNSCHEDULABLE) for each in ALL), after=2, **THERE)
    assert story.plan.urgent
