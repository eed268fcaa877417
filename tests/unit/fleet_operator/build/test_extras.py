"""What a job has beside its pods and its Service."""

from typing import Any

import pytest

from fleet_operator.api import FleetJob, Role
from fleet_operator.build import ClusterHosts, build_extras, build_pod, role_env
from fleet_operator.plan.model import Attempt
from tests.support import jobs
from tests.support.pods import template

CLAIM = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}

SHARED = {"volumeClaimTemplate": CLAIM, "scope": "Job"}


def job_of(collective: bool = False, **spec: Any) -> FleetJob:
    """Return a job without a NetworkPolicy, unless it says something else of its network."""
    spec = {"network": {"policy": {"type": "None"}}, **spec}
    return jobs.job(jobs.collective_manifest(**spec) if collective else jobs.manifest(**spec))


def extras_of(job: FleetJob, life: int = 0, **said: Any) -> dict[str, Any]:
    return {each.manifest["metadata"]["name"]: each.manifest for each in build_extras(job, life, **said)}


def pod_of(job: FleetJob, role: Role = Role.TRAINER, index: int = 0, life: int = 0) -> dict[str, Any]:
    return build_pod(job, role, index, Attempt(life), ClusterHosts(job))


def test_a_plain_job_has_nothing_beside_but_its_network_policy():
    [policy] = build_extras(jobs.job(), 0)
    assert (policy.manifest["kind"], policy.by_default) == ("NetworkPolicy", True)


# The checkpoint.


def test_each_server_has_a_claim_of_its_own():
    job = job_of(checkpoint={"volumeClaimTemplate": CLAIM})
    claims = extras_of(job)
    assert list(claims) == ["digits-checkpoint-11111111-pserver-0", "digits-checkpoint-11111111-pserver-1"]
    assert claims["digits-checkpoint-11111111-pserver-1"]["spec"] == CLAIM["spec"]
    spec = pod_of(job, Role.PSERVER, 1)["spec"]
    assert spec["volumes"] == [
        {
            "name": "fleet-checkpoint",
            "persistentVolumeClaim": {"claimName": "digits-checkpoint-11111111-pserver-1"},
        }
    ]
    assert spec["containers"][0]["volumeMounts"] == [{"name": "fleet-checkpoint", "mountPath": "/checkpoint"}]
    assert "volumes" not in pod_of(job)["spec"]


def test_a_later_job_of_the_same_name_finds_no_weights_unless_it_names_their_claims():
    checkpoint = {"volumeClaimTemplate": CLAIM}
    first = job_of(checkpoint=checkpoint)
    second = jobs.job(jobs.manifest(checkpoint=checkpoint), uid="22222222-2222-4222-8222-222222222222")
    assert not extras_of(first).keys() & extras_of(second).keys()
    named = {"claimName": "digits-checkpoint-11111111", "scope": "Pserver"}
    third = jobs.job(jobs.manifest(checkpoint=named), uid="33333333-3333-4333-8333-333333333333")
    volumes = [pod_of(job, Role.PSERVER, 1)["spec"]["volumes"] for job in (first, second, third)]
    assert volumes[0] == volumes[2] != volumes[1]
    assert "volumes" not in pod_of(third)["spec"]


@pytest.mark.parametrize(
    ("checkpoint", "collective", "claim"),
    [
        pytest.param(SHARED, False, "digits-checkpoint-11111111", id="by-its-scope"),
        pytest.param(
            {"volumeClaimTemplate": CLAIM}, True, "digits-checkpoint-11111111", id="without-servers"
        ),
        pytest.param({"claimName": "shared"}, False, "shared", id="a-claim-that-is-there-already"),
    ],
)
def test_one_claim_for_all_pods(checkpoint, collective, claim):
    job = job_of(collective, checkpoint={**checkpoint, "mountPath": "/state"})
    assert list(extras_of(job)) == ([] if claim == "shared" else [claim])
    for role in job.roles:
        spec = pod_of(job, role)["spec"]
        assert spec["volumes"][-1]["persistentVolumeClaim"] == {"claimName": claim}
        assert spec["containers"][0]["volumeMounts"][-1]["mountPath"] == "/state"
        env = role_env(job, role, 0, ClusterHosts(job))
        assert env["FLEET_CHECKPOINT_DIR"] == "/state"


def test_only_a_job_with_a_checkpoint_tells_where_it_is():
    job = job_of()
    assert "FLEET_CHECKPOINT_DIR" not in role_env(job, Role.PSERVER, 0, ClusterHosts(job))


