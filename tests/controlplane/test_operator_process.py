"""The operator's process: killed in the middle of its work, stopped, and limited to namespaces."""

from __future__ import annotations

import asyncio
import contextlib
from http.client import HTTPConnection
from typing import TYPE_CHECKING

import yaml

from fleet_operator.api.names import METRICS_PORT
from tests.support.digits_job import SERVERS, TRAINERS
from tests.support.jobs import manifest
from tests.support.kube import (
    WAIT_SECONDS,
    ApiException,
    attempt,
    is_running,
    runs_again,
)
from tests.support.operator_process import CRD, NAMESPACE, OperatorProcess

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.controlplane import ControlPlane
    from tests.support.forked_operator import ForkedOperator
    from tests.support.kube import Manifest, Namespace


async def until_taken(namespace: Namespace, document: Manifest) -> Manifest:
    """Create a job as soon as the API server uses the definition that admits it."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            with contextlib.suppress(ApiException):
                return await namespace.create_job(document)
            await asyncio.sleep(0.1)


async def until_refused(namespace: Namespace, document: Manifest) -> None:
    """Wait until the API server uses the definition that refuses the job."""
    async with asyncio.timeout(WAIT_SECONDS):
        with contextlib.suppress(ApiException):
            while await namespace.create_job(document, dry_run=True):  # noqa: ASYNC110 there is only the asking
                await asyncio.sleep(0.1)


async def test_an_operator_that_is_killed_goes_on_where_it_was(
    namespace: Namespace, operator: OperatorProcess
):
    names = [f"job-{index}" for index in range(5)]
    for name in names:
        await namespace.create_job(manifest(name))
    # Killed as soon as the first pods are there, amid the creation of the others.
    await namespace.until("pods", "the first pods", bool)
    operator.kill()
    # What happens meanwhile is found afterwards: a job more and a job less.
    await namespace.create_job(manifest("later"))
    await namespace.delete("fleetjobs", "job-0")
    operator.start()
    kept = [*names[1:], "later"]
    wanted = {
        f"{name}-{role}-{index}" for name in kept for role in ("pserver", "trainer") for index in (0, 1)
    }

    def all_run_once(pods: dict[str, Manifest]) -> bool:
        return set(pods) == wanted and all(is_running(pod) for pod in pods.values())

    pods = await namespace.until("pods", "the pods of all jobs", all_run_once)
    assert set(map(attempt, pods.values())) == {"0.0"}
    for name in kept:
        assert (await namespace.until_state(name, "Running"))["status"]["restarts"] == 0


async def test_a_trainer_that_fails_while_no_operator_runs_is_started_again(
    namespace: Namespace, operator: OperatorProcess
):
    await namespace.create_job(manifest())
    await namespace.until_state("digits", "Running")
    operator.kill()
    await namespace.end("digits-trainer-1", exit_code=1)
    await namespace.end("digits-trainer-0")
    operator.start()
    await namespace.until_pods("digits", "trainer 1 again", runs_again("digits-trainer-1", "0.1"))
    # The trainer that had completed is never run again, not even when its pod is gone.
    await namespace.delete("pods", "digits-trainer-0")
    await namespace.end("digits-trainer-1")
    await namespace.until_state("digits", "Succeeded")
    pods = await namespace.until_pods("digits", "the pods", bool)
    assert "digits-trainer-0" not in pods


async def test_a_job_that_a_newer_build_has_run_keeps_what_that_noted(
    namespace: Namespace, operator: OperatorProcess
):
    await namespace.create_job(manifest())
    job = await namespace.until_state("digits", "Running")
    operator.stop()
    foreign = {
        "type": "Evaluated",
        "status": "True",
        "reason": "Best",
        "message": "",
        "lastTransitionTime": "2026-11-22T12:00:00Z",
    }
    job["status"] |= {
        "conditions": [*job["status"]["conditions"], foreign],
        "evaluations": {"best": 0.9},
        "roles": [*job["status"]["roles"], {"role": "evaluator", "active": 1}],
    }
    await namespace.client.replace(namespace.path("fleetjobs", "digits", subresource="status"), job)
    await namespace.end("digits-trainer-1", exit_code=1)
    operator.start()
    await namespace.until_pods("digits", "trainer 1 again", runs_again("digits-trainer-1", "0.1"))
    await namespace.end(*TRAINERS)
    ended = (await namespace.until_state("digits", "Succeeded"))["status"]
    assert [each for each in ended["conditions"] if each["type"] == "Evaluated"] == [foreign]
    assert (ended["evaluations"], ended["restarts"]) == ({"best": 0.9}, 1)
    assert "evaluator" in {each["role"] for each in ended["roles"]}


async def test_what_another_definition_let_in_runs_on_or_is_told_of(
    namespace: Namespace, operator: OperatorProcess, control_plane: ControlPlane
):
    operator.stop()
    breaks_a_rule = manifest(trainer={"replicas": 2, "port": METRICS_PORT})
    other = yaml.safe_load(CRD.read_text())
    spec = other["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["trainer"]["properties"]["port"]["x-kubernetes-validations"]
    spec["properties"]["syncMode"]["enum"].append("Gossip")
    control_plane.admin.kubectl("replace", "-f", "-", stdin=yaml.safe_dump(other))
    try:
        job = await until_taken(namespace, breaks_a_rule)
        await namespace.create_job(manifest("newer", syncMode="Gossip"))
    finally:
        control_plane.admin.kubectl("replace", "-f", str(CRD))
    await until_refused(namespace, manifest("another", trainer={"port": METRICS_PORT}))
    job["status"] = {"state": "Running", "startTime": "2026-11-22T12:00:00Z", "restarts": 0, "roles": []}
    await namespace.client.replace(namespace.path("fleetjobs", "digits", subresource="status"), job)
    operator.start()
    await namespace.until_running("digits", *SERVERS, *TRAINERS)
    told = await namespace.until(
        "events", "a warning", lambda seen: any(each["reason"] == "InvalidSpec" for each in seen.values())
    )
    [warning] = [each for each in told.values() if each["reason"] == "InvalidSpec"]
    assert warning["involvedObject"]["name"] == "newer"
    assert "spec.syncMode: found 'Gossip', expected one of 'Sync', 'Async'" in warning["message"]
    assert not [name for name in await namespace.all("pods") if name["metadata"]["name"].startswith("newer")]
    await namespace.end(*TRAINERS)
    await namespace.until_state("digits", "Succeeded")


async def test_a_stopped_operator_waits_for_no_timer(namespace: Namespace, operator: ForkedOperator):
    operator.stop()
    # kopf waits 5 s for tasks that do not end, which is 500 s here. A busy machine takes less than that.
    operator.slowness_of_stopping = 100.0
    with contextlib.closing(HTTPConnection("127.0.0.1", operator.port)) as scraper:
        try:
            operator.start()
            await namespace.create_job(manifest())
            await namespace.until_state("digits", "Running")
            scraper.request("GET", "/metrics")  # as Prometheus does, which keeps its connections
            assert scraper.getresponse().read()
            assert operator.stop() == 0
        finally:
            operator.slowness_of_stopping = 1.0


async def test_an_operator_can_be_limited_to_namespaces(
    namespace: Namespace, control_plane: ControlPlane, operator: OperatorProcess, tmp_path: Path
):
    await namespace.create_job(manifest())
    await namespace.until_state("digits", "Running")
    shown = "fleet_operator_jobs{"
    nowhere = OperatorProcess(tmp_path, control_plane.admin.kubeconfig, FLEET_OPERATOR_NAMESPACES=NAMESPACE)
    nowhere.start()
    try:
        await nowhere.until_leading()
        nowhere.until_ready()  # again, with the lists of its term
        served = nowhere.get("/metrics")
        assert served is not None
        assert shown not in served
        assert shown in (operator.get("/metrics") or "")
    finally:
        assert nowhere.stop() == 0


async def test_an_api_server_that_was_away_is_found_again(namespace: Namespace, control_plane: ControlPlane):
    await namespace.create_job(manifest())
    await namespace.until_state("digits", "Running")
    control_plane.restart_api_server()
    await namespace.create_job(manifest("later"))
    await namespace.until_state("later", "Running")
    await namespace.end(*TRAINERS)
    await namespace.until_state("digits", "Succeeded")
    await namespace.delete("fleetjobs", "later")
    await namespace.until_pods("later", "no pod", lambda pods: not pods)
