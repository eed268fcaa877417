"""What users of other operators complain about, each told as a story: docs/complaints.md lists them.

A test has the name of its complaint and shows that it does not hold here.
"""

from __future__ import annotations

from typing import Any

from fleet_operator.api import ConditionType, JobState, Role
from fleet_operator.build import ClusterHosts, build_pod, build_service, replica_ports, role_env
from fleet_operator.plan.model import Attempt, ObjectRef, ObservedObject
from tests.support import jobs
from tests.support.plans import Story, at, ended, pending, pserver, trainer

SERVERS = (pserver(0), pserver(1))
TRAINERS = (trainer(0), trainer(1))
DONE = (ended(trainer(0)), ended(trainer(1)))


def acts(lines: list[str]) -> list[str]:
    """Return what a plan does to pods."""
    return [line for line in lines if line.startswith(("create ", "delete "))]


def running(**spec: Any) -> Story:
    """Return a job all of whose replicas run."""
    story = Story(**spec)
    story.sees(*SERVERS, *TRAINERS)
    return story


def test_parameter_servers_keep_running_after_the_trainers_have_finished():
    story = running()
    story.sees(*SERVERS, *DONE, after=60)
    assert story.job.status.state == "Succeeded"
    assert acts(story.sees(*SERVERS, *DONE, after=90)) == [
        "delete digits-pserver-0 0.0",
        "delete digits-pserver-1 0.0",
    ]


def test_the_loss_of_a_node_hangs_the_job():
    story = running()
    silent = trainer(1, not_ready_reason="NodeNotReady", not_ready_since=at(0), node="gpu-7")
    story.sees(*SERVERS, trainer(0), silent, after=300)
    assert "create digits-trainer-1 0.1" in story.sees(*SERVERS, trainer(0), after=310)
    assert story.job.status.failures == 0


def test_a_gpu_that_has_failed_is_not_distinguished_from_a_bug():
    rules = [
        {
            "name": "codes-restartjob",
            "onExitCodes": {"operator": "In", "values": [217]},
            "action": "RestartJob",
        },
        {"name": "trainer-failjob", "role": "trainer", "action": "FailJob"},
    ]
    story = running(failurePolicy={"rules": rules})
    story.sees(*SERVERS, trainer(0), ended(trainer(1), 217), after=5)
    assert (story.job.status.state, story.job.status.job_restarts) == ("Restarting", 1)
    story = running(failurePolicy={"rules": rules})
    story.sees(*SERVERS, trainer(0), ended(trainer(1), 1), after=5)
    assert story.job.status.state == "Failed"


def test_a_gang_is_not_restarted_as_a_whole():
    group = ObjectRef("scheduling.volcano.sh/v1beta1", "PodGroup", "digits-0")
    story = Story(jobs.collective_manifest(podGroupPolicy={"volcano": {}}))
    there: dict[str, Any] = {"objects": {group: ObservedObject()}}
    story.sees(*TRAINERS, **there)
    lines = story.sees(trainer(0), ended(trainer(1), 1), after=5, **there)
    assert acts(lines)[:2] == ["delete digits-trainer-0 0.0", "delete digits-trainer-1 0.0"]
    assert {"delete PodGroup digits-0", "ensure PodGroup digits-1"} <= set(lines)


def test_everything_is_restarted_when_only_one_member_failed():
    story = running()
    lines = story.sees(*SERVERS, trainer(0), ended(trainer(1), 1), after=5)
    assert acts(lines) == ["delete digits-trainer-1 0.0"]


def test_the_backoff_limit_is_ignored():
    story = running(runPolicy={"backoffLimit": 1})
    story.sees(*SERVERS, trainer(0), ended(trainer(1), 1), after=5)
    assert story.job.status.state == "Restarting"
    story.sees(*SERVERS, trainer(0), ended(trainer(1, "0.1"), 1), after=15)
    failed = story.job.status.condition(ConditionType.FAILED)
    assert failed is not None
    assert failed.reason == "BackoffLimitExceeded"


