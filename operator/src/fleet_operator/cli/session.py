"""A user's session with an API server: its address, the namespace, and refusals as sentences."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fleet_operator.api.names import LABEL_JOB_NAME, PLURAL
from fleet_operator.api.rules import name_problem
from fleet_operator.cluster import Key
from fleet_operator.errors import OperatorError
from fleet_operator.kubernetes.client import ApiClient, ApiError, collection
from fleet_operator.kubernetes.indexer import Cache, Entry, Store, key_of, version_of
from fleet_operator.kubernetes.login import connect_user
from fleet_operator.kubernetes.reflector import ExpiredError, ListWatch, list_pages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
    from pathlib import Path

T = TypeVar("T")
Manifest = dict[str, Any]

MANAGER = "fleetjob"
"""The field manager of this program."""

SYNC_SECONDS = 60.0
"""How long the initial list of a watch may take."""


class ClusterRefusal(OperatorError):  # noqa: N818  the name describes the event, as the message does
    """The API server refused a request, or did not respond; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Where:
    """The cluster and the namespace to use; None means the kubeconfig's."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


class Session:
    """A user's session with an API server.

    Parameters
    ----------
    client : ApiClient
        The API server.
    server : str
        Its address, for messages.
    namespace : str
        The namespace of the session's requests.
    """

    def __init__(self, client: ApiClient, server: str, namespace: str) -> None:
        self.client = client
        self.server = server
        self.namespace = namespace

    def path(self, name: str, subresource: str = "") -> str:
        """Return the path of a FleetJob or its subresource; never the collection, which could be deleted."""
        if name_problem(name) is not None:
            raise ValueError(f"{name!r} is no name of a FleetJob")
        return "/".join(part for part in (collection(PLURAL, self.namespace), name, subresource) if part)

    async def job(self, name: str) -> Manifest:
        """Return the FleetJob of this name."""
        with self.explained(name):
            return await self.client.get(self.path(name))

    async def jobs(self, *, everywhere: bool = False) -> list[Manifest]:
        """Return the FleetJobs in the namespace, or in all namespaces."""
        path = collection(PLURAL, None if everywhere else self.namespace)
        with self.explained():
            return [item async for page in list_pages(self.client, path) for item in page["items"]]

    async def pods(self, job: str) -> list[Manifest]:
        """Return the pods of a job, by name."""
        selector = {"labelSelector": f"{LABEL_JOB_NAME}={job}"}
        with self.explained():
            pages = list_pages(self.client, collection("pods", self.namespace), selector)
            return [item async for page in pages for item in page["items"]]

    @contextlib.contextmanager
    def explained(self, job: str | None = None) -> Iterator[None]:
        """Return a context that converts API errors into a `ClusterRefusal` with advice in its message."""
        try:
            yield
        except ApiError as error:
            raise ClusterRefusal(self._sentence(error, job)) from error
        except ExpiredError as error:
            raise ClusterRefusal(f"{self.server} took too long to list: {error}; try again") from error

    def _sentence(self, error: ApiError, job: str | None) -> str:
        said = str(error)
        match error.status:
            case 0 if error.reason == "NoToken":
                return said
            case 0:
                return f"{said}; is the cluster up, and is this the right --context?"
            case 401:
                return f"{self.server} does not know who you are ({said}); sign in again"
            case 403 if error.reason == "Forbidden" and "exceeded quota" not in said:
                return f"you may not do this: {said}; ask whoever administers the cluster for the right"
            case 404 if said.startswith("namespaces "):
                return f"{said}; create it, or name another by -n"
            case 404 if job is not None and f'"{job}"' in said:
                return f"no FleetJob {job} in namespace {self.namespace}; `fleetjob status -A` lists all"
            case 404 if job is None or "could not find" in said:
                return (
                    f"{self.server} does not know FleetJobs ({said}); install the chart fleet-operator first"
                )
            case 409:
                return f"{said}; somebody else has changed it: look, and try again"
            case status if status >= 500 or status == 429:
                return f"{self.server} is in trouble: {said}; try again later"
        return said

    @contextlib.asynccontextmanager
    async def watching(
        self, plural: str, *, job: str | None = None, everywhere: bool = False
    ) -> AsyncIterator[Watched]:
        """Return a context in which the FleetJobs, or one job's pods, are kept in sync with the API server.

        Raises
        ------
        ClusterRefusal
            The initial list was refused, or did not arrive in time. Later failures are retried indefinitely.
        """
        path = collection(plural, None if everywhere else self.namespace)
        field = f"metadata.name={job}" if job is not None and plural == PLURAL else None
        label = f"{LABEL_JOB_NAME}={job}" if job is not None and plural != PLURAL else None
        with self.explained():
            await self.client.get(path, {"limit": "1"})
        watched = Watched()
        watch = ListWatch(
            self.client,
            path,
            Cache(watched.store, _whole, lambda _: watched.changed.set()),
            selector=label,
            field_selector=field,
        )
        running = asyncio.create_task(watch.run(), name=f"watch {path}")
        try:
            try:
                async with asyncio.timeout(SYNC_SECONDS):
                    await watch.synced.wait()
            except TimeoutError:
                raise ClusterRefusal(
                    f"{self.server} has not listed {path} within {SYNC_SECONDS:g} s; try again later"
                ) from None
            yield watched
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class Watched:
    """The current objects of a watch, and an event that changes set."""

    def __init__(self) -> None:
        self.store: Store[Manifest] = Store()
        self.changed = asyncio.Event()

    def all(self) -> list[Manifest]:
        """Return the objects, ordered by namespace and name."""
        return [entry.value for entry in sorted(self.store, key=lambda entry: entry.key)]

    async def change(self, seconds: float | None = None) -> bool:
        """Wait for the next change; return False on a time-out."""
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.changed.clear()
        return True


def _whole(manifest: Mapping[str, Any]) -> Entry[Manifest]:
    key = key_of(manifest)
    return Entry(key, manifest["metadata"]["uid"], version_of(manifest), Key(*key), None, dict(manifest))


@contextlib.asynccontextmanager
async def open_session(where: Where) -> AsyncIterator[Session]:
    """Return a context with a session: find the cluster, and connect to it."""
    connection = connect_user(os.environ, kubeconfig=where.kubeconfig, context=where.context)
    async with ApiClient(connection) as client:
        yield Session(client, connection.server, where.namespace or connection.namespace)


def in_session(where: Where, work: Callable[[Session], Awaitable[T]]) -> T:
    """Run `work` from synchronous code, in its own session and event loop."""

    async def run() -> T:
        async with open_session(where) as session:
            return await work(session)

    return asyncio.run(run())
