"""An HTTP server that stands in for an API server with one job, its pods and their logs."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from fleet_operator.cli.logs import print_logs, print_with
from fleet_operator.client.logs import Logs, Wanted
from fleet_operator.client.session import Session
from fleet_operator.kubernetes.client import ApiClient
from fleet_operator.kubernetes.login import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from fleet_operator.client.logs import LogLine

BASE = "/api/v1/namespaces/default/pods"
JOBS = "/apis/fleetjob.dev/v1alpha1/namespaces/default/fleetjobs"


@dataclass
class Reading:
    """Collects the lines that ``fleetjob logs`` prints."""

    logs: Logs
    show: Callable[[LogLine], None]

    async def print_once(self) -> int:
        return await print_logs(self.logs, follow=False, show=self.show)

    async def follow(self) -> int:
        return await print_logs(self.logs, follow=True, show=self.show)


class LogServer:
    """A fake API server; each request for a pod's log gets the next prepared answer."""

    def __init__(self) -> None:
        self.version = 1
        self.job: dict[str, Any] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, list[Any]] = {}
        self.latest = b""
        self.asked: list[dict[str, str]] = []
        self.watchers: dict[str, list[asyncio.Queue[dict[str, Any]]]] = {"pods": [], "fleetjobs": []}
        self.shown: list[str] = []
        self.notes: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.is_down = False
        self.heard = asyncio.Event()
        self.set_job("Running")

    def set_job(self, state: str) -> None:
        self.version += 1
        self.job = {
            "metadata": {
                "name": "digits",
                "namespace": "default",
                "uid": "j",
                "resourceVersion": f"{self.version}",
            },
            "spec": {"mode": "Collective"},
            "status": {"state": state},
        }
        self._tell("fleetjobs", "MODIFIED", self.job)

    def put(
        self,
        index: int,
        *logs: Any,
        life: int = 0,
        phase: str = "Running",
        role: str = "trainer",
        waiting: tuple[str, ...] = (),
    ) -> None:
        """Add a pod and the answers to requests for its log."""
        name = f"digits-{role}-{index}"
        self.version += 1
        labels = {
            "fleetjob.dev/job-name": "digits",
            "fleetjob.dev/role": role,
            "fleetjob.dev/index": str(index),
            "fleetjob.dev/attempt": f"0.{life}",
        }
        metadata = {
            "name": name,
            "namespace": "default",
            "uid": f"{name}@{life}",
            "labels": labels,
            "resourceVersion": str(self.version),
        }
        containers = [{"name": "sidecar"}, {"name": "fleet"}]
        status: dict[str, Any] = {"phase": phase}
        if phase != "Pending":
            status["containerStatuses"] = [
                {**each, "state": {"waiting" if each["name"] in waiting else "running": {}}}
                for each in containers
            ]
        self.pods[name] = {"metadata": metadata, "spec": {"containers": containers}, "status": status}
        if logs:
            self.logs[name] = list(logs)
        self._tell("pods", "MODIFIED", self.pods[name])

    def _tell(self, plural: str, kind: str, item: dict[str, Any]) -> None:
        for queue in self.watchers[plural]:
            queue.put_nowait({"type": kind, "object": item})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if self.is_down:
            return web.json_response({"message": "the server is down"}, status=503)
        if path == "/api/v1/namespaces/default/events":
            assert request.query["fieldSelector"] == "involvedObject.kind=FleetJob,involvedObject.name=digits"
            return web.json_response({"items": self.events})
        if path.endswith("/log"):
            return await self._log(request)
        if path == f"{JOBS}/digits":
            return web.json_response(self.job)
        if path.startswith(f"{BASE}/"):
            pod = self.pods.get(path.rpartition("/")[2])
            return web.json_response(
                pod or {"reason": "NotFound", "message": "gone"}, status=200 if pod else 404
            )
        if path not in (BASE, JOBS):
            name = path.rpartition("/")[2]
            return web.json_response({"message": f'fleetjobs "{name}" not found'}, status=404)
        plural = path.rpartition("/")[2]
        if "watch" in request.query:
            return await self._watch(request, plural)
        items = [self.job] if plural == "fleetjobs" else list(self.pods.values())
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.watchers[plural].append(queue)
        self.heard.set()
        with suppress(ConnectionError):
            while True:
                await response.write(json.dumps(await queue.get()).encode() + b"\n")
        return response

    async def _log(self, request: web.Request) -> web.StreamResponse:
        name, container = request.path.split("/")[-2], request.query["container"]
        if "limitBytes" in request.query:  # the beginning of the last line
            return web.Response(body=self.latest)
        self.asked.append({"pod": name, **request.query})
        statuses = self.pods[name]["status"].get("containerStatuses", ())
        if not any(each["name"] == container and "waiting" not in each["state"] for each in statuses):
            return web.json_response(
                {"message": f'container "{container}" in pod "{name}" is waiting to start'}, status=400
            )
        answers = self.logs.get(name) or [b""]
        given = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(given, tuple):
            return web.json_response({"message": given[1]}, status=given[0])
        response = web.StreamResponse()
        await response.prepare(request)
        if isinstance(given, bytes):
            await response.write(given)
        else:
            await given(response)
        return response

    @asynccontextmanager
    async def address(self) -> AsyncIterator[str]:
        """Run the server within the block, and yield its address."""
        application = web.Application()
        application.router.add_get("/{path:.*}", self.answer)
        server = TestServer(application, host="127.0.0.1")
        await server.start_server(shutdown_timeout=0.1)
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            await server.close()

    @asynccontextmanager
    async def kubeconfig(self, folder: Path) -> AsyncIterator[Path]:
        """Run the server within the block, and yield a kubeconfig with its address."""
        async with self.address() as address:
            document: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", "current-context": "here"}
            document["clusters"] = [{"name": "here", "cluster": {"server": address}}]
            document["users"] = [{"name": "me", "user": {}}]
            document["contexts"] = [{"name": "here", "context": {"cluster": "here", "user": "me"}}]
            kubeconfig = folder / "kubeconfig"
            kubeconfig.write_text(yaml.safe_dump(document))
            yield kubeconfig

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Run the server within the block, and yield a client session with it."""
        async with self.address() as address, ApiClient(Connection(address)) as client:
            yield Session(client, address, "default")

    def reading(self, session: Session, *, timestamps: bool = False, **wanted: Any) -> Reading:
        show = print_with(prefixes=True, colour=False, write=self._show, timestamps=timestamps)
        return Reading(Logs(session, "digits", Wanted(**wanted), note=self._note), show)

    async def until_shown(self, count: int) -> None:
        await self.until(lambda: len(self.shown) >= count)

    async def until_noted(self) -> None:
        await self.until(lambda: bool(self.notes))

    async def until(self, probe: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not (all(self.watchers.values()) and probe()):
                self.heard.clear()
                await self.heard.wait()

    def _show(self, line: str) -> None:
        self.shown.append(line)
        self.heard.set()

    def _note(self, line: str) -> None:
        self.notes.append(line)
        self.heard.set()


def at(second: int, *lines: str) -> bytes:
    stamped = (f"2026-01-01T00:00:{second:02}.{n:09}Z {line}\n" for n, line in enumerate(lines))
    return "".join(stamped).encode()
