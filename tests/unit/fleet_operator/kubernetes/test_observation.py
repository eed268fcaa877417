from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from fleet_operator.api import Role
from fleet_operator.build import ClusterHosts, Start, build_pod, replica_ports
from fleet_operator.kubernetes.observation import observe_object, observe_pod
from fleet_operator.plan.model import Attempt, ObservedObject, ObservedPod, PodPhase
from tests.support import jobs

START, END = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
START_TIME, END_TIME = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 0, 1, tzinfo=UTC)


def pod(status: dict[str, Any] | None = None, *, containers: tuple[str, ...] = ("fleet",), **metadata: Any):
    labels = {
        "fleetjob.dev/role": "trainer",
        "fleetjob.dev/index": "1",
        "fleetjob.dev/attempt": "2.3",
    }
    return {
        "metadata": {"name": "digits-trainer-1", "uid": "u", "labels": labels, **metadata},
        "spec": {"nodeName": "node-1", "containers": [{"name": name} for name in containers]},
        "status": status or {},
    }


def observed(status: dict[str, Any] | None = None, **more: Any) -> ObservedPod:
    result = observe_pod(pod(status, **more))
    assert result is not None
    return result


def state(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state}


def ready(status: str, reason: str | None = None) -> dict[str, Any]:
    return {"type": "Ready", "status": status, "reason": reason}


def test_the_key_is_the_main_containers():
    manifest = pod(containers=("istio-proxy", "fleet"))
    assert observe_pod(manifest) == observed(containers=("istio-proxy", "fleet"))
    manifest["spec"]["containers"][1]["env"] = [{"name": "FLEET_JOB_KEY", "value": "aa"}]
    seen = observe_pod(manifest)
    assert seen is not None
    assert seen.key == "aa"


@pytest.mark.parametrize(("on_host", "told"), [(True, (20010, 20020)), (False, ())])
def test_ports_are_those_that_the_pod_was_told(on_host: bool, told: tuple[int, ...]):
    network = {"hostNetwork": on_host, "portRange": {"first": 20000, "last": 29999}} if on_host else {}
    one = jobs.job(jobs.manifest(network=network))
    built = build_pod(one, Role.TRAINER, 1, Attempt(), ClusterHosts(one), Start(ports=told))
    seen = observe_pod({**built, "metadata": {**built["metadata"], "uid": "u"}})
    assert seen is not None
    assert seen.assigned_ports == told
    assert seen.metrics_port == replica_ports(one, Role.TRAINER, 1).metrics


def test_a_container_that_was_injected_first_does_not_speak_for_the_pod():
    statuses = [
        state("istio-proxy", running={"startedAt": START}),
        state("train", terminated={"exitCode": 0}),
    ]
    seen = observed(
        {"phase": "Running", "containerStatuses": statuses},
        containers=("istio-proxy", "train"),
        annotations={"kubectl.kubernetes.io/default-container": "train"},
    )
    assert (seen.container, seen.exit_code) == ("train", 0)


def test_a_pod_just_created():
    assert observed(creationTimestamp=START) == ObservedPod(
        name="digits-trainer-1",
        uid="u",
        role=Role.TRAINER,
        index=1,
        attempt=Attempt(2, 3),
        phase=PodPhase.PENDING,
        created_at=START_TIME,
        container="fleet",
        node="node-1",
    )


def test_a_pod_that_runs_and_is_ready():
    running = state("fleet", running={"startedAt": START})
    seen = observed({"phase": "Running", "conditions": [ready("True")], "containerStatuses": [running]})
    assert (seen.phase, seen.ready, seen.started_at) == (PodPhase.RUNNING, True, START_TIME)
    assert (seen.not_ready_reason, seen.exit_code) == (None, None)


@pytest.mark.parametrize("status", ["False", "Unknown"])
def test_a_pod_that_is_not_ready_says_why(status: str):
    seen = observed({"phase": "Running", "conditions": [ready(status, "NodeStatusUnknown")]})
    assert (seen.ready, seen.not_ready_reason) == (False, "NodeStatusUnknown")


