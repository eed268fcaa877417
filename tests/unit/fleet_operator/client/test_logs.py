"""Merged logs: an API server that speaks HTTP, and replicas that write, end, come back, and never stop."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from fleet_operator.api import Role
from fleet_operator.cli.logs import print_logs, print_with
from fleet_operator.client import logs as module
from fleet_operator.client.logs import LINE_BYTES, LogLine, Logs, Position, Wanted, lines_of, stamp_of
from fleet_operator.client.session import ClusterRefusal
from tests.support.log_server import LogServer, at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> LogServer:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    return LogServer()


async def cut(response: web.StreamResponse) -> None:
    """Break the connection of an answer."""
    assert response._req is not None
    transport = response._req.transport
    assert transport is not None
    transport.abort()


async def fall_silent(response: web.StreamResponse) -> None:
    """Write one line, and neither another nor the end."""
    await response.write(at(1, "one"))
    await asyncio.Event().wait()


async def test_what_there_is_one_replica_after_the_other(world: LogServer):
    world.put(1, at(0, "b"), phase="Succeeded")
    world.put(0, at(5, "a", "", "a again"))
    world.put(2, phase="Pending")
    async with world.session() as session:
        assert await world.reading(session, tail=7, since_seconds=60).print_once() == 0
    assert world.shown == ["[trainer-0] a", "[trainer-0] ", "[trainer-0] a again", "[trainer-1] b"]
    assert {(each["container"], each["tailLines"], each["sinceSeconds"]) for each in world.asked} == {
        ("fleet", "7", "60")
    }


async def test_only_the_replicas_that_are_wanted(world: LogServer):
    world.put(0, at(0, "trainer"))
    world.put(0, at(0, "server"), role="pserver")
    async with world.session() as session:
        await world.reading(session, role=Role.PSERVER, index=0, timestamps=True).print_once()
    assert world.shown == ["[pserver-0] 2026-01-01T00:00:00.000000000Z server"]


async def test_nothing_to_show_says_why(world: LogServer):
    world.put(0, phase="Pending")
    async with world.session() as session:
        assert await world.reading(session).print_once() == 1
        assert await world.reading(session, role=Role.PSERVER).print_once() == 1
        with pytest.raises(ClusterRefusal, match="no FleetJob other in namespace default"):
            await anext(Logs(session, "other", Wanted(), note=print).existing())
    assert "no replica of FleetJob digits has started yet" in world.notes[0]
    assert "no pod of this role and index" in world.notes[1]
    assert world.shown == []


async def test_a_log_that_cannot_be_read_does_not_keep_the_others_from_being_shown(world: LogServer):
    world.put(0, cut)
    world.put(1, at(0, "one"))
    async with world.session() as session:
        assert await world.reading(session).print_once() == 0
        assert await world.reading(session, role=Role.TRAINER, index=0).print_once() == 1
    assert world.shown == ["[trainer-1] one"]
    assert world.notes[0].startswith("the log of trainer-0 cannot be read: ")


async def test_a_log_that_falls_silent_is_not_waited_for_for_ever(
    world: LogServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.1)
    world.put(0, fall_silent)
    world.put(1, at(0, "two"))
    async with world.session() as session, asyncio.timeout(10):
        assert await world.reading(session).print_once() == 0
    assert world.shown[-1] == "[trainer-1] two"
    assert world.notes[0].startswith("the log of trainer-0 cannot be read: ")


async def test_it_ends_when_nobody_reads_what_it_shows(world: LogServer):
    def broken(line: str) -> None:
        raise BrokenPipeError

    world.put(0, at(0, "one"))
    async with world.session() as session:
        show = print_with(prefixes=True, colour=False, write=broken)
        with pytest.raises(BrokenPipeError):
            await print_logs(Logs(session, "digits", Wanted(), note=print), follow=True, show=show)


async def test_a_replica_that_starts_again_is_followed_into_its_next_life(world: LogServer):
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


async def test_the_log_of_a_pod_that_was_replaced_is_not_read_for_both(world: LogServer):
    async def ends_with_its_pod(response: web.StreamResponse) -> None:
        await response.write(at(1, "first life"))
        await world.until_shown(1)
        world.put(0, at(9, "second life"), life=1)
        await cut(response)

    world.put(0, ends_with_its_pod)
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_shown(2)
        world.put(0, life=1, phase="Succeeded")
        world.set_job("Succeeded")
        assert await following == 0
    assert world.shown == ["[trainer-0] first life", "[trainer-0] second life"]


async def test_a_log_whose_connection_breaks_goes_on_where_it_broke(world: LogServer):
    async def breaks(response: web.StreamResponse) -> None:
        await response.write(at(1, "one", "two") + b"2026-01-01T00:00:02.5Z thr")
        await cut(response)

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


async def test_a_log_with_its_node_s_time_zone_goes_on_where_it_broke(world: LogServer):
    one, two = b"2026-10-25T02:59:59.5+02:00 one\n", b"2026-10-25T02:00:01+01:00 two\n"  # summer time ends
    world.put(0, one, one + two)
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_shown(2)
        world.put(0, phase="Succeeded")
        world.set_job("Succeeded")
        assert await following == 0
    assert world.shown == ["[trainer-0] one", "[trainer-0] two"]
    assert world.asked[1]["sinceTime"] == "2026-10-25T00:59:59Z"


async def test_a_long_line_whose_connection_breaks_is_shown_once_to_its_end(world: LogServer):
    pieces = [str(number) * LINE_BYTES for number in (1, 2, 3)]
    line = f"2026-01-01T00:00:01.5Z {''.join(pieces)}".encode()

    async def breaks(response: web.StreamResponse) -> None:
        await response.write(line[: LINE_BYTES + 9])
        await world.until_shown(1)
        await cut(response)

    world.put(0, breaks, line + b"\n" + at(2, "the next"))
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_shown(5)
        world.put(0, phase="Succeeded")
        world.set_job("Succeeded")
        assert await following == 0
    assert len(world.shown) == 5  # the timestamp moves the last bytes into a fourth piece
    assert "".join(each.removeprefix("[trainer-0] ") for each in world.shown) == f"{''.join(pieces)}the next"


def test_lines_of_one_instant_are_told_apart_by_the_bytes_before_them():
    position = Position()
    lines = [b"2026-01-01T00:00:01Z one", b"2026-01-01T00:00:01Z two", b"2026-01-01T00:00:01Z three"]
    assert [position.unseen(each) for each in lines[:2]] == lines[:2]
    again = Position.parse(str(position))
    assert [again.unseen(each) for each in lines] == [b"", b"", lines[2]]
    assert again.since_time == "2026-01-01T00:00:01Z"


CLOCKS = {
    "set-back-by-an-hour": ("12:00:01.5", "12:00:02.5", "11:00:00.5", "11:00:01.5", "12:00:03.5"),
    "set-back-twice": ("12:00:05.5", "12:00:01.5", "12:00:02.5", "11:00:00.5", "12:00:01.7", "12:00:06"),
    "set-back-twice-the-second-time-from-later": ("12:00:05", "12:00:01", "12:00:09", "12:00:00", "12:00:06"),
    "of-two-streams": ("12:00:00.7", "12:00:00.6", "12:00:01.1", "12:00:00.9", "12:00:00.9", "12:00:01.2"),
}


def since(log: list[bytes], position: Position) -> list[bytes]:
    """Return what the kubelet sends of a log: it leaves out every line before sinceTime, wherever it is."""
    second = position.since_time
    if second is None or stamp_of(log[-1]) < position.stamp:
        return log
    return [line for line in log if stamp_of(line)[:19] >= second[:19]]


@pytest.mark.parametrize("clock", CLOCKS.values(), ids=CLOCKS)
@pytest.mark.parametrize("rotated", [False, True], ids=["kept", "rotated"])
def test_lines_of_a_clock_that_was_set_back_are_given_once(clock: tuple[str, ...], *, rotated: bool):
    log = [f"2026-01-01T{time}Z line {number}".encode() for number, time in enumerate(clock)]
    for first in range(1, len(log)):
        cursor, given = "", list[bytes]()
        for end in range(first, len(log) + 1):
            position = Position.parse(cursor)
            start = len(given) - 1 if rotated and given else 0  # the last known line is always kept
            kept = log[start:end]
            given += filter(None, map(position.unseen, since(kept, position)))
            cursor = str(position)
        assert given == log


@pytest.mark.parametrize("while_read", [True, False], ids=["while-it-is-read", "while-nobody-reads"])
async def test_a_log_goes_on_after_its_node_s_clock_was_set_back(world: LogServer, *, while_read: bool):
    before, after = at(50, "one", "two"), at(10, "three")
    world.latest = at(11, "four")

    async def breaks(response: web.StreamResponse) -> None:
        await response.write(before + after if while_read else before)
        await world.until_shown(3 if while_read else 2)
        await cut(response)

    world.put(0, breaks, before + after + at(11, "four"))
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_shown(4)
        world.put(0, phase="Succeeded")
        world.set_job("Succeeded")
        assert await following == 0
    assert world.shown == [f"[trainer-0] {each}" for each in ("one", "two", "three", "four")]
    assert world.asked[1].get("sinceTime") == ("2026-01-01T00:00:10Z" if while_read else None)


@pytest.mark.parametrize("text", ["", "x", "2026-01-01T00:00:01Z", "2026-01-01T00:00:01Z -1", " 7"])
def test_a_position_that_nobody_wrote_is_the_beginning(text: str):
    assert Position.parse(text).since_time is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(b"2026-01-01T00:00:01.25Z text", "2026-01-01T00:00:01.250000000Z", id="utc"),
        pytest.param(b"2026-01-01T01:00:00+02:00 text", "2025-12-31T23:00:00.000000000Z", id="of-a-zone"),
        pytest.param(b"2026-99-01T01:00:00+02:00 text", "", id="no-date"),
        pytest.param(b"0001-01-01T01:00:00+02:00 text", "", id="before-the-first-year"),
        pytest.param(b"the rest of a line", "", id="none"),
    ],
)
def test_timestamps_compare_as_text(line: bytes, expected: str):
    assert stamp_of(line) == expected


async def test_a_replica_that_never_stops_writing_waits_for_whoever_reads(world: LogServer):
    written = 0

    async def endless(response: web.StreamResponse) -> None:
        nonlocal written
        with suppress(ConnectionError):
            while True:
                await response.write(b"x" * 1000 + b"\n")
                written += 1

    world.put(0, endless)
    async with world.session() as session:
        logs = Logs(session, "digits", Wanted(), note=print)
        async with aclosing(logs.follow()) as lines:
            assert (await anext(lines)).text == "x" * 1000
            before = -1
            while written != before or not logs._lines.full():  # until the sockets are full too
                before = written
                await asyncio.sleep(0.3)
    assert written < 20_000  # the kernel's buffers and the queue, of what would be for ever


async def test_a_log_that_a_lost_node_never_ends_is_given_up(
    world: LogServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "LAST_SECONDS", 0.1)
    world.put(0, fall_silent)
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until_shown(1)
        world.put(0, phase="Failed")
        world.set_job("Failed")
        async with asyncio.timeout(10):
            assert await following == 0
    assert world.shown == ["[trainer-0] one"]


async def test_why_nothing_comes_is_told_meanwhile(world: LogServer):
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
    assert world.notes[-1] == "FleetJob digits has no pods; `fleetjob status digits` shows why"


async def test_a_container_that_starts_after_its_sidecar_is_waited_for(world: LogServer):
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


async def test_a_container_that_its_node_knows_later_than_its_status_is_asked_again(world: LogServer):
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
async def test_where_no_log_could_be_read_the_exit_status_says_so(world: LogServer, status: int, phase: str):
    world.put(0, (status, "no log for you"), phase=phase)
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session).follow())
        await world.until(lambda: "the log of trainer-0 cannot be read: no log for you" in world.notes)
        world.put(0, phase="Failed")
        world.set_job("Failed")
        assert await following == 1
    assert world.shown == []


async def test_a_container_that_no_replica_has_is_refused_by_name(world: LogServer):
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


async def test_a_container_that_no_replica_has_is_told_of_while_the_job_runs(world: LogServer):
    world.put(0, at(0, "one"))
    async with world.session() as session:
        following = asyncio.create_task(world.reading(session, container="fleer").follow())
        await world.until(lambda: any("has a container fleer" in note for note in world.notes))
        world.put(0, phase="Succeeded")
        world.set_job("Succeeded")
        assert await following == 1
    assert len([note for note in world.notes if "has a container fleer" in note]) == 1


async def test_what_a_replica_said_last_is_asked_for_again_when_its_connection_breaks(
    world: LogServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)

    async def breaks(response: web.StreamResponse) -> None:
        await response.write(at(0, "one"))
        world.put(0, phase="Failed")
        world.set_job("Failed")
        await cut(response)

    world.put(0, breaks, at(0, "one") + at(1, "Traceback"))
    async with world.session() as session:
        assert await world.reading(session).follow() == 0
    assert world.shown == ["[trainer-0] one", "[trainer-0] Traceback"]
    assert not [note for note in world.notes if "cannot be read" in note]


async def test_a_node_that_does_not_answer_is_why_its_log_is_not_read(
    world: LogServer, monkeypatch: pytest.MonkeyPatch
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


async def test_a_job_that_is_deleted_before_anything_is_read_is_no_success(world: LogServer):
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
        show(LogLine(replica, b"\xff"))
    assert shown[0] == shown[2] != shown[1].replace("trainer-1", "trainer-0")
    assert shown[0].startswith("\x1b[36m[trainer-0]\x1b[0m ")


def test_the_main_container_is_the_one_that_the_pod_was_built_around():
    pod: dict[str, Any] = {
        "metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "train"}},
        "spec": {"containers": [{"name": "proxy"}, {"name": "train"}]},
    }
    assert Wanted().params(pod)["container"] == "train"
    assert Wanted(container="proxy").params(pod)["container"] == "proxy"
