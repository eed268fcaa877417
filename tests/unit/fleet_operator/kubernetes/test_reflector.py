from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.kubernetes import reflector
from fleet_operator.kubernetes.client import ApiError
from fleet_operator.kubernetes.indexer import Cache, Entry, Store, key_of, version_of
from fleet_operator.kubernetes.reflector import Failing, ListWatch
from tests.support.fake_api import FakeApi

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from fleet_operator.cluster import Key

pytestmark = pytest.mark.timeout(20)

PODS = "/api/v1/pods"


def path(name: str) -> str:
    return f"/api/v1/namespaces/ns/pods/{name}"


class Watched:
    """A watch on an API of memory, and what it told."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self.store: Store[None] = Store()
        self.told: list[str] = []
        self.relists = 0
        self.changed = asyncio.Event()
        self.restored = 0
        self.watch = ListWatch(
            api,
            PODS,
            Cache(self.store, reduce, self.change),
            on_relist=self.relist,
            on_restored=self.restore,
        )

    def change(self, job: Key) -> None:
        self.told.append(job.name)
        self.changed.set()

    def relist(self) -> None:
        self.relists += 1
        self.changed.set()

    def restore(self) -> None:
        self.restored += 1

    def version(self, name: str) -> int:
        (version,) = [entry.version for entry in self.store if entry.key.name == name]
        return version

    def names(self) -> list[str]:
        return sorted(entry.key.name for entry in self.store)

    async def until(self, probe: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not probe():
                self.changed.clear()
                await self.changed.wait()

    async def until_names(self, *names: str) -> None:
        await self.until(lambda: self.names() == list(names))


def reduce(manifest: Mapping[str, Any]) -> Entry[None] | None:
    key = key_of(manifest)
    if key.name.startswith("foreign"):
        return None
    return Entry(key, manifest["metadata"]["uid"], version_of(manifest), key, None, None)


@asynccontextmanager
async def watching(api: FakeApi) -> AsyncIterator[Watched]:
    watched = Watched(api)
    task = asyncio.create_task(watched.watch.run())
    try:
        await watched.watch.synced.wait()
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    monkeypatch.setattr(reflector, "BACKOFF_SECONDS", (0.0, 0.001))
    return FakeApi()


def count(api: FakeApi, verb: str) -> int:
    return api.requests.count((verb, PODS))


async def test_it_lists_page_by_page_and_then_follows_the_changes(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reflector, "PAGE", 2)
    for name in ("a", "b", "c", "foreign"):
        api.put(path(name), {})
    async with watching(api) as watched:
        assert (watched.names(), count(api, "GET")) == (["a", "b", "c"], 2)
        api.put(path("d"), {})
        api.vanish(path("a"))
        await watched.until_names("b", "c", "d")
        assert sorted(watched.told) == ["a", "a", "b", "c", "d"]
        assert (count(api, "GET"), watched.relists) == (2, 0)


@pytest.mark.parametrize("first", [True, False], ids=["at-the-start", "again"])
async def test_a_list_that_breaks_off_is_made_again_from_its_beginning(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, first: bool
):
    monkeypatch.setattr(reflector, "PAGE", 2)
    answer, broken = api.get, [True] if first else []

    async def get(path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        if params and params.get("continue") and broken:
            broken.clear()
            raise ApiError(503, "ServiceUnavailable", "the server is starting")
        return await answer(path, params)

    monkeypatch.setattr(api, "get", get)
    for name in ("a", "b", "c"):
        api.put(path(name), {})
    async with watching(api) as watched:
        assert watched.names() == ["a", "b", "c"]
        if not first:
            broken.append(True)
            api.vanish(path("b"))
            api.put(path("d"), {})
            api.forget()
            await watched.until_names("a", "c", "d")
            await watched.until(lambda: watched.relists == 1)


async def test_a_cut_connection_costs_a_new_one_and_loses_nothing(api: FakeApi):
    async with watching(api) as watched:
        api.put(path("a"), {})
        await watched.until_names("a")
        api.cut()
        api.put(path("b"), {})
        api.vanish(path("a"))
        await watched.until_names("b")
        assert (count(api, "GET"), watched.relists) == (2, 0)  # a list, and where the server is


async def test_a_server_that_was_restored_from_a_backup_is_followed_from_where_it_is(api: FakeApi):
    api.put(path("kept"), {})
    api.put(path("changed"), {"spec": "before"})
    backup = api.back_up()
    async with watching(api) as watched:
        api.put(path("changed"), {"spec": "since"})
        api.put(path("created-since"), {})
        api.vanish(path("kept"))
        await watched.until_names("changed", "created-since")
        known = api.objects[path("changed")]["metadata"]["resourceVersion"]
        watched.told.clear()
        api.restore(backup)
        await watched.until_names("changed", "kept")
        assert watched.version("changed") < int(known)
        assert (watched.relists, watched.restored) == (1, 1)
        assert watched.told.count("created-since") == 1
        api.put(path("new"), {})
        api.vanish(path("changed"))
        await watched.until_names("kept", "new")
        assert (watched.relists, watched.restored) == (1, 1)


async def test_a_watch_ends_without_being_noticed(api: FakeApi, monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []
    stream = api.stream

    def noting(path: str, params: Mapping[str, str], *, silence_seconds: float) -> Any:
        asked.append(silence_seconds)
        return stream(path, params, silence_seconds=silence_seconds)

    monkeypatch.setattr(api, "stream", noting)
    async with watching(api) as watched:
        api.put(path("a"), {})
        await watched.until_names("a")
        api.fail_watch(0, "nothing was heard for too long")  # as the client says it
        api.put(path("b"), {})
        await watched.until_names("a", "b")
    # A bookmark comes every minute: who hears nothing for longer has lost the connection.
    assert len(asked) == 2
    assert all(60 < seconds < 300 for seconds in asked)


async def test_a_forgotten_history_is_listed_again_and_tells_what_is_gone(api: FakeApi):
    api.put(path("a"), {})
    api.put(path("b"), {})
    async with watching(api) as watched:
        del api.objects[path("a")]  # nobody told of it
        api.forget()
        await watched.until_names("b")
        await watched.until(lambda: watched.relists == 1)
        assert watched.told.count("a") == 2
        api.put(path("c"), {})
        await watched.until_names("b", "c")


async def test_a_history_that_is_forgotten_at_once_is_not_asked_for_without_a_pause(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reflector, "BACKOFF_SECONDS", (0.0, 3600.0))
    api.put(path("a"), {})
    async with watching(api):
        api.forgotten = 10**9
        api.cut()
        for _ in range(500):
            await asyncio.sleep(0)
        assert count(api, "WATCH") >= 1
        assert count(api, "GET") <= 2


async def test_an_error_event_that_says_expired_is_a_forgotten_history(api: FakeApi):
    async with watching(api) as watched:
        api.fail_watch(410, "too old resource version")
        await watched.until(lambda: watched.relists == 1)


async def test_another_error_event_means_watching_again(api: FakeApi):
    async with watching(api) as watched:
        api.fail_watch(500, "etcd is busy")
        api.put(path("a"), {})
        await watched.until_names("a")
        assert watched.relists == 0


async def test_a_bookmark_moves_the_place_that_a_later_watch_goes_on_from(api: FakeApi):
    async with watching(api) as watched:
        api.version += 50  # other kinds of objects changed
        api.bookmark()
        api.put(path("a"), {})
        await watched.until_names("a")
        api.forgotten = api.version - 1
        api.cut()
        api.put(path("b"), {})
        await watched.until_names("a", "b")
        assert watched.relists == 0


async def test_a_refused_list_is_tried_again(api: FakeApi):
    api.refusals["GET", PODS] = ApiError(500, "InternalError", "etcd is away")
    api.put(path("a"), {})
    async with watching(api) as watched:
        assert watched.names() == ["a"]


@pytest.mark.parametrize("refused", ["GET", "WATCH"])
async def test_what_is_refused_again_and_again_is_known_until_it_is_granted(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, refused: str
):
    granted, tried, note = asyncio.Event(), asyncio.Event(), api._note

    def refuse(verb: str, path: str) -> None:
        note(verb, path)
        if verb == refused and not granted.is_set():
            if api.requests.count((verb, path)) == 5:
                tried.set()
            raise ApiError(403, "Forbidden", f"no right to {verb}")

    monkeypatch.setattr(api, "_note", refuse)
    watched = Watched(api)
    # A second for each such request.
    watched.watch.failing = Failing(monotonic=lambda: float(count(api, refused)))
    running = asyncio.create_task(watched.watch.run())
    try:
        async with asyncio.timeout(10):
            await tried.wait()
            assert watched.watch.failing.seconds == 4  # since the first refusal, though the list went well
            granted.set()
            api.put(path("a"), {})
            await watched.until_names("a")
            api.put(path("b"), {})
            await watched.until_names("a", "b")
        assert watched.watch.failing.seconds == 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_watch_of_which_nothing_is_heard_goes_well_once_it_has_stayed_open(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reflector, "WELL_SECONDS", 0.01)
    monkeypatch.setattr(reflector, "BACKOFF_SECONDS", (0.001,))
    api.refusals["WATCH", PODS] = ApiError(403, "Forbidden", "no right to WATCH")
    watched, went = Watched(api), list[bool]()
    well = asyncio.Event()

    class Noting(Failing):
        def tried(self, *, went_well: bool) -> None:
            went.append(went_well)
            super().tried(went_well=went_well)
            if went_well:
                well.set()

    watched.watch.failing = Noting()
    running = asyncio.create_task(watched.watch.run())
    try:
        async with asyncio.timeout(10):
            await well.wait()
        assert went == [False, True]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_watch_that_is_granted_and_breaks_at_once_goes_on_to_fail(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reflector, "BACKOFF_SECONDS", (0.001,))
    opened, tries, stream = list[str](), asyncio.Event(), api.stream

    @asynccontextmanager
    async def breaking(
        path: str, params: Mapping[str, str], *, silence_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        opened.append(path)
        if len(opened) == 5:
            tries.set()
        api.fail_watch(500, "etcd is away")
        async with stream(path, params, silence_seconds=silence_seconds) as lines:
            yield lines

    monkeypatch.setattr(api, "stream", breaking)
    watched = Watched(api)
    watched.watch.failing = Failing(monotonic=lambda: float(len(opened)))
    running = asyncio.create_task(watched.watch.run())
    try:
        async with asyncio.timeout(10):
            await tries.wait()
        assert watched.watch.failing.seconds >= 4
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_pages_that_took_too_long_are_read_again_from_the_first(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    api.refusals["GET", PODS] = ApiError(410, "Expired", "the continue token is too old")
    api.put(path("a"), {})
    async with watching(api) as watched:
        assert watched.names() == ["a"]
