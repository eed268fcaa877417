"""One control plane and one operator for all tests of a process; each test has its own namespace."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

import pytest

from fleet_operator.settings import FEATURES
from tests.support.controlplane import ControlPlane
from tests.support.fault_proxy import proxy_for
from tests.support.faulty import Faulty
from tests.support.forked_operator import ForkedOperator
from tests.support.kube import client_for, fresh_namespace
from tests.support.operator_process import (
    CRD,
    METRICS_READER,
    NAMESPACE,
    POD_GROUPS,
    grant_lease,
    install,
    refusals,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.support.kube import Namespace

# The control plane is written in Go: its programs collect garbage less often, for a tenth less CPU time.
os.environ.setdefault("GOGC", "400")


# Of the package, not of the session: an idle control plane takes an eighth of a core until it is stopped.
@pytest.fixture(scope="package")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that knows FleetJobs, without an operator."""
    plane = ControlPlane(tmp_path_factory.mktemp("control-plane") / "plane", definitions=[CRD, POD_GROUPS])
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture(scope="package")
def operator_kubeconfig(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's kubeconfig, with the permissions that the chart grants it."""
    token = install(control_plane, FEATURES)
    path = tmp_path_factory.mktemp("account") / "kubeconfig"
    return control_plane.admin.write_kubeconfig(path, token, NAMESPACE)


@pytest.fixture(scope="package")
def shared_operator(
    operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForkedOperator]:
    """The operator of all namespaces, which starts when a test first needs it."""
    process = ForkedOperator(
        tmp_path_factory.mktemp("operator"),
        operator_kubeconfig,
        FLEET_OPERATOR_FEATURES=",".join(FEATURES),
        FLEET_OPERATOR_METRICS_READERS=json.dumps([METRICS_READER]),
    )
    process.log.touch()
    yield process
    if process.runs:
        process.stop()
    # Its rights are enough for all that the tests made it do, and no pass failed.
    log = process.log.read_text()
    assert not refusals(log)
    raised = log[max(0, log.find("Traceback") - 300) :][:4000]
    assert "Traceback" not in log, raised


@pytest.fixture
def operator(shared_operator: ForkedOperator) -> ForkedOperator:
    """The shared operator, which runs."""
    if not shared_operator.runs:
        shared_operator.start()
    return shared_operator


@pytest.fixture(scope="module")
def alone(shared_operator: ForkedOperator) -> None:
    """Keeps the shared operator from running for a module, whose tests start their own."""
    if shared_operator.runs:
        shared_operator.stop()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> None:
    """Lets the shared operator run, except for modules that use `alone`."""
    if "alone" not in request.fixturenames:
        request.getfixturevalue("operator")


@pytest.fixture
async def namespace(control_plane: ControlPlane, served: None) -> AsyncIterator[Namespace]:
    """A new namespace, which the shared operator serves if it runs."""
    async with client_for(control_plane.admin.kubeconfig) as client, fresh_namespace(client) as fresh:
        yield fresh


@pytest.fixture
async def faulty(
    namespace: Namespace, control_plane: ControlPlane, operator_kubeconfig: Path, tmp_path: Path
) -> AsyncIterator[Faulty]:
    """An operator for this namespace only, behind a proxy; for modules that use `alone`."""
    await asyncio.to_thread(grant_lease, control_plane, namespace.name)
    async with proxy_for(operator_kubeconfig).running() as proxy:
        forked = ForkedOperator(
            tmp_path,
            proxy.kubeconfig(tmp_path / "kubeconfig", like=operator_kubeconfig),
            FLEET_OPERATOR_NAMESPACES=namespace.name,
            FLEET_OPERATOR_LEASE=namespace.name,  # of its own: it is killed with the lease in its hand
        )
        faulty = Faulty(forked, proxy, namespace)
        await faulty.start()
        try:
            yield faulty
        finally:
            await faulty.kill()
        log = forked.log.read_text()
        assert not refusals(log)
        assert "Traceback" not in log, forked.tail()
