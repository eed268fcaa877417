"""The Python clients against a real API server, with the operator at work."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fleet_operator.api import FleetJob, JobState, Role
from fleet_operator.client import (
    AsyncFleetJobClient,
    ClusterRefusal,
    FleetJobClient,
    JobFailedError,
    JobNotFoundError,
    NotInTimeError,
)
from fleet_operator.client.session import Where, open_session
from fleet_operator.errors import InvalidJob
from tests.support.digits_job import TRAINERS
from tests.support.documents import block
from tests.support.jobs import collective_manifest, manifest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Manifest, Namespace


@pytest.fixture
async def client(control_plane: ControlPlane, namespace: Namespace) -> AsyncIterator[AsyncFleetJobClient]:
    kubeconfig = control_plane.admin.kubeconfig
    async with AsyncFleetJobClient(kubeconfig=kubeconfig, namespace=namespace.name) as opened:
        yield opened


def without_namespace(document: Manifest) -> Manifest:
    document["metadata"].pop("namespace", None)
    return document


async def test_a_job_is_submitted_watched_and_waited_for(namespace: Namespace, client: AsyncFleetJobClient):
    submitted = await client.submit(without_namespace(manifest()))
    assert isinstance(submitted, FleetJob)
    assert (submitted.name, submitted.metadata.namespace) == ("digits", namespace.name)
    with pytest.raises(NotInTimeError, match=r"has not finished after 0.1 s and continues") as late:
        await client.wait("digits", timeout_seconds=0.1)
    assert isinstance(late.value, TimeoutError)
    states = list[JobState | None]()
    async for job in client.watch("digits"):
        if job.status.state is JobState.RUNNING and JobState.RUNNING not in states:
            await namespace.end(*TRAINERS)
        states.append(job.status.state)
    assert states[-1] is JobState.SUCCEEDED
    finished = await client.wait("digits")
    assert finished.status.is_true("Complete")
    assert [job.name for job in await client.list()] == ["digits"]
    everywhere = await client.list(all_namespaces=True)
    assert (namespace.name, "digits") in {(job.metadata.namespace, job.name) for job in everywhere}
    # What was read may be submitted as it is, and changes nothing.
    again = await client.submit(finished)
    assert again.metadata.generation == finished.metadata.generation


async def test_a_job_that_fails_is_an_error_with_its_reason(client: AsyncFleetJobClient):
    failing = without_namespace(manifest(failurePolicy={"action": "FailJob"}))
    failing["spec"]["template"]["metadata"] = {
        "annotations": {"fleet.test/exit-code": "3", "fleet.test/message": "no data"}
    }
    await client.submit(failing)
    with pytest.raises(JobFailedError, match="failed with exit code 3: no data") as failed:
        await client.wait("digits", timeout_seconds=60)
    failure = failed.value.job.status.last_failure
    assert failure is not None
    assert failure.exit_code == 3
    assert (await client.wait("digits", raise_on_failure=False)).status.state is JobState.FAILED


async def test_errors_say_what_was_found_and_what_to_do(
    namespace: Namespace, client: AsyncFleetJobClient, tmp_path: Path
):
    for call in (client.get, client.status, client.wait, client.suspend, client.delete):
        with pytest.raises(JobNotFoundError, match=f"no FleetJob none in namespace {namespace.name}"):
            await call("none")
    with pytest.raises(JobNotFoundError):
        await anext(client.logs("none", follow=True))
    await client.delete("none", missing_ok=True)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifest(trainer={"replicas": 0}), sort_keys=True))
    with pytest.raises(InvalidJob, match=rf"{file}:\d+: spec.trainer.replicas: found 0, expected at least 1"):
        await client.submit(file)
    elsewhere = manifest()
    elsewhere["metadata"]["namespace"] = "elsewhere"
    with pytest.raises(ClusterRefusal, match="is for namespace elsewhere, but"):
        await client.submit(elsewhere)
    assert await client.list() == []
    await client.submit(without_namespace(manifest()))
    with pytest.raises(ClusterRefusal, match="pserver") as refused:
        await client.submit(without_namespace(manifest(pserver={"replicas": 5})))
    assert refused.value.http_status == 422


async def test_a_job_is_scaled_suspended_resumed_and_deleted(
    namespace: Namespace, client: AsyncFleetJobClient
):
    elastic = collective_manifest(trainer={"replicas": 2, "minReplicas": 1, "maxReplicas": 4})
    await client.submit(without_namespace(elastic))
    name = elastic["metadata"]["name"]
    await namespace.until_state(name, "Running")
    assert (await client.scale(name, 3)).replicas(Role.TRAINER) == 3
    await namespace.until_running(name, *(f"{name}-trainer-{index}" for index in range(3)))
    with pytest.raises(ClusterRefusal):
        await client.scale(name, 9)
    assert (await client.suspend(name)).spec.suspend
    assert (await client.suspend(name)).spec.suspend
    await namespace.until_state(name, "Suspended")
    assert not (await client.resume(name)).spec.suspend
    await namespace.until_state(name, "Running")
    await client.delete(name, wait_seconds=60)
    assert await namespace.all("pods") == []
    with pytest.raises(JobNotFoundError):
        await client.get(name)


async def test_a_deletion_ends_the_waiting(
    control_plane: ControlPlane, namespace: Namespace, client: AsyncFleetJobClient
):
    await client.submit(without_namespace(manifest()))
    heard = asyncio.Event()
    where = Where(control_plane.admin.kubeconfig, namespace=namespace.name)
    async with open_session(where) as session:
        waiting = asyncio.create_task(session.wait("digits", say=lambda _: heard.set()))
        await heard.wait()  # a job that is deleted before the first look has never existed for who waits
        await client.delete("digits")
        with pytest.raises(JobNotFoundError, match="was deleted before it had finished"):
            await waiting


async def test_logs_are_lines_with_their_replica_and_time(
    namespace: Namespace, client: AsyncFleetJobClient, control_plane: ControlPlane
):
    await client.submit(without_namespace(manifest()))
    with pytest.raises(ClusterRefusal, match="no log of FleetJob digits could be read"):
        _ = [line async for line in client.logs("digits", container="none")]
    await namespace.until_state("digits", "Running")
    stamp = "2026-01-02T03:04:05.678901234Z"
    control_plane.pods_log.write_text(f"{stamp} stdout F loss 0.5\n{stamp} stdout F bytes: é\n")
    lines = [line async for line in client.logs("digits", role=Role.TRAINER, index=1)]
    assert [(line.replica, line.text) for line in lines] == [
        ("trainer-1", "loss 0.5"),
        ("trainer-1", "bytes: é"),
    ]
    assert lines[0].time == datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)


@pytest.fixture
def blocking(control_plane: ControlPlane, namespace: Namespace) -> Iterator[FleetJobClient]:
    with FleetJobClient(kubeconfig=control_plane.admin.kubeconfig, namespace=namespace.name) as opened:
        yield opened


async def test_the_blocking_client_does_the_same_even_where_an_event_loop_runs(
    namespace: Namespace, blocking: FleetJobClient, control_plane: ControlPlane, tmp_path: Path
):
    """This test is a coroutine, so an event loop runs in its thread, as in a notebook."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(without_namespace(manifest())))
    assert blocking.namespace == namespace.name
    assert blocking.submit(str(file)).name == "digits"
    await namespace.until_state("digits", "Running")
    stamp = "2026-01-02T03:04:05.678901234Z"
    control_plane.pods_log.write_text(f"{stamp} stdout F one\n")
    followed = blocking.logs("digits", follow=True, role=Role.TRAINER, index=0)
    assert next(followed).text == "one"
    followed.close()  # type: ignore[attr-defined]
    assert blocking.suspend("digits").spec.suspend
    assert not blocking.resume("digits").spec.suspend
    assert blocking.get("digits").name == "digits"
    await namespace.until_state("digits", "Running")
    changes = blocking.watch("digits")
    assert next(changes).status.state is JobState.RUNNING
    await namespace.end(*TRAINERS)
    assert list(changes)[-1].status.state is JobState.SUCCEEDED
    assert blocking.wait("digits", timeout_seconds=30).status.finished
    assert blocking.status("digits").state is JobState.SUCCEEDED
    assert [job.name for job in blocking.list()] == ["digits"]
    with pytest.raises(ClusterRefusal):
        blocking.scale("digits", 0)
    blocking.delete("digits", wait_seconds=60)
    with pytest.raises(JobNotFoundError):
        blocking.status("digits")