@pytest.mark.parametrize(("retention", "owned"), [(None, False), ("Retain", False), ("Delete", True)])
def test_a_claim_outlives_its_job_unless_it_is_to_be_deleted(retention, owned):
    said = {"retention": retention} if retention else {}
    [claim] = extras_of(job_of(True, checkpoint={"volumeClaimTemplate": CLAIM, **said})).values()
    assert ("ownerReferences" in claim["metadata"]) is owned
    assert claim["metadata"]["labels"]["fleetjob.dev/job-name"] == "digits"


# The network.


OPERATOR = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "fleet-system"}}}
PROMETHEUS = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}


def test_a_jobs_pods_are_reached_by_each_other_and_its_metrics_by_those_who_are_named():
    [policy] = extras_of(
        job_of(network={"policy": {"type": "Isolated"}}), readers=(OPERATOR, PROMETHEUS)
    ).values()
    own = {"matchLabels": {"fleetjob.dev/job-name": "digits"}}
    assert policy["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": own}]},
            {"from": [OPERATOR, PROMETHEUS], "ports": [{"port": 6180, "protocol": "TCP"}]},
        ],
    }


def test_without_a_reader_nobody_reads_and_not_everybody():
    [policy] = extras_of(job_of(network={"policy": {"type": "Isolated"}}), metrics_open=True).values()
    assert len(policy["spec"]["ingress"]) == 1


@pytest.mark.parametrize("network", [{}, {"tls": {"secretName": "certificates"}}], ids=["plain", "with-tls"])
def test_a_job_that_says_nothing_of_a_policy_is_read_by_everybody_until_somebody_is_named(network):
    job, port = job_of(network=network), {"ports": [{"port": 6180, "protocol": "TCP"}]}
    for open_to_all, reading in ((True, port), (False, {"from": [OPERATOR], **port})):
        [policy] = extras_of(job, readers=(OPERATOR,), metrics_open=open_to_all).values()
        assert policy["spec"]["ingress"][1] == reading


HOST_NETWORK = {"hostNetwork": True, "portRange": {"first": 20000, "last": 20100}}


@pytest.mark.parametrize(
    "network", [{"policy": {"type": "None"}}, HOST_NETWORK], ids=["refused", "host-network"]
)
def test_a_job_has_no_policy_where_it_refuses_or_none_would_hold(network):
    assert extras_of(job_of(network=network)) == {}


def test_what_is_made_anew_says_what_it_was_made_from_and_a_claim_does_not():
    checkpoint: dict[str, Any] = {"volumeClaimTemplate": CLAIM, "scope": "Job"}
    group: dict[str, Any] = {"volcano": {}}
    network, pserver = {"policy": {"type": "Isolated"}}, {"replicas": 2, "disruptionBudget": {}}
    every: dict[str, Any] = {
        "checkpoint": checkpoint,
        "podGroupPolicy": group,
        "network": network,
        "pserver": pserver,
    }
    said = [each.made_from for each in build_extras(job_of(**every), 0)]
    assert said[0] is None
    assert len({*said[1:]} - {None}) == 3
    assert [each.made_from for each in build_extras(job_of(**every), 1)] == said
    more = build_extras(job_of(**every, trainer={"replicas": 3}), 0, readers=(OPERATOR,))
    changed = [new.made_from != old for new, old in zip(more, said, strict=True)]
    assert changed == [False, True, False, True], "the policy by its readers, the PodGroup by its size"


# The budget.


def test_no_server_may_be_evicted():
    job = job_of(pserver={"replicas": 3, "disruptionBudget": {}})
    [budget] = extras_of(job).values()
    assert budget["spec"] == {
        "minAvailable": 3,
        "selector": {"matchLabels": {"fleetjob.dev/job-name": "digits", "fleetjob.dev/role": "pserver"}},
    }


# The gang.


def test_volcano_places_the_pods_of_each_life_together():
    policy = {"volcano": {"queue": "research"}}
    job = job_of(podGroupPolicy=policy, scheduling={"priorityClassName": "high"})
    group = extras_of(job, life=2)["digits-2"]
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert group["spec"] == {"minMember": 4, "queue": "research", "priorityClassName": "high"}
    pod = pod_of(job, life=2)
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "digits-2"
    assert pod["spec"]["schedulerName"] == "volcano"


def test_coscheduling_knows_its_pods_by_a_label():
    job = job_of(podGroupPolicy={"coscheduling": {"minMember": 3, "scheduleTimeoutSeconds": 90}})
    group = extras_of(job)["digits-0"]
    assert (group["apiVersion"], group["kind"]) == ("scheduling.x-k8s.io/v1alpha1", "PodGroup")
    assert group["spec"] == {"minMember": 3, "scheduleTimeoutSeconds": 90}
    pod = pod_of(job)
    assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "digits-0"
    assert pod["spec"]["schedulerName"] == "scheduler-plugins-scheduler"


