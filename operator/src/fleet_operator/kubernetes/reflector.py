"""Keep a cache in step with the API server: list once, then watch, for as long as the process lives.

The list comes in pages. The watch goes on from the list's resourceVersion, and takes a newer one from every
event and bookmark, so that a connection that ends costs nothing but a new one. When the server has forgotten
the place (410), everything is listed again and what is no longer there counts as deleted; `on_relist` is
told, because whoever else watched through that gap has missed deletions too.

A server whose etcd was restored from a backup counts on from the backup's resourceVersion. A watch from the
place reached before would be told nothing until that place is reached again, so each new watch first asks
where the server is. If that is behind, everything is listed again, the list replaces what was newer by the
old count, and `on_restored` is told.

A `Scope` says how far the cache of a namespace, or of all of them, is in sync: a namespace that cannot be
listed keeps no other from being served.
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
"""How many objects one answer to a list has: larger ones only take memory, which stays taken."""

WATCH_SECONDS = 300
"""How long the server is asked to keep a watch open; it ends in an orderly way then."""

SILENCE_SECONDS = 75.0
"""A bookmark comes every minute: a connection that is silent for longer is dead."""

WELL_SECONDS = 10.0
"""How long a watch of which nothing is heard stays open if it goes well: there may be nothing to be heard."""

BACKOFF_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

_NO_ANSWER = frozenset({0, 429, 503, 504})
"""Statuses by which a server says nothing about what was asked."""


class ExpiredError(Exception):
    """The server no longer knows the place in its history from which we want to go on."""


class ListWatch(Generic[T]):
    """One collection of the API server, kept in step in one cache.

    Parameters
    ----------
    client : ApiClient
        The API server.
    path : str
        The collection, as in ``/api/v1/pods``.
    cache : Cache
        Where the objects go.
    on_relist : callable, optional
        Told when everything had to be listed again.
    on_restored : callable, optional
        Told when the server's history had gone back, as it does when its etcd is restored from a backup.
    selector : str, optional
        A label selector, applied by the server.
    field_selector : str, optional
        A field selector, applied by the server.
    namespace : str, optional
        The namespace that `path` is limited to, if it is.
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
        self._newest = 0  # the newest resourceVersion that was seen, also while everything is listed again
        self._backoff = backoff()
        self.failing = Failing()
        self.synced = asyncio.Event()
        self.answered = asyncio.Event()  # there is a list, or a word that there is none
        self.heard = asyncio.Event()  # the same; whoever wants to hear it again clears it

    async def run(self) -> None:
        """List, then watch; never returns, and ends only by being cancelled."""
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
                await asyncio.sleep(next(self._backoff))  # a place that is forgotten at once must not spin
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
        self._version = version  # not before: after a list that broke off the watch would go on over holes
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
        """Raise ExpiredError if the server is behind the place from which the watch is to go on."""
        page = await self._client.get(self.path, {"limit": "1"})
        if (at := version_of(page)) < self._newest:
            raise ExpiredError(f"the server is at version {at}, and was at {self._newest} before")

    def _note_well(self) -> None:
        self.failing.tried(went_well=True)

    def _note_answer(self) -> None:
        self.answered.set()
        self.heard.set()

    async def _watch(self) -> None:
        """Follow the events of one connection until it ends."""
        # Many watches that begin together should not all end together.
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
                        if silent:  # only now is it more than a watch that is granted and ends in an error
                            silent, self._backoff = False, backoff()
                            self._note_well()
                finally:
                    well.cancel()
        except ApiError as error:
            if error.status == 410:
                raise ExpiredError(str(error)) from error
            raise
        if silent:  # a server that ends watches at once must not be asked for the next one at once
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
    """Whether a server has said that it does not do what was asked, and not only that it cannot now."""
    return isinstance(error, ApiError) and error.status not in _NO_ANSWER


async def list_pages(
    client: ApiClient, path: str, params: Mapping[str, str] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """List a collection page by page, all of them as they were at one moment."""
    token = ""
    while True:
        try:
            page = await client.get(path, {**(params or {}), "limit": str(PAGE), "continue": token})
        except ApiError as error:
            if error.status == 410:  # the pages took too long; what was read so far is of no use
                raise ExpiredError(str(error)) from error
            raise
        yield page
        token = page["metadata"].get("continue") or ""
        if not token:
            return


def backoff() -> Iterator[float]:
    """Return how long to wait before each further try, without end."""
    return chain(BACKOFF_SECONDS, repeat(BACKOFF_SECONDS[-1]))


class Scope:
    """What is looked at together: a namespace, or all of them.

    Parameters
    ----------
    namespace : str or None
        Which; None for all of them.
    owned : mapping
        The watches without which no job can be served, by resource: of pods and Services.
    extras : mapping
        Those of what jobs may have beside these, by resource: some kinds may not be served.
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
        self._noticing.tried(went_well=False)  # whoever is to watch its FleetJobs may never begin to

    def watches(self) -> Iterator[ListWatch[Any]]:
        """Return all watches of it."""
        yield from self.owned.values()
        yield from self.extras.values()

    def jobs_were_listed(self, error: Exception | None = None) -> None:
        """Note how a list of its FleetJobs has ended."""
        self._listing.tried(went_well=error is None)
        if error is None:
            self._jobs_listed.set()
        if error is None or is_refusal(error):
            self._jobs_answered.set()

    def jobs_were_watched(self, *, went_well: bool) -> None:
        """Note whether whoever watches its FleetJobs could."""
        self._noticing.tried(went_well=went_well)

    @property
    def shows_what_jobs_own(self) -> bool:
        """Whether what jobs own there has been seen: before, none of its jobs is judged."""
        return self._shown.is_set()

    @property
    def answered(self) -> bool:
        """Whether it is known what there is to see: everything has been listed, or refused."""
        return self._jobs_answered.is_set() and all(watch.answered.is_set() for watch in self.watches())

    async def until_seen(self) -> None:
        """Wait until its jobs can be served: what must be seen has been, and of the rest what there is.

        Where all was refused at first, because the namespace was gone for example, that says nothing of the
        rest: it is asked for again.
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
        """Wait until it is known what there is to see."""
        await self._jobs_answered.wait()
        for watch in self.watches():
            await watch.answered.wait()

    def missing(self) -> Iterator[str]:
        """Return what is still waited for, in words."""
        yield from (watch.path for watch in self.owned.values() if not watch.synced.is_set())
        yield from (watch.path for watch in self.extras.values() if not watch.answered.is_set())
        if not self._jobs_listed.is_set():
            where = "" if self.namespace is None else f" of {self.namespace}"
            yield f"{PLURAL}{where} (is the CRD installed?)"

    def failing(self) -> Iterator[tuple[str, float]]:
        """Return for how many seconds each kind of object could not be followed; 0 while it is."""
        yield PLURAL, max(self._listing.seconds, self._noticing.seconds)
        for resource, watch in (*self.owned.items(), *self.extras.items()):
            yield resource, watch.failing.seconds


class Failing:
    """One thing that is tried again and again.

    Parameters
    ----------
    monotonic : callable
        Seconds that only grow.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since: float | None = None

    def tried(self, *, went_well: bool) -> None:
        """Note how a try has ended."""
        if went_well:
            self._since = None
        elif self._since is None:
            self._since = self._monotonic()

    @property
    def seconds(self) -> float:
        """For how long no try has gone well, from the first that did not; 0 if the last one did."""
        return 0.0 if self._since is None else self._monotonic() - self._since
