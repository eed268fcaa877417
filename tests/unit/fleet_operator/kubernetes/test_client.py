"""The client of the API server, asked of a server that answers as it is told; and the rate of its writes."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from fleet_operator.kubernetes import client as client_module
from fleet_operator.kubernetes import reflector
from fleet_operator.kubernetes.client import ApiClient, ApiError, TokenBucket
from fleet_operator.kubernetes.indexer import Cache, Entry, Store, key_of, version_of
from fleet_operator.kubernetes.login import Connection, ConnectionSettingsError
from fleet_operator.kubernetes.reflector import ListWatch
from tests.support.clusters import FakeClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    Requests = list[tuple[object, ...]]

pytestmark = pytest.mark.timeout(20)


def test_a_burst_goes_at_once_and_the_rest_at_the_rate():
    clock = FakeClock()
    bucket = TokenBucket(10, 3, monotonic=clock.monotonic)
    assert [bucket.reserve() for _ in range(6)] == pytest.approx([0, 0, 0, 0.1, 0.2, 0.3])


def test_a_quiet_time_saves_up_no_more_than_a_burst():
    clock = FakeClock()
    bucket = TokenBucket(10, 2, monotonic=clock.monotonic)
    clock.seconds = 3600
    assert [bucket.reserve() for _ in range(3)] == pytest.approx([0, 0, 0.1])
    clock.seconds += 0.1
    assert bucket.reserve() == pytest.approx(0.1)


async def test_those_who_wait_pass_in_their_order():
    bucket = TokenBucket(200, 1)
    passed: list[int] = []

    async def go(number: int) -> None:
        await bucket.take()
        passed.append(number)

    async with asyncio.timeout(5):
        await asyncio.gather(*(go(number) for number in range(5)))
    assert passed == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0)])
def test_a_bucket_that_lets_nothing_through_is_refused(rate: float, burst: int):
    with pytest.raises(ValueError, match="expected a positive rate and burst"):
        TokenBucket(rate, burst)


PODS = "/api/v1/namespaces/ns/pods"


@asynccontextmanager
async def served(
    handler: Handler, **connection: object
) -> AsyncIterator[tuple[ApiClient, list[tuple[object, ...]]]]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    server = TestServer(application, host="127.0.0.1")
    await server.start_server()
    requests: Requests = []
    address = f"http://127.0.0.1:{server.port}"
    made = Connection(address, **connection)  # type: ignore[arg-type]
    try:
        async with ApiClient(made, on_request=lambda *told: requests.append(told[:3])) as client:
            yield client, requests
    finally:
        await server.close()


async def test_a_body_goes_out_as_json_and_the_answer_comes_back():
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(
            {"got": await request.json(), "type": request.content_type, "verb": request.method}
        )

    async with served(handler) as (client, requests):
        assert await client.create(PODS, {"a": 1}) == {
            "got": {"a": 1},
            "type": "application/json",
            "verb": "POST",
        }
        patched = await client.merge_patch(f"{PODS}/p", {"b": 2})
        assert patched["type"] == "application/merge-patch+json"
        deleted = await client.delete(f"{PODS}/p", {"gracePeriodSeconds": 0})
        assert deleted["got"] == {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        await client.replace("/apis/fleetjob.dev/v1alpha1/namespaces/ns/fleetjobs/j/status", {})
        assert requests == [
            ("POST", "pods", 200),
            ("PATCH", "pods", 200),
            ("DELETE", "pods", 200),
            ("PUT", "fleetjobs/status", 200),
        ]


async def test_what_becomes_of_unknown_fields_is_asked_for():
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"asked": dict(request.query)})

    async with served(handler) as (client, _):
        strict = await client.create(PODS, {}, field_validation="Strict")
        assert strict == {"asked": {"fieldValidation": "Strict"}}
        assert await client.create(PODS, {}) == {"asked": {}}


async def test_an_integer_of_any_size_goes_out_for_the_server_to_judge():
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=f'{{"got": {json.dumps(await request.text())}}}')

    async with served(handler) as (client, _):
        assert await client.create(PODS, {"a": 10**20}) == {"got": '{"a": 100000000000000000000}'}


async def test_an_applied_manifest_is_what_it_was_to_a_reader_of_yaml():
    """Which takes escapes of 16 bits one by one, and refuses some characters that JSON has as they are."""
    text = "grün \x7f\x85\u2028\ufeff 日本 \U0001f680"

    async def handler(request: web.Request) -> web.Response:
        sent = await request.text()
        assert "\\ud83d" not in sent
        return web.json_response({"got": yaml.safe_load(sent)})

    async with served(handler) as (client, _):
        answer = await client.apply(f"{PODS}/p", {"a": text}, manager="tests")
        assert answer == {"got": {"a": text}}


async def test_an_error_carries_the_servers_own_sentence():
    async def handler(_: web.Request) -> web.Response:
        details = {"name": "p", "kind": "pods"}
        body = {"kind": "Status", "reason": "AlreadyExists", "message": 'pods "p" already exists'}
        return web.json_response({**body, "details": details}, status=409)

    async with served(handler) as (client, _):
        with pytest.raises(ApiError, match=r'^pods "p" already exists$') as raised:
            await client.create(PODS, {})
        assert (raised.value.status, raised.value.reason) == (409, "AlreadyExists")
        assert raised.value.details == {"name": "p", "kind": "pods"}


@pytest.mark.parametrize("answer", ["bad gateway", '{"message": "bad gateway"}', '["bad gateway"]'])
async def test_an_error_of_a_proxy_is_told_too_and_is_known_as_none_of_the_api_servers(answer: str):
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=502, text=answer)

    async with served(handler) as (client, _):
        with pytest.raises(ApiError, match="bad gateway") as raised:
            await client.get(PODS)
        assert (raised.value.status, raised.value.details) == (502, None)


async def test_an_answer_that_is_no_json_is_no_answer():
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text="<html>Welcome</html>")

    async with served(handler) as (client, _):
        with pytest.raises(ApiError, match="sent invalid JSON") as raised:
            await client.get(PODS)
        assert raised.value.transient


async def test_a_token_that_cannot_be_read_is_an_error_of_the_request(tmp_path: Path):
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({})

    token = tmp_path / "token"
    async with served(handler, authorization=token.read_text) as (client, _):
        with pytest.raises(ApiError, match="token of the API server cannot be read"):
            await client.get(PODS)
        token.write_text("Bearer here again")
        assert await client.get(PODS) == {}


async def test_a_watch_goes_on_after_its_login_has_failed_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "TOKEN_SECONDS", 0.0)
    monkeypatch.setattr(reflector, "BACKOFF_SECONDS", (0.0,))
    changed = asyncio.Event()
    asked = []

    async def handler(request: web.Request) -> web.Response:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        pod = {"metadata": {"namespace": "ns", "name": "p", "uid": "u", "resourceVersion": "2"}}
        return web.Response(text=json.dumps({"type": "ADDED", "object": pod}) + "\n")

    def log_in() -> str:
        asked.append(1)
        if len(asked) == 2:
            raise ConnectionSettingsError("its program failed")
        return "Bearer t"

    async with served(handler, authorization=log_in) as (client, _):
        watch: ListWatch[None] = ListWatch(client, PODS, Cache(Store(), _nothing_of, lambda _: changed.set()))
        running = asyncio.create_task(watch.run())
        seen = asyncio.create_task(changed.wait())
        try:
            await asyncio.wait((running, seen), timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert changed.is_set()
            assert not running.done()
        finally:
            running.cancel()
            seen.cancel()
            await asyncio.gather(running, seen, return_exceptions=True)
    assert len(asked) >= 3


@pytest.mark.parametrize(
    ("status", "transient"),
    [(0, True), (409, True), (429, True), (500, True), (503, True), (400, False), (403, False), (422, False)],
)
def test_whether_the_same_request_may_go_better_the_next_time(status: int, transient: bool):
    assert ApiError(status, "", "no").transient is transient


async def test_no_answer_within_the_time_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "REQUEST_SECONDS", 0.05)
    forever = asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        await forever.wait()
        return web.Response()

    async with served(handler) as (client, requests):
        with pytest.raises(ApiError, match=r"no answer from http://127\.0\.0\.1") as raised:
            await client.get(PODS)
        assert raised.value.status == 0
        assert requests == [("GET", "pods", 0)]
        forever.set()


async def test_a_token_file_is_read_again_before_it_grows_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"told": request.headers.get("Authorization")})

    token = tmp_path / "token"
    token.write_text("Bearer first")
    async with served(handler, authorization=token.read_text) as (client, _):
        assert (await client.get(PODS))["told"] == "Bearer first"
        token.write_text("Bearer second")
        assert (await client.get(PODS))["told"] == "Bearer first"
        monkeypatch.setattr(client_module, "TOKEN_SECONDS", 0.0)
        assert (await client.get(PODS))["told"] == "Bearer second"


@pytest.mark.parametrize("size", [1, 8, 9, 10, 4096, 1_000_000])
async def test_a_stream_is_cut_into_lines_wherever_its_chunks_end(size: int):
    lines = [b'{"a": 1}', b"x" * (200_000 if size > 10 else 20), b'{"b": 2}']
    whole = b"\n".join(lines) + b"\n\n"

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for at in range(0, len(whole), size):
            await response.write(whole[at : at + size])
            await asyncio.sleep(0)
        return response

    async with served(handler) as (client, _), client.stream(PODS, {}, silence_seconds=5) as stream:
        assert [line async for line in stream] == lines


async def test_a_refused_stream_is_an_error():
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"reason": "Expired", "message": "too old"}, status=410)

    async with served(handler) as (client, _):
        with pytest.raises(ApiError, match="too old") as raised:
            async with client.stream(PODS, {}, silence_seconds=5):
                pass
        assert raised.value.status == 410


async def test_what_goes_on_for_ever_is_counted_when_it_is_answered():
    async def handler(request: web.Request) -> web.StreamResponse:
        if "forbidden" in request.path:
            return web.json_response({"message": "no right to watch"}, status=403)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{}\n")
        await asyncio.Event().wait()
        return response

    async with served(handler) as (client, requests):
        async with client.stream(PODS, {}, silence_seconds=5) as lines:
            assert await anext(lines) == b"{}"
            assert requests == [("WATCH", "pods", 200)]
        with pytest.raises(ApiError, match="no right to watch"):
            async with client.stream("/api/v1/namespaces/forbidden/services", {}, silence_seconds=5):
                pass
        async with client.chunks(f"{PODS}/p/log", {}) as chunks:
            await anext(chunks)
    with pytest.raises(aiohttp.ClientError):
        async with (
            ApiClient(
                Connection("http://127.0.0.1:1"), on_request=lambda *told: requests.append(told[:3])
            ) as client,
            client.stream(PODS, {}, silence_seconds=5),
        ):
            pass
    assert requests[1:] == [("WATCH", "services", 403), ("GET", "pods/log", 200), ("WATCH", "pods", 0)]


async def test_a_stream_that_falls_silent_ends_with_an_error():
    forever = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await forever.wait()
        return response

    async with served(handler) as (client, _):
        with pytest.raises(TimeoutError):
            async with client.stream(PODS, {}, silence_seconds=0.05) as stream:
                assert [line async for line in stream] == []
        forever.set()


@pytest.mark.parametrize("silence_seconds", [None, 5.0])
async def test_a_log_comes_as_it_is_whatever_its_type(silence_seconds: float | None):
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.headers['Accept']} {request.query['tailLines']}")

    async with (
        served(handler) as (client, _),
        client.chunks(f"{PODS}/p/log", {"tailLines": "1"}, silence_seconds=silence_seconds) as chunks,
    ):
        assert b"".join([chunk async for chunk in chunks]) == b"*/* 1"


async def test_a_refused_log_is_an_error_that_says_when_to_come_again():
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"message": "busy"}, status=429, headers={"Retry-After": "7"})

    async with served(handler) as (client, _):
        with pytest.raises(ApiError, match="busy") as raised:
            async with client.chunks(f"{PODS}/p/log", {}):
                pass
        assert raised.value.retry_after_seconds == 7


async def test_a_client_that_was_not_started_says_so():
    with pytest.raises(RuntimeError, match="not started"):
        await ApiClient(Connection("http://127.0.0.1:1")).get(PODS)


def _nothing_of(manifest: Mapping[str, Any]) -> Entry[None]:
    key = key_of(manifest)
    return Entry(key, manifest["metadata"]["uid"], version_of(manifest), key, None, None)
