"""A typed API client on one shared aiohttp session, and the resources that it accesses.

Objects are plain mappings. A response other than a success raises an `ApiError` with the server's own
message. The client never retries: its callers know whether a retry makes sense. A token bucket limits the
rate of writes, so that a burst of jobs does not overload the API server.

Every job has pods and a Service. The operator may read and create the other kinds only if the chart grants it
the permission. `Settings.features` names the enabled kinds.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import aiohttp
import orjson
from yarl import URL

from fleet_operator.api.names import API_VERSION, PLURAL
from fleet_operator.cluster import ClusterError
from fleet_operator.kubernetes.login import ConnectionSettingsError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from types import SimpleNamespace

    from fleet_operator.kubernetes.login import Connection

    OnRequest = Callable[[str, str, int, float], None]

__all__ = ["FEATURES", "KINDS", "PODS", "RESOURCES", "SERVICES", "Resource", "collection"]

PODS, SERVICES = "pods", "services"


class Resource(NamedTuple):
    """A resource type of the API server."""

    api_version: str
    kind: str
    plural: str

    @property
    def key(self) -> str:
        """The unique name of the resource, in kubectl's notation."""
        group = self.api_version.rpartition("/")[0]
        return f"{self.plural}.{group}" if group else self.plural

    @property
    def base(self) -> str:
        """The path of the resource's API group."""
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"


FEATURES = {
    "checkpointClaims": Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    "networkPolicies": Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    "podDisruptionBudgets": Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    "volcano": Resource("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups"),
    "coscheduling": Resource("scheduling.x-k8s.io/v1alpha1", "PodGroup", "podgroups"),
}
"""The optional resources, by the chart value that enables each."""


RESOURCES = {each.key: each for each in FEATURES.values()}
KINDS = {PODS: "Pod", SERVICES: "Service"} | {key: each.kind for key, each in RESOURCES.items()}
"""Maps plural names, and the keys of optional resources, to kinds."""


def collection(resource: str, namespace: str | None) -> str:
    """Return the path of a collection in one namespace or in all namespaces.

    `resource` is ``fleetjobs`` or one of `KINDS`; every other plural belongs to the core API.
    """
    if (known := RESOURCES.get(resource)) is not None:
        base, plural = known.base, known.plural
    else:
        base, plural = f"/apis/{API_VERSION}" if resource == PLURAL else "/api/v1", resource
    return f"{base}/{plural}" if namespace is None else f"{base}/namespaces/{namespace}/{plural}"


REQUEST_SECONDS = 30.0
CONNECT_SECONDS = 5.0
# The kubelet renews a service account's token when a fifth of its lifetime is left, which is minutes.
TOKEN_SECONDS = 60.0
"""How long an Authorization header is reused before the `Connection` is asked for a new one."""

RETRY_AFTER_LIMIT_SECONDS = 60.0
"""The maximum Retry-After that is honoured."""

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class TokenBucket:
    """A rate limiter that admits an initial burst, then callers at a steady rate in FIFO order.

    Parameters
    ----------
    per_second : float
        The sustained rate.
    burst : int
        The size of a burst after an idle period.
    monotonic : callable
        Returns seconds of a monotonic clock.
    """

    def __init__(
        self, per_second: float, burst: int, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        if per_second <= 0 or burst < 1:
            raise ValueError(f"expected a positive rate and burst, found {per_second:g} and {burst}")
        self._per_second = per_second
        self._burst = burst
        self._monotonic = monotonic
        self._tokens = float(burst)  # negative while callers wait
        self._counted_at = monotonic()

    async def take(self) -> None:
        """Wait for a token; a cancelled caller loses its token."""
        if (wait := self.reserve()) > 0:
            await asyncio.sleep(wait)

    def reserve(self) -> float:
        """Reserve the next token; return the seconds until it is available."""
        now = self._monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._counted_at) * self._per_second)
        self._counted_at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_second)


