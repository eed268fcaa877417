from __future__ import annotations

import asyncio
import logging
import signal
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import kopf
import pytest

from fleet_operator import startup, term
from fleet_operator.engine import NotLeadingError
from fleet_operator.handlers import registry_for
from fleet_operator.kubernetes.login import Connection
from fleet_operator.settings import Settings
from fleet_operator.startup import Operator, run_operator
from tests.support.seen_cluster import api_with_a_job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.fake_api import FakeApi


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(
            {"FLEET_OPERATOR_WORKERS": "none"}, "FLEET_OPERATOR_WORKERS: found 'none'", id="setting"
        ),
        pytest.param({}, "set KUBECONFIG to a kubeconfig file", id="no-cluster"),
        pytest.param({"KUBECONFIG": "/nowhere"}, "cannot read the kubeconfig /nowhere", id="no-kubeconfig"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    environ: dict[str, str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_operator({"HOME": str(tmp_path), **environ}) == 2
    assert expected in capsys.readouterr().err


def test_a_mistake_of_its_own_ends_it_with_a_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def fail(_: Operator) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(Operator, "run", fail)
    for of_the_whole_process in ("configure_logging", "_collect_rarely"):
        monkeypatch.setattr(startup, of_the_whole_process, lambda *_: None)
    monkeypatch.setattr(startup, "connect", lambda _: Connection("http://127.0.0.1:1"))
    assert run_operator({}) == 1
    assert "ZeroDivisionError" in caplog.text


async def test_a_port_that_is_taken_is_told_in_a_sentence(caplog: pytest.LogCaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(http_host="127.0.0.1", http_port=port)
        assert await Operator(settings, Connection("http://127.0.0.1:1")).run() == 1
    assert f"FLEET_OPERATOR_HTTP_PORT {port} cannot be served on" in caplog.text


async def test_a_server_name_that_kopf_cannot_be_told_is_refused_in_a_sentence(
    caplog: pytest.LogCaptureFixture,
):
    settings = Settings(http_host="127.0.0.1", http_port=0)
    connection = Connection("https://127.0.0.1:1", tls_server_name="kubernetes.example")
    assert await Operator(settings, connection).run() == 1
    assert "tls-server-name kubernetes.example is not supported for the operator" in caplog.text


def api_with_a_free_lease() -> FakeApi:
    """Return an API with a job, and a lease that was released, which is taken at once."""
    api = api_with_a_job()
    lease = f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{Settings().lease}"
    api.put(lease, {"spec": {"holderIdentity": "", "leaseDurationSeconds": 1}})
    return api


@pytest.mark.timeout(60)
async def test_a_signal_while_kopf_starts_ends_the_operator(monkeypatch: pytest.MonkeyPatch):
    api, sent = api_with_a_free_lease(), list[int]()

    def registry(*arguments: Any, **options: Any) -> kopf.OperatorRegistry:
        made = registry_for(*arguments, **options)

        @kopf.on.startup(registry=made)
        def tell_it_to_end(**_: Any) -> None:
            if not sent:  # what is not heard the first time is not said again
                sent.append(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)

        return made

    monkeypatch.setattr(startup, "ApiClient", lambda *_, **__: api)
    monkeypatch.setattr(term, "registry_for", registry)
    operator = Operator(Settings(http_host="127.0.0.1", http_port=0), Connection("http://127.0.0.1:1"))
    async with asyncio.timeout(20):
        assert await operator.run() == 0
    assert sent == [signal.SIGTERM]
    (lease,) = (each for path, each in api.objects.items() if "/leases/" in path)
    assert lease["spec"]["holderIdentity"] == ""


@pytest.mark.timeout(60)
async def test_a_term_in_which_kopf_does_not_begin_to_watch_ends(monkeypatch: pytest.MonkeyPatch):
    api, told = api_with_a_free_lease(), asyncio.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "FleetJobs have not been watched within 0.1 s" in record.getMessage():
                told.set()

    monkeypatch.setattr(startup, "ApiClient", lambda *_, **__: api)
    monkeypatch.setattr(term, "WATCH_SECONDS", 0.1)
    handler = Told()
    term.logger.addHandler(handler)
    operator = Operator(Settings(http_host="127.0.0.1", http_port=0), Connection("http://127.0.0.1:1"))
    running = asyncio.create_task(operator.run())
    try:
        async with asyncio.timeout(20):
            await told.wait()
            while operator._term is not None:  # noqa: ASYNC110 nothing tells
                await asyncio.sleep(0)
            signal.raise_signal(signal.SIGTERM)
            assert await running == 0
    finally:
        term.logger.removeHandler(handler)


def test_what_kopf_leaves_behind_makes_no_traceback_at_the_end(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    left = []

    async def watch() -> AsyncIterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("it does not stop")

    async def answer() -> None:
        raise aiohttp.ClientConnectionError("Connection closed")

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(startup._tell_of_loop)
        left.append(watch())
        await anext(left[0])
        request = asyncio.create_task(answer())
        await asyncio.wait({request})
        del request
        asyncio.get_running_loop().call_exception_handler({"message": "a task was never awaited"})

    asyncio.run(work())
    assert "it does not stop" in caplog.text
    assert "Connection closed" in caplog.text
    assert "Traceback" not in caplog.text
    assert [each.levelname for each in caplog.records if "never awaited" in each.message] == ["ERROR"]


async def test_nothing_is_written_by_an_operator_that_does_not_lead():
    operator = Operator(Settings(), Connection("http://127.0.0.1:1"))
    with pytest.raises(NotLeadingError, match="the lease fleet-operator is not held"):
        await operator._client.create("/api/v1/namespaces/default/pods", {})
