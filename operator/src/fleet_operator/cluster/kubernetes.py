"""A cluster of Kubernetes: what is there is kept in memory, what is to be done goes to the API server.

FleetJobs are watched by kopf, which hands its events in (`take_job`); pods and Services are watched here.
Answers to own writes go into the same stores, so that the next pass over a job sees them before the watch
brings them. Only a deletion can leave doubt (the server may answer with the pod as it was): until it is seen,
`observe` says that it does not know.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fleet_operator.api import FleetJob, FleetJobStatus, parse_job
from fleet_operator.api.names import (
    API_VERSION,
    KIND,
    LABEL_JOB_NAME,
    LABEL_MANAGED_BY,
    MANAGED_BY,
    PLURAL,
    service_name,
)
from fleet_operator.build import ClusterHosts
from fleet_operator.cluster.client import ApiError
from fleet_operator.cluster.events import EventRecorder, Subject
from fleet_operator.cluster.interface import ConflictError, Key
from fleet_operator.cluster.observe import observe_pod
from fleet_operator.cluster.store import Entry, Store, key_of, owner_of, version_of
from fleet_operator.cluster.watch import ExpiredError, ListWatch, list_pages
from fleet_operator.errors import InvalidJob
from fleet_operator.plan.model import (
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    DeleteService,
    Event,
    Observed,
    ObservedPod,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fleet_operator.build import Hosts
    from fleet_operator.cluster.client import ApiClient
    from fleet_operator.plan.model import Action

logger = logging.getLogger(__name__)

SYNC_SECONDS = 120.0
"""How long the first lists may take before the operator gives up, to be started again."""

RELIST_SECONDS = 600.0
"""How often FleetJobs are listed again: kopf reports no deletion that happened while it was not watching."""

FOREIGN_SECONDS = 10.0
"""How often an object of another owner that has one of our names is looked at again."""

UNSEEN_SECONDS = 5.0
"""How long a deletion may go unseen before the pod is believed to be there still."""

SELECTOR = f"{LABEL_MANAGED_BY}={MANAGED_BY},{LABEL_JOB_NAME}"


class NotSyncedError(Exception):
    """The first lists did not arrive in time; the message says which."""


@dataclass(frozen=True, slots=True)
class _Rejection:
    generation: int
    message: str


class KubernetesCluster:
    """The cluster behind one API server.

    Parameters
    ----------
    client : ApiClient
        Started by the caller, and closed by it after `close`.
    namespaces : tuple of str
        What is looked at; every namespace if it is empty.
    on_deleted : callable, optional
        Told of each FleetJob that is gone.
    monotonic : callable
        Seconds that only grow.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        namespaces: tuple[str, ...] = (),
        on_deleted: Callable[[Key], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._on_deleted = on_deleted
        self._scopes: tuple[str | None, ...] = namespaces or (None,)
        self._monotonic = monotonic
        self._listeners: list[Callable[[Key], None]] = []
        self._jobs: Store[FleetJob] = Store()
        self._pods: Store[ObservedPod] = Store()
        self._services: Store[None] = Store()
        self._rejections: dict[str, _Rejection] = {}
        self._foreign: dict[Key, dict[str, str]] = {}  # job: {"Kind/name": path}
        self._leaving: dict[str, float] = {}  # uids of pods we deleted, and until when we wait to see it
        self._invalid: dict[str, int] = {}  # uids of jobs that do not parse, and their generation
        self._events = EventRecorder(client)
        self._relist = asyncio.Event()
        self._watches = [*self._watch_all("pods", self._pods), *self._watch_all("services", self._services)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs_listed = asyncio.Event()

    # What the engine reads: from memory.

    def job(self, key: Key) -> FleetJob | None:
        """Return the newest known version of a job, or None if it is gone."""
        entry = self._jobs.get(key)
        return None if entry is None else entry.value

    def jobs(self) -> Iterator[FleetJob]:
        """Return every known job."""
        for key in self._jobs.keys():  # noqa: SIM118 not a mapping
            if (job := self.job(key)) is not None:
                yield job

    def observe(self, job: FleetJob) -> Observed | None:
        """Return what is there for `job`, or None while a deletion of our own has not been seen yet."""
        key, uid = _key(job), job.metadata.uid
        pods, foreign = [], list(self._foreign.get(key, ()))
        for entry in self._pods.of_job(key):
            pod, owned = entry.value, entry.owner is not None and entry.owner.uid == uid
            if owned and pod.deleted_at is None and self._is_leaving(pod.uid):
                return None
            pods.append(replace(pod, owned=owned))
            if not owned:
                foreign.append(f"Pod/{pod.name}")
        service = self._services.get(Key(key.namespace, service_name(key.name)))
        ours = service is not None and service.owner is not None and service.owner.uid == uid
        if service is not None and not ours:
            foreign.append(f"Service/{service.key.name}")
        rejection = self._rejections.get(uid)
        rejected = rejection is not None and rejection.generation == job.metadata.generation
        return Observed(
            pods=tuple(pods),
            service=ours,
            foreign=tuple(dict.fromkeys(foreign)),
            rejected=rejection.message if rejected and rejection is not None else None,
        )

    def hosts(self, job: FleetJob) -> Hosts:
        """Return the DNS names of the job's replicas."""
        return ClusterHosts(job)

    # What the engine does: on the API server.

    async def write_status(self, job: FleetJob, status: FleetJobStatus) -> FleetJob:
        """Replace the job's status; ConflictError if `job` is not its newest version."""
        metadata = job.metadata
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                "name": metadata.name,
                "namespace": metadata.namespace,
                "uid": metadata.uid,
                "resourceVersion": metadata.resource_version,
            },
            "status": status.to_manifest(),
        }
        try:
            answer = await self._client.replace(f"{_job_path(job)}/status", body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            await self._refresh(job)
            raise ConflictError(str(error)) from error
        self._put_job(answer)
        return parse_job(answer)

    async def apply(self, job: FleetJob, action: Action) -> None:
        """Carry one action out. An action that has been carried out already is no error."""
        match action:
            case CreateService(manifest):
                await self._create(job, "services", self._services, manifest)
            case CreatePod(manifest):
                await self._create(job, "pods", self._pods, manifest)
            case DeletePod():
                await self._delete_pod(job, action)
            case DeleteService(name):
                await self._delete_service(job, name)
            case DeleteJob(uid):
                await self._delete(_job_path(job), {"uid": uid})

    async def record(self, job: FleetJob, event: Event) -> None:
        """Tell people. A failure to tell is logged, never raised."""
        await self._events.record(Subject(*_key(job), job.metadata.uid), event)

    async def _create(
        self, job: FleetJob, plural: str, store: Store[Any], manifest: Mapping[str, Any]
    ) -> None:
        collection = _collection(plural, job.metadata.namespace)
        try:
            answer = await self._client.create(collection, manifest)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                await self._meet(job, plural, store, manifest["metadata"]["name"])
                return
            if plural == "pods" and error.status in (400, 422):
                # The pod as written can never be: the job's mistake, and only another spec mends it.
                self._rejections[job.metadata.uid] = _Rejection(job.metadata.generation or 0, str(error))
                self._notify(_key(job))
                return
            raise
        self._put(plural, store, answer)

    async def _meet(self, job: FleetJob, plural: str, store: Store[Any], name: str) -> None:
        """Find out who has a name that we wanted: we ourselves, unseen as yet, or somebody else."""
        path = f"{_collection(plural, job.metadata.namespace)}/{name}"
        shown = f"{_KINDS[plural]}/{name}"
        known = self._foreign.get(_key(job), {})
        try:
            found = await self._client.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            known.pop(shown, None)
        else:
            entry = self._reduce(plural, found)
            if entry is not None and entry.job == _key(job):
                store.put(entry)  # it is watched, so it will be seen to go, whoever owns it
                known.pop(shown, None)
            elif shown in known:
                return
            else:
                self._foreign.setdefault(_key(job), {})[shown] = path
        self._notify(_key(job))

    async def _delete_pod(self, job: FleetJob, action: DeletePod) -> None:
        options: dict[str, Any] = {"preconditions": {"uid": action.uid}}
        if action.grace_period_seconds is not None:
            options["gracePeriodSeconds"] = action.grace_period_seconds
        path = f"{_collection('pods', job.metadata.namespace)}/{action.name}"
        now = self._monotonic()
        self._leaving = {uid: until for uid, until in self._leaving.items() if until > now}
        self._leaving[action.uid] = now + UNSEEN_SECONDS
        try:
            answer = await self._client.delete(path, options)
        except ApiError as error:
            del self._leaving[action.uid]
            if error.status not in (404, 409):  # 409: the name has another pod by now
                raise
        else:
            if answer.get("kind") == "Pod" and answer["metadata"].get("deletionTimestamp"):
                self._put("pods", self._pods, answer)

    async def _delete_service(self, job: FleetJob, name: str) -> None:
        entry = self._services.get(Key(job.metadata.namespace, name))
        if entry is not None and entry.owner is not None and entry.owner.uid == job.metadata.uid:
            await self._delete(
                f"{_collection('services', job.metadata.namespace)}/{name}", {"uid": entry.uid}
            )

    async def _delete(self, path: str, preconditions: Mapping[str, str]) -> None:
        options = {"preconditions": preconditions, "propagationPolicy": "Background"}
        try:
            await self._client.delete(path, options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def _is_leaving(self, uid: str) -> bool:
        return self._leaving.get(uid, 0.0) > self._monotonic()

    # How the stores are kept.

    def subscribe(self, listener: Callable[[Key], None]) -> None:
        """Have `listener` told of each job for which something has changed."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Begin to watch; return when everything that is there has been seen.

        Raises
        ------
        NotSyncedError
            It was not seen within `SYNC_SECONDS`.
        """
        self._spawn(self._list_jobs_forever(), "list FleetJobs")
        self._spawn(self._check_foreign_forever(), "look at foreign objects")
        for watch in self._watches:
            self._spawn(watch.run(), f"watch {watch.path}")
        try:
            async with asyncio.timeout(SYNC_SECONDS):
                await self._jobs_listed.wait()
                for watch in self._watches:
                    await watch.synced.wait()
        except TimeoutError:
            missing = [watch.path for watch in self._watches if not watch.synced.is_set()]
            missing += [] if self._jobs_listed.is_set() else [f"{PLURAL} (is the CRD installed?)"]
            raise NotSyncedError(
                f"not listed within {SYNC_SECONDS:g} s: {', '.join(missing)}; the log says why"
            ) from None

    async def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    @property
    def synced(self) -> bool:
        """Whether everything that is there has been seen."""
        return self._jobs_listed.is_set() and all(watch.synced.is_set() for watch in self._watches)

    def take_job(self, kind: str | None, manifest: Mapping[str, Any]) -> None:
        """Take one event of a watch on FleetJobs: ``DELETED``, or anything else for what is there."""
        if kind == "DELETED":
            key, uid = key_of(manifest), manifest["metadata"]["uid"]
            self._forget_job(key, uid, version_of(manifest))
        else:
            self._put_job(manifest)

    def _put_job(self, manifest: Mapping[str, Any]) -> None:
        entry = self._reduce_job(manifest)
        if entry is not None and self._jobs.put(entry):
            self._notify(entry.key)

    def _reduce_job(self, manifest: Mapping[str, Any]) -> Entry[FleetJob] | None:
        key, uid = key_of(manifest), manifest["metadata"]["uid"]
        try:
            job = parse_job(manifest)
        except InvalidJob as error:
            self._tell_invalid(manifest, error)
            return None
        self._invalid.pop(uid, None)
        return Entry(key, uid, version_of(manifest), key, owner_of(manifest), job)

    def _tell_invalid(self, manifest: Mapping[str, Any], error: InvalidJob) -> None:
        """Say once for each generation that a job cannot be understood. It is left as it is."""
        metadata = manifest["metadata"]
        uid, generation = metadata["uid"], metadata.get("generation", 0)
        if self._invalid.get(uid) == generation:
            return
        self._invalid[uid] = generation
        key = key_of(manifest)
        logger.error("%s", error, extra={"job": str(key)})
        event = Event("Warning", "InvalidSpec", f"{error}\nIs the CRD older or newer than the operator?")
        self._spawn(self._events.record(Subject(*key, uid), event), "record an event")

    def _forget_job(self, key: Key, uid: str, version: int) -> None:
        self._rejections.pop(uid, None)
        self._invalid.pop(uid, None)
        if self._jobs.remove(key, uid, version) is not None:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        self._foreign.pop(key, None)
        if self._on_deleted is not None:
            self._on_deleted(key)
        self._notify(key)

    async def _refresh(self, job: FleetJob) -> None:
        """Read a job anew that turned out to be older than we thought, or gone."""
        try:
            self._put_job(await self._client.get(_job_path(job)))
        except ApiError as error:
            if error.status != 404:
                raise
            self._forget_job(_key(job), job.metadata.uid, int(job.metadata.resource_version or 0))

    def _put(self, plural: str, store: Store[Any], manifest: Mapping[str, Any]) -> None:
        entry = self._reduce(plural, manifest)
        if entry is not None and store.put(entry):
            self._notify(entry.job)

    def _reduce(self, plural: str, manifest: Mapping[str, Any]) -> Entry[Any] | None:
        metadata = manifest["metadata"]
        labels = metadata.get("labels") or {}
        job = labels.get(LABEL_JOB_NAME)
        if not job or labels.get(LABEL_MANAGED_BY) != MANAGED_BY:
            return None
        value = observe_pod(manifest) if plural == "pods" else None
        if plural == "pods" and value is None:
            return None
        key = key_of(manifest)
        owner = owner_of(manifest)
        return Entry(key, metadata["uid"], version_of(manifest), Key(key.namespace, job), owner, value)

    def _watch_all(self, plural: str, store: Store[Any]) -> Iterator[ListWatch[Any]]:
        for namespace in self._scopes:
            yield ListWatch(
                self._client,
                _collection(plural, namespace),
                store=store,
                reduce=lambda manifest: self._reduce(plural, manifest),
                on_change=self._notify,
                on_relist=self._relist.set,
                selector=SELECTOR,
                namespace=namespace,
            )

    async def _list_jobs_forever(self) -> None:
        """List FleetJobs at the start, whenever a watch had to list again, and at times."""
        while True:
            self._relist.clear()
            try:
                for namespace in self._scopes:
                    await self._list_jobs(namespace)
                self._jobs_listed.set()
                wait = RELIST_SECONDS
            except (ApiError, ExpiredError) as error:
                logger.warning("listing FleetJobs: %s", error)
                wait = 1.0
            try:
                async with asyncio.timeout(wait):
                    await self._relist.wait()
            except TimeoutError:
                continue

    async def _list_jobs(self, namespace: str | None) -> None:
        entries: list[Entry[FleetJob]] = []
        version = 0
        async for page in list_pages(self._client, _collection(PLURAL, namespace)):
            entries += [entry for item in page["items"] if (entry := self._reduce_job(item)) is not None]
            version = version_of(page)
        for key in self._jobs.replace(entries, version, namespace):
            if key in self._jobs:
                self._notify(key)
            else:
                self._forget(key)

    async def _check_foreign_forever(self) -> None:
        while True:
            await asyncio.sleep(FOREIGN_SECONDS)
            for key in list(self._foreign):
                job = self.job(key)
                if job is None:
                    self._foreign.pop(key, None)
                    continue
                try:
                    for shown in list(self._foreign[key]):
                        await self._meet(job, *self._place(shown))
                except ApiError as error:
                    logger.warning("looking at a foreign object: %s", error, extra={"job": str(key)})

    def _place(self, shown: str) -> tuple[str, Store[Any], str]:
        kind, _, name = shown.partition("/")
        return ("pods", self._pods, name) if kind == "Pod" else ("services", self._services, name)

    def _notify(self, key: Key) -> None:
        for listener in self._listeners:
            listener(key)

    def _spawn(self, coroutine: Any, name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_KINDS = {"pods": "Pod", "services": "Service"}


def _collection(plural: str, namespace: str | None) -> str:
    base = f"/apis/{API_VERSION}" if plural == PLURAL else "/api/v1"
    return f"{base}/{plural}" if namespace is None else f"{base}/namespaces/{namespace}/{plural}"


def _key(job: FleetJob) -> Key:
    return Key(job.metadata.namespace, job.metadata.name)


def _job_path(job: FleetJob) -> str:
    return f"{_collection(PLURAL, job.metadata.namespace)}/{job.metadata.name}"
