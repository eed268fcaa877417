"""What jobs do on this machine: the table that a cluster is held to as well."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import Role, parse_job
from fleet_operator.cli import run
from fleet_operator.cli.local_job import RunOptions, prepare
from fleet_operator.cli.run import run_job
from fleet_operator.local import kubelet
from fleet_operator.local.cluster import ProcessCluster
from tests.support.behaviours import BEHAVIOURS, LIFE, is_pause
from tests.support.local import Lines, job_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.behaviours import Behaviour

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        sys.platform != "linux", reason="only on Linux can no descendant of a supervisor hide"
    ),
]


def kept(monkeypatch: pytest.MonkeyPatch) -> list[ProcessCluster]:
    """Have every cluster of a run kept for a look at what it has left."""
    clusters: list[ProcessCluster] = []

    def make(*arguments: Any, **options: Any) -> ProcessCluster:
        clusters.append(ProcessCluster(*arguments, **options))
        return clusters[-1]

    monkeypatch.setattr(run, "ProcessCluster", make)
    return clusters


@pytest.mark.parametrize("behaviour", [pytest.param(each, id=each.id) for each in BEHAVIOURS])
async def test_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour):
    first = "" if behaviour.first is None else str(behaviour.first)
    lives = " ".join(f"{name}:{','.join(map(str, codes))}" for name, codes in behaviour.lives.items())
    document = job_manifest(
        LIFE,
        server=None if behaviour.collective else LIFE,
        trainers=2,
        servers=2,
        env=[{"name": "LIVES", "value": lives}, {"name": "FIRST", "value": first}],
        **behaviour.spec,
    )
    options = RunOptions(
        workdirs=dict.fromkeys(Role, tmp_path), logs=tmp_path / "logs", environ=os.environ, timeout_seconds=50
    )
    display = Lines()
    clusters = kept(monkeypatch)
    result = await asyncio.wait_for(run_job(prepare(parse_job(document)), options, display), 55)
    status = result.view.status
    told = status.condition(status.terminal_state or "")
    assert told is not None, display.said
    assert (status.state, told.reason) == (behaviour.state, behaviour.reason), told.message
    assert (status.failures, status.job_restarts) == (behaviour.failures, behaviour.job_restarts)
    assert behaviour.says in told.message
    if behaviour.pause_seconds is not None:
        assert is_pause(status.to_manifest(), behaviour.pause_seconds)
    if behaviour.first is not None:
        assert {(tmp_path / f"first-{index}").read_text() for index in (0, 1)} == {first}
    if behaviour.left is not None:
        assert {pod.replica for pod in clusters[0].kubelet.pods} == behaviour.left


@pytest.mark.parametrize("patience", [pytest.param(0.5, id="in-time"), pytest.param(60.0, id="not-before")])
async def test_a_server_that_runs_and_does_not_listen_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, patience: float
):
    monkeypatch.setattr(kubelet, "READY_TELL_SECONDS", patience)
    asleep = "import time; time.sleep(60)"
    document = job_manifest(asleep, server=asleep)
    options = RunOptions(
        workdirs=dict.fromkeys(Role, tmp_path), logs=tmp_path / "logs", environ=os.environ, timeout_seconds=3
    )
    await asyncio.wait_for(run_job(prepare(parse_job(document)), options, Lines()), 55)
    said = [line for line in caplog.messages if line.startswith("trainers wait for pserver-0, which has run")]
    assert bool(said) == (patience < 3)
    assert all("see its log" in line for line in said)
