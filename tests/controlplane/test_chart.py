"""Several releases of the chart on one API server: what Helm refuses, and what an uninstallation keeps."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.controlplane import ControlPlane
from tests.support.digits_job import SERVERS, TRAINERS, run
from tests.support.documents import block
from tests.support.forked_operator import ForkedOperator
from tests.support.jobs import manifest
from tests.support.kube import client_for, fresh_namespace, uids
from tests.support.operator_process import CHART
from tools import assets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

DEFINITION = "fleetjobs.fleetjob.dev"
SECONDS = 60.0
NOTHING_CLUSTER_WIDE = ("crd.install=false", "rbac.aggregate=false")


class Helm:
    """Helm, which does not wait for the pods of releases, because nothing runs them here."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.program = assets.find(["helm"])["helm"]

    def __call__(self, *arguments: str, namespace: str) -> subprocess.CompletedProcess[str]:
        """Run helm in a namespace."""
        kubeconfig = str(self._plane.admin.kubeconfig)
        words = [str(self.program), "--kubeconfig", kubeconfig, "--namespace", namespace, *arguments]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    def install(
        self, release: str, *values: str, namespace: str, verb: str = "install", more: tuple[str, ...] = ()
    ) -> str | None:
        """Install a release; return why it was refused, if it was."""
        sets = [word for value in values for word in ("--set", value)]
        creates = ("--create-namespace",) if verb == "install" else ()
        # It takes helm half of its time; those who follow the pages have it.
        more = (*more, "--disable-openapi-validation")
        ended = self(verb, release, str(CHART), *creates, *more, *sets, namespace=namespace)
        return None if ended.returncode == 0 else ended.stderr


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane for this module alone, without the definition, which the chart installs."""
    plane = ControlPlane(tmp_path_factory.mktemp("chart") / "plane")
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture
def helm(plane: ControlPlane) -> Iterator[Helm]:
    """Helm; all of its releases are uninstalled after the test."""
    helm = Helm(plane)
    yield helm
    secrets = plane.admin.request("GET", "/api/v1/secrets?labelSelector=owner%3Dhelm")["items"]
    releases = {(each["metadata"]["labels"]["name"], each["metadata"]["namespace"]) for each in secrets}
    for name, namespace in releases:
        ended = helm("uninstall", name, namespace=namespace)
        assert ended.returncode == 0, ended.stderr
    plane.admin.kubectl("delete", "crd", DEFINITION, "--ignore-not-found")


def owner(plane: ControlPlane) -> tuple[str, str]:
    """Return the namespace and the name of the release that owns the definition."""
    found = json.loads(plane.admin.kubectl("get", "crd", DEFINITION, "-o", "json"))
    annotations: dict[str, Any] = found["metadata"]["annotations"]
    return annotations["meta.helm.sh/release-namespace"], annotations["meta.helm.sh/release-name"]


def test_a_second_release_that_would_serve_the_same_jobs_is_refused(helm: Helm, plane: ControlPlane):
    plane.admin.kubectl("create", "namespace", "team-a")
    assert helm.install("one", namespace="one") is None
    for values in ((), ("operator.namespaces={team-a}",)):
        refused = helm.install("two", "crd.install=false", *values, namespace="two")
        assert refused is not None
        assert "of all namespaces are already served by the release one in the namespace one" in refused
    assert helm.install("one", "replicas=2", namespace="one", verb="upgrade") is None


def test_releases_share_a_cluster_if_they_serve_other_namespaces(helm: Helm, plane: ControlPlane):
    for namespace in ("team-b", "team-c"):
        plane.admin.kubectl("create", "namespace", namespace)
    assert helm.install("fleet", "operator.namespaces={team-b}", namespace="one") is None
    serves_c = ("operator.namespaces={team-c}", "crd.install=false")
    assert helm.install("fleet", *serves_c, namespace="two") is None
    refused = helm.install("third", *serves_c, namespace="three")
    assert refused is not None
    assert "the namespace team-c are already served by the release fleet in the namespace two" in refused
    refused = helm.install("everywhere", "crd.install=false", namespace="three")
    assert refused is not None
    assert "the namespace team-b are already served by the release fleet in the namespace one" in refused


def test_who_has_rights_in_namespaces_only_may_install(helm: Helm, plane: ControlPlane, tmp_path: Path):
    """An administrator has installed the definition before."""
    kubectl = plane.admin.kubectl
    assert helm.install("definition", "rbac.create=false", "replicas=0", namespace="crds") is None
    kubectl("create", "namespace", "team-d")
    kubectl("create", "serviceaccount", "lead", "-n", "team-d")
    kubectl("create", "rolebinding", "lead", "-n", "team-d", "--clusterrole=cluster-admin",
            "--serviceaccount=team-d:lead")  # fmt: skip
    token = kubectl("create", "token", "lead", "-n", "team-d").strip()
    kubeconfig = plane.admin.write_kubeconfig(tmp_path / "kubeconfig", token, "team-d")
    values = [*NOTHING_CLUSTER_WIDE, "operator.namespaces={team-d}"]
    sets = [word for value in values for word in ("--set", value)]
    words = ["install", "mine", str(CHART), "--kubeconfig", str(kubeconfig)]
    ended = helm(*words, *sets, namespace="team-d")
    assert ended.returncode == 0, ended.stderr
    account = "system:serviceaccount:team-d:mine-fleet-operator"
    deadline = time.monotonic() + SECONDS
    question = ("auth", "can-i", "create", "pods", "-n", "team-d", "--as", account)
    while not kubectl(*question, check=False).startswith("yes"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert kubectl(
        "auth", "can-i", "create", "pods", "-n", "default", "--as", account, check=False
    ).startswith("no")


def test_a_definition_that_a_release_has_left_is_adopted_by_the_next(helm: Helm, plane: ControlPlane):
    assert helm.install("old", namespace="one") is None
    assert helm("uninstall", "old", "--wait", namespace="one").returncode == 0
    assert owner(plane) == ("one", "old")
    refused = helm.install("new", namespace="two")
    assert refused is not None
    assert f"the definition {DEFINITION} belongs to the release old in the namespace one" in refused
    assert "take the definition over with --set crd.adopt=true --take-ownership" in refused
    adopting = ("--take-ownership",)
    assert helm.install("new", "crd.adopt=true", namespace="two", more=adopting) is None
    assert owner(plane) == ("two", "new")
    assert helm.install("new", "replicas=2", namespace="two", verb="upgrade") is None


@pytest.mark.parametrize(
    ("section", "before"),
    [
        ("Install, upgrade, uninstall", None),
        ("Several releases in one cluster", None),
        ("Without cluster-wide permissions", "rbac.create=false"),  # has the definition, and serves no job
        ("Under another name", "crd.keep=true"),
        ("OpenShift", None),
    ],
)
def test_every_installation_of_the_page_is_one(
    helm: Helm, plane: ControlPlane, tmp_path: Path, section: str, before: str | None
):
    for namespace in ("team-a", "team-b", "team-c", "fleet-system"):
        plane.admin.kubectl("create", "namespace", namespace, check=False)
    # Like OpenShift, the level restricted requires a user that is not root, and leaves open which.
    enforced = "pod-security.kubernetes.io/enforce=restricted"
    plane.admin.kubectl("label", "namespace", "fleet-system", enforced, "--overwrite")
    if before:
        assert helm.install("before", before, namespace="before") is None
    if section == "Under another name":
        assert helm("uninstall", "before", "--wait", namespace="before").returncode == 0
    (tmp_path / "helm").symlink_to(helm.program)
    code = block("docs/operations.md", section, "bash")
    # Here no pod of `helm test` would ever end.
    code = "\n".join(line for line in code.splitlines() if not line.startswith("helm test"))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "KUBECONFIG": str(plane.admin.kubeconfig),
    }
    words = ["bash", "-euc", code]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    if section == "OpenShift":
        found = plane.admin.kubectl("get", "deployment", "-n", "fleet-system", "-o", "json")
        [deployment] = json.loads(found)["items"]
        created = "--for=jsonpath={.status.replicas}=1"
        plane.admin.kubectl(
            "wait", created, "deployment/fleet-operator", "-n", "fleet-system", "--timeout=30s"
        )
        context = deployment["spec"]["template"]["spec"]["securityContext"]
        assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


@contextlib.asynccontextmanager
async def operator_of(plane: ControlPlane, release: str, namespace: str, folder: Path) -> AsyncIterator[None]:
    """Run the operator with the settings of a release's Deployment, because kwok's pods run nothing."""
    kubectl, name = plane.admin.kubectl, f"{release}-fleet-operator"
    deployment = json.loads(kubectl("get", "deployment", name, "-n", namespace, "-o", "json"))
    pod = deployment["spec"]["template"]["spec"]
    token = kubectl("create", "token", pod["serviceAccountName"], "-n", namespace).strip()
    kubeconfig = plane.admin.write_kubeconfig(folder / f"{release}.kubeconfig", token, namespace)
    settings = {each["name"]: each["value"] for each in pod["containers"][0]["env"] if "value" in each}
    del settings["FLEET_OPERATOR_HTTP_PORT"]
    operator = ForkedOperator(folder, kubeconfig, **settings)
    operator.start()
    try:
        await operator.until_leading()
        operator.until_ready()
        yield
    finally:
        operator.stop()


async def test_a_job_is_not_disturbed_by_what_happens_to_its_operator(
    helm: Helm, plane: ControlPlane, tmp_path: Path
):
    quickly = "operator.leaseSeconds=2"
    async with client_for(plane.admin.kubeconfig) as client:
        assert helm.install("first", quickly, namespace="one") is None
        async with fresh_namespace(client) as namespace:
            async with operator_of(plane, "first", "one", tmp_path):
                started = uids(await run(namespace))
            more = ("replicas=2", "operator.logFormat=json", "features.podDisruptionBudgets=true")
            assert helm.install("first", quickly, *more, namespace="one", verb="upgrade") is None
            async with operator_of(plane, "first", "one", tmp_path):
                await namespace.create_job(manifest("upgraded"))
                await namespace.until_state("upgraded", "Running")
            assert helm("rollback", "first", namespace="one").returncode == 0
            async with operator_of(plane, "first", "one", tmp_path):
                await namespace.create_job(manifest("back"))
                await namespace.until_state("back", "Running")
            assert helm("uninstall", "first", "--wait", namespace="one").returncode == 0
            assert uids(await namespace.until_running("digits", *SERVERS, *TRAINERS)) == started
            adopting = ("--take-ownership",)
            assert helm.install("second", quickly, "crd.adopt=true", namespace="two", more=adopting) is None
            async with operator_of(plane, "second", "two", tmp_path):
                assert uids(await namespace.until_running("digits", *SERVERS, *TRAINERS)) == started
                await namespace.end(*TRAINERS)
                ended = await namespace.until_state("digits", "Succeeded")
            assert ended["status"]["restarts"] == 0


async def test_an_uninstallation_deletes_the_lease(helm: Helm, plane: ControlPlane, tmp_path: Path):
    assert helm.install("fleet", "operator.leaseSeconds=2", namespace="one") is None
    kubectl, name = plane.admin.kubectl, "fleet-fleet-operator"
    async with operator_of(plane, "fleet", "one", tmp_path):
        assert name in kubectl("get", "lease", "-n", "one")
    assert helm("uninstall", "fleet", "--wait", namespace="one").returncode == 0
    kubectl("wait", "--for=delete", f"lease/{name}", "-n", "one", f"--timeout={SECONDS:.0f}s")
