"""The blocking client: its thread, its end, and calls that are interrupted."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.client import FleetJobClient, JobNotFoundError, session
from fleet_operator.kubernetes.login import Connection, ConnectionSettingsError
from tests.support.log_server import LogServer, at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LogServer]:
    """An API server, which each client of the test uses; it answers while the test awaits."""
    served = LogServer()
    async with served.session() as opened:
        monkeypatch.setattr(session, "connect", lambda _: Connection(opened.server))
        yield served


@pytest.fixture
def client(world: LogServer) -> Iterator[FleetJobClient]:
    with FleetJobClient(namespace="default") as opened:
        yield opened


async def test_a_reader_of_logs_may_stop_and_the_client_goes_on(world: LogServer, client: FleetJobClient):
    world.put(0, at(0, "one", "two"))

    def first() -> str:
        for line in client.logs("digits", follow=True):
            return line.text
        return ""

    assert await asyncio.to_thread(first) == "one"
    with pytest.raises(JobNotFoundError, match="no FleetJob other in namespace default"):
        await asyncio.to_thread(client.get, "other")


async def test_a_call_of_another_thread_ends_with_the_client(world: LogServer, client: FleetJobClient):
    waiting = asyncio.create_task(asyncio.to_thread(next, client.logs("digits", follow=True)))
    async with asyncio.timeout(10):
        while not all(world.watchers.values()):  # it follows
            world.heard.clear()
            await world.heard.wait()
    await asyncio.to_thread(client.close)
    with pytest.raises(RuntimeError, match="closed during the call"):
        await waiting


async def test_a_call_that_the_closing_loop_never_begins_ends_too(
    world: LogServer, client: FleetJobClient, monkeypatch: pytest.MonkeyPatch
):
    came = threading.Event()

    def never(work: Coroutine[Any, Any, Any], _: object) -> Future[Any]:
        came.set()
        return Future()

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", never)
    waiting = asyncio.create_task(asyncio.to_thread(client.get, "digits"))
    await asyncio.to_thread(came.wait)
    await asyncio.to_thread(client.close)
    with pytest.raises(RuntimeError, match="closed during the call"):
        await waiting


async def test_a_client_that_cannot_log_in_leaves_no_thread(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: object) -> Connection:
        raise ConnectionSettingsError("the kubeconfig has no current-context")

    monkeypatch.setattr(session, "connect", refuse)
    with pytest.raises(ConnectionSettingsError, match="no current-context"):
        await asyncio.to_thread(FleetJobClient)
    assert "FleetJobClient" not in {thread.name for thread in threading.enumerate()}


async def test_a_forked_process_is_told_to_make_its_own(client: FleetJobClient):
    if (pid := os.fork()) == 0:
        try:
            client.list()
        except RuntimeError as error:
            os._exit(0 if "make a new one" in str(error) else 1)
        finally:
            os._exit(2)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
