"""A proxy in front of the API server that can answer, delay, cut and lose requests.

The proxy speaks plain HTTP to its clients and forwards their tokens, so clients keep their permissions. A
fault is selected by a verb and a resource such as ``pods`` or ``fleetjobs/status``; the verb of a watch is
``WATCH``. `calls` contains all received requests, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from kubernetes import config
from kubernetes.client import Configuration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

DROPPED = frozenset({"host", "content-length", "transfer-encoding", "content-encoding", "connection"})


@dataclass
class Call:
    """A request that has reached the proxy."""

    verb: str
    resource: str
    path: str
    at: float  # time.monotonic()
    status: int = 0  # of the API server's response, even if the client never received it
    answer: bytes = b""

    @property
    def writes(self) -> bool:
        """True if the request may change an object."""
        return self.verb not in ("GET", "WATCH")


@dataclass(frozen=True)
class Answer:
    """A fault: the proxy sends this response itself, and the request does not reach the API server."""

    status: int
    reason: str = "InternalError"
    retry_after: int | None = None
    message: str = "a fault of the test"


@dataclass(frozen=True)
class Page:
    """A fault: the proxy responds with an HTML page, and the request does not reach the API server."""

    status: int
    text: str = "<html><body><h1>Bad request</h1></body></html>"


@dataclass(frozen=True)
class Reset:
    """A fault: the connection is reset before the request reaches the API server."""


@dataclass(frozen=True)
class Lost:
    """A fault: the API server handles the request, but the connection is reset before the response."""


@dataclass(frozen=True)
class Held:
    """A fault: the API server handles the request, but its response waits until the test releases it."""

    until: asyncio.Event


@dataclass(frozen=True)
class Slow:
    """A fault: the request reaches the API server late."""

    seconds: float


@dataclass(frozen=True)
class ErrorEvent:
    """A fault: a watch receives an error event; status 410 means that its version has expired."""

    code: int


Fault = Answer | Page | Reset | Lost | Held | Slow | ErrorEvent


@dataclass
class _Rule:
    fault: Fault
    verb: str
    resource: str
    times: int
    done: asyncio.Event = field(default_factory=asyncio.Event)


class FaultProxy:
    """A fault-injecting proxy in front of an API server; `server` is its address once it has started."""

    def __init__(self, upstream: Configuration) -> None:
        self.server = ""
        self.calls: list[Call] = []
        self.on_call: Callable[[Call], Fault | None] = lambda _: None
        self.on_answer: Callable[[Call], None] = lambda _: None
        """Called when the API server has responded or has begun a watch, before the client is notified."""
        self.dead = False
        """While this is set, every connection is reset, as if the server were down."""
        self._upstream = upstream
        self._rules: list[_Rule] = []
        self._watching: list[tuple[web.BaseRequest, str]] = []
        self._held: set[str] = set()

    def kubeconfig(self, path: Path, *, like: Path) -> Path:
        """Write a copy of a kubeconfig in which this proxy is the API server; return its path."""
        path.write_text(like.read_text().replace(self._upstream.host, self.server))
        return path

    def fail(self, fault: Fault, verb: str, resource: str, *, times: int = 1) -> asyncio.Event:
        """Apply a fault to the next matching requests; return an event that is set once all have arrived."""
        rule = _Rule(fault, verb, resource, times)
        self._rules.append(rule)
        return rule.done

    def hold(self, resource: str) -> None:
        """Silence all watches of a resource; the watches stay open but receive no further changes."""
        self._held.add(resource)

    def hold_no_more(self) -> None:
        """Deliver changes to new watches; silenced watches stay silent, like dead connections."""
        self._held.clear()

    def cut(self) -> int:
        """Reset all watches and return their number; later watches work normally."""
        watching = list(self._watching)
        self._held.clear()
        for request, _ in watching:
            _reset(request)
        return len(watching)

    def writes(self) -> list[Call]:
        """Return the requests that may have changed objects other than Leases and Events."""
        return [call for call in self.calls if call.writes and call.resource not in ("leases", "events")]

    def answered(self, verb: str, resource: str) -> int:
        """Return how many matching requests the API server has answered, even if the response was lost."""
        return sum(call.status > 0 for call in self.calls if (call.verb, call.resource) == (verb, resource))

    def created(self, resource: str) -> list[str]:
        """Return the names of created objects, in order of creation."""
        made = [
            call for call in self.calls if (call.verb, call.resource, call.status) == ("POST", resource, 201)
        ]
        return [json.loads(call.answer)["metadata"]["name"] for call in made]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FaultProxy]:
        """Run the proxy on a free loopback port within the block."""
        tls = ssl.create_default_context(cafile=self._upstream.ssl_ca_cert)
        connector = aiohttp.TCPConnector(ssl=tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            runner = web.ServerRunner(web.Server(self._serve), shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.server = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                self.dead = True
                self.cut()
                await runner.cleanup()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        verb = "WATCH" if "watch" in request.query else request.method
        call = Call(verb, _resource(request.path), request.path, time.monotonic())
        self.calls.append(call)
        fault = self.on_call(call) or self._fault_for(call)
        if self.dead or isinstance(fault, Reset):
            return _reset(request)
        match fault:
            case Answer():
                return _status(fault)
            case Page(status, text):
                return web.Response(status=status, text=text, content_type="text/html")
            case ErrorEvent(code):
                told = {"kind": "Status", "code": code, "message": "an error event of the test"}
                return web.json_response({"type": "ERROR", "object": told})
            case Slow(seconds):
                await asyncio.sleep(seconds)
        try:
            return await self._forward(request, call, fault)
        except (aiohttp.ClientError, ConnectionError):
            return _reset(request)

    def _fault_for(self, call: Call) -> Fault | None:
        for rule in self._rules:
            if (rule.verb, rule.resource) == (call.verb, call.resource):
                rule.times -= 1
                if rule.times == 0:
                    self._rules.remove(rule)
                    rule.done.set()
                return rule.fault
        return None

    async def _forward(self, request: web.BaseRequest, call: Call, fault: Fault | None) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED}
        async with self._session.request(
            request.method,
            self._upstream.host + str(request.rel_url),
            headers=headers,
            data=await request.read() or None,  # an empty body would get its own content type
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in DROPPED}
            call.status = answer.status
            if call.verb != "WATCH":
                call.answer = await answer.read()
            self.on_answer(call)
            if isinstance(fault, Held):
                await fault.until.wait()
            if isinstance(fault, Lost) or self.dead:
                return _reset(request)
            if call.verb != "WATCH":
                return web.Response(status=answer.status, headers=kept, body=call.answer)
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            watching = (request, call.resource)
            self._watching.append(watching)
            try:
                silenced = False
                async for chunk in answer.content.iter_any():
                    silenced = silenced or call.resource in self._held
                    if not silenced:
                        await response.write(chunk)
            finally:
                self._watching.remove(watching)
            return response


def proxy_for(kubeconfig: Path) -> FaultProxy:
    """Return a proxy in front of the API server of a kubeconfig."""
    upstream = Configuration()
    config.load_kube_config(str(kubeconfig), client_configuration=upstream)
    return FaultProxy(upstream)


def _resource(path: str) -> str:
    """Return the resource of a request path, such as ``pods`` or ``fleetjobs/status``."""
    root, *parts = path.strip("/").split("/")
    parts = parts[1:] if root == "api" else parts[2:]  # the rest of the path after the API version
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    kind, _, *subresource = [*parts, "", ""][: max(2, len(parts))]
    return "/".join([kind, *subresource]) or "other"


def _status(fault: Answer) -> web.Response:
    headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    body = {"kind": "Status", "code": fault.status, "reason": fault.reason, "message": fault.message}
    return web.Response(
        status=fault.status, headers=headers, text=json.dumps(body), content_type="application/json"
    )


def _reset(request: web.BaseRequest) -> web.StreamResponse:
    """Reset the connection of a request, as if its peer had died."""
    if (transport := request.transport) is not None:
        with contextlib.suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()
    return web.Response()
