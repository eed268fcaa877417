"""What changes a job on a cluster."""

import pytest

from fleet_operator.cli.change import scale, submit, suspend
from fleet_operator.client.session import MANAGER, ClusterRefusal, Session
from fleet_operator.kubernetes.client import ApiError
from tests.support.fake_api import FakeApi
from tests.support.jobs import manifest

JOB = "/apis/fleetjob.dev/v1alpha1/namespaces/default/fleetjobs/digits"


async def test_the_api_server_is_told_who_has_set_what():
    api, said = FakeApi(), list[str]()
    api.put(JOB, manifest())
    api.put(f"{JOB}/scale", {"spec": {"replicas": 2}})
    session = Session(api, "https://fake", "default")
    await suspend(session, "digits", suspended=True, say=said.append)
    await scale(session, "digits", trainers=3, say=said.append)
    assert api.managers == [MANAGER, MANAGER] == ["fleetjob", "fleetjob"]
    assert len(said) == 2


async def test_a_manifest_whose_namespace_is_left_empty_goes_where_the_session_is():
    api, document, shown = FakeApi(), manifest(), list[str]()
    document["metadata"]["namespace"] = None
    session = Session(api, "https://fake", "default")
    exit_status = await submit(
        session,
        document,
        wait=False,
        timeout_seconds=None,
        as_json=False,
        force=False,
        show=shown.append,
        say=print,
    )
    assert exit_status == 0
    assert shown == ["FleetJob digits created in namespace default"]


@pytest.mark.parametrize(("suspended", "verb"), [(True, "suspend"), (False, "resume")])
async def test_a_job_that_has_finished_is_neither_suspended_nor_resumed(suspended: bool, verb: str):
    api = FakeApi()
    finished = {"type": "Succeeded", "status": "True", "reason": "AllSucceeded", "message": "done"}
    moment = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    document = manifest(suspend=not suspended)
    api.put(JOB, {**document, "status": {"state": "Succeeded", "conditions": [{**finished, **moment}]}})
    session = Session(api, "https://fake", "default")
    with pytest.raises(ClusterRefusal, match=f"has finished: there is nothing to {verb}$"):
        await suspend(session, "digits", suspended=suspended, say=print)


async def test_scaling_that_is_refused_says_what_to_do():
    api = FakeApi()
    api.put(JOB, manifest())
    api.refusals["GET", f"{JOB}/scale"] = ApiError(403, "Forbidden", "no scale for you")
    with pytest.raises(ClusterRefusal, match="you may not do this"):
        await scale(Session(api, "https://fake", "default"), "digits", trainers=3, say=print)
