"""An operator whose API server's data is restored from a backup."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.controlplane import ControlPlane
from tests.support.forked_operator import ForkedOperator
from tests.support.jobs import manifest
from tests.support.kube import WAIT_SECONDS, client_for, fresh_namespace
from tests.support.operator_process import CRD, NAMESPACE, install

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.operator_process import OperatorProcess


def known_jobs(operator: OperatorProcess) -> int:
    """Return the number of jobs in an operator's metrics."""
    lines = (operator.get("/metrics") or "").splitlines()
    shown = (line for line in lines if line.startswith("fleet_operator_jobs{"))
    return sum(int(float(line.rpartition(" ")[2])) for line in shown)


@pytest.mark.timeout(300)
async def test_an_etcd_that_is_restored_from_a_backup_blinds_no_operator(tmp_path: Path):
    """Versions go back, and a watch from a place that is not reached again soon would hear of nothing."""
    plane = ControlPlane(tmp_path / "plane", nodes=1, definitions=[CRD])
    plane.start()
    token = install(plane)
    kubeconfig = plane.admin.write_kubeconfig(tmp_path / "kubeconfig", token, NAMESPACE)
    operator = ForkedOperator(tmp_path, kubeconfig, FLEET_OPERATOR_LEASE_SECONDS="600")
    operator.start()
    try:
        async with client_for(plane.admin.kubeconfig) as client, fresh_namespace(client) as namespace:
            await namespace.create_job(manifest())
            await namespace.until_state("digits", "Running")
            backup = await asyncio.to_thread(plane.back_up)
            await namespace.create_job(manifest("since"))
            await namespace.until_state("since", "Running")
            for number in range(300):
                await namespace.annotate("since-trainer-0", number=str(number))
            await asyncio.to_thread(plane.restore, backup)
            await namespace.create_job(manifest("new"))
            servers = {"new-pserver-0", "new-pserver-1"}  # nobody runs them: kwok is blind itself
            await namespace.until_pods("new", "the servers of a new job", lambda found: {*found} == servers)
            async with asyncio.timeout(WAIT_SECONDS):
                while known_jobs(operator) != 2:  # noqa: ASYNC110 there is only the asking
                    await asyncio.sleep(0.1)
            log = await asyncio.to_thread(operator.log.read_text)
            assert "restored from a backup" in log
            assert "Traceback" not in log
    finally:
        operator.stop()
        plane.stop()
