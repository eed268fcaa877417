from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kopf import Body

from fleet_operator.handlers import kopf_settings, registry_for
from fleet_operator.kubernetes.login import Connection

pytestmark = pytest.mark.timeout(20)


class Uncopied(dict[str, object]):
    def __deepcopy__(self, memo: object) -> Uncopied:
        raise AssertionError("kopf copies every object with each event")


def test_kopf_keeps_and_copies_nothing_of_an_object():
    storage = kopf_settings().persistence.diffbase_storage
    body = Body({"metadata": {"name": "digits"}, "spec": Uncopied(mode="Collective")})
    assert storage.build(body=body, extra_fields=[("spec",)]) == {}
    assert storage.fetch(body=body) is None


def test_kopf_never_gives_up():
    backoffs = kopf_settings().networking.error_backoffs
    assert isinstance(backoffs, Iterable)
    for _ in range(2):  # each request begins anew
        waits = list(islice(backoffs, 100_000))
        assert len(waits) == 100_000
        assert (waits[0], waits[-1]) == (0.1, 5.0)


def test_kopf_does_not_kill_the_process_long_after_its_own_end():
    assert kopf_settings().process.ultimate_exiting_timeout is None


@pytest.mark.parametrize(("namespace", "path"), [(None, ""), ("team", "/namespaces/team")])
async def test_what_kopf_hears_is_passed_on_and_counted(namespace: str | None, path: str):
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}, status=int(request.query["status"]))

    heard: list[object] = []
    requests: list[tuple[object, ...]] = []
    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application, host="127.0.0.1") as server:
        registry = registry_for(
            Connection(f"http://127.0.0.1:{server.port}"),
            lambda *_: None,
            on_listed=lambda: heard.append("listed"),
            on_watched=lambda *told: heard.append(told),
            on_request=lambda *told: requests.append(told[:3]),
        )
        (login,) = registry._activities.get_all_handlers()
        log_in: Any = login.fn
        opened = await log_in()
        async with opened.aiohttp_session as session:
            for verb in ("", "watch=true&"):
                for status in (200, 403):
                    for where in (f"/apis/fleetjob.dev/v1alpha1{path}/fleetjobs", "/apis/fleetjob.dev"):
                        await session.get(f"{opened.server}{where}?{verb}status={status}")
    assert heard == ["listed", (namespace, False), (namespace, True), (namespace, False)]
    assert [each for each in requests if each[1] != "other"] == [
        ("GET", "fleetjobs", 200),
        ("GET", "fleetjobs", 403),
        ("WATCH", "fleetjobs", 200),
        ("WATCH", "fleetjobs", 403),
    ]