def test_a_pod_that_failed_tells_its_exit_code_and_message():
    ended = {
        "exitCode": 1,
        "reason": "Error",
        "message": "loss is nan\n",
        "startedAt": START,
        "finishedAt": END,
    }
    seen = observed({"phase": "Failed", "containerStatuses": [state("fleet", terminated=ended)]})
    assert (seen.phase, seen.exit_code, seen.reason, seen.message) == (
        PodPhase.FAILED,
        1,
        "Error",
        "loss is nan",
    )
    assert (seen.started_at, seen.finished_at) == (START_TIME, END_TIME)


def test_the_container_named_fleet_speaks_for_the_pod_wherever_it_stands():
    statuses = [state("proxy", terminated={"exitCode": 9}), state("fleet", terminated={"exitCode": 0})]
    seen = observed({"phase": "Failed", "containerStatuses": statuses}, containers=("proxy", "fleet"))
    assert (seen.container, seen.exit_code) == ("fleet", 0)


def test_else_the_first_container_speaks():
    statuses = [state("b", terminated={"exitCode": 9}), state("a", terminated={"exitCode": 3})]
    seen = observed({"phase": "Failed", "containerStatuses": statuses}, containers=("a", "b"))
    assert (seen.container, seen.exit_code) == ("a", 3)


def test_an_init_container_that_failed_speaks_for_a_main_one_that_never_ran():
    seen = observed(
        {
            "phase": "Failed",
            "initContainerStatuses": [
                state("first", terminated={"exitCode": 0}),
                state("data", terminated={"exitCode": 4, "message": "no space"}),
            ],
            "containerStatuses": [state("fleet", waiting={"reason": "PodInitializing"})],
        }
    )
    assert (seen.container, seen.exit_code, seen.message) == ("data", 4, "no space")


def test_a_waiting_container_says_what_it_waits_for():
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    seen = observed({"phase": "Pending", "containerStatuses": [state("fleet", waiting=waiting)]})
    assert (seen.reason, seen.message) == ("ImagePullBackOff", "Back-off pulling image")


@pytest.mark.parametrize(
    ("init", "main", "sidecar"),
    [
        pytest.param("ImagePullBackOff", "PodInitializing", "PodInitializing", id="an-init-container"),
        pytest.param(None, "ContainerCreating", "ImagePullBackOff", id="a-sidecar"),
    ],
)
def test_another_container_that_keeps_the_pod_pending_says_what_it_waits_for(init, main, sidecar):
    waiting = {"fleet": main, "data": init, "proxy": sidecar}
    statuses = {name: state(name, waiting={"reason": reason}) for name, reason in waiting.items() if reason}
    seen = observed(
        {
            "phase": "Pending",
            "initContainerStatuses": [statuses["data"]] if init else [],
            "containerStatuses": [statuses["fleet"], statuses["proxy"]],
        }
    )
    assert (seen.reason, seen.exit_code) == ("ImagePullBackOff", None)


def test_a_main_container_that_has_ended_is_not_hidden_by_a_sidecar_that_waits():
    statuses = [
        state("fleet", terminated={"exitCode": 3}),
        state("proxy", waiting={"reason": "ImagePullBackOff"}),
    ]
    seen = observed({"phase": "Pending", "containerStatuses": statuses})
    assert (seen.container, seen.exit_code) == ("fleet", 3)


def test_a_pod_that_no_node_takes_has_the_schedulers_sentence():
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    }
    seen = observed({"phase": "Pending", "conditions": [unschedulable]})
    assert (seen.reason, seen.message) == ("Unschedulable", unschedulable["message"])


def test_the_pods_own_reason_outweighs_the_containers():
    ended = {"exitCode": 137, "reason": "Error"}
    seen = observed(
        {
            "phase": "Failed",
            "reason": "Evicted",
            "message": "The node was low on resource: memory.",
            "containerStatuses": [state("fleet", terminated=ended)],
        }
    )
    assert (seen.reason, seen.message, seen.exit_code) == (
        "Evicted",
        "The node was low on resource: memory.",
        137,
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("DisruptionTarget", "PreemptionByScheduler"), ("TerminationTarget", "StoppedByKueue")],
)
@pytest.mark.parametrize("holds", [True, False])
def test_a_disruption_counts_only_while_it_holds(kind: str, reason: str, holds: bool):
    disrupted = {"type": kind, "status": str(holds), "reason": reason}
    assert observed({"phase": "Running", "conditions": [disrupted]}).disruption == (reason if holds else None)


