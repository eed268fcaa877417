from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.kubernetes import events
from fleet_operator.kubernetes.client import ApiError
from fleet_operator.kubernetes.events import MESSAGE_CHARACTERS, EventRecorder, Subject
from fleet_operator.plan.model import Event
from tests.support.fake_api import FakeApi

if TYPE_CHECKING:
    from collections.abc import Mapping

JOB = Subject("ns", "digits", "uid-1")
EVENTS = "/api/v1/namespaces/ns/events"
FAILED = Event("Warning", "ReplicaFailed", "digits-trainer-0 failed with exit code 1")


async def test_an_event_names_the_job_and_who_tells():
    api = FakeApi()
    await EventRecorder(api).record(JOB, FAILED)
    (posted,) = api.objects.values()
    assert posted["involvedObject"] == {
        "apiVersion": "fleetjob.dev/v1alpha1",
        "kind": "FleetJob",
        "namespace": "ns",
        "name": "digits",
        "uid": "uid-1",
    }
    assert (posted["type"], posted["reason"], posted["message"]) == (
        FAILED.type,
        FAILED.reason,
        FAILED.message,
    )
    assert posted["source"] == {"component": "fleet-operator"}


async def test_an_event_that_repeats_is_counted():
    api = FakeApi()
    recorder = EventRecorder(api)
    for _ in range(3):
        await recorder.record(JOB, FAILED)
    await recorder.record(JOB, Event("Normal", "Started", "all replicas run"))
    assert [(each["reason"], each["count"]) for each in api.objects.values()] == [
        ("ReplicaFailed", 3),
        ("Started", 1),
    ]


async def test_an_event_that_the_server_has_dropped_is_posted_anew():
    api = FakeApi()
    recorder = EventRecorder(api)
    await recorder.record(JOB, FAILED)
    api.objects.clear()
    await recorder.record(JOB, FAILED)
    assert [each["count"] for each in api.objects.values()] == [1]


async def test_a_failure_to_tell_is_not_raised_and_one_for_good_is_not_tried_again():
    api = FakeApi()
    api.refusals["POST", EVENTS] = ApiError(403, "Forbidden", "namespace is being terminated")
    recorder = EventRecorder(api)
    await recorder.record(JOB, FAILED)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await recorder.record(JOB, FAILED)
    assert len(api.objects) == 1


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for between tries."""
    monkeypatch.setattr(events, "AGAIN_SECONDS", (0.0,) * 3)


async def until_quiet() -> None:
    """Wait until nothing is tried again any more."""
    async with asyncio.timeout(5):
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


@pytest.mark.usefixtures("at_once")
async def test_an_event_that_a_busy_server_refuses_is_told_later():
    api = FakeApi()
    api.refusals["POST", EVENTS] = ApiError(503, "ServiceUnavailable", "busy")
    await EventRecorder(api).record(JOB, FAILED)
    assert not api.objects
    await until_quiet()
    assert [each["reason"] for each in api.objects.values()] == ["ReplicaFailed"]


@pytest.mark.usefixtures("at_once")
async def test_an_event_whose_answer_was_lost_is_told_once():
    api = FakeApi()
    create = api.create

    async def lose_the_answer(path: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        api.create = create  # type: ignore[method-assign]
        await create(path, manifest)
        raise ApiError(0, "NoAnswer", "connection reset")

    api.create = lose_the_answer  # type: ignore[method-assign, assignment]
    recorder = EventRecorder(api)
    await recorder.record(JOB, FAILED)
    await until_quiet()
    await recorder.record(JOB, FAILED)
    assert [each["count"] for each in api.objects.values()] == [2]


@pytest.mark.usefixtures("at_once")
async def test_an_event_that_is_refused_again_and_again_is_given_up():
    api = FakeApi()
    tries = []

    async def refuse(path: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        tries.append(manifest["metadata"]["name"])
        raise ApiError(500, "InternalError", "no")

    api.create = refuse  # type: ignore[method-assign, assignment]
    await EventRecorder(api).record(JOB, FAILED)
    await until_quiet()
    assert tries == tries[:1] * (1 + len(events.AGAIN_SECONDS))


async def test_a_server_that_asks_to_be_left_alone_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    api = FakeApi()
    api.refusals["POST", EVENTS] = ApiError(429, "TooManyRequests", "busy", retry_after_seconds=7)
    await EventRecorder(api).record(JOB, FAILED)
    await until_quiet()
    assert slept == [7]
    assert len(api.objects) == 1


async def test_nothing_is_tried_again_after_the_end():
    api = FakeApi()
    api.refusals["POST", EVENTS] = ApiError(429, "TooManyRequests", "busy", retry_after_seconds=60)
    recorder = EventRecorder(api)
    await recorder.record(JOB, FAILED)
    await recorder.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not api.objects


async def test_a_long_message_is_cut_to_what_the_server_takes():
    api = FakeApi()
    await EventRecorder(api).record(JOB, Event("Warning", "Long", "x" * 5000))
    (posted,) = api.objects.values()
    assert len(posted["message"]) == MESSAGE_CHARACTERS
