"""The operator's cluster view of an in-memory API server that has one job."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.build import ClusterHosts, Start, build_pod
from fleet_operator.cluster import Key
from fleet_operator.kubernetes.cluster import KubernetesCluster
from fleet_operator.kubernetes.events import EventRecorder
from fleet_operator.kubernetes.informer_cache import ClusterView
from fleet_operator.plan.model import Attempt, CreatePod
from tests.support.clusters import FakeClock
from tests.support.fake_api import FakeApi
from tests.support.jobs import manifest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fleet_operator.api import FleetJob
    from fleet_operator.plan.model import Observed

KEY = Key("default", "digits")
JOBS = "/apis/fleetjob.dev/v1alpha1/namespaces/default/fleetjobs"
JOB = f"{JOBS}/digits"
PODS = "/api/v1/namespaces/default/pods"
POD = f"{PODS}/digits-trainer-0"
SERVICES = "/api/v1/namespaces/default/services"
SERVICE = f"{SERVICES}/digits"


class SeenCluster:
    """The operator's view of an in-memory API server, with a clock that tests advance."""

    def __init__(self, api: FakeApi, features: tuple[str, ...] = ()) -> None:
        self.api = api
        self.clock = FakeClock()
        self.told: list[Key] = []
        self.deleted: list[Key] = []
        self.changed = asyncio.Event()
        events = EventRecorder(api)
        self.view = ClusterView(api, events, features=features, on_deleted=self.deleted.append)
        self.cluster = KubernetesCluster(api, self.view, events, monotonic=self.clock.monotonic)
        self.view.subscribe(self._notice)

    def _notice(self, key: Key) -> None:
        self.told.append(key)
        self.changed.set()

    async def until(self, probe: Callable[[], object]) -> None:
        """Wait until a condition is true, for at most ten seconds."""
        async with asyncio.timeout(10):
            while not probe():
                self.changed.clear()
                await self.changed.wait()

    @property
    def job(self) -> FleetJob:
        """The job in the operator's view."""
        job = self.cluster.job(KEY)
        assert job is not None
        return job

    def observe(self) -> Observed:
        """Return the objects of the job in the operator's view."""
        observed = self.cluster.observe(self.job)
        assert observed is not None
        return observed

    def pod(self, key: str | None = None, **metadata: Any) -> CreatePod:
        """Return the action that creates trainer 0's pod, optionally with a key and other metadata."""
        built = build_pod(self.job, Role.TRAINER, 0, Attempt(), ClusterHosts(self.job), Start(key=key))
        return CreatePod(lambda: {**built, "metadata": {**built["metadata"], **metadata}})

    async def served(self) -> None:
        """Wait until the objects that belong to jobs have been listed."""
        await self.until(lambda: len([*self.view.extras(KEY.namespace)]) == 2)

    def taken(self, kind: str = "ADDED") -> None:
        """Deliver the job to the operator's view, as kopf would."""
        self.view.jobs.take(kind, self.api.objects[JOB])

    def events(self) -> list[dict[str, Any]]:
        """Return the Events that have been posted."""
        return [each for path, each in self.api.objects.items() if "/events/" in path]


@asynccontextmanager
async def started(api: FakeApi) -> AsyncIterator[SeenCluster]:
    """Yield a started cluster view without optional features, and close it afterwards."""
    world = SeenCluster(api)
    await world.view.start()
    try:
        yield world
    finally:
        await world.view.close()


def api_with_a_job() -> FakeApi:
    """Return an in-memory API server that contains the job."""
    api = FakeApi()
    api.put(JOB, {**manifest(), "metadata": {"generation": 1}})
    return api
