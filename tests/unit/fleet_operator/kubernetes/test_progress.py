"""Asking replicas how far they are."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from fleet_operator.api import FleetJobStatus, JobState, Role
from fleet_operator.api.names import METRICS_PORT
from fleet_operator.build import replica_ports
from fleet_operator.cluster import Key
from fleet_operator.engine.reconcile import Reconciler
from fleet_operator.kubernetes import progress as module
from fleet_operator.kubernetes.indexer import Entry, Owner
from fleet_operator.kubernetes.informer_cache import ClusterView
from fleet_operator.kubernetes.progress import CONCURRENT, ProgressReader, Target, fetch_progress, targets
from fleet_operator.plan import plan
from fleet_operator.plan.model import Observed, PodPhase
from fleet_operator.plan.observe.progress import Progress
from tests.support.clusters import FakeClock, FakeCluster
from tests.support.jobs import job, manifest
from tests.support.plans import pserver, trainer

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob
    from fleet_operator.kubernetes.client import ApiClient
    from fleet_operator.kubernetes.events import EventRecorder

WHOLE = '{"step": 12, "totalSteps": 100, "loss": 0.31}'
PARSED = Progress(step=12, total_steps=100, loss=0.31)
KEY = Key("default", "digits")
TARGET = Target(KEY, "uid-1", "10.0.0.1", 6180)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(f"HTTP/1.0 200 OK\r\nA: b\r\n\r\n{WHOLE}", PARSED, id="its-progress"),
        pytest.param("HTTP/1.0 404 Not Found\r\n\r\n{}", None, id="no-such-page"),
        pytest.param("garbage", None, id="garbage"),
        pytest.param("", None, id="nothing"),
    ],
)
async def test_a_replica_answers(answer, expected):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /progress HTTP/1.0\r\n")
        writer.write(answer.encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await fetch_progress("127.0.0.1", port) == expected


async def test_a_replica_that_says_nothing_is_given_up_on():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(3):
            assert await fetch_progress("127.0.0.1", port) is None


async def test_an_answer_of_the_greatest_length_is_read(monkeypatch):
    body = WHOLE.ljust(module.MAX_BYTES - len("HTTP/1.0 200 OK\r\n\r\n"))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.0 200 OK\r\n\r\n{body}".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(module, "TIMEOUT_SECONDS", 10.0)
        assert await fetch_progress("127.0.0.1", port) == PARSED


def test_answers_take_little_memory_however_many_come_at_once():
    assert CONCURRENT * (module.MAX_BYTES + 2 * module.BUFFER_BYTES) <= 4 << 20


async def test_nobody_listens():
    assert await fetch_progress("127.0.0.1", 9) is None


async def test_an_answer_without_an_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 60.0)  # not what ends it

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"x" * 100)
                await writer.drain()
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(20):
            assert await fetch_progress("127.0.0.1", port) is None


class World:
    """Trainers, what they answer, and when somebody asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.targets = [TARGET]
        self.answer: Progress | None = Progress(step=1, total_steps=10)
        self.breaks: set[str] = set()  # hosts whose answers nobody foresaw
        self.asked: list[str] = []
        self.told: list[Key] = []
        self.read: list[bool] = []
        self.seconds = 0.0
        self.reader = ProgressReader(
            lambda is_due: [each for each in self.targets if is_due(each.job, each.pod_uid)],
            self.told.append,
            now=lambda: NOW,
            fetch=self.fetch,
            on_read=self.read.append,
        )
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.seconds, raising=False)

    def step(self, pod_uid: str = "uid-1") -> int | None:
        told = self.reader.of(KEY, pod_uid)
        assert told is not None
        return told.step

    async def fetch(self, host: str, port: int) -> Progress | None:
        self.asked.append(host)
        if host in self.breaks:
            raise ValueError("what is this?")
        return self.answer

    async def after(self, seconds: float, answer: Progress | None) -> None:
        self.seconds += seconds
        self.answer = answer
        await self.reader.ask()


