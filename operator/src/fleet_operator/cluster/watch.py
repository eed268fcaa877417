"""Keep a cache in step with the API server: list once, then watch, for as long as the process lives.

The list comes in pages. The watch goes on from the list's resourceVersion, and takes a newer one from every
event and bookmark, so that a connection that ends costs nothing but a new one. When the server has forgotten
the place (410), everything is listed again and what is no longer there counts as deleted; `on_relist` is
told, because whoever else watched through that gap has missed deletions too.

A server whose etcd was restored from a backup counts on from the backup's resourceVersion. A watch from the
place reached before would be told nothing until that place is reached again, so each new watch first asks
where the server is. If that is behind, everything is listed again, the list replaces what was newer by the
old count, and `on_restored` is told.
"""

from __future__ import annotations

import asyncio
import logging
import random
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import aiohttp
import orjson

from fleet_operator.cluster.client import ApiError
from fleet_operator.cluster.failing import Failing
from fleet_operator.cluster.store import version_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from fleet_operator.cluster.cache import Cache
    from fleet_operator.cluster.client import ApiClient
    from fleet_operator.cluster.store import Entry

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
