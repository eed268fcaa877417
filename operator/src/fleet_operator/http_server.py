"""The operator's HTTP server for metrics and for liveness and readiness probes."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry


class HttpServer:
    """Serves /metrics, /healthz and /readyz.

    Parameters
    ----------
    registry : CollectorRegistry
        The metrics.
    problem : callable
        Returns why the operator is unhealthy, or None. /healthz reports it.
    waiting : callable
        Returns what the operator is waiting for before it is ready, or None. /readyz reports it.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        problem: Callable[[], str | None],
        waiting: Callable[[], str | None],
    ) -> None:
        self._registry = registry
        self._problem = problem
        self._waiting = waiting
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> int:
        """Listen on `host` (empty: all interfaces) and return the port; port 0 selects a free one."""
        await self._runner.setup()
        await web.SockSite(self._runner, _listening(host, port)).start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _healthz(self, _: web.Request) -> web.Response:
        return _answer(self._problem())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer(self._problem() or self._waiting())


def _listening(host: str, port: int) -> socket.socket:
    """Return a listening socket; a socket for all interfaces also accepts IPv6, if available."""
    if host:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _answer(problem: str | None) -> web.Response:
    return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)