@pytest.fixture
async def world(monkeypatch):
    return World(monkeypatch)


async def test_a_job_is_asked_every_fifteen_seconds_and_no_more(world: World):
    await world.reader.ask()
    for _ in range(14):
        await world.after(1, Progress(step=2))
    assert (len(world.asked), world.told) == (1, [KEY])
    await world.after(1, Progress(step=2))
    assert (len(world.asked), world.told) == (2, [KEY, KEY])


async def test_a_status_is_written_for_its_progress_every_fifteen_seconds_at_most(world: World):
    cluster, clock, written_at = FakeCluster(), FakeClock(), list[int]()
    cluster.add(job())
    seen = Observed((pserver(0), pserver(1), trainer(0), trainer(1)), service=True)
    reconciler = Reconciler(cluster, clock=clock, decide=plan)
    for second in range(90):  # in each of which the training goes on, and somebody looks at the job
        clock.seconds = second
        await world.after(1, Progress(step=second, total_steps=100))
        cluster.observed = replace(seen, progress=world.reader.of(KEY, TARGET.pod_uid))
        cluster.done.clear()
        await reconciler.reconcile(KEY)
        written_at += [second for each in cluster.done if isinstance(each, FleetJobStatus)]
    assert len(written_at) == 6
    assert min(later - one for one, later in itertools.pairwise(written_at)) >= module.INTERVAL_SECONDS
    told = cluster.jobs[KEY].status.progress
    assert told is not None
    assert told.step == 75


async def test_what_has_not_moved_is_no_news(world: World):
    await world.reader.ask()
    before = world.reader.of(KEY, "uid-1")
    await world.after(15, Progress(step=1, total_steps=10))
    assert (len(world.asked), world.told) == (2, [KEY])
    assert world.reader.of(KEY, "uid-1") == before


async def test_the_estimate_follows_the_pace(world: World):
    await world.reader.ask()
    first = world.reader.of(KEY, "uid-1")
    assert first is not None
    assert first.eta_seconds is None
    await world.after(15, Progress(step=4, total_steps=10))
    told = world.reader.of(KEY, "uid-1")
    assert told is not None
    assert (told.percentage, told.eta_seconds, told.time) == (40, 30, NOW)


async def test_a_silent_trainer_takes_nothing_back(world: World):
    await world.reader.ask()
    await world.after(15, None)
    assert world.step() == 1
    assert world.read == [True, False]


async def test_an_answer_that_nobody_foresaw_disturbs_no_other_job(world: World, caplog):
    other = Target(Key("default", "other"), "uid-2", "10.0.0.2", 6180)
    world.targets, world.breaks = [TARGET, other], {TARGET.host}
    await world.reader.ask()
    assert (world.told, world.read) == ([other.job], [False, True])
    assert [record.job for record in caplog.records] == ["default/digits"]
    world.breaks.clear()
    await world.after(4, Progress(step=3))
    assert world.step() == 3


async def test_a_script_that_has_just_begun_is_soon_asked_again_and_a_silent_one_rarely(
    world: World,
):
    world.answer = None
    asked_at = []
    await world.reader.ask()
    for second in range(1, 61):
        before = len(world.asked)
        await world.after(1, None)
        if len(world.asked) > before:
            asked_at.append(second)
    assert asked_at == [4, 12, 28, 58]


async def test_another_pod_is_asked_at_once_and_the_old_ones_words_are_not_its_own(world: World):
    await world.reader.ask()
    world.targets = [TARGET._replace(pod_uid="uid-2")]
    assert world.reader.of(KEY, "uid-2") is None
    await world.after(1, Progress(step=0))
    assert world.step("uid-2") == 0
    assert world.reader.of(KEY, "uid-1") is None


