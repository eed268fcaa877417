"""The cluster, the images on it and the operator, made once for all end-to-end tests.

Nothing here skips: without a cluster these tests fail.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.e2e import bringup, images
from tests.support.e2e.images import Images
from tests.support.e2e.kubectl import Kubectl
from tests.support.e2e.namespaces import fresh_namespace
from tests.support.e2e.release import Release
from tools import assets

if TYPE_CHECKING:
    from collections.abc import Iterator

NewNamespace = Callable[[str], AbstractContextManager[Kubectl]]
IN_USE = pytest.StashKey[list[Kubectl]]()
"""kubectl for each namespace of the operator and of the tests that run."""

HERE = Path(__file__).parent
TEST_SECONDS = 900
FIRST_TEST_SECONDS = 4800
"""The first test's time holds the cluster's, the images' and the operator's start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.timeout(FIRST_TEST_SECONDS if item is ours[0] else TEST_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Add to a failure what the cluster says about it."""
    report = yield
    if report.failed:
        for kubectl in item.config.stash.get(IN_USE, []):
            report.sections.append((f"namespace {kubectl.namespace}", kubectl.everything()))
    return report


@pytest.fixture(scope="session")
def programs() -> bringup.Programs:
    return bringup.Programs(**assets.find(["kubectl", "helm", "kind"]))


@pytest.fixture(scope="session")
def cluster(programs: bringup.Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """kubectl of a cluster that answers."""
    with bringup.cluster(programs, tmp_path_factory.mktemp("cluster")) as kubeconfig:
        yield Kubectl(programs.kubectl, kubeconfig)


@pytest.fixture(scope="session")
def loaded(cluster: Kubectl) -> Images:
    """The images, built from this tree, on every node. The trainer's name is the one in the example."""
    manifest = yaml.safe_load(Path("examples/digits/fleetjob.yaml").read_text())
    trainer = manifest["spec"]["template"]["spec"]["containers"][0]["image"]
    version = yaml.safe_load(Path("charts/fleet-operator/Chart.yaml").read_text())["appVersion"]
    names = Images(operator=f"fleet-operator:{version}", trainer=trainer)
    images.build(names)
    images.load(names, cluster)
    return names


@pytest.fixture(scope="session")
def operator(
    programs: bringup.Programs, cluster: Kubectl, loaded: Images, pytestconfig: pytest.Config
) -> Iterator[Release]:
    """The operator, installed by its chart."""
    release = Release(programs.helm, cluster, namespace=f"fleet-system-{secrets.token_hex(3)}")
    pytestconfig.stash[IN_USE] = [cluster.within(release.namespace)]
    try:
        # The cluster may not be ours: it keeps nothing of the tests, not even the definition.
        release.install(loaded.operator, "crd.keep=false")
        yield release
    finally:
        release.uninstall()
        cluster("delete", "namespace", release.namespace, "--ignore-not-found", timeout=180)


@pytest.fixture(scope="session")
def new_namespace(cluster: Kubectl, operator: Release, pytestconfig: pytest.Config) -> NewNamespace:
    """Make namespaces that the operator serves; a failure tells what is in those that are in use."""

    @contextlib.contextmanager
    def make(purpose: str) -> Iterator[Kubectl]:
        with fresh_namespace(cluster, f"e2e-{purpose}-{secrets.token_hex(3)}") as kubectl:
            pytestconfig.stash[IN_USE].append(kubectl)
            yield kubectl
            pytestconfig.stash[IN_USE].remove(kubectl)

    return make
