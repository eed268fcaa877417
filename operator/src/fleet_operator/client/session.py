"""A user's session with an API server: requests about jobs, with errors that give advice."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fleet_operator.api.names import KIND, LABEL_JOB_NAME, PLURAL
from fleet_operator.api.rules import name_problem
from fleet_operator.client.summary import Summary
from fleet_operator.cluster import Key
from fleet_operator.errors import OperatorError
from fleet_operator.kubernetes.client import ApiClient, ApiError, collection
from fleet_operator.kubernetes.indexer import Cache, Entry, Store, key_of, version_of
from fleet_operator.kubernetes.login import connect_user
from fleet_operator.kubernetes.reflector import ExpiredError, ListWatch, list_pages

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
    from pathlib import Path

    from fleet_operator.kubernetes.login import Connection

T = TypeVar("T")
Manifest = dict[str, Any]

MANAGER = "fleetjob"
"""The field manager of this program."""

SHOWN_NAMES = 3
"""The maximum number of pod names in a message."""

SYNC_SECONDS = 60.0
"""How long the initial list of a watch may take."""


class ClusterRefusal(OperatorError):  # noqa: N818  the name describes the event, as the message does
    """The API server refused a request or did not respond; the message suggests what to do.

    Attributes
    ----------
    http_status : int, optional
        The HTTP status, such as 409 for a conflict; 0 if there was no response, None if nothing was refused
        by the API server itself.
    """

    def __init__(self, message: str, http_status: int | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status


class JobNotFoundError(ClusterRefusal):
    """The FleetJob does not exist or has been deleted."""


class NotInTimeError(OperatorError, TimeoutError):
    """A wait timed out; the awaited event may still happen."""

    exit_status = 124  # that of timeout(1)


@dataclass(frozen=True, slots=True)
class Where:
    """The cluster and namespace to use; None means the default in the kubeconfig."""

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
        """Return the path of a FleetJob or of its subresource; raise ValueError for an invalid name."""
        if name_problem(name) is not None:
            raise ValueError(f"{name!r} is not a valid name of a FleetJob")
        return "/".join(part for part in (collection(PLURAL, self.namespace), name, subresource) if part)

    async def job(self, name: str) -> Manifest:
        """Return the FleetJob with the given name."""
        with self.explained(name):
            return await self.client.get(self.path(name))

    async def jobs(self, *, everywhere: bool = False) -> list[Manifest]:
        """Return the FleetJobs in the namespace, or in all namespaces."""
        path = collection(PLURAL, None if everywhere else self.namespace)
        with self.explained():
            return [item async for page in list_pages(self.client, path) for item in page["items"]]

    async def pods(self, job: str) -> list[Manifest]:
        """Return the pods of a job, sorted by name."""
        selector = {"labelSelector": f"{LABEL_JOB_NAME}={job}"}
        with self.explained():
            pages = list_pages(self.client, collection("pods", self.namespace), selector)
            return [item async for page in pages for item in page["items"]]

    async def events(self, job: str) -> list[Manifest]:
        """Return the events of a job, oldest first; the API server keeps them for an hour."""
        selector = {"fieldSelector": f"involvedObject.kind={KIND},involvedObject.name={job}"}
        with self.explained():
            found = await self.client.get(collection("events", self.namespace), selector)
        return sorted(found["items"], key=lambda event: (last_time(event), _number_of_version(event)))

    async def submit(
        self, manifest: Mapping[str, Any], *, force: bool = False
    ) -> tuple[Manifest | None, Manifest]:
        """Create a job or apply its changed manifest; return the previous job, if any, and the new one.

        With `force`, fields that other field managers have set differently are taken over.
        """
        name = manifest["metadata"]["name"]
        own = manifest["metadata"].get("namespace") or self.namespace
        if own != self.namespace:
            raise ClusterRefusal(
                f"the manifest is for namespace {own}, but {self.namespace} was requested; "
                f"choose namespace {own} (-n {own}), or leave it out of the manifest"
            )
        before: Manifest | None = None
        try:
            before = await self.job(name)
        except ClusterRefusal as error:
            if error.http_status != 404:
                raise
        document = {**manifest, "metadata": {**manifest["metadata"], "namespace": self.namespace}}
        with self.explained():
            try:
                after = await self.client.apply(self.path(name), document, manager=MANAGER, force=force)
            except ApiError as error:
                if error.status != 409:
                    raise
                raise ClusterRefusal(
                    f"{' '.join(str(error).split())}; to take over fields that others have set, "
                    "use force (--force-conflicts)",
                    error.status,
                ) from error
        return before, after

    async def changes(self, name: str) -> AsyncGenerator[Manifest]:
        """Yield the job immediately and after each change, until it has finished.

        Raises
        ------
        JobNotFoundError
            There is no such job, or it was deleted before it had finished.
        """
        found = await self.job(name)  # an unknown name is a mistake, not a job to wait for
        uid = found["metadata"]["uid"]
        async with self.watching(PLURAL, job=name) as watched:
            # A job that was created again under this name is another one, whose end nobody has asked for.
            while jobs := [job for job in watched.all() if job["metadata"]["uid"] == uid]:
                yield jobs[0]
                if Summary.of(jobs[0]).status.finished:
                    return
                await watched.change()
        raise JobNotFoundError(f"FleetJob {name} was deleted before it had finished")

    async def wait(
        self,
        name: str,
        *,
        timeout_seconds: float | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Summary:
        """Wait until a job has finished, and return its summary; pass each new summary line to `say`.

        Raises
        ------
        NotInTimeError
            The job has not finished after `timeout_seconds`.
        JobNotFoundError
            There is no such job, or it was deleted before it had finished.
        """
        last = ""
        try:
            async with asyncio.timeout(timeout_seconds), contextlib.aclosing(self.changes(name)) as changes:
                async for manifest in changes:
                    job = Summary.of(manifest)
                    if (line := job.line()) != last:
                        last = line
                        if say is not None:
                            say(line)
        except TimeoutError:
            raise NotInTimeError(
                f"FleetJob {name} has not finished after {timeout_seconds:g} s and continues; "
                f"its last state: {last}"
            ) from None
        return job

    async def suspend(self, name: str, *, suspended: bool) -> tuple[Manifest, Manifest]:
        """Suspend or resume an unfinished job; return the job before and after the change."""
        before = await self.job(name)
        if bool((before.get("spec") or {}).get("suspend")) == suspended:
            return before, before
        if Summary.of(before).status.finished:
            verb = "suspend" if suspended else "resume"
            raise ClusterRefusal(f"FleetJob {name} has finished: there is nothing to {verb}")
        patch = {"spec": {"suspend": suspended}}
        with self.explained(name):
            return before, await self.client.merge_patch(self.path(name), patch, manager=MANAGER)

    async def scale(self, name: str, trainers: int) -> int:
        """Change the number of trainers, and return the previous number."""
        await self.job(name)
        path, patch = self.path(name, "scale"), {"spec": {"replicas": trainers}}
        with self.explained(name):
            before = await self.client.get(path)
            await self.client.merge_patch(path, patch, manager=MANAGER)
        return int(before["spec"].get("replicas", 0))

    async def delete(self, name: str, *, wait_seconds: float | None = None) -> None:
        """Delete a job; with `wait_seconds`, wait until its pods are gone, or raise NotInTimeError."""
        with self.explained(name):
            await self.client.delete(self.path(name), {"propagationPolicy": "Background"})
        if wait_seconds is None:
            return
        left: list[str] = []
        try:
            async with asyncio.timeout(wait_seconds), self.watching("pods", job=name) as watched:
                while left := [pod["metadata"]["name"] for pod in watched.all()]:
                    await watched.change()
        except TimeoutError:
            more = f" and {len(left) - SHOWN_NAMES} more" if len(left) > SHOWN_NAMES else ""
            exist = "still exists" if len(left) == 1 else "still exist"
            shown = ", ".join(left[:SHOWN_NAMES])
            raise NotInTimeError(
                f"FleetJob {name} is deleted, but {shown}{more} {exist} after {wait_seconds:g} s"
            ) from None

    @contextlib.contextmanager
    def explained(self, job: str | None = None) -> Iterator[None]:
        """Convert API errors from the ``with`` block to `ClusterRefusal` errors that give advice."""
        try:
            yield
        except ApiError as error:
            absent = error.status == 404 and job is not None and f'"{job}"' in str(error)
            kind = JobNotFoundError if absent else ClusterRefusal
            raise kind(self._sentence(error, job), error.status) from error
        except ExpiredError as error:
            raise ClusterRefusal(f"{self.server} took too long to list: {error}; try again") from error

    def _sentence(self, error: ApiError, job: str | None) -> str:
        said = str(error)
        match error.status:
            case 0 if error.reason == "NoToken":
                return said
            case 0:
                return f"{said}; is the cluster up, and is this the right context?"
            case 401:
                return f"{self.server} does not accept your credentials ({said}); sign in again"
            case 403 if error.reason == "Forbidden" and "exceeded quota" not in said:
                return f"you may not do this: {said}; ask an administrator of the cluster for the permission"
            case 404 if said.startswith("namespaces "):
                return f"{said}; create it, or choose another namespace"
            case 404 if job is not None and f'"{job}"' in said:
                return f"no FleetJob {job} in namespace {self.namespace}; `fleetjob status -A` lists all"
            case 404 if job is None or "could not find" in said:
                return (
                    f"{self.server} does not know FleetJobs ({said}); install the chart fleet-operator first"
                )
            case 409:
                return f"{said}; it was changed in the meantime: check it, and try again"
            case status if status >= 500 or status == 429:
                return f"{self.server} is unavailable or overloaded: {said}; try again later"
        return said

    @contextlib.asynccontextmanager
    async def watching(
        self, plural: str, *, job: str | None = None, everywhere: bool = False
    ) -> AsyncIterator[Watched]:
        """Watch the FleetJobs, or the pods of one job, within the ``with`` block.

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
    """The current state of watched objects, and an event that is set when an object changes."""

    def __init__(self) -> None:
        self.store: Store[Manifest] = Store()
        self.changed = asyncio.Event()

    def all(self) -> list[Manifest]:
        """Return the objects, sorted by namespace and name."""
        return [entry.value for entry in sorted(self.store, key=lambda entry: entry.key)]

    async def change(self, seconds: float | None = None) -> bool:
        """Wait for the next change; return False after a time-out."""
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.changed.clear()
        return True


