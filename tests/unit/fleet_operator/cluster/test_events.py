from __future__ import annotations

from fleet_operator.cluster.client import ApiError
from fleet_operator.cluster.events import MESSAGE_CHARACTERS, EventRecorder, Subject
from fleet_operator.plan.model import Event
from tests.support.fake_api import FakeApi

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


async def test_a_failure_to_tell_is_not_raised():
    api = FakeApi()
    api.refusals["POST", EVENTS] = ApiError(403, "Forbidden", "namespace is being terminated")
    recorder = EventRecorder(api)
    await recorder.record(JOB, FAILED)
    await recorder.record(JOB, FAILED)
    assert len(api.objects) == 1


async def test_a_long_message_is_cut_to_what_the_server_takes():
    api = FakeApi()
    await EventRecorder(api).record(JOB, Event("Warning", "Long", "x" * 5000))
    (posted,) = api.objects.values()
    assert len(posted["message"]) == MESSAGE_CHARACTERS
