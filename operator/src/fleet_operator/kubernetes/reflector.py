"""The reflector, which keeps a cache in sync with the API server: it lists once, then watches.

Lists are paged. The watch continues from the list's resourceVersion, and takes a newer one from every event
and bookmark, so that a lost connection requires only a new watch. When the server no longer has that version
(410), everything is listed again, and missing objects count as deleted. `on_relist` is then called, because
other watches have also missed deletions in the gap.

A server whose etcd was restored from a backup continues from the backup's resourceVersion. A watch from the
previous version would receive nothing until that version is reached again. So before each new watch, the
reflector requests the server's current version. If that version is lower, everything is listed again, the
list replaces objects with higher versions, and `on_restored` is called.

A `Scope` tracks how far the cache of a namespace, or of all of them, is in sync: a namespace that cannot be
listed does not block other namespaces.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import aiohttp
import orjson

from fleet_operator.api.names import PLURAL
from fleet_operator.kubernetes.client import ApiError
from fleet_operator.kubernetes.indexer import version_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from fleet_operator.kubernetes.client import ApiClient
    from fleet_operator.kubernetes.indexer import Cache, Entry

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAGE = 100
"""The page size of a list; larger pages only use more memory, which is never released to the system."""

WATCH_SECONDS = 300
"""How long we ask the server to keep a watch open."""

SILENCE_SECONDS = 75.0
"""The time-out for a silent connection: more than the minute between two bookmarks."""

WELL_SECONDS = 10.0
"""How long a watch must stay open to count as working even though no event has arrived."""

BACKOFF_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

_NO_ANSWER = frozenset({0, 429, 503, 504})
"""The HTTP statuses of failures that are not refusals: 0 (no response), 429, 503 and 504."""


class ExpiredError(Exception):
    """The server no longer has the resourceVersion from which a watch should resume."""


class ListWatch(Generic[T]):
    """A reflector that keeps a cache in sync with one collection on the API server.

    Parameters
    ----------
    client : ApiClient
        The API server.
    path : str
        The collection, as in ``/api/v1/pods``.
    cache : Cache
        The cache of the objects.
    on_relist : callable, optional
        Called whenever everything had to be listed again.
    on_restored : callable, optional
        Called when the server's history was rolled back, as by a restore of etcd from a backup.
    selector : str, optional
        A label selector, applied by the server.
    field_selector : str, optional
        A field selector, applied by the server.
    namespace : str, optional
        The namespace of `path`, if it has one.
    """

    def __init__(
        self,
        client: ApiClient,
        path: str,
        cache: Cache[T],
        *,
        on_relist: Callable[[], None] | None = None,
        on_restored: Callable[[], None] | None = None,
        selector: str | None = None,
        field_selector: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self._client = client
        self.path = path
        self._cache = cache
        self._on_relist = on_relist
        self._on_restored = on_restored
        self._selector = {"labelSelector": selector} if selector else {}
        if field_selector:
            self._selector["fieldSelector"] = field_selector
        self._namespace = namespace
        self._version = ""
        self._newest = 0  # the newest known resourceVersion, also during a new list
        self._backoff = backoff()
        self.failing = Failing()
        self.synced = asyncio.Event()
        self.answered = asyncio.Event()  # a list has arrived or was refused
        self.heard = asyncio.Event()  # the same, but cleared by the task that waits for the next list

    async def run(self) -> None:
        """List the collection, then watch it, until cancelled."""
        while True:
            try:
                if self._version:
                    await self._check_history()
                else:
                    await self._list()
                await self._watch()
            except ExpiredError as expired:
                self.failing.tried(went_well=False)
                logger.info("%s: listing again: %s", self.path, expired)
                self._version = ""
                await asyncio.sleep(next(self._backoff))  # the new version may expire immediately as well
            except (ApiError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                if is_refusal(error):
                    self._note_answer()
                self.failing.tried(went_well=False)
                delay = max(next(self._backoff), getattr(error, "retry_after_seconds", 0.0))
                reason = str(error) or type(error).__name__
                logger.warning("%s: %s; trying again in %g s", self.path, reason, delay)
                await asyncio.sleep(delay)

    async def _list(self) -> None:
        entries: list[Entry[T]] = []
        version = ""
        async for page in list_pages(self._client, self.path, self._selector):
            entries += [entry for item in page["items"] if (entry := self._cache.reduce(item)) is not None]
            version = page["metadata"]["resourceVersion"]
        restored = int(version) < self._newest
        self._cache.replace(entries, int(version), self._namespace, restored=restored)
        self._version = version  # only now: after an incomplete list, the watch would miss objects
        self._newest = int(version)
        if restored:
            logger.warning("%s: the server's history has gone back: it was restored from a backup", self.path)
            if self._on_restored is not None:
                self._on_restored()
        if self.synced.is_set() and self._on_relist is not None:
            self._on_relist()
        self.synced.set()
        self._note_answer()

    async def _check_history(self) -> None:
        """Raise ExpiredError if the server's current resourceVersion is lower than one already seen."""
        page = await self._client.get(self.path, {"limit": "1"})
        if (at := version_of(page)) < self._newest:
            raise ExpiredError(f"the server is at version {at}, and was at {self._newest} before")

    def _note_well(self) -> None:
        self.failing.tried(went_well=True)

    def _note_answer(self) -> None:
        self.answered.set()
        self.heard.set()

    async def _watch(self) -> None:
        """Process the events of one watch connection until it ends."""
        # Jitter keeps watches that start together from all ending together.
        seconds = round(WATCH_SECONDS * random.uniform(0.8, 1.0))  # noqa: S311 no secret
        params = {
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(seconds),
            **self._selector,
        }
        silent = True
        try:
            async with self._client.stream(self.path, params, silence_seconds=SILENCE_SECONDS) as lines:
                well = asyncio.get_running_loop().call_later(WELL_SECONDS, self._note_well)
                try:
                    async for line in lines:
                        self._take(orjson.loads(line))
                        if silent:  # only an event proves that the watch works
                            silent, self._backoff = False, backoff()
                            self._note_well()
                finally:
                    well.cancel()
        except ApiError as error:
            if error.status == 410:
                raise ExpiredError(str(error)) from error
            raise
        if silent:  # do not reopen immediately: the server may end every watch immediately
            self._note_well()
            await asyncio.sleep(next(self._backoff))

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == 410:
                raise ExpiredError(item.get("message", "410"))
            raise ApiError(item.get("code", 0), item.get("reason", ""), item.get("message", ""))
        self._version = item["metadata"]["resourceVersion"]
        self._newest = int(self._version)
        if kind == "DELETED":
            self._cache.remove(item)
        elif kind != "BOOKMARK":
            self._cache.put(item)


