"""Several operators: one works, and the next takes over when it ends, dies, is paused or loses its lease."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.digits_job import TRAINERS
from tests.support.fault_proxy import Answer, Held, Lost, Reset, proxy_for
from tests.support.forked_operator import ForkedOperator
from tests.support.jobs import manifest
from tests.support.kube import WAIT_SECONDS, attempt
from tests.support.operator_process import CHART, LEASES, grant_lease, refusals
from tools import assets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.controlplane import ControlPlane
    from tests.support.fault_proxy import Call, FaultProxy
    from tests.support.kube import Namespace
    from tests.support.operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("alone")

LEASE_SECONDS = 5
"""For tests that wait for its end."""
LONG_LEASE_SECONDS = 10
"""For tests in which no lease ends."""


@contextlib.asynccontextmanager
async def operators(
    control_plane: ControlPlane,
    kubeconfig: Path,
    folder: Path,
    namespace: Namespace,
    *,
    lease_seconds: int = LEASE_SECONDS,
) -> AsyncIterator[tuple[OperatorProcess, OperatorProcess, FaultProxy]]:
    """Run two operators for one namespace, the first, which leads, behind a proxy."""
    environment = {
        "FLEET_OPERATOR_LEASE_SECONDS": str(lease_seconds),
        "FLEET_OPERATOR_LEASE": namespace.name,
        "FLEET_OPERATOR_NAMESPACES": namespace.name,
    }
    await asyncio.to_thread(grant_lease, control_plane, namespace.name)
    async with proxy_for(kubeconfig).running() as proxy:
        (folder / "one").mkdir()
        (folder / "two").mkdir()
        through = proxy.kubeconfig(folder / "one" / "kubeconfig", like=kubeconfig)
        one = ForkedOperator(folder / "one", through, **environment)
        two = ForkedOperator(folder / "two", kubeconfig, **environment)
        started: list[ForkedOperator] = []
        try:
            for each in (one, two):
                await asyncio.to_thread(each.start)
                started.append(each)
            assert (one.leads(), two.leads()) == (True, False)
            yield one, two, proxy
        finally:
            for each in started:
                each.kill()
        for each in started:
            log = each.log.read_text()
            assert not refusals(log)
            assert "Traceback" not in log, each.tail()


async def test_the_next_takes_over_at_once_when_the_leader_ends(
    namespace: Namespace, control_plane: ControlPlane, operator_kubeconfig: Path, tmp_path: Path
):
    async with operators(
        control_plane, operator_kubeconfig, tmp_path, namespace, lease_seconds=LONG_LEASE_SECONDS
    ) as (one, two, _):
        await namespace.create_job(manifest())
        await namespace.until_state("digits", "Running")
        held = await namespace.client.get(f"{LEASES}/{namespace.name}")
        assert await asyncio.to_thread(one.stop) == 0
        ended = asyncio.get_running_loop().time()
        await two.until_leading()
        waited = asyncio.get_running_loop().time() - ended
        assert waited < LONG_LEASE_SECONDS * 0.7  # until it asked again, and not until the lease would end
        taken = await namespace.client.get(f"{LEASES}/{namespace.name}")
        assert taken["spec"]["holderIdentity"] != held["spec"]["holderIdentity"]
        assert taken["spec"]["leaseTransitions"] > held["spec"]["leaseTransitions"]
        await namespace.end(*TRAINERS)
        await namespace.until_state("digits", "Succeeded")
        assert await asyncio.to_thread(two.stop) == 0
        assert (await namespace.client.get(f"{LEASES}/{namespace.name}"))["spec"]["holderIdentity"] == ""


async def test_a_leader_of_whom_one_renewal_fails_at_a_time_leads_on(
    namespace: Namespace, control_plane: ControlPlane, operator_kubeconfig: Path, tmp_path: Path
):
    async with operators(
        control_plane, operator_kubeconfig, tmp_path, namespace, lease_seconds=LONG_LEASE_SECONDS
    ) as (one, two, proxy):
        held = await namespace.client.get(f"{LEASES}/{namespace.name}")
        for fault in (Answer(409, "Conflict"), Answer(500), Reset(), Lost()):
            failed = proxy.fail(fault, "PUT", "leases")
            async with asyncio.timeout(WAIT_SECONDS):
                await failed.wait()
                before = len(proxy.calls)
                while not renewals(proxy, before):  # noqa: ASYNC110 there is only the asking
                    await asyncio.sleep(0.05)
        await namespace.create_job(manifest())
        await namespace.until_state("digits", "Running")
        assert (await asyncio.to_thread(one.leads), await asyncio.to_thread(two.leads)) == (True, False)
        now = await namespace.client.get(f"{LEASES}/{namespace.name}")
        for field in ("holderIdentity", "leaseTransitions"):
            assert now["spec"][field] == held["spec"][field]
        assert "is lost" not in one.log.read_text()


def renewals(proxy: FaultProxy, since: int) -> list[Call]:
    """Return the calls from a place on by which the Lease was written."""
    calls = proxy.calls[since:]
    return [call for call in calls if (call.verb, call.resource, call.status) == ("PUT", "leases", 200)]


async def test_a_leader_that_cannot_renew_stops_writing_and_stands_by(
    namespace: Namespace, control_plane: ControlPlane, operator_kubeconfig: Path, tmp_path: Path
):
    async with operators(control_plane, operator_kubeconfig, tmp_path, namespace) as (one, two, proxy):
        for verb in ("GET", "PUT"):
            proxy.fail(Answer(500), verb, "leases", times=1000)
        await two.until_leading()
        written = len(proxy.writes())
        # The first sees the job as soon as the second does, and was given no other reason to leave it alone.
        await namespace.create_job(manifest())
        await namespace.until_state("digits", "Running")
        assert proxy.writes()[written:] == []
        assert await asyncio.to_thread(one.leads) is False
        assert await asyncio.to_thread(one.get, "/readyz") == "ok\n"
        assert await asyncio.to_thread(one.stop) == 0


async def test_a_paused_leader_writes_nothing_before_it_holds_the_lease_again(
    namespace: Namespace, control_plane: ControlPlane, operator_kubeconfig: Path, tmp_path: Path
):
    async with operators(control_plane, operator_kubeconfig, tmp_path, namespace) as (one, two, proxy):
        one.pause()
        await two.until_leading()
        two.pause()
        # The lease is the second's now, and there is work that nobody has done when the first goes on.
        await namespace.create_job(manifest())
        before = len(proxy.calls)
        one.resume()
        await namespace.until_state("digits", "Running")
        calls = [call for call in proxy.calls[before:] if call.writes]
        assert calls[0].resource == "leases"
        two.resume()
        await two.until_leading(holds=False)
        assert await asyncio.to_thread(one.leads)
        # What both did is there once.
        pods = await namespace.until_pods("digits", "the pods", bool)
        assert set(map(attempt, pods.values())) == {"0.0"}
        assert (await namespace.get("fleetjobs", "digits"))["status"]["restarts"] == 0


async def test_a_leader_that_is_paused_amid_a_pass_does_not_go_on_with_it(
    namespace: Namespace, control_plane: ControlPlane, operator_kubeconfig: Path, tmp_path: Path
):
    async with operators(control_plane, operator_kubeconfig, tmp_path, namespace) as (one, two, proxy):
        answered = asyncio.Event()
        proxy.fail(Held(answered), "POST", "services")
        await namespace.create_job(manifest())
        await namespace.until("services", "the job's", lambda found: "digits" in found)
        one.pause()
        await two.until_leading()
        await namespace.until_state("digits", "Running")
        # What the first waits for when it goes on is the answer, and then it would make pods.
        before = len(proxy.writes())
        answered.set()
        one.resume()
        await one.until_leading(holds=False)
        assert proxy.writes()[before:] == []
        assert "CreatePod: the lease" in one.log.read_text()


async def test_a_lease_that_somebody_deletes_is_made_anew_by_its_holder_and_nobody_else_leads(
    namespace: Namespace, control_plane: ControlPlane, operator_kubeconfig: Path, tmp_path: Path
):
    async with operators(
        control_plane, operator_kubeconfig, tmp_path, namespace, lease_seconds=LONG_LEASE_SECONDS
    ) as (one, two, _):
        held = await namespace.client.get(f"{LEASES}/{namespace.name}")
        await namespace.client.delete(f"{LEASES}/{namespace.name}")
        async with asyncio.timeout(WAIT_SECONDS):
            while "created the lease" not in one.log.read_text():  # noqa: ASYNC110 there is only the asking
                await asyncio.sleep(0.05)
        now = await namespace.client.get(f"{LEASES}/{namespace.name}")
        assert now["spec"]["holderIdentity"] == held["spec"]["holderIdentity"]
        assert now["metadata"]["uid"] != held["metadata"]["uid"]
        assert (await asyncio.to_thread(one.leads), await asyncio.to_thread(two.leads)) == (True, False)
        assert "is lost" not in one.log.read_text()


@pytest.mark.parametrize("how", [(), ("--force",)], ids=["merged", "forced"])
def test_an_upgrade_leaves_the_lease_to_its_holder(
    control_plane: ControlPlane, namespace: Namespace, how: tuple[str, ...]
):
    release = f"fleet-{namespace.name}"
    name = f"{release}-fleet-operator"

    def helm(*arguments: str | Path) -> None:
        where = ("--kubeconfig", control_plane.admin.kubeconfig, "--namespace", namespace.name)
        command = [assets.find(["helm"])["helm"], *arguments, *where]
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    def lease() -> dict[str, Any]:
        found = control_plane.admin.kubectl("get", "lease", name, "-n", namespace.name, "-o", "json")
        return dict(json.loads(found))

    settings = ("--set", "replicas=0,crd.install=false,rbac.create=false")
    helm("install", release, CHART, *settings)
    spec = {"holderIdentity": "one", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"}
    made = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
    control_plane.admin.kubectl("create", "-n", namespace.name, "-f", "-", stdin=json.dumps(made))
    before = lease()
    helm("upgrade", release, CHART, *settings, *how)
    helm("uninstall", release)
    assert lease() == before
