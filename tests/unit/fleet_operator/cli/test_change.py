"""What changes a job on a cluster."""

from fleet_operator.cli.change import scale, suspend
from fleet_operator.cli.session import MANAGER, Session
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