async def test_what_is_gone_is_forgotten(world: World):
    await world.reader.ask()
    world.targets = []
    await world.after(1, None)
    assert world.reader.of(KEY, "uid-1") is None


async def test_a_thousand_silent_trainers_are_asked_a_bounded_number_at_once():
    at_once, most, asked = 0, 0, 0

    async def silent(host: str, port: int) -> None:
        nonlocal at_once, most, asked
        asked += 1
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1

    targets = [Target(Key("default", f"job-{i}"), "uid", "10.0.0.1", 6180) for i in range(1000)]
    reader = ProgressReader(lambda _: targets, lambda _: None, now=lambda: NOW, fetch=silent)
    await reader.ask()
    assert (asked, most) == (1000, CONCURRENT)


def view_of(one: FleetJob, **pod: Any) -> ClusterView:
    """Return what is known of a cluster with one job and its trainer 0."""
    view = ClusterView(cast("ApiClient", None), cast("EventRecorder", None))
    observed = trainer(0, **({"ip": "10.0.0.1"} | pod))
    owner = Owner(one.metadata.uid, "FleetJob", "digits")
    view.owned.pods.put(Entry(Key("default", observed.name), observed.uid, 1, KEY, owner, observed))
    view.jobs._store.put(Entry(KEY, one.metadata.uid, 1, KEY, None, one))
    return view


def running(**spec: Any) -> FleetJob:
    return job(manifest(**spec)).with_status(FleetJobStatus(state=JobState.RUNNING))


def test_trainer_0_of_a_running_job_is_asked_at_its_own_port():
    (target,) = targets(view_of(running()), NOW)
    assert target == Target(KEY, "digits-trainer-0@0.0", "10.0.0.1", METRICS_PORT)
    network = {"hostNetwork": True, "portRange": {"first": 20000, "last": 20100}}
    shared = running(network=network)
    (target,) = targets(view_of(shared), NOW)
    assert target.port == replica_ports(shared, Role.TRAINER, 0).metrics != METRICS_PORT
    (target,) = targets(view_of(shared, metrics_port=20055), NOW)
    assert target.port == 20055, "the pod was told so, by whichever version has made it"


@pytest.mark.parametrize("seconds", [4, 3600, -1])
def test_a_trainer_that_has_run_for_a_while_is_asked_whatever_its_nodes_clock_says(seconds: int):
    view = view_of(running(), started_at=NOW - timedelta(seconds=seconds))
    assert [target.host for target in targets(view, NOW)] == ["10.0.0.1"]


@pytest.mark.parametrize(
    ("one", "pod"),
    [
        pytest.param(running(), {"started_at": NOW - timedelta(seconds=3)}, id="a-trainer-that-just-began"),
        pytest.param(job(), {}, id="a-job-that-does-not-run"),
        pytest.param(running(managedBy="example.com/other"), {}, id="a-job-of-another-controller"),
        pytest.param(running(), {"ip": None}, id="a-pod-without-an-address"),
        pytest.param(running(), {"phase": PodPhase.SUCCEEDED}, id="a-pod-that-has-ended"),
        pytest.param(running(), {"deleted_at": NOW}, id="a-pod-on-its-way-out"),
    ],
)
def test_nobody_else_is_asked(one: FleetJob, pod: dict[str, Any]):
    assert list(targets(view_of(one, **pod), NOW)) == []


def test_only_who_is_due_is_asked():
    view, asked_of = view_of(running()), list[tuple[Key, str]]()

    def is_due(job: Key, pod_uid: str) -> bool:
        asked_of.append((job, pod_uid))
        return False

    assert list(targets(view, NOW, is_due)) == []
    assert asked_of == [(KEY, "digits-trainer-0@0.0")]


def test_a_pod_of_another_owner_is_not_asked():
    view = view_of(running())
    stranger = view_of(running().model_copy(update={"metadata": job(uid="other").metadata}))
    view.owned = stranger.owned
    assert list(targets(view, NOW)) == []