async def test_a_closed_client_is_told_of_and_leaves_no_thread(
    control_plane: ControlPlane, namespace: Namespace
):
    client = FleetJobClient(kubeconfig=control_plane.admin.kubeconfig, namespace=namespace.name)
    assert client.list() == []
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="is closed"):
        client.list()
    assert "FleetJobClient" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="not open"):
        await AsyncFleetJobClient().get("digits")


def code_of_the_page(position: int, namespace: str) -> str:
    code = block("docs/client.md", "Call jobs from Python", position=position)
    assert '"research"' in code
    return code.replace('"research"', repr(namespace))


@pytest.fixture
def kubeconfig(control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(control_plane.admin.kubeconfig))


@pytest.mark.usefixtures("kubeconfig")
async def test_the_page_s_client_submits_waits_and_deletes(
    namespace: Namespace, control_plane: ControlPlane, capfd: pytest.CaptureFixture[str]
):
    control_plane.pods_log.write_text("2026-01-02T03:04:05.6Z stdout F loss 0.5\n")
    running = asyncio.create_task(asyncio.to_thread(exec, code_of_the_page(0, namespace.name), {}))
    await namespace.until_state("digits", "Running")
    await namespace.end(*TRAINERS)
    await running
    assert await namespace.all("pods") == []
    out = capfd.readouterr().out
    assert "finished at 20" in out
    assert "trainer-0 2026-01-02 03:04:05.600000+00:00 loss 0.5" in out


@pytest.mark.usefixtures("kubeconfig")
async def test_the_page_s_client_waits_for_many_jobs(namespace: Namespace):
    names: dict[str, Any] = {"asyncio": asyncio}
    exec(code_of_the_page(1, namespace.name), names)  # noqa: S102 the page is ours
    training = asyncio.create_task(names["train"](["examples/digits/fleetjob.yaml"]))
    await namespace.until_state("digits", "Running")
    assert not training.done()
    await namespace.end(*TRAINERS)
    await training
    assert (await namespace.get("fleetjobs", "digits"))["status"]["state"] == "Succeeded"