def test_one_replica_fails_for_good_and_its_siblings_go_on_burning_gpus():
    story = Story(jobs.collective_manifest(failurePolicy={"action": "FailJob"}))
    story.sees(*TRAINERS)
    assert acts(story.sees(trainer(0), ended(trainer(1), 1), after=5)) == ["delete digits-trainer-0 0.0"]


def test_a_pod_that_had_finished_is_created_again():
    story = running()
    story.sees(*SERVERS, trainer(0), ended(trainer(1)), after=5)
    assert acts(story.sees(*SERVERS, trainer(0), after=6)) == [], "somebody has deleted it"


def test_there_is_no_time_to_live_and_no_deadline():
    story = running(runPolicy={"ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 600})
    assert story.sees(*SERVERS, *TRAINERS, after=100)[-1] == "look again after 500 s"
    story.sees(*SERVERS, *TRAINERS, after=600)
    assert story.job.status.state == "Failed"
    assert "delete the job" in story.sees(after=660)


def test_the_status_does_not_say_why_a_job_is_pending():
    story = Story(runPolicy={"pendingDeadlineSeconds": 60})
    waits = pending(trainer(1), "ImagePullBackOff", 'Back-off pulling image "example.com/trainer:1"')
    lines = story.sees(*SERVERS, trainer(0), waits)
    assert lines[0].startswith("Pending ")
    assert any(line.startswith("Running False ImagePullBackOff: digits-trainer-1 is") for line in lines)
    assert any("correct the image's name" in line for line in lines)
    story.sees(*SERVERS, trainer(0), waits, after=60)
    assert story.job.status.state == "Failed"


def test_trainers_start_when_the_name_of_a_server_resolves_though_nothing_listens_yet():
    probe = build_pod(jobs.job(), Role.PSERVER, 0, Attempt(), ClusterHosts(jobs.job()))["spec"]["containers"][
        0
    ]
    assert probe["readinessProbe"]["grpc"]["port"] == 6174
    assert build_service(jobs.job())["spec"]["publishNotReadyAddresses"] is True, "names resolve early"
    story = Story()
    assert acts(story.sees(pserver(0), pserver(1, ready=False))) == []
    assert len(acts(story.sees(*SERVERS, after=1))) == 2


def test_no_message_says_why_a_gang_is_pending():
    group = ObjectRef("scheduling.volcano.sh/v1beta1", "PodGroup", "digits-0")
    message = "pod group is not ready, 4 Pending, 4 minAvailable; 2 Insufficient nvidia.com/gpu"
    pods = [pending(each, "Unschedulable", message) for each in (*SERVERS, *TRAINERS)]
    lines = Story(podGroupPolicy={"volcano": {}}).sees(*pods, objects={group: ObservedObject()})
    assert any(line.startswith("Running False Unschedulable") and message in line for line in lines)


def test_two_replicas_on_one_node_clash_on_its_network():
    network = {"hostNetwork": True, "portRange": {"first": 20000, "last": 20999}}
    job = jobs.job(jobs.manifest(network=network))
    ports = [port for role in Role for index in (0, 1) for port in replica_ports(job, role, index)]
    assert len(ports) == len(set(ports))


def test_there_is_no_elasticity():
    story = Story(jobs.collective_manifest(trainer={"replicas": 2, "minReplicas": 1, "maxReplicas": 3}))
    story.sees(*TRAINERS)
    story.scale(3)
    assert "delete digits-trainer-0 0.0" in acts(story.sees(*TRAINERS, after=5))
    assert acts(story.sees(after=9)) == [f"create digits-trainer-{index} 1.0" for index in range(3)]
    assert story.job.status.failures == 0
    story = running(syncMode="Async", trainer={"replicas": 2, "minReplicas": 1, "maxReplicas": 3})
    story.scale(3)
    assert acts(story.sees(*SERVERS, *TRAINERS, after=5)) == ["create digits-trainer-2 0.0"]


def test_a_job_with_an_injected_sidecar_never_ends():
    story = running()
    still_there = [
        ended(each, 0, phase=each.phase) for each in TRAINERS
    ]  # the pods run on with their proxies
    story.sees(*SERVERS, *still_there, after=60)
    assert story.job.status.state == "Succeeded"
    assert "delete digits-trainer-0 0.0" in story.sees(*SERVERS, *still_there, after=90)


def test_istio_breaks_the_rendezvous():
    document = jobs.manifest()
    outside = {"sidecar.istio.io/inject": "false"}
    document["spec"]["template"]["metadata"] = {"labels": outside}
    job = jobs.job(document)
    for role in Role:
        pod = build_pod(job, role, 0, Attempt(), ClusterHosts(job))
        assert pod["metadata"]["labels"].items() >= outside.items(), (
            "pods stay out of the mesh if they are told to"
        )
        assert (
            role_env(job, role, 0, ClusterHosts(job))["PADDLE_PSERVERS_IP_PORT_LIST"].count(".svc:6174") == 2
        )
        assert "initContainers" not in pod["spec"], "nothing waits for a name before the proxy is there"


def test_the_status_diverges_from_what_is_there():
    story = running()
    wrong = {"state": JobState.PENDING, "trainers": "7/9", "pservers": None, "roles": ()}
    story.job = story.job.with_status(story.job.status.model_copy(update=wrong))
    story.sees(*SERVERS, *TRAINERS, after=5)
    status = story.job.status
    assert (status.state, status.columns.trainers, status.columns.pservers) == (
        JobState.RUNNING,
        "2/2",
        "2/2",
    )


# What was wrong with paddle-operator 0.3.5.


def test_the_environment_comes_after_the_pods():
    job = jobs.job()
    [container] = build_pod(job, Role.TRAINER, 0, Attempt(), ClusterHosts(job))["spec"]["containers"]
    assert "envFrom" not in container
    env = {each["name"]: each for each in container["env"]}
    expected = ",".join(f"digits-pserver-{index}.digits.default.svc:6174" for index in (0, 1))
    assert env["PADDLE_PSERVERS_IP_PORT_LIST"]["value"] == expected, "known before any pod is there"


def test_endpoints_are_stale_after_a_pod_was_replaced():
    job = jobs.job()
    lives = [build_pod(job, Role.PSERVER, 0, Attempt(0, life), ClusterHosts(job)) for life in (0, 1)]
    names = [(pod["metadata"]["name"], pod["spec"]["hostname"], pod["spec"]["subdomain"]) for pod in lives]
    assert names[0] == names[1] == ("digits-pserver-0", "digits-pserver-0", "digits")


def test_the_port_of_the_service_is_not_that_of_the_pods():
    job = jobs.job(jobs.manifest(pserver={"replicas": 1, "port": 7000}))
    service = {each["name"]: each["port"] for each in build_service(job)["spec"]["ports"]}
    [container] = build_pod(job, Role.PSERVER, 0, Attempt(), ClusterHosts(job))["spec"]["containers"]
    assert service == {each["name"]: each["containerPort"] for each in container["ports"]}


def test_any_pod_that_fails_fails_the_job():
    story = running()
    story.sees(*SERVERS, trainer(0), ended(trainer(1), 1), after=5)
    assert story.job.status.state == "Restarting"


def test_parameter_servers_must_end_well_for_a_job_to_succeed():
    story = running()
    story.sees(ended(pserver(0), 143), pserver(1), *DONE, after=60)
    assert story.job.status.state == "Succeeded"


def test_the_status_is_written_at_every_pass():
    story = running()
    before = story.job.status
    story.sees(*SERVERS, *TRAINERS, after=500)
    assert story.job.status == before


def test_pods_do_not_say_which_job_they_are_of():
    job = jobs.job()
    labels = build_pod(job, Role.TRAINER, 1, Attempt(), ClusterHosts(job))["metadata"]["labels"]
    said = {"job-name": "digits", "role": "trainer", "index": "1", "attempt": "0.0"}
    assert labels.items() >= {f"fleetjob.dev/{name}": value for name, value in said.items()}.items()
