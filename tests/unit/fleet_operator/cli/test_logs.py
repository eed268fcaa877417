"""Merged logs: an API server that speaks HTTP, and replicas that write, end, come back, and never stop."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fleet_operator.api import Role
from fleet_operator.cli import logs as module
from fleet_operator.cli.logs import LINE_BYTES, Logs, Wanted, lines_of, print_with
from fleet_operator.cli.session import ClusterRefusal, Session
from fleet_operator.cluster.client import ApiClient
from fleet_operator.cluster.connection import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.timeout(20)

BASE = "/api/v1/namespaces/default/pods"
JOBS = "/apis/fleetjob.dev/v1alpha1/namespaces/default/fleetjobs"


class World:
    """Pods, one job, and the logs: each request for a log gets the next of the pod's answers."""

    def __init__(self) -> None:
        self.version = 1
        self.job: dict[str, Any] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, list[Any]] = {}
        self.asked: list[dict[str, str]] = []
        self.watchers: dict[str, list[asyncio.Queue[dict[str, Any]]]] = {"pods": [], "fleetjobs": []}
        self.shown: list[str] = []
        self.notes: list[str] = []
        self.heard = asyncio.Event()
        self.set_job("Running")

    def set_job(self, state: str) -> None:
        self.version += 1
        self.job = {
            "metadata": {
                "name": "digits",
                "namespace": "default",
                "uid": "j",
                "resourceVersion": f"{self.version}",
            },
            "spec": {"mode": "Collective"},
            "status": {"state": state},
        }
        self._tell("fleetjobs", "MODIFIED", self.job)

    def put(
        self,
        index: int,
        *logs: Any,
        life: int = 0,
        phase: str = "Running",
        role: str = "trainer",
        waiting: tuple[str, ...] = (),
    ) -> None:
        """Have a pod, and what its log's requests are answered with; some containers may not have started."""
        name = f"digits-{role}-{index}"
        self.version += 1
        labels = {
            "fleetjob.dev/job-name": "digits",
            "fleetjob.dev/role": role,
            "fleetjob.dev/index": str(index),
            "fleetjob.dev/attempt": f"0.{life}",
        }
        metadata = {
            "name": name,
            "namespace": "default",
            "uid": f"{name}@{life}",
            "labels": labels,
            "resourceVersion": str(self.version),
        }
        containers = [{"name": "sidecar"}, {"name": "fleet"}]
        status: dict[str, Any] = {"phase": phase}
        if phase != "Pending":
            status["containerStatuses"] = [
                {**each, "state": {"waiting" if each["name"] in waiting else "running": {}}}
                for each in containers
            ]
        self.pods[name] = {"metadata": metadata, "spec": {"containers": containers}, "status": status}
        if logs:
            self.logs[name] = list(logs)
        self._tell("pods", "MODIFIED", self.pods[name])

    def _tell(self, plural: str, kind: str, item: dict[str, Any]) -> None:
        for queue in self.watchers[plural]:
            queue.put_nowait({"type": kind, "object": item})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path.endswith("/log"):
            return await self._log(request)
        if path == f"{JOBS}/digits":
            return web.json_response(self.job)
        if path.startswith(f"{BASE}/"):
            pod = self.pods.get(path.rpartition("/")[2])
            return web.json_response(
                pod or {"reason": "NotFound", "message": "gone"}, status=200 if pod else 404
            )
        if path not in (BASE, JOBS):
            name = path.rpartition("/")[2]
            return web.json_response({"message": f'fleetjobs "{name}" not found'}, status=404)
        plural = path.rpartition("/")[2]
        if "watch" in request.query:
            return await self._watch(request, plural)
        items = [self.job] if plural == "fleetjobs" else list(self.pods.values())
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.watchers[plural].append(queue)
        self.heard.set()
        with suppress(ConnectionError):
            while True:
                await response.write(json.dumps(await queue.get()).encode() + b"\n")
        return response

    async def _log(self, request: web.Request) -> web.StreamResponse:
        name, container = request.path.split("/")[-2], request.query["container"]
        self.asked.append({"pod": name, **request.query})
        statuses = self.pods[name]["status"].get("containerStatuses", ())
        if not any(each["name"] == container and "waiting" not in each["state"] for each in statuses):
            return web.json_response(
                {"message": f'container "{container}" in pod "{name}" is waiting to start'}, status=400
            )
        answers = self.logs.get(name) or [b""]
        given = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(given, tuple):
            return web.json_response({"message": given[1]}, status=given[0])
        response = web.StreamResponse()
        await response.prepare(request)
        if isinstance(given, bytes):
            await response.write(given)
        else:
            await given(response)
        return response

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        application = web.Application()
        application.router.add_get("/{path:.*}", self.answer)
        server = TestServer(application, host="127.0.0.1")
        await server.start_server(shutdown_timeout=0.1)
        address = f"http://127.0.0.1:{server.port}"
        try:
            async with ApiClient(Connection(address)) as client:
                yield Session(client, address, "default")
        finally:
            await server.close()

    def reading(self, session: Session, **wanted: Any) -> Logs:
        show = print_with(prefixes=True, colour=False, write=self._show)
        return Logs(session, "digits", Wanted(**wanted), show=show, note=self._note)

    async def until_shown(self, count: int) -> None:
        await self._until(lambda: len(self.shown) >= count)

    async def until_noted(self) -> None:
        await self._until(lambda: bool(self.notes))

    async def _until(self, probe: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not (all(self.watchers.values()) and probe()):
                self.heard.clear()
                await self.heard.wait()

    def _show(self, line: str) -> None:
        self.shown.append(line)
        self.heard.set()

    def _note(self, line: str) -> None:
        self.notes.append(line)
        self.heard.set()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    return World()


def at(second: int, *lines: str) -> bytes:
    stamped = (f"2026-01-01T00:00:{second:02}.{n:09}Z {line}\n" for n, line in enumerate(lines))
    return "".join(stamped).encode()


async def test_what_there_is_one_replica_after_the_other(world: World):
    world.put(1, at(0, "b"), phase="Succeeded")
    world.put(0, at(5, "a", "", "a again"))
    world.put(2, phase="Pending")
    async with world.session() as session:
        assert await world.reading(session, tail=7, since_seconds=60).print_once() == 0
    assert world.shown == ["[trainer-0] a", "[trainer-0] ", "[trainer-0] a again", "[trainer-1] b"]
    assert {(each["container"], each["tailLines"], each["sinceSeconds"]) for each in world.asked} == {
        ("fleet", "7", "60")
    }


async def test_only_the_replicas_that_are_wanted(world: World):
    world.put(0, at(0, "trainer"))
    world.put(0, at(0, "server"), role="pserver")
    async with world.session() as session:
        await world.reading(session, role=Role.PSERVER, index=0, timestamps=True).print_once()
    assert world.shown == ["[pserver-0] 2026-01-01T00:00:00.000000000Z server"]


async def test_nothing_to_show_says_why(world: World):
    world.put(0, phase="Pending")
    async with world.session() as session:
        assert await world.reading(session).print_once() == 1
        assert await world.reading(session, role=Role.PSERVER).print_once() == 1
        with pytest.raises(ClusterRefusal, match="no FleetJob other in namespace default"):
            await Logs(session, "other", Wanted(), show=print, note=print).print_once()
    assert "no replica of FleetJob digits has started yet" in world.notes[0]
    assert "no pod of this role and index" in world.notes[1]
    assert world.shown == []


async def test_a_log_that_cannot_be_read_does_not_keep_the_others_from_being_shown(world: World):
    async def cut(response: web.StreamResponse) -> None:
        assert response._req is not None
        transport = response._req.transport
        assert transport is not None
        transport.abort()

    world.put(0, cut)
    world.put(1, at(0, "one"))
    async with world.session() as session:
        assert await world.reading(session).print_once() == 0
        assert await world.reading(session, role=Role.TRAINER, index=0).print_once() == 1
    assert world.shown == ["[trainer-1] one"]
    assert world.notes[0].startswith("the log of trainer-0 cannot be read: ")


async def test_a_log_that_falls_silent_is_not_waited_for_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.1)

    async def hangs(response: web.StreamResponse) -> None:
        await response.write(at(1, "one"))
        await asyncio.Event().wait()

    world.put(0, hangs)
    world.put(1, at(0, "two"))
    async with world.session() as session, asyncio.timeout(10):
        assert await world.reading(session).print_once() == 0
    assert world.shown[-1] == "[trainer-1] two"
    assert world.notes[0].startswith("the log of trainer-0 cannot be read: ")


