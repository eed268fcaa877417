from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest

from fleet_operator.cli.ui.machine import LocalRuns
from fleet_operator.cli.ui.server import PortError, UiServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKEN = "the-token"


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    server = UiServer(LocalRuns([]), None, token=TOKEN)
    address = await server.start(0)
    assert address.endswith(f"/?token={TOKEN}")
    jar = aiohttp.CookieJar(unsafe=True)  # else it refuses cookies of addresses
    try:
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            yield address.partition("/?")[0], session
    finally:
        await server.close()


async def test_the_token_opens_the_page_and_a_cookie_the_data():
    async with served() as (address, session):
        assert (await session.get(f"{address}/api/jobs")).status == 403
        assert (await session.get(f"{address}/?token=another")).status == 403
        page = await session.get(f"{address}/?token={TOKEN}")
        assert page.status == 200
        assert "httponly" in page.headers["Set-Cookie"].lower()
        assert "samesite=strict" in page.headers["Set-Cookie"].lower()
        answer = await session.get(f"{address}/api/jobs")
        assert (await answer.json())["jobs"] == []
        for path, kind in (("/ui.js", "text/javascript"), ("/ui.css", "text/css")):
            assert (await session.get(f"{address}{path}")).content_type == kind


async def test_a_cookie_that_is_no_text_is_refused_like_a_wrong_one():
    async with served() as (address, _):
        port = int(address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        host = f"Host: 127.0.0.1:{port}\r\nConnection: close".encode()
        writer.write(b"GET / HTTP/1.1\r\n%b\r\nCookie: fleetjob-%d=\xff\r\n\r\n" % (host, port))
        assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
        writer.close()


async def test_another_host_s_name_is_refused():
    async with served() as (address, session):
        for host in ("evil.example", "evil.example:80", "127.0.0.1:1", "127.0.0.1.evil.example"):
            answer = await session.get(f"{address}/api/jobs?token={TOKEN}", headers={"Host": host})
            assert answer.status == 421, host
            assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_nothing_but_reading_is_answered(method: str):
    async with served() as (address, session):
        assert (await session.request(method, f"{address}/api/jobs?token={TOKEN}")).status == 405


async def test_every_answer_forbids_scripts_and_requests_of_others():
    async with served() as (address, session):
        for path in ("/", f"/?token={TOKEN}", "/api/jobs", "/api/job?id=unknown", "/nothing"):
            headers = (await session.get(f"{address}{path}")).headers
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


async def test_unknown_jobs_are_not_found():
    async with served() as (address, session):
        for query in ("id=unknown", "id=default/digits", "id=../x", ""):
            for path in ("job", "log"):
                answer = await session.get(f"{address}/api/{path}?token={TOKEN}&{query}")
                assert answer.status == 404


async def test_only_this_machine_is_listened_to_and_a_busy_port_is_named():
    async with served() as (address, _):
        port = int(address.rpartition(":")[2])
        with pytest.raises(PortError, match=f"port {port} of 127.0.0.1 cannot be used: .*--port 0"):
            await UiServer(LocalRuns([]), None, token=TOKEN).start(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
