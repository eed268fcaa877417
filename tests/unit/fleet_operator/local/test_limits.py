from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet_operator.local.container import Given
from fleet_operator.local.limits import not_applied, refusals
from tests.support.local import job_manifest

CONTAINER = "spec.trainer.template.spec.containers[0]"


def with_container(**fields: Any) -> dict[str, Any]:
    job = job_manifest("pass")
    job["spec"]["trainer"]["template"]["spec"]["containers"][0].update(fields)
    return job


def with_pod_spec(**fields: Any) -> dict[str, Any]:
    job = job_manifest("pass")
    job["spec"]["trainer"]["template"]["spec"].update(fields)
    return job


def test_a_plain_job_is_not_refused():
    assert refusals(job_manifest("pass")) == ()


@pytest.mark.parametrize(
    ("job", "path", "found"),
    [
        pytest.param(with_container(command=None), f"{CONTAINER}.command", "nothing", id="no-command"),
        pytest.param(with_container(args=[1]), f"{CONTAINER}.args", "[1]", id="args-that-are-no-text"),
        pytest.param(
            with_container(env=[{"name": "N", "value": 3}]),
            f"{CONTAINER}.env[0].value",
            "3",
            id="a-number-as-value",
        ),
        pytest.param(
            with_container(
                env=[{"name": "A"}, {"name": "K", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
            ),
            f"{CONTAINER}.env[1].valueFrom.secretKeyRef",
            "K from s",
            id="a-secret",
        ),
        pytest.param(
            with_container(env=[{"name": "K", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]),
            f"{CONTAINER}.env[0].valueFrom.configMapKeyRef",
            "K from c",
            id="a-config-map",
        ),
        pytest.param(
            with_container(
                env=[{"name": "K", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]
            ),
            f"{CONTAINER}.env[0].valueFrom.resourceFieldRef",
            "K from limits.cpu",
            id="a-resource",
        ),
        pytest.param(
            with_container(env=[{"name": "K", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}]),
            f"{CONTAINER}.env[0].valueFrom.fieldRef.fieldPath",
            "status.phase",
            id="a-field-that-no-pod-here-has",
        ),
        pytest.param(
            with_container(env=[{"name": "K", "valueFrom": {"fieldRef": "metadata.name"}}]),
            f"{CONTAINER}.env[0].valueFrom.fieldRef",
            "'metadata.name'",
            id="a-field-by-its-path-alone",
        ),
        pytest.param(
            with_container(env=[{"name": "K", "valueFrom": "metadata.name"}]),
            f"{CONTAINER}.env[0].valueFrom",
            "'metadata.name'",
            id="a-source-that-is-no-map",
        ),
        pytest.param(
            with_container(envFrom=[{"prefix": "P_", "secretRef": {"name": "s"}}]),
            f"{CONTAINER}.envFrom[0].secretRef",
            "secretRef",
            id="variables-from-a-secret",
        ),
        pytest.param(
            with_container(workingDir="src"),
            f"{CONTAINER}.workingDir",
            "'src'",
            id="a-relative-working-directory",
        ),
        pytest.param(
            with_container(envFrom=3), f"{CONTAINER}.envFrom[0]", "3", id="variables-from-what-is-no-list"
        ),
        pytest.param(
            with_pod_spec(initContainers=[{"name": "fetch", "image": "i"}]),
            "spec.trainer.template.spec.initContainers[0]",
            "fetch",
            id="an-init-container",
        ),
        pytest.param(
            with_pod_spec(
                volumes=[{"name": "ok", "emptyDir": {}}, {"name": "data", "hostPath": {"path": "/"}}]
            ),
            "spec.trainer.template.spec.volumes[1].hostPath",
            "data",
            id="a-volume-that-is-no-emptyDir",
        ),
        pytest.param(
            job_manifest("pass", suspend=True),
            "spec.suspend",
            "true",
            id="a-suspended-job",
        ),
        pytest.param(
            job_manifest("pass", managedBy="kueue.x-k8s.io/multikueue"),
            "spec.managedBy",
            "kueue.x-k8s.io/multikueue",
            id="a-job-of-another-controller",
        ),
        pytest.param(
            job_manifest("pass", checkpoint={"claimName": "state"}),
            "spec.checkpoint",
            "a volume",
            id="a-checkpoint",
        ),
    ],
)
def test_refused_by_its_field(job, path, found):
    (problem,) = refusals(job)
    assert (problem.path, problem.found) == (path, found)
    assert problem.expected


def test_every_refusal_of_every_role_is_told_and_a_shared_template_once():
    job = job_manifest("pass")
    shared = {"spec": {"containers": [{"name": "main", "image": "i"}]}}
    job["spec"] = {"template": shared, "pserver": {}, "trainer": {}}
    assert [problem.path for problem in refusals(job)] == ["spec.template.spec.containers[0].command"]


def test_what_is_left_out_is_listed_once():
    job = with_container(resources={"limits": {"cpu": 1}}, livenessProbe={})
    job["spec"]["trainer"]["template"]["spec"]["affinity"] = {}
    job["spec"]["trainer"]["template"]["spec"]["containers"].append({"name": "proxy", "image": "p"})
    job["spec"]["trainer"] |= {
        "devices": {"count": 1, "resourceName": "example.com/gpu"},
        "sharedMemory": "1Gi",
    }
    job["spec"]["scheduling"] = {"nodeSelector": {"gpu": "h100"}}
    job["spec"]["podGroupPolicy"] = {"volcano": {}}
    job["spec"]["network"] = {"policy": {"type": "Isolated"}}
    job["spec"]["pserver"]["disruptionBudget"] = {}
    job["spec"]["runPolicy"] = {"ttlSecondsAfterFinished": 0}
    assert not_applied(job) == (
        "spec.scheduling",
        "spec.podGroupPolicy",
        "spec.trainer.sharedMemory",
        "spec.network",
        "spec.pserver.disruptionBudget",
        "spec.runPolicy.ttlSecondsAfterFinished",
        "spec.trainer.devices",
        "image",
        "resources",
        "livenessProbe",
        "affinity",
        "container proxy",
    )


def test_a_working_directory_is_left_out_unless_the_run_has_it():
    job = with_container(workingDir="/workspace")
    assert not_applied(job) == ("image", "workingDir")
    assert not_applied(job, [Path("/home")]) == ("image", "workingDir")
    assert not_applied(job, [Path("/home"), Path("/workspace")]) == ("image",)


def with_volumes(*arguments: str, env: list[dict[str, Any]] | None = None, **mount: Any) -> dict[str, Any]:
    job = with_container(
        args=list(arguments), env=env or [], volumeMounts=[{"name": "data", "mountPath": "/data/", **mount}]
    )
    job["spec"]["trainer"]["template"]["spec"]["volumes"] = [
        {"name": "data", "hostPath": {"path": "/mnt/data"}}
    ]
    return job


FOLDER = Given({"data": Path("/home/me/data")})


@pytest.mark.parametrize(
    ("job", "given"),
    [
        pytest.param(with_volumes("--data=/data"), FOLDER, id="an-argument-tells-it"),
        pytest.param(with_volumes(env=[{"name": "D", "value": "/data"}]), FOLDER, id="a-variable-tells-it"),
        pytest.param(with_volumes(), Given({"data": Path("/data")}), id="the-folder-is-there-anyway"),
    ],
)
def test_a_volume_is_honoured_where_a_folder_stands_for_it(job, given):
    assert refusals(job, given) == ()
    assert [problem.path for problem in refusals(job)] == ["spec.trainer.template.spec.volumes[0].hostPath"]


def test_a_mount_that_only_the_script_knows_is_refused_by_its_path():
    (problem,) = refusals(with_volumes("--database", "my/data"), FOLDER)
    assert (problem.path, problem.found) == (f"{CONTAINER}.volumeMounts[0].mountPath", "/data/")
    assert "--volume data=/data/" in problem.expected


def test_a_path_that_differs_in_each_pod_is_refused():
    (problem,) = refusals(with_volumes("/data", subPathExpr="$(POD_IP)"), FOLDER)
    assert problem.path == f"{CONTAINER}.volumeMounts[0].subPathExpr"


def test_a_file_of_variables_stands_for_secrets_and_config_maps():
    secret = {"name": "s", "key": "k"}
    job = with_container(
        envFrom=[{"configMapRef": {"name": "c"}}],
        env=[
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": secret}},
            {"name": "MAYBE", "valueFrom": {"secretKeyRef": secret | {"optional": True}}},
        ],
    )
    assert refusals(job, Given(variables={"TOKEN": "t"})) == ()
    (problem,) = refusals(job, Given(variables={}))
    assert problem.path == f"{CONTAINER}.env[0].valueFrom.secretKeyRef"
    assert "TOKEN=" in problem.expected


def test_a_checkpoint_is_honoured_where_a_folder_stands_for_it():
    job = job_manifest("pass", checkpoint={"claimName": "state"})
    given = Given({"checkpoint": Path("/home/me/state")})
    assert refusals(job, given) == ()
    assert not_applied(job, given=given) == ("spec.checkpoint.claimName", "image")


def test_what_volumes_promise_beyond_a_folder_is_left_out():
    job = with_volumes("/data", readOnly=True)
    spec = job["spec"]["trainer"]["template"]["spec"]
    spec["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
    for path in ("/dev/shm", "/data/shm"):  # noqa: S108  shared memory has this path
        spec["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": path})
    spec["containers"][0]["args"].append("/data/shm")
    assert not_applied(job, given=FOLDER) == (
        "image",
        "emptyDir.medium",
        "emptyDir.sizeLimit",
        "the emptyDir at /dev/shm",
        "volumeMounts.readOnly",
    )


def test_a_working_directory_in_a_volume_is_applied():
    job = with_volumes()
    job["spec"]["trainer"]["template"]["spec"]["containers"][0]["workingDir"] = "/data/code"
    assert refusals(job, FOLDER) == ()
    assert not_applied(job, [Path("/home/me/data/code")], FOLDER) == ("image",)