async def test_it_ends_when_nobody_reads_what_it_shows(world: World):
    def broken(line: str) -> None:
        raise BrokenPipeError

    world.put(0, at(0, "one"))
    async with world.session() as session:
        show = print_with(prefixes=True, colour=False, write=broken)
        with pytest.raises(BrokenPipeError):
            await Logs(session, "digits", Wanted(), show=show, note=world.notes.append).follow()


async def test_a_replica_that_starts_again_is_followed_into_its_next_life(world: World):
    world.put(0, at(0, "first life"), phase="Failed")
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session, tail=1).follow())
        await world.until_shown(1)
        world.put(0, at(9, "second life"), life=1, phase="Succeeded")
        await world.until_shown(2)
        world.set_job("Succeeded")
        assert await following == 0
    assert world.shown == ["[trainer-0] first life", "[trainer-0] second life"]
    assert "trainer-0 has started again (attempt 0.1)" in world.notes
    assert [each.get("tailLines") for each in world.asked] == ["1", None]  # of a new life all is wanted


async def test_a_log_whose_connection_breaks_goes_on_where_it_broke(world: World):
    async def breaks(response: web.StreamResponse) -> None:
        await response.write(at(1, "one", "two") + b"2026-01-01T00:00:02.5Z thr")
        assert response._req is not None
        transport = response._req.transport
        assert transport is not None
        transport.abort()

    # Places in a log are named by the second, so what was seen of that second is sent again.
    world.put(0, breaks, at(1, "one", "two", "three"))
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_shown(3)
        world.put(0, phase="Succeeded")
        world.set_job("Succeeded")
        assert await following == 0
    assert world.shown[:3] == ["[trainer-0] one", "[trainer-0] two", "[trainer-0] three"]
    assert len(world.shown) == 3
    assert world.asked[1]["sinceTime"] == "2026-01-01T00:00:01Z"