class ApiError(ClusterError):
    """The API server returned an error, or did not respond (status 0).

    Attributes
    ----------
    status : int
        The HTTP status.
    reason : str
        The API server's reason, such as ``Invalid``.
    details : mapping, optional
        The details of the response's ``metav1.Status``, possibly empty. None if the response is not a
        ``Status``: it may then come from a proxy, and not from the API server.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after_seconds: float = 0.0,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message or reason or f"HTTP status {status}")
        self.status = status
        self.reason = reason
        self.details = details
        self.retry_after_seconds = retry_after_seconds
        # A creation may get 409, too: a quota that two creations update at the same time is a conflict.
        self.transient = status in (0, 409, 429) or status >= 500


class ApiClient:
    """A client for one API server.

    Parameters
    ----------
    connection : Connection
        The API server's address, and our credentials.
    on_request : callable, optional
        Called after each request with its verb, its resource, the HTTP status (0 without a response), and the
        seconds it took. A watch has the verb WATCH; an endless request counts as ended with its headers.
    before_write : callable, optional
        Awaited before each write. It may wait, or raise a ClusterError to refuse the write.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        on_request: OnRequest | None = None,
        before_write: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._connection = connection
        self._on_request = on_request
        self._before_write = before_write
        self._session: aiohttp.ClientSession | None = None
        self._server_name: str | None = None
        self._token = _Token(connection)
        through = URL(connection.proxy) if connection.proxy else None
        self._shown = connection.server + (
            f" through the proxy {through.host}:{through.port}" if through else ""
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Open the session; connections are made on demand."""
        https = self._connection.server.startswith("https:")
        self._server_name = self._connection.tls_server_name if https else None
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS)
        self._session = _session(self._connection, {"Accept": "application/json"}, timeout=timeout)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the object or list at `path`."""
        return await self._request("GET", path, params=params)

    async def create(
        self,
        path: str,
        manifest: Mapping[str, Any],
        *,
        field_validation: str | None = None,
    ) -> dict[str, Any]:
        """Create an object in the collection at `path`; return the stored object.

        `field_validation` is the treatment of unknown fields: Strict, Warn or Ignore.
        """
        params = {"fieldValidation": field_validation} if field_validation is not None else None
        return await self._request("POST", path, params=params, body=manifest)

    async def replace(self, path: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the object at `path`; a resourceVersion in the manifest must be the current one."""
        return await self._request("PUT", path, body=manifest)

    async def merge_patch(
        self, path: str, patch: Mapping[str, Any], *, manager: str | None = None
    ) -> dict[str, Any]:
        """Apply a merge patch to the object at `path`, with `manager` as the field manager."""
        params = {"fieldManager": manager} if manager is not None else None
        return await self._request("PATCH", path, params=params, body=patch, content_type=MERGE_PATCH)

    async def apply(
        self, path: str, manifest: Mapping[str, Any], *, manager: str, force: bool = False
    ) -> dict[str, Any]:
        """Create or change the object at `path` by a server-side apply of the manifest.

        Fields that `manager` applied before and that the manifest lacks are removed; those of other managers
        are kept. A field that another manager has set differently is a conflict (409); with `force`, it is
        overwritten.
        """
        params = {"fieldManager": manager, "fieldValidation": "Strict", "force": str(force).lower()}
        return await self._request("PATCH", path, params=params, body=manifest, content_type=APPLY_PATCH)

    async def delete(self, path: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Delete the object at `path` with the given DeleteOptions; return the response."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        return await self._request("DELETE", path, body=body)

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, silence_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch; the context manager yields the lines of its response.

        Raises
        ------
        ApiError
            The server refused the watch.
        aiohttp.ClientError, TimeoutError
            The connection was lost, or no byte arrived for `silence_seconds`.
        """
        async with self.chunks(path, {**params, "watch": "true"}, silence_seconds=silence_seconds) as chunks:
            yield _lines(chunks)

    @asynccontextmanager
    async def chunks(
        self, path: str, params: Mapping[str, str], *, silence_seconds: float | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a response of any length, such as a log; the context manager yields its bytes as they arrive.

        Raises
        ------
        ApiError
            The server refused the request.
        aiohttp.ClientError, TimeoutError
            The connection was lost, or no byte arrived for `silence_seconds`, if given.
        """
        is_watch = "watch" in params
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        headers = {**self._token.headers(), "Accept": "application/json" if is_watch else "*/*"}
        started, status = time.monotonic(), 0
        try:
            response = await self._open.get(
                self._connection.server + path,
                params=params,
                headers=headers,
                timeout=timeout,
                server_hostname=self._server_name,
            )
            status = response.status
        finally:
            if self._on_request is not None:
                verb = "WATCH" if is_watch else "GET"
                self._on_request(verb, _resource(path), status, time.monotonic() - started)
        async with response:
            if response.status != 200:
                retry_after = response.headers.get("Retry-After", "")
                raise _error(response.status, await response.read(), retry_after)
            yield response.content.iter_any()

    async def _request(
        self,
        verb: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        data = None if body is None else _encode(body, content_type)
        if verb != "GET" and self._before_write is not None:
            await self._before_write()
        started, status, retry_after = time.monotonic(), 0, ""
        headers = self._token.headers()
        if data is not None:
            headers["Content-Type"] = content_type
        try:
            async with self._open.request(
                verb,
                self._connection.server + path,
                params=params,
                data=data,
                headers=headers,
                server_hostname=self._server_name,
            ) as response:
                status, retry_after = response.status, response.headers.get("Retry-After", "")
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise ApiError(0, "NoAnswer", f"no answer from {self._shown}: {why}") from error
        finally:
            if self._on_request is not None:
                self._on_request(verb, _resource(path), status, time.monotonic() - started)
        if status >= 300:
            raise _error(status, answer, retry_after)
        try:
            parsed: dict[str, Any] = orjson.loads(answer)
        except ValueError as error:  # a proxy responded, or the response was truncated
            raise ApiError(0, "NoAnswer", f"{self._connection.server} sent invalid JSON: {error}") from error
        return parsed

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the API client is not started; call start() first")
        return self._session


class _Token:
    """The Authorization header, which is reloaded periodically because the token file may change."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._header: str | None = None
        self._read_at = -TOKEN_SECONDS

    def headers(self) -> dict[str, str]:
        """Return the header, if any; raise ApiError if no credentials are available now."""
        now = time.monotonic()
        if now - self._read_at >= TOKEN_SECONDS:
            try:
                self._header, self._read_at = self._connection.authorization(), now
            except ConnectionSettingsError as error:
                raise ApiError(0, "NoToken", str(error)) from error
            except OSError as error:
                raise ApiError(
                    0, "NoToken", f"the token of the API server cannot be read: {error}"
                ) from error
        return {"Authorization": self._header} if self._header else {}


def open_session(
    connection: Connection,
    *,
    on_answer: Callable[[str, Mapping[str, str], int], None],
    on_request: OnRequest | None = None,
) -> aiohttp.ClientSession:
    """Open a session with the current token, for code that uses the API server directly.

    Parameters
    ----------
    connection : Connection
        The API server's address, and our credentials.
    on_answer : callable
        Called at the start of each response with the path and parameters of the request, and the status.
    on_request : callable, optional
        Called after each request, as `ApiClient` does.
    """

    def count(
        request: aiohttp.TraceRequestEndParams | aiohttp.TraceRequestExceptionParams, took: float, status: int
    ) -> None:
        if on_request is not None:
            verb = "WATCH" if "watch" in request.url.query else request.method
            on_request(verb, _resource(request.url.path), status, took)

    async def begin(_: object, context: SimpleNamespace, __: object) -> None:
        context.started = time.monotonic()

    async def tell(_: object, context: SimpleNamespace, answered: aiohttp.TraceRequestEndParams) -> None:
        status = answered.response.status
        count(answered, time.monotonic() - context.started, status)
        on_answer(answered.url.path, answered.url.query, status)

    async def tell_none(
        _: object, context: SimpleNamespace, failed: aiohttp.TraceRequestExceptionParams
    ) -> None:
        count(failed, time.monotonic() - context.started, 0)

    traces = aiohttp.TraceConfig()
    traces.on_request_start.append(begin)
    traces.on_request_end.append(tell)
    traces.on_request_exception.append(tell_none)
    header = connection.authorization()
    return _session(connection, {"Authorization": header} if header else {}, trace_configs=[traces])


def _session(connection: Connection, headers: Mapping[str, str], **options: Any) -> aiohttp.ClientSession:
    tls: ssl.SSLContext | bool = True if connection.tls is None else connection.tls
    if (proxy := connection.proxy) is not None and proxy.startswith("socks"):
        connector = _through_socks(proxy, tls)
    else:
        # aiohttp's default of 100 connections would make writes wait for watches, of which each namespace
        # has several. The number of workers limits the other requests.
        connector = aiohttp.TCPConnector(ssl=tls, limit=0)
        options["proxy"] = proxy
    return aiohttp.ClientSession(
        connector=connector, headers={**headers, "User-Agent": "fleet-operator"}, **options
    )


def _through_socks(proxy: str, tls: ssl.SSLContext | bool) -> aiohttp.TCPConnector:
    """Return a connector for a SOCKS proxy that converts the proxy's errors to aiohttp errors."""
    from aiohttp_socks import ProxyConnectionError, ProxyConnector, ProxyError, ProxyTimeoutError

    class Connector(ProxyConnector):
        async def connect(self, *arguments: Any, **options: Any) -> Any:
            try:
                return await super().connect(*arguments, **options)
            except aiohttp.ClientError:
                raise
            except (ProxyConnectionError, ProxyError, ProxyTimeoutError, OSError) as error:
                raise aiohttp.ClientConnectionError(str(error)) from error

    return Connector.from_url(proxy, ssl=tls, limit=0, rdns=True)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a response into lines of any length; aiohttp's own reader refuses long lines."""
    parts: list[bytes] = []
    async for chunk in chunks:
        head, *rest = chunk.split(b"\n")
        parts.append(head)
        for piece in rest:
            if line := b"".join(parts):
                yield line
            parts = [piece]


def _error(status: int, answer: bytes, retry_after: str = "") -> ApiError:
    # A date instead of seconds comes from a proxy; our own back-off applies then.
    wait = min(float(retry_after), RETRY_AFTER_LIMIT_SECONDS) if retry_after.isdecimal() else 0.0
    details: Mapping[str, Any] | None = None
    try:
        told = orjson.loads(answer)
        reason, message = told.get("reason") or "", told.get("message") or ""
        if told.get("kind") == "Status":
            details = told.get("details") or {}
    except (ValueError, AttributeError):  # a proxy responded, not the API server
        reason, message = "", answer[:300].decode(errors="replace")
    return ApiError(status, reason, message, retry_after_seconds=wait, details=details)


def _encode(body: Mapping[str, Any], content_type: str) -> bytes:
    if content_type == APPLY_PATCH:
        # The API server parses this body as YAML, which requires some escapes and has no surrogate pairs.
        text = json.dumps(body, ensure_ascii=False)
        return re.sub("[\x7f-\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text).encode()
    try:
        return orjson.dumps(body)
    except TypeError:  # an integer of more than 64 bits: the API server refuses it with its own message
        return json.dumps(body).encode()


def _resource(path: str) -> str:
    """Return the resource that a path refers to, such as ``pods`` or ``fleetjobs/status``."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]  # /api/v1/… or /apis/GROUP/VERSION/…
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return "/".join(parts[:1] + parts[2:]) or "other"
