"""What is known of a Kubernetes cluster: every FleetJob, and all that has the label of one.

FleetJobs are watched by kopf, which hands its events in (`take_job`); pods, Services and what else jobs may
have (`extras`) are watched here. Because kopf does not report what was deleted while it was not watching,
FleetJobs are listed again whenever kopf (`list_jobs_again`) or a watch had to list again, and at times.
Answers to own writes are put in too, so that the next pass over a job sees them before the watch brings them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from fleet_operator.api import FleetJob, read_job
from fleet_operator.api.names import API_VERSION, LABEL_JOB_NAME, LABEL_MANAGED_BY, MANAGED_BY, PLURAL
from fleet_operator.cluster.client import ApiError
from fleet_operator.cluster.events import Subject
from fleet_operator.cluster.interface import Key
from fleet_operator.cluster.observe import observe_object, observe_pod
from fleet_operator.cluster.resources import FEATURES
from fleet_operator.cluster.scope import Scope
from fleet_operator.cluster.store import Entry, Store, key_of, owner_of, version_of
from fleet_operator.cluster.watch import ExpiredError, ListWatch, list_pages
from fleet_operator.errors import InvalidJob, OperatorError
from fleet_operator.plan.model import Event, ObservedObject, ObservedPod
from fleet_operator.plan.pods import has_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fleet_operator.cluster.client import ApiClient
    from fleet_operator.cluster.events import EventRecorder
    from fleet_operator.cluster.resources import Resource

logger = logging.getLogger(__name__)

SYNC_SECONDS = 120.0
"""How long the first lists may take before the operator gives up, to be started again."""

RELIST_SECONDS = 600.0
"""How often FleetJobs are listed again in any case."""

AGAIN_SECONDS = 30.0
"""How long to wait at most after a list that was refused, unless the API server asks for more."""

FOREIGN_SECONDS = 10.0
"""How often an object of another owner that has one of our names is looked at again."""

SELECTOR = f"{LABEL_MANAGED_BY}={MANAGED_BY},{LABEL_JOB_NAME}"

PODS, SERVICES = "pods", "services"
KINDS = {PODS: "Pod", SERVICES: "Service"} | {each.key: each.kind for each in FEATURES.values()}
_RESOURCES = {each.key: each for each in FEATURES.values()}


class NotSyncedError(OperatorError):
    """The first lists did not arrive in time; the message says which."""


class ClusterView:
    """Keeps what is known, and tells listeners for which jobs it has changed.

    Parameters
    ----------
    client : ApiClient
        The API server.
    events : EventRecorder
        Where people are told of FleetJobs that cannot be understood.
    namespaces : tuple of str
        What is looked at; every namespace if it is empty.
    features : tuple of str
        Which kinds of objects jobs may have beside pods and Services, of `FEATURES`.
    on_deleted : callable, optional
        Told of each FleetJob that is gone.
    """

    def __init__(
        self,
        client: ApiClient,
        events: EventRecorder,
        *,
        namespaces: tuple[str, ...] = (),
        features: tuple[str, ...] = (),
        on_deleted: Callable[[Key], None] | None = None,
    ) -> None:
        self._client = client
        self._events = events
        self._on_deleted = on_deleted
        self._listeners: list[Callable[[Key], None]] = []
        self._jobs: Store[FleetJob] = Store()
        self.pods: Store[ObservedPod] = Store(is_final=has_ended)
        self.services: Store[None] = Store()
        self._extras: dict[str, Store[ObservedObject]] = {FEATURES[name].key: Store() for name in features}
        self._foreign: dict[Key, dict[str, tuple[str, str]]] = {}  # job: {"Kind/name": (resource, name)}
        self._invalid: dict[str, int] = {}  # uids of jobs that cannot be understood, and their generation
        self._relist, self._serves, self._jobs_watched = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._scopes = {namespace: self._scope(namespace) for namespace in namespaces or (None,)}
        self._keepers: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()

    def subscribe(self, listener: Callable[[Key], None]) -> None:
        """Have `listener` told of each job for which something has changed."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Begin to watch; return when everything that is there has been seen.

        A namespace of which something was refused, because it is gone for example, is not waited for where
        there is another one to serve. It is served as soon as it has been seen.

        Raises
        ------
        NotSyncedError
            It was not seen within `SYNC_SECONDS`.
        """
        scopes = self._scopes.values()
        self._keepers = [
            asyncio.create_task(self._list_jobs_forever(), name="list FleetJobs"),
            asyncio.create_task(self._check_foreign_forever(), name="look at foreign objects"),
            *(
                asyncio.create_task(self._serve_when_seen(each), name="wait for a namespace")
                for each in scopes
            ),
            *(
                asyncio.create_task(self._notify_when_served(each, watch), name=f"wait for {watch.path}")
                for each in scopes
                for watch in each.extras.values()
            ),
            *(
                asyncio.create_task(watch.run(), name=f"watch {watch.path}")
                for each in scopes
                for watch in each.watches()
            ),
        ]
        try:
            async with asyncio.timeout(SYNC_SECONDS):
                for each in scopes:
                    await each.until_answered()
                await self._serves.wait()
        except TimeoutError:
            missing = [what for each in scopes for what in each.missing()]
            raise NotSyncedError(
                f"not listed within {SYNC_SECONDS:g} s: {', '.join(missing)}; the log says why"
            ) from None

    async def _serve_when_seen(self, scope: Scope) -> None:
        """Look at every job of a namespace once what they own has been seen: it may come late."""
        await scope.until_seen()
        self._serves.set()
        self._notify_all(scope)
        await asyncio.Event().wait()

    async def _notify_when_served(self, scope: Scope, watch: ListWatch[Any]) -> None:
        """Look at every job again once a kind of object can be seen: its definition may come late."""
        await watch.synced.wait()
        self._notify_all(scope)
        await asyncio.Event().wait()

    def _notify_all(self, scope: Scope) -> None:
        for entry in self._jobs:
            if scope.namespace in (None, entry.key.namespace):
                self.notify(entry.key)

    async def close(self) -> None:
        """Stop watching."""
        tasks = [*self._keepers, *self._telling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._keepers.clear()

    @property
    def synced(self) -> bool:
        """Whether everything that is there has been seen, as far as it was not refused."""
        return self._serves.is_set() and all(each.answered for each in self._scopes.values())

    def ended(self) -> list[str]:
        """Return what has ended though it should go on for ever: without it, changes go unseen."""
        ended = [task for task in self._keepers if task.done() and not task.cancelled()]
        return [f"{task.get_name()} ({task.exception()})" for task in ended]

    def failing(self) -> Iterator[tuple[str, str | None, float]]:
        """Return what is followed, where, and for how many seconds that has failed; 0 while it goes well.

        Where is a namespace, or None for all of them.
        """
        for namespace, scope in self._scopes.items():
            yield from ((resource, namespace, seconds) for resource, seconds in scope.failing())

    # FleetJobs.

    def job(self, key: Key) -> FleetJob | None:
        """Return the newest known version of a job, or None if it is gone."""
        entry = self._jobs.get(key)
        return None if entry is None else entry.value

    def jobs(self) -> Iterator[FleetJob]:
        """Return every known job."""
        return (entry.value for entry in self._jobs)

    def take_job(self, kind: str | None, manifest: Mapping[str, Any]) -> None:
        """Take one event of a watch on FleetJobs: ``DELETED``, or anything else for what is there."""
        if kind == "DELETED":
            self._drop_job(key_of(manifest), manifest["metadata"]["uid"], version_of(manifest))
        else:
            self.put_job(manifest)

    def put_job(self, manifest: Mapping[str, Any]) -> FleetJob | None:
        """Take a job as it is now; return it, or None if it cannot be understood or a newer one is known."""
        entry = self._reduce_job(manifest)
        if entry is None:
            return None
        if self._jobs.put(entry):
            self.notify(entry.key)
        return entry.value if entry.version == version_of(manifest) else None

    def put_own_status(self, manifest: Mapping[str, Any]) -> FleetJob | None:
        """Take the answer to a write of a status; return as `put_job` does.

        Nobody is told: a plan that is made again from the status that it wrote is the same plan.
        """
        entry = self._reduce_job(manifest)
        if entry is None:
            return None
        self._jobs.put(entry)
        return entry.value if entry.version == version_of(manifest) else None

    def list_jobs_again(self) -> None:
        """Find out soon which FleetJobs there still are: whoever watches them may have missed deletions."""
        self._relist.set()

    def note_job_watch(self, namespace: str | None, went_well: bool) -> None:
        """Note whether whoever watches FleetJobs could, at a namespace or at all of them."""
        self._scopes[namespace].jobs_were_watched(went_well=went_well)
        if went_well:
            self._jobs_watched.set()

    async def until_jobs_are_watched(self) -> None:
        """Wait until FleetJobs are watched somewhere."""
        await self._jobs_watched.wait()

    async def refresh_job(self, job: FleetJob) -> None:
        """Read a job anew that turned out to be older than we thought, or gone."""
        metadata = job.metadata
        try:
            self.put_job(await self._client.get(f"{collection(PLURAL, metadata.namespace)}/{metadata.name}"))
        except ApiError as error:
            if error.status != 404:
                raise
            self._drop_job(job_key(job), metadata.uid or "", int(metadata.resource_version or 0))

    # What jobs own.

    def put(self, resource: str, manifest: Mapping[str, Any]) -> None:
        """Take what a job owns, a pod or anything else, as it is now."""
        entry = self._reduce(resource, manifest)
        if entry is not None and self._store(resource).put(entry):
            self.notify(entry.job)

    def shows_what_jobs_own(self, namespace: str) -> bool:
        """Whether the pods and Services of a namespace, and what else its jobs may have, have been seen."""
        return self._scope_of(namespace).shows_what_jobs_own

    def extras(self, namespace: str) -> Iterator[tuple[Resource, Store[ObservedObject]]]:
        """Return what jobs of a namespace may have beside pods and Services, as far as it has been seen."""
        for key, watch in self._scope_of(namespace).extras.items():
            if watch.synced.is_set():
                yield _RESOURCES[key], self._extras[key]

    def foreign(self, key: Key) -> tuple[str, ...]:
        """Return the objects without our labels that have names of a job's, as ``Kind/name``."""
        return tuple(self._foreign.get(key, ()))

    async def meet(self, key: Key, resource: str, name: str) -> None:
        """Find out who has a name that a job wants: we ourselves, unseen as yet, or somebody else."""
        shown = f"{KINDS[resource]}/{name}"
        found: Mapping[str, Any] | None = None
        try:
            found = await self._client.get(f"{collection(resource, key.namespace)}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
        if key not in self._jobs:
            return  # it was deleted meanwhile: nobody would forget what is noted of it now
        known = self._foreign.get(key, {})
        entry = None if found is None else self._reduce(resource, found)
        if entry is not None and entry.job == key:
            self._store(resource).put(entry)  # it is watched, so it will be seen to go, whoever owns it
            known.pop(shown, None)
        elif found is None:
            known.pop(shown, None)
        elif shown in known:
            return
        else:
            self._foreign.setdefault(key, {})[shown] = (resource, name)
        self.notify(key)

    def notify(self, key: Key) -> None:
        """Tell everyone that something of a job has changed."""
        for listener in self._listeners:
            listener(key)

    # How it is kept.

    def _store(self, resource: str) -> Store[Any]:
        if resource in self._extras:
            return self._extras[resource]
        return self.pods if resource == PODS else self.services

    def _scope(self, namespace: str | None) -> Scope:
        return Scope(
            namespace,
            {resource: self._watch(resource, namespace) for resource in (PODS, SERVICES)},
            {resource: self._watch(resource, namespace) for resource in self._extras},
        )

    def _scope_of(self, namespace: str) -> Scope:
        return self._scopes[namespace if namespace in self._scopes else None]

    def _watch(self, resource: str, namespace: str | None) -> ListWatch[Any]:
        return ListWatch(
            self._client,
            collection(resource, namespace),
            store=self._store(resource),
            reduce=lambda manifest: self._reduce(resource, manifest),
            on_change=self.notify,
            on_relist=self.list_jobs_again,
            selector=SELECTOR,
            namespace=namespace,
        )

    def _reduce(self, resource: str, manifest: Mapping[str, Any]) -> Entry[Any] | None:
        """Return what is kept of what a job owns; None if its labels do not make it a job's."""
        labels = manifest["metadata"].get("labels") or {}
        job = labels.get(LABEL_JOB_NAME)
        value: ObservedPod | ObservedObject | None = None
        if resource == PODS:
            value = observe_pod(manifest)
        elif resource in self._extras:
            value = observe_object(KINDS[resource], manifest)
        if not job or labels.get(LABEL_MANAGED_BY) != MANAGED_BY or (resource == PODS and value is None):
            return None
        key, uid = key_of(manifest), manifest["metadata"]["uid"]
        return Entry(key, uid, version_of(manifest), Key(key.namespace, job), owner_of(manifest), value)

    def _reduce_job(self, manifest: Mapping[str, Any]) -> Entry[FleetJob] | None:
        key, uid = key_of(manifest), manifest["metadata"]["uid"]
        known = self._jobs.get(key)
        if known is not None and known.uid == uid and known.version >= version_of(manifest):
            return known  # spares what most of a list's time goes to: the parsing
        try:
            job = read_job(manifest, None if known is None else known.value)
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
        telling = asyncio.create_task(self._events.record(Subject(*key, uid), event))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    def _drop_job(self, key: Key, uid: str, version: int) -> None:
        self._invalid.pop(uid, None)
        if self._jobs.remove(key, uid, version) is not None:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        self._foreign.pop(key, None)
        if self._on_deleted is not None:
            self._on_deleted(key)
        self.notify(key)

    async def _list_jobs_forever(self) -> None:
        """List them now and then; a namespace that cannot be listed keeps no other one from it."""
        everywhere = tuple(self._scopes.values())
        scopes, tries, loop = everywhere, 0, asyncio.get_running_loop()
        while True:
            self._relist.clear()
            if scopes is everywhere:
                listed_at = loop.time()
            failed: dict[Scope, float] = {}  # and for how long the API server wants no more
            for scope in scopes:
                try:
                    await self._list_jobs(scope.namespace)
                except (ApiError, ExpiredError) as error:
                    logger.warning("listing FleetJobs: %s", error)
                    scope.jobs_were_listed(error)
                    failed[scope] = getattr(error, "retry_after_seconds", 0.0)
                else:
                    scope.jobs_were_listed()
            wait = max(min(2.0**tries, AGAIN_SECONDS), *failed.values()) if failed else RELIST_SECONDS
            tries = min(tries + 1, 10) if failed else 0
            try:
                async with asyncio.timeout(wait):
                    await self._relist.wait()
                scopes = everywhere
            except TimeoutError:
                due = not failed or loop.time() - listed_at >= RELIST_SECONDS
                scopes = everywhere if due else tuple(failed)

    async def _list_jobs(self, namespace: str | None) -> None:
        entries: list[Entry[FleetJob]] = []
        version = 0
        async for page in list_pages(self._client, collection(PLURAL, namespace)):
            entries += [entry for item in page["items"] if (entry := self._reduce_job(item)) is not None]
            version = version_of(page)
        for key in self._jobs.replace(entries, version, namespace):
            if key in self._jobs:
                self.notify(key)
            else:
                self._forget(key)

    async def _check_foreign_forever(self) -> None:
        """Look at foreign objects again, which no watch tells of."""
        while True:
            await asyncio.sleep(FOREIGN_SECONDS)
            for key in list(self._foreign):
                try:
                    for resource, name in list(self._foreign.get(key, {}).values()):
                        await self.meet(key, resource, name)
                except ApiError as error:
                    logger.warning("looking at a foreign object: %s", error, extra={"job": str(key)})


def collection(resource: str, namespace: str | None) -> str:
    """Return the path of a collection, of one namespace or of all of them."""
    if (known := _RESOURCES.get(resource)) is not None:
        base, plural = known.base, known.plural
    else:
        base, plural = f"/apis/{API_VERSION}" if resource == PLURAL else "/api/v1", resource
    return f"{base}/{plural}" if namespace is None else f"{base}/namespaces/{namespace}/{plural}"


def job_key(job: FleetJob) -> Key:
    """Return a job's key."""
    return Key(job.metadata.namespace, job.metadata.name)