async def test_a_replica_that_never_stops_writing_waits_for_whoever_reads(world: World):
    written = 0

    async def endless(response: web.StreamResponse) -> None:
        nonlocal written
        with suppress(ConnectionError):
            while True:
                await response.write(b"x" * 1000 + b"\n")
                written += 1

    world.put(0, endless)
    blocked = asyncio.Event()
    async with world.session() as session:
        reading = world.reading(session)

        async def stuck() -> None:  # a terminal that takes nothing
            blocked.set()
            await asyncio.Event().wait()

        reading._print = stuck  # type: ignore[method-assign]
        following = asyncio.create_task(reading.follow())
        await blocked.wait()
        before = -1
        while written != before or not reading._lines.full():  # until the sockets are full too
            before = written
            await asyncio.sleep(0.3)
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    assert written < 20_000  # the kernel's buffers and the queue, of what would be for ever


async def test_a_log_that_a_lost_node_never_ends_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LAST_SECONDS", 0.1)

    async def hangs(response: web.StreamResponse) -> None:
        await response.write(at(1, "one"))
        await asyncio.Event().wait()

    world.put(0, hangs)
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_shown(1)
        world.put(0, phase="Failed")
        world.set_job("Failed")
        async with asyncio.timeout(10):
            assert await following == 0
    assert world.shown == ["[trainer-0] one"]


async def test_why_nothing_comes_is_told_meanwhile(world: World):
    world.job["status"] |= {
        "conditions": [
            {
                "type": "Running",
                "status": "False",
                "reason": "Unschedulable",
                "message": "no node fits",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ]
    }
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_noted()
        world.set_job("Failed")
        assert await following == 1
    assert world.notes[0] == "digits is Running: no node fits"
    assert world.notes[-1] == "FleetJob digits has no pods; `fleetjob status digits` says why"


async def test_a_container_that_starts_after_its_sidecar_is_waited_for(world: World):
    world.put(0, at(0, "late"), waiting=("fleet",))
    world.put(1, at(0, "first"))
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_shown(1)
        world.put(0)
        await world.until_shown(2)
        world.put(0, phase="Succeeded")
        world.put(1, phase="Succeeded")
        world.set_job("Succeeded")
        assert await following == 0
    assert world.shown == ["[trainer-1] first", "[trainer-0] late"]
    assert not [note for note in world.notes if "cannot be read" in note]


async def test_a_container_that_its_node_knows_later_than_its_status_is_asked_again(world: World):
    world.put(0, (400, "waiting to start: ContainerCreating"), (502, "bad gateway"), at(0, "one"))
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_shown(1)
        world.put(0, phase="Succeeded")
        world.set_job("Succeeded")
        assert await following == 0
    assert not [note for note in world.notes if "cannot be read" in note]


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        pytest.param(403, "Running", id="without-the-right"),
        pytest.param(400, "Failed", id="of-a-pod-that-has-ended"),
        pytest.param(502, "Failed", id="of-a-node-that-is-away"),
    ],
)
async def test_where_no_log_could_be_read_the_exit_status_says_so(world: World, status: int, phase: str):
    world.put(0, (status, "no log for you"), phase=phase)
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world._until(lambda: "the log of trainer-0 cannot be read: no log for you" in world.notes)
        world.put(0, phase="Failed")
        world.set_job("Failed")
        assert await following == 1
    assert world.shown == []


