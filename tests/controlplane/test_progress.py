"""The progress of a job, which the operator reads from trainer 0 and writes to the status."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from fleet_operator.api.names import METRICS_PORT
from tests.support.digits_job import TRAINERS, annotated
from tests.support.kube import WAIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Namespace

POD_IP, SILENT_IP = "127.77.0.5", "127.77.0.6"  # addresses of this machine, given to pods by kwok


@contextlib.asynccontextmanager
async def pod_answers(progress: dict[str, Any], host: str) -> AsyncIterator[None]:
    """Serve /progress as a trainer's pod does, at its address."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(progress)

    application = web.Application()
    application.router.add_get("/progress", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, host, METRICS_PORT).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def test_the_status_tells_how_far_trainer_0_is(namespace: Namespace, control_plane: ControlPlane):
    table = {
        "name": "users",
        "rows": 1000,
        "bytes": 90000,
        "rowsOnDisk": 40,
        "hitPercentage": 79,
        "shardSkew": 1.25,
    }
    progress = {"step": 50, "totalSteps": 200, "loss": 0.125, "tables": [table]}
    async with pod_answers(progress, POD_IP):
        await namespace.create_job(annotated(ip=POD_IP))
        job = await namespace.until_job("digits", "progress", lambda job: "progress" in job.get("status", {}))
        told = job["status"]["progress"]
        assert (told["percentage"], told["step"], told["totalSteps"], told["loss"]) == (25, 50, 200, 0.125)
        assert told["tables"] == [table]
        shown = control_plane.admin.kubectl("get", "fj", "digits", "-n", namespace.name)
        assert shown.splitlines()[0].split()[5] == "PROGRESS"
        assert shown.splitlines()[1].split()[5] == "25%"
    # The last word comes with the end of the pod: nobody need ask in time.
    last = json.dumps({"step": 200, "totalSteps": 200, "loss": 0.0625})
    await namespace.end(*TRAINERS, message=last)
    job = await namespace.until_state("digits", "Succeeded")
    told = job["status"]["progress"]
    assert (told["percentage"], told["loss"], told.get("etaSeconds")) == (100, 0.0625, None)


async def test_a_trainer_that_never_answers_holds_nothing_up(namespace: Namespace):
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, SILENT_IP, METRICS_PORT)
    async with server:
        await namespace.create_job(annotated(ip=SILENT_IP))
        await namespace.until_state("digits", "Running")
        async with asyncio.timeout(WAIT_SECONDS):
            await asked.wait()
        await namespace.end(*TRAINERS)
        job = await namespace.until_state("digits", "Succeeded")
    assert "progress" not in job["status"]
