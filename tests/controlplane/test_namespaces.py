"""An operator with permissions in some namespaces only, one of which is deleted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.forked_operator import ForkedOperator
from tests.support.jobs import manifest
from tests.support.kube import client_for, fresh_namespace
from tests.support.operator_process import NAMESPACE, SERVING, grant_lease

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Namespace

pytestmark = pytest.mark.usefixtures("alone")

LIMITED = "limited"


def limited_kubeconfig(control_plane: ControlPlane, folder: Path, lease: str) -> Path:
    """Create an account that may only hold a Lease; return its kubeconfig."""
    control_plane.admin.kubectl("create", "serviceaccount", LIMITED, "-n", NAMESPACE)
    grant_lease(control_plane, lease, LIMITED)
    token = control_plane.admin.kubectl("create", "token", LIMITED, "-n", NAMESPACE, "--duration=1h").strip()
    return control_plane.admin.write_kubeconfig(folder / "kubeconfig", token, NAMESPACE)


def bind(control_plane: ControlPlane, namespace: str, role: str) -> None:
    """Give the account a role in a namespace."""
    account = f"--serviceaccount={NAMESPACE}:{LIMITED}"
    control_plane.admin.kubectl("create", "rolebinding", LIMITED, "-n", namespace, role, account)


def failing(served: str | None, namespace: str) -> dict[str, float]:
    """Return for how many seconds the watch of each kind of object in a namespace has failed."""
    found = dict[str, float]()
    for line in (served or "").splitlines():
        if line.startswith("fleet_operator_watch_failing_seconds{") and f'"{namespace}"' in line:
            labels, _, value = line.rpartition(" ")
            found[labels.split('resource="')[1].split('"')[0]] = float(value)
    return found


async def test_a_namespace_that_is_gone_keeps_no_other_unserved_and_is_served_once_it_is_there(
    namespace: Namespace, control_plane: ControlPlane, tmp_path: Path
):
    gone = f"{namespace.name}-later"
    kubeconfig = limited_kubeconfig(control_plane, tmp_path, namespace.name)
    bind(control_plane, namespace.name, f"--clusterrole={SERVING}")
    operator = ForkedOperator(
        tmp_path,
        kubeconfig,
        FLEET_OPERATOR_NAMESPACES=f"{gone},{namespace.name}",
        FLEET_OPERATOR_LEASE=namespace.name,
    )
    await asyncio.to_thread(operator.start)
    try:
        await namespace.create_job(manifest())
        await namespace.until_state("digits", "Running")
        unseen = failing(await asyncio.to_thread(operator.get, "/metrics"), gone)
        assert unseen.keys() == {"fleetjobs", "pods", "services"}
        assert min(unseen.values()) > 0
        async with (
            client_for(control_plane.admin.kubeconfig) as client,
            fresh_namespace(client, gone) as late,
        ):
            bind(control_plane, gone, f"--clusterrole={SERVING}")
            await late.create_job(manifest())
            await late.until_state("digits", "Running", seconds=60)
            async with asyncio.timeout(60):
                while any(failing(await asyncio.to_thread(operator.get, "/metrics"), gone).values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        assert await asyncio.to_thread(operator.stop) == 0
    finally:
        operator.kill()
    assert "Traceback" not in operator.log.read_text(), operator.tail()
