"""The read-only HTTP server of ``fleetjob ui``, which accepts requests only from its own user.

It listens on 127.0.0.1. Another user of the machine can connect there too, so every request needs the token
that the command prints. The Host header must be ours, so that a page of another site cannot send requests
under a host name that resolves to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web

from fleet_operator.api.rules import name_problem
from fleet_operator.cli.lines import now
from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fleet_operator.cli.ui.cluster import ClusterJobs
    from fleet_operator.cli.ui.machine import LocalRuns

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOST = "127.0.0.1"
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
PAGE = {
    "/": ("index.html", "text/html"),
    "/ui.css": ("ui.css", "text/css"),
    "/ui.js": ("ui.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class PortError(OperatorError):
    """The server cannot listen on the requested port."""


class UiServer:
    """Serves the web page of ``fleetjob ui``, and its data as JSON.

    Parameters
    ----------
    runs : LocalRuns
        The runs of this machine.
    cluster : ClusterJobs, optional
        The jobs of a cluster.
    token : str
        The secret that every request must have, in its query or in a cookie.
    """

    def __init__(self, runs: LocalRuns, cluster: ClusterJobs | None, *, token: str) -> None:
        self._runs = runs
        self._cluster = cluster
        self._token = token
        self._port = 0
        application = web.Application(middlewares=[self._guard])
        application.add_routes([web.get(path, self._file) for path in PAGE])
        application.add_routes(
            [
                web.get("/api/jobs", self._jobs),
                web.get("/api/job", self._job),
                web.get("/api/log", self._log),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, port: int) -> str:
        """Listen on a port (0 selects a free one); return the page's URL, including the token.

        Raises
        ------
        PortError
            The port is in use, or must not be used.
        """
        try:
            listening = socket.create_server((HOST, port))
        except OSError as error:
            raise PortError(
                f"port {port} of {HOST} cannot be used: {error.strerror}; choose another with --port, or "
                "--port 0 for any"
            ) from error
        self._port = listening.getsockname()[1]
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()
        return f"http://{HOST}:{self._port}/?token={self._token}"

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()
        if self._cluster is not None:
            await self._cluster.close()

    @property
    def _cookie(self) -> str:
        return f"fleetjob-{self._port}"  # cookies do not distinguish ports

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reject other users' requests, and add security headers to every response."""
        given = request.query.get("token") or request.cookies.get(self._cookie, "")
        answer: web.StreamResponse
        if request.host not in (f"{HOST}:{self._port}", f"localhost:{self._port}"):
            answer = web.Response(text=f"expected the host {HOST}:{self._port}\n", status=421)
        # aiohttp decodes bytes of a header that are not UTF-8 to surrogates, which UTF-8 cannot encode.
        elif not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
            answer = web.Response(
                text="open the address that `fleetjob ui` has printed; it has a token\n", status=403
            )
        else:
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = web.Response(text=f"{error.reason}\n", status=error.status)
            except OperatorError as error:
                answer = web.json_response({"error": str(error)}, status=502)
            if "token" in request.query:
                answer.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict")
        answer.headers.update(HEADERS)
        return answer

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = PAGE[request.path]
        text = files("fleet_operator.cli.ui").joinpath(name).read_text(encoding="utf-8")
        return web.Response(text=text, content_type=kind)

    async def _jobs(self, _: web.Request) -> web.Response:
        machine = asyncio.to_thread(self._runs.rows)
        cluster: dict[str, Any] | None = None
        rows: list[dict[str, Any]] = []
        if self._cluster is not None:
            try:
                name, rows = await self._cluster.rows()
                cluster = {"name": name, "error": None}
            except OperatorError as error:
                cluster = {"name": "", "error": str(error)}
        return web.json_response(
            {"now": now().isoformat(), "jobs": [*await machine, *rows], "cluster": cluster}
        )

    async def _job(self, request: web.Request) -> web.Response:
        job = request.query.get("id", "")
        namespace, slash, name = job.partition("/")
        if slash:
            cluster = self._of_cluster(namespace, name)
            return web.json_response(await cluster.detail(namespace, name))
        return _found(await asyncio.to_thread(self._runs.detail, job))

    async def _log(self, request: web.Request) -> web.Response:
        job = request.query.get("id", "")
        namespace, slash, name = job.partition("/")
        replica, cursor = request.query.get("replica", ""), request.query.get("cursor", "")
        if slash:
            cluster = self._of_cluster(namespace, name)
            return web.json_response(await cluster.log(namespace, name, replica, cursor))
        return _found(await asyncio.to_thread(self._runs.log, job, replica, cursor))

    def _of_cluster(self, namespace: str, name: str) -> ClusterJobs:
        if self._cluster is None or NAMESPACE.fullmatch(namespace) is None or name_problem(name):
            raise web.HTTPNotFound
        return self._cluster


def _found(document: dict[str, Any] | None) -> web.Response:
    if document is None:
        raise web.HTTPNotFound
    return web.json_response(document)


async def serve(server: UiServer, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until cancelled."""
    try:
        say(f"fleetjob ui: {await server.start(port)}  (Ctrl-C ends it)")
        await asyncio.Event().wait()
    finally:
        await server.close()
