"""The operator's permissions on a real API server, its pod's security, and what training pods get."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.jobs import manifest
from tests.support.operator_process import ACCOUNT, CHART, NAMESPACE
from tools import assets

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Manifest, Namespace

OPERATOR = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
EVERYDAY = {"get", "list", "watch", "create", "delete"}
RIGHTS = {  # where it serves FleetJobs, and beside what everybody may ask about himself
    ("fleetjob.dev", "fleetjobs"): {"get", "list", "watch", "delete"},
    ("fleetjob.dev", "fleetjobs/status"): {"update"},
    ("fleetjob.dev", "fleetjobs/finalizers"): {"update"},
    ("", "pods"): EVERYDAY,
    ("", "services"): EVERYDAY,
}
FEATURES = {  # and with all of the chart's features on, as these tests have them
    ("", "persistentvolumeclaims"): EVERYDAY - {"delete"},
    ("networking.k8s.io", "networkpolicies"): EVERYDAY,
    ("policy", "poddisruptionbudgets"): EVERYDAY,
    ("scheduling.volcano.sh", "podgroups"): EVERYDAY,
    ("scheduling.x-k8s.io", "podgroups"): EVERYDAY,
    ("kueue.x-k8s.io", "workloads"): {"list"},
    ("", "events"): {"create", "patch", "list"},  # list is for Kueue
}
LEASES = {("coordination.k8s.io", "leases"): {"get", "create", "update"}}
EVERYBODYS = {"authorization.k8s.io", "authentication.k8s.io"}


def rights_in(control_plane: ControlPlane, namespace: str) -> dict[tuple[str, str], set[str]]:
    """Ask the API server what the operator may do in a namespace."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    answer = control_plane.admin.kubectl(
        "create", "--as", OPERATOR, "--validate=false", "-f", "-", "-o", "json", stdin=json.dumps(review)
    )
    granted: dict[tuple[str, str], set[str]] = {}
    for rule in json.loads(answer)["status"]["resourceRules"]:
        if rule.get("resourceNames", [ACCOUNT]) != [ACCOUNT]:
            continue  # the Lease of an operator that a test has started
        assert "resourceNames" not in rule or rule["resources"] == ["leases"]
        for group in set(rule["apiGroups"]) - EVERYBODYS:
            for resource in rule["resources"]:
                granted.setdefault((group, resource), set()).update(rule["verbs"])
    return granted


@pytest.mark.usefixtures("operator_kubeconfig")
def test_the_operator_has_the_rights_of_the_design_and_no_other(control_plane: ControlPlane):
    assert rights_in(control_plane, "default") == RIGHTS | FEATURES
    assert rights_in(control_plane, NAMESPACE) == RIGHTS | FEATURES | LEASES


@pytest.fixture(scope="module")
def operators_pod() -> dict[str, Any]:
    """The pod of the operator as its Deployment makes it."""
    helm = assets.find(["helm"])["helm"]
    rendered = subprocess.run(
        [helm, "template", "fleet", CHART, "--kube-version", assets.KUBERNETES],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (deployment,) = [
        each for each in yaml.safe_load_all(rendered.stdout) if each and each["kind"] == "Deployment"
    ]
    template = deployment["spec"]["template"]
    spec = {**template["spec"], "serviceAccountName": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}


async def test_the_operators_pod_is_taken_where_only_restricted_pods_are(
    namespace: Namespace, control_plane: ControlPlane, operators_pod: dict[str, Any]
):
    enforced = "pod-security.kubernetes.io/enforce=restricted"
    control_plane.admin.kubectl("label", "namespace", namespace.name, enforced)
    create = ("create", "-n", namespace.name, "--dry-run=server", "-f", "-")
    assert "created" in control_plane.admin.kubectl(*create, stdin=json.dumps(operators_pod))
    container = operators_pod["spec"]["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # The namespace does refuse: without its container's context the same pod is not taken.
    loose = {key: value for key, value in container.items() if key != "securityContext"}
    loosened = {**operators_pod, "spec": {**operators_pod["spec"], "containers": [loose]}}
    said = control_plane.admin.kubectl(*create, stdin=json.dumps(loosened), check=False)
    assert "violates PodSecurity" in said


def has(count: int) -> Callable[[dict[str, Manifest]], bool]:
    """Return a probe: there are so many objects."""
    return lambda found: len(found) == count


async def test_training_pods_hold_no_token_unless_the_template_asks(namespace: Namespace):
    await namespace.create_job(manifest())
    asking = manifest("asking", pservers=1, trainers=1)
    asking["spec"]["template"]["spec"]["automountServiceAccountToken"] = True
    await namespace.create_job(asking)
    for job, count in (("digits", 4), ("asking", 2)):
        pods = await namespace.until_pods(job, "all pods", has(count))
        for pod in pods.values():
            mounts = [
                mount["mountPath"]
                for container in pod["spec"]["containers"]
                for mount in container.get("volumeMounts", ())
            ]
            holds = "/var/run/secrets/kubernetes.io/serviceaccount" in mounts
            assert holds is (job == "asking")


async def test_what_a_namespace_forbids_its_jobs_may_not_do_either(namespace: Namespace):
    """A template's fields are the cluster's own admission's business: it judges the pods themselves."""
    patch = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}}
    await namespace.client.merge_patch(f"/api/v1/namespaces/{namespace.name}", patch)
    reaching_out = manifest()
    reaching_out["spec"]["template"]["spec"]["hostPID"] = True
    await namespace.create_job(reaching_out)
    job = await namespace.until_job(
        "digits",
        "the refusal in the status",
        lambda job: any(
            each["reason"] == "CreationRefused" and "violates PodSecurity" in each["message"]
            for each in job.get("status", {}).get("conditions", ())
        ),
    )
    assert job["status"]["state"] == "Pending"