def asking(requests: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return template({"resources": {"requests": requests}}, **spec)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param(
            {"template": asking({"cpu": "1500m", "memory": "1Gi"})},
            {"cpu": "6", "memory": "4294967296"},
            id="of-every-pod",
        ),
        pytest.param(
            {"template": template({"resources": {"limits": {"cpu": 2}}})},
            {"cpu": "8"},
            id="limits-are-requests",
        ),
        pytest.param(
            {"trainer": {"replicas": 2, "devices": {"count": 8}}}, {"nvidia.com/gpu": "16"}, id="devices"
        ),
        pytest.param(
            {"template": asking({"cpu": 1}), "trainer": {"replicas": 9}, "minMember": 3},
            {"cpu": "3"},
            id="of-the-pods-that-must-have-a-place",
        ),
        pytest.param(
            {
                "template": asking(
                    {"cpu": 2, "memory": "1k"},
                    initContainers=[
                        {
                            "name": "proxy",
                            "image": "p",
                            "restartPolicy": "Always",
                            "resources": {"requests": {"cpu": 1}},
                        },
                        {"name": "data", "image": "d", "resources": {"requests": {"cpu": 1, "memory": "5k"}}},
                    ],
                )
            },
            {"cpu": "12", "memory": "20000"},
            id="sidecars-add-up-and-what-runs-before-counts-if-it-is-more",
        ),
        pytest.param({"template": asking({"cpu": "many"})}, None, id="no-number"),
    ],
)
@pytest.mark.parametrize("gang", ["volcano", "coscheduling"])
def test_a_gang_says_what_it_needs_of_the_cluster(gang, spec, expected):
    least = {"minMember": spec["minMember"]} if "minMember" in spec else {}
    spec = {name: value for name, value in spec.items() if name != "minMember"}
    group = extras_of(job_of(podGroupPolicy={gang: least}, **spec))["digits-0"]
    assert group["spec"].get("minResources") == expected


def test_kueue_admits_a_group_of_all_pods():
    network = {"hostNetwork": True, "portRange": {"first": 20000, "last": 20099}}
    job = job_of(podGroupPolicy={"kueue": {"queueName": "research"}}, network=network)
    assert extras_of(job) == {}
    metadata = pod_of(job)["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == "digits-11111111-0", (
        "a namesake has another"
    )
    assert metadata["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "4"
    assert metadata["annotations"]["kueue.x-k8s.io/retriable-in-group"] == "false"
    sets = {
        pod_of(job, role, index)["metadata"]["annotations"]["kueue.x-k8s.io/role-hash"]
        for role in Role
        for index in (0, 1)
    }
    assert sets == {"pserver", "trainer"}, "whatever ports they have"
    index = metadata["annotations"]["kueue.x-k8s.io/pod-group-pod-index-label"]
    assert metadata["labels"][index] == "0"


def test_the_label_by_which_kueue_knows_a_job_names_its_queue_unless_a_policy_does():
    label = {"kueue.x-k8s.io/queue-name": "research"}
    assert (
        pod_of(jobs.job(labels=label))["metadata"]["labels"].items()
        >= {
            "kueue.x-k8s.io/queue-name": "research",
            "kueue.x-k8s.io/pod-group-name": "digits-11111111-0",
        }.items()
    )
    other = jobs.job(jobs.manifest(podGroupPolicy={"kueue": {"queueName": "night"}}), labels=label)
    assert pod_of(other)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "night"
    placed = jobs.job(jobs.manifest(podGroupPolicy={"volcano": {}}), labels=label)
    assert "kueue.x-k8s.io/pod-group-name" not in pod_of(placed)["metadata"]["labels"]


def test_the_templates_own_scheduler_stays():
    document = jobs.manifest(podGroupPolicy={"volcano": {}})
    document["spec"]["template"]["spec"]["schedulerName"] = "mine"
    assert pod_of(jobs.job(document))["spec"]["schedulerName"] == "mine"


@pytest.mark.parametrize(("mode", "size"), [("Sync", 6), ("Geo", 6), ("Async", 3), ("HalfAsync", 3)])
def test_a_gang_is_as_large_as_the_job_or_as_an_elastic_one_can_become(mode, size):
    trainer = {"replicas": 4, "minReplicas": 1, "maxReplicas": 8}
    job = job_of(syncMode=mode, trainer=trainer, podGroupPolicy={"volcano": {}})
    assert extras_of(job)["digits-0"]["spec"]["minMember"] == size