def is_refusal(error: Exception) -> bool:
    """Return whether an error counts as a refusal: a response with a status other than 429, 503 or 504."""
    return isinstance(error, ApiError) and error.status not in _NO_ANSWER


async def list_pages(
    client: ApiClient, path: str, params: Mapping[str, str] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Yield the pages of a collection's list, which together form a consistent snapshot."""
    token = ""
    while True:
        try:
            # Without a resourceVersion, the response is at least as new as the request. With 0, it could come
            # from a cache of the API server that is behind, and contain objects that are already deleted.
            page = await client.get(path, {**(params or {}), "limit": str(PAGE), "continue": token})
        except ApiError as error:
            if error.status == 410:  # the continue token has expired, so the pages read so far are useless
                raise ExpiredError(str(error)) from error
            raise
        yield page
        token = page["metadata"].get("continue") or ""
        if not token:
            return


def backoff() -> Iterator[float]:
    """Return an endless iterator over retry delays, in seconds."""
    return chain(BACKOFF_SECONDS, repeat(BACKOFF_SECONDS[-1]))


class Scope:
    """The reflectors for one namespace or for all namespaces.

    Parameters
    ----------
    namespace : str or None
        The namespace; None for all of them.
    owned : mapping
        The reflectors without which no job can be served, by resource: of pods and Services.
    extras : mapping
        The reflectors of additional kinds, by resource: the server may not have some of them.
    """

    def __init__(
        self,
        namespace: str | None,
        owned: Mapping[str, ListWatch[Any]],
        extras: Mapping[str, ListWatch[Any]],
    ) -> None:
        self.namespace = namespace
        self.owned = owned
        self.extras = extras
        self._jobs_listed, self._jobs_answered = asyncio.Event(), asyncio.Event()
        self._shown = asyncio.Event()
        self._listing, self._noticing = Failing(), Failing()
        self._noticing.tried(went_well=False)  # failing until the watch of its FleetJobs has started

    def watches(self) -> Iterator[ListWatch[Any]]:
        """Yield all reflectors of this scope."""
        yield from self.owned.values()
        yield from self.extras.values()

    def jobs_were_listed(self, error: Exception | None = None) -> None:
        """Record the result of listing the scope's FleetJobs."""
        self._listing.tried(went_well=error is None)
        if error is None:
            self._jobs_listed.set()
        if error is None or is_refusal(error):
            self._jobs_answered.set()

    def jobs_were_watched(self, *, went_well: bool) -> None:
        """Record whether an attempt to watch the scope's FleetJobs succeeded."""
        self._noticing.tried(went_well=went_well)

    @property
    def shows_what_jobs_own(self) -> bool:
        """True if the objects of the scope's jobs are listed, so that jobs can be reconciled."""
        return self._shown.is_set()

    @property
    def answered(self) -> bool:
        """True if every list has arrived or was refused."""
        return self._jobs_answered.is_set() and all(watch.answered.is_set() for watch in self.watches())

    async def until_seen(self) -> None:
        """Wait until the required lists have arrived, and the others have arrived or were refused.

        If all lists were refused at first, for example because the namespace was deleted, the additional
        kinds are listed again.
        """
        await self.until_answered()
        comes_late = not all(watch.synced.is_set() for watch in self.owned.values())
        await self._jobs_listed.wait()
        for watch in self.owned.values():
            await watch.synced.wait()
        if comes_late:
            refused = [watch for watch in self.extras.values() if not watch.synced.is_set()]
            for watch in refused:
                watch.heard.clear()
            for watch in refused:
                await watch.heard.wait()
        self._shown.set()

    async def until_answered(self) -> None:
        """Wait until every list has arrived or was refused."""
        await self._jobs_answered.wait()
        for watch in self.watches():
            await watch.answered.wait()

    def missing(self) -> Iterator[str]:
        """Yield the names of the lists that have not arrived, for messages."""
        yield from (watch.path for watch in self.owned.values() if not watch.synced.is_set())
        yield from (watch.path for watch in self.extras.values() if not watch.answered.is_set())
        if not self._jobs_listed.is_set():
            where = "" if self.namespace is None else f" of {self.namespace}"
            yield f"{PLURAL}{where} (is the CRD installed?)"

    def failing(self) -> Iterator[tuple[str, float]]:
        """Yield each resource and the number of seconds its watch has been failing, or 0 if it works."""
        yield PLURAL, max(self._listing.seconds, self._noticing.seconds)
        for resource, watch in (*self.owned.items(), *self.extras.items()):
            yield resource, watch.failing.seconds


class Failing:
    """Tracks for how long a repeated operation has been failing.

    Parameters
    ----------
    monotonic : callable
        Returns seconds of a monotonic clock.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since: float | None = None

    def tried(self, *, went_well: bool) -> None:
        """Record the result of an attempt."""
        if went_well:
            self._since = None
        elif self._since is None:
            self._since = self._monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the current series of failures began; 0 if the last attempt succeeded."""
        return 0.0 if self._since is None else self._monotonic() - self._since
