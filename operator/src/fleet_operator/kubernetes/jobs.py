"""The cache of FleetJobs, filled from the events that kopf delivers and from periodic lists.

kopf watches FleetJobs and passes its events on (`take`). Because kopf does not report deletions that happened
while it was not watching, they are listed again whenever kopf or a watch had to list again (`list_again`),
and periodically. Responses to our own writes are stored too, so that the next pass over a job sees them
before the watch reports them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fleet_operator.api import FleetJob, newer_state, read_job
from fleet_operator.api.names import PLURAL
from fleet_operator.cluster import Key
from fleet_operator.errors import InvalidJob
from fleet_operator.kubernetes.client import ApiError, collection
from fleet_operator.kubernetes.events import Subject
from fleet_operator.kubernetes.indexer import Entry, Store, key_of, owner_of, version_of
from fleet_operator.kubernetes.reflector import ExpiredError, list_pages
from fleet_operator.plan.model import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from fleet_operator.kubernetes.client import ApiClient
    from fleet_operator.kubernetes.events import EventRecorder
    from fleet_operator.kubernetes.reflector import Scope

logger = logging.getLogger(__name__)

RELIST_SECONDS = 600.0
"""How often FleetJobs are listed again even without events."""

AGAIN_SECONDS = 30.0
"""The maximum delay before a failed list is retried, unless the API server asks for a longer delay."""


class FleetJobs:
    """A cache of FleetJobs that reports changed and deleted jobs to callbacks.

    Parameters
    ----------
    client : ApiClient
        The API server.
    events : EventRecorder
        Records events about FleetJobs that cannot be parsed.
    on_change : callable
        Called with each changed FleetJob.
    on_deleted : callable
        Called with each deleted FleetJob.
    """

    def __init__(
        self,
        client: ApiClient,
        events: EventRecorder,
        *,
        on_change: Callable[[Key], None],
        on_deleted: Callable[[Key], None],
    ) -> None:
        self._client = client
        self._events = events
        self._on_change = on_change
        self._on_deleted = on_deleted
        self._store: Store[FleetJob] = Store()
        self._invalid: dict[str, int] = {}  # by uid: the generation of a job that cannot be parsed
        self._relist = asyncio.Event()
        self._telling: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancel the recording of events about invalid jobs."""
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)

    def get(self, key: Key) -> FleetJob | None:
        """Return the newest known version of a job, or None if the job is gone."""
        entry = self._store.get(key)
        return None if entry is None else entry.value

    def __iter__(self) -> Iterator[FleetJob]:
        """Return an iterator over all known jobs."""
        return (entry.value for entry in self._store)

    def take(self, kind: str | None, manifest: Mapping[str, Any]) -> None:
        """Update the cache from a watch event; any type other than ``DELETED`` means that the job exists."""
        if kind == "DELETED":
            self._drop(key_of(manifest), manifest["metadata"]["uid"], version_of(manifest))
        else:
            self.put(manifest)

    def put(self, manifest: Mapping[str, Any], *, tells: bool = True) -> FleetJob | None:
        """Store a job's current state; return the job, or None if its manifest is invalid or outdated.

        Our own status writes cause no notification, because they would lead to the same plan.
        """
        entry = self._reduce(manifest)
        if entry is None:
            return None
        if self._store.put(entry) and tells:
            self._on_change(entry.key)
        return entry.value if entry.version == version_of(manifest) else None

    async def refresh(self, job: FleetJob) -> None:
        """Read a job from the API server, because its cached version is outdated."""
        metadata = job.metadata
        try:
            self.put(await self._client.get(f"{collection(PLURAL, metadata.namespace)}/{metadata.name}"))
        except ApiError as error:
            if error.status != 404:
                raise
            self._drop(Key.of(job), metadata.uid or "", int(metadata.resource_version or 0))

    def list_again(self) -> None:
        """Request a new list of FleetJobs, because the watch may have missed deletions."""
        self._relist.set()

    async def list_forever(self, scopes: Iterable[Scope]) -> None:
        """List FleetJobs periodically; failures in one namespace do not affect the others."""
        everywhere = tuple(scopes)
        scopes, tries, loop = everywhere, 0, asyncio.get_running_loop()
        while True:
            self._relist.clear()
            if scopes is everywhere:
                listed_at = loop.time()
            # the scopes whose list failed, and the delays that the API server asks for
            failed: dict[Scope, float] = {}
            for scope in scopes:
                try:
                    await self._list(scope.namespace)
                except (ApiError, ExpiredError) as error:
                    logger.warning("listing FleetJobs: %s", error)
                    scope.jobs_were_listed(error)
                    failed[scope] = getattr(error, "retry_after_seconds", 0.0)
                else:
                    scope.jobs_were_listed()
            wait = max(min(2.0**tries, AGAIN_SECONDS), *failed.values()) if failed else RELIST_SECONDS
            tries = min(tries + 1, 10) if failed else 0
            try:
                async with asyncio.timeout(wait):
                    await self._relist.wait()
                scopes = everywhere
            except TimeoutError:
                due = not failed or loop.time() - listed_at >= RELIST_SECONDS
                scopes = everywhere if due else tuple(failed)

    async def _list(self, namespace: str | None) -> None:
        entries: list[Entry[FleetJob]] = []
        version = 0
        async for page in list_pages(self._client, collection(PLURAL, namespace)):
            entries += [entry for item in page["items"] if (entry := self._reduce(item)) is not None]
            version = version_of(page)
        for key in self._store.replace(entries, version, namespace):
            if key in self._store:
                self._on_change(key)
            else:
                self._on_deleted(key)

    def _reduce(self, manifest: Mapping[str, Any]) -> Entry[FleetJob] | None:
        key, uid = key_of(manifest), manifest["metadata"]["uid"]
        known = self._store.get(key)
        if known is not None and known.uid == uid and known.version >= version_of(manifest):
            return known  # this skips parsing, which takes most of a list's time
        try:
            job = read_job(manifest, None if known is None else known.value)
        except InvalidJob as error:
            self._tell_invalid(manifest, error)
            if known is None or known.uid != uid:
                return None
            # The last valid spec stays in force, and writes of the status need the newest version.
            return replace(known, version=version_of(manifest), value=newer_state(known.value, manifest))
        self._invalid.pop(uid, None)
        return Entry(key, uid, version_of(manifest), key, owner_of(manifest), job)

    def _tell_invalid(self, manifest: Mapping[str, Any], error: InvalidJob) -> None:
        """Record an event about an invalid job once per generation."""
        metadata = manifest["metadata"]
        uid, generation = metadata["uid"], metadata.get("generation", 0)
        if self._invalid.get(uid) == generation:
            return
        self._invalid[uid] = generation
        key = key_of(manifest)
        logger.error("%s", error, extra={"job": str(key)})
        event = Event("Warning", "InvalidSpec", f"{error}\nIs the CRD older or newer than the operator?")
        telling = asyncio.create_task(self._events.record(Subject(*key, uid), event))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    def _drop(self, key: Key, uid: str, version: int) -> None:
        self._invalid.pop(uid, None)
        if self._store.remove(key, uid, version) is not None:
            self._on_deleted(key)