def last_time(event: Mapping[str, Any]) -> str:
    """Return the time at which an event last occurred."""
    return str(event.get("lastTimestamp") or event["metadata"]["creationTimestamp"])


def _number_of_version(event: Mapping[str, Any]) -> int:
    return int(event["metadata"].get("resourceVersion") or 0)


def _whole(manifest: Mapping[str, Any]) -> Entry[Manifest]:
    key = key_of(manifest)
    return Entry(key, manifest["metadata"]["uid"], version_of(manifest), Key(*key), None, dict(manifest))


def connect(where: Where) -> Connection:
    """Log in and return the connection; a credential program may wait for the user to sign in."""
    return connect_user(os.environ, kubeconfig=where.kubeconfig, context=where.context)


@contextlib.asynccontextmanager
async def open_session(where: Where) -> AsyncIterator[Session]:
    """Connect to the cluster; the session ends with the ``with`` block.

    Raises
    ------
    ConnectionSettingsError
        There is no kubeconfig and no service account, or it is not usable.
    """
    # In a thread, because a credential program may wait for a person to sign in.
    connection = await asyncio.to_thread(connect, where)
    async with ApiClient(connection) as client:
        yield Session(client, connection.server, where.namespace or connection.namespace)


def in_session(where: Where, work: Callable[[Session], Awaitable[T]]) -> T:
    """Run `work` from synchronous code, in a new session and event loop."""

    async def run() -> T:
        async with open_session(where) as session:
            return await work(session)

    return asyncio.run(run())