async def test_a_container_that_no_replica_has_is_refused_by_name(world: World):
    world.put(0, at(0, "one"), phase="Failed")
    world.set_job("Failed")
    async with world.session() as session:
        for ending in (
            world.reading(session, container="fleer").print_once(),
            world.reading(session, container="fleer").follow(),
        ):
            assert await ending == 1
            told = "no replica of FleetJob digits has a container fleer; there are sidecar, fleet"
            assert world.notes.pop(0 if world.notes[0] == told else 1) == told
    assert told not in world.notes
    assert world.shown == []


async def test_a_container_that_no_replica_has_is_told_of_while_the_job_runs(world: World):
    world.put(0, at(0, "one"))
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session, container="fleer").follow())
        await world._until(lambda: any("has a container fleer" in note for note in world.notes))
        world.put(0, phase="Succeeded")
        world.set_job("Succeeded")
        assert await following == 1
    assert len([note for note in world.notes if "has a container fleer" in note]) == 1


async def test_what_a_replica_said_last_is_asked_for_again_when_its_connection_breaks(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)

    async def breaks(response: web.StreamResponse) -> None:
        await response.write(at(0, "one"))
        world.put(0, phase="Failed")
        world.set_job("Failed")
        transport = response._req.transport if response._req is not None else None
        assert transport is not None
        transport.abort()

    world.put(0, breaks, at(0, "one") + at(1, "Traceback"))
    async with world.session() as session:
        assert await world.reading(session).follow() == 0
    assert world.shown == ["[trainer-0] one", "[trainer-0] Traceback"]
    assert not [note for note in world.notes if "cannot be read" in note]


async def test_a_node_that_does_not_answer_is_why_its_log_is_not_read(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "LAST_SECONDS", 0.1)
    asked, answered = asyncio.Event(), asyncio.Event()

    async def no_answer(request: web.Request) -> web.StreamResponse:
        asked.set()
        await answered.wait()
        return web.Response()

    monkeypatch.setattr(world, "_log", no_answer)
    world.put(0)
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await asked.wait()
        world.put(0, phase="Failed")
        world.set_job("Failed")
        assert await following == 1
        answered.set()
    assert world.notes[-1] == "the log of trainer-0 cannot be read: its node does not answer"


async def test_a_job_that_is_deleted_before_anything_is_read_is_no_success(world: World):
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_noted()
        world.version += 1
        world.job["metadata"]["resourceVersion"] = f"{world.version}"
        world._tell("fleetjobs", "DELETED", world.job)
        assert await following == 1
    assert world.notes[-1] == "FleetJob digits has been deleted"


async def chunks(*given: bytes) -> AsyncIterator[bytes]:
    for each in given:
        yield each


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param((b"a\nb", b"c\n", b"d"), [b"a", b"bc", b"d"], id="lines-across-chunks"),
        pytest.param((b"\n\n",), [b"", b""], id="empty-lines-are-lines"),
        pytest.param((b"12345678", b"9\n1"), [b"1234", b"5678", b"9", b"1"], id="a-long-line-in-pieces"),
        pytest.param((), [], id="nothing"),
    ],
)
async def test_lines(given: tuple[bytes, ...], expected: list[bytes]):
    assert [line async for line in lines_of(chunks(*given), 4)] == expected


async def test_a_line_without_an_end_is_not_held():
    pieces = [line async for line in lines_of(chunks(*[b"x" * LINE_BYTES] * 3))]
    assert [len(piece) for piece in pieces] == [LINE_BYTES] * 3


def test_each_replica_has_a_colour_of_its_own():
    shown: list[str] = []
    show = print_with(prefixes=True, colour=True, write=shown.append)
    for replica in ("trainer-0", "trainer-1", "trainer-0"):
        show(replica, b"\xff")
    assert shown[0] == shown[2] != shown[1].replace("trainer-1", "trainer-0")
    assert shown[0].startswith("\x1b[36m[trainer-0]\x1b[0m ")


def test_the_main_container_is_the_one_that_the_pod_was_built_around():
    pod: dict[str, Any] = {
        "metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "train"}},
        "spec": {"containers": [{"name": "proxy"}, {"name": "train"}]},
    }
    assert Wanted().params(pod)["container"] == "train"
    assert Wanted(container="proxy").params(pod)["container"] == "proxy"
