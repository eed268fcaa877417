from __future__ import annotations

import socket

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from fleet_operator.http_server import HttpServer

pytestmark = pytest.mark.timeout(20)


class Health:
    problem: str | None = None
    waiting: str | None = None


async def test_what_is_served():
    registry, health = CollectorRegistry(), Health()
    Counter("things", "Things", registry=registry).inc()
    server = HttpServer(registry, problem=lambda: health.problem, waiting=lambda: health.waiting)
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

            async def get(path: str) -> tuple[int, str]:
                async with session.get(path) as response:
                    return response.status, await response.text()

            status, text = await get("/metrics")
            assert (status, "things_total 1.0" in text) == (200, True)
            assert await get("/healthz") == await get("/readyz") == (200, "ok\n")
            health.waiting = "the first lists have not arrived"
            assert await get("/healthz") == (200, "ok\n")
            assert await get("/readyz") == (503, "the first lists have not arrived\n")
            health.problem = "ended: engine"
            assert await get("/healthz") == await get("/readyz") == (503, "ended: engine\n")
            assert (await get("/"))[0] == 404
    finally:
        await server.close()


async def test_all_interfaces_are_those_of_both_families():
    server = HttpServer(CollectorRegistry(), problem=lambda: None, waiting=lambda: None)
    port = await server.start("", 0)
    try:
        async with aiohttp.ClientSession() as session:
            for address in ("127.0.0.1", *(["[::1]"] if has_ipv6() else [])):
                async with session.get(f"http://{address}:{port}/healthz") as answer:
                    assert answer.status == 200
    finally:
        await server.close()


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6; without it there is nothing to be asked by."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