def test_kueues_message_about_a_stop_is_kept():
    why = {"reason": "WorkloadEvicted", "message": "The workload is deactivated"}
    seen = observed({"conditions": [{"type": "TerminationTarget", "status": "True", **why}]})
    assert (seen.disruption, seen.disruption_message) == tuple(why.values())


def test_who_disrupts_a_pod_without_a_reason_is_known_by_the_condition():
    stopped = {"type": "TerminationTarget", "status": "True"}
    assert observed({"phase": "Running", "conditions": [stopped]}).disruption == "TerminationTarget"


@pytest.mark.parametrize(
    ("ready", "reason"),
    [
        pytest.param({"status": "True"}, None, id="ready"),
        pytest.param({"status": "False", "reason": "ContainersNotReady"}, "ContainersNotReady", id="a-probe"),
        pytest.param({"status": "False"}, "NodeNotReady", id="the-node-controller-gives-no-reason"),
        pytest.param({"status": "Unknown", "reason": "NodeLost"}, "NodeLost", id="unknown"),
    ],
)
def test_why_a_pod_is_not_ready_and_since_when(ready: dict[str, str], reason: str | None):
    condition = {"type": "Ready", "lastTransitionTime": END, **ready}
    seen = observed({"phase": "Running", "conditions": [condition]})
    assert seen.not_ready_reason == reason
    assert seen.not_ready_since == (END_TIME if reason else None)


def test_a_pod_on_its_way_out():
    assert observed(deletionTimestamp=END).deleted_at == END_TIME


def test_a_phase_of_the_future_is_unknown():
    assert observed({"phase": "Hibernating"}).phase is PodPhase.UNKNOWN


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param({}, id="none"),
        pytest.param({"fleetjob.dev/role": "worker", "fleetjob.dev/index": "0"}, id="a-role-of-others"),
        pytest.param({"fleetjob.dev/role": "trainer", "fleetjob.dev/index": "-1"}, id="no-index"),
    ],
)
def test_a_pod_whose_labels_say_nothing_is_none_of_ours(labels: dict[str, str]):
    assert observe_pod(pod(labels=labels)) is None


def test_who_schedules_a_pod_who_holds_it_back_and_who_keeps_it():
    manifest = pod({"phase": "Pending"})
    manifest["spec"] |= {
        "schedulerName": "volcano",
        "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}],
    }
    manifest["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
    seen = observe_pod(manifest)
    assert seen is not None
    assert (seen.scheduler, seen.gates) == ("volcano", ("kueue.x-k8s.io/admission",))
    assert seen.finalizers == ("kueue.x-k8s.io/managed",)


WAITS = {"type": "Unschedulable", "status": "True", "message": "queue is full"}


@pytest.mark.parametrize(
    ("kind", "status", "held_back"),
    [
        pytest.param("PodGroup", {}, None, id="nobody-has-looked-at-it"),
        pytest.param("PodGroup", {"phase": "Pending"}, "Pending", id="without-a-word"),
        pytest.param(
            "PodGroup",
            {"phase": "Inqueue", "conditions": [WAITS]},
            "Inqueue: queue is full",
            id="with-a-word",
        ),
        pytest.param("PodGroup", {"phase": "Running", "conditions": [WAITS]}, None, id="no-longer"),
        pytest.param("PersistentVolumeClaim", {"phase": "Pending"}, None, id="a-claim-has-phases-of-its-own"),
    ],
)
def test_why_a_pod_group_waits(kind: str, status: dict[str, Any], held_back: str | None):
    manifest = {"metadata": {"annotations": {"fleetjob.dev/made-from": "abc"}}, "status": status}
    assert observe_object(kind, manifest) == ObservedObject("abc", held_back)


@pytest.mark.parametrize("annotations", [None, {}, {"example.com/by": "hand"}])
def test_an_object_without_our_word_is_left_as_it_is(annotations: dict[str, str] | None):
    assert observe_object("NetworkPolicy", {"metadata": {"annotations": annotations}}).made_from is None
