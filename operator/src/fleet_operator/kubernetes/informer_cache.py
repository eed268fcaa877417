"""What is known of a Kubernetes cluster: every FleetJob, and all that has the label of one.

Pods, Services and the objects beside them (`extras`) are watched here; FleetJobs are watched by kopf. No
watch tells of an object of somebody else's with a name that a job wants: it is looked up.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from fleet_operator.api.names import LABEL_JOB_NAME, LABEL_MANAGED_BY, MANAGED_BY
from fleet_operator.cluster import Key
from fleet_operator.errors import OperatorError
from fleet_operator.kubernetes.client import FEATURES, KINDS, PODS, RESOURCES, SERVICES, ApiError, collection
from fleet_operator.kubernetes.indexer import Cache, Entry, Store, key_of, owner_of, version_of
from fleet_operator.kubernetes.jobs import FleetJobs
from fleet_operator.kubernetes.observation import observe_object, observe_pod
from fleet_operator.kubernetes.reflector import ListWatch, Scope
from fleet_operator.plan.observe.pods import has_ended

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from fleet_operator.kubernetes.client import ApiClient, Resource
    from fleet_operator.kubernetes.events import EventRecorder
    from fleet_operator.plan.model import ObservedObject, ObservedPod

logger = logging.getLogger(__name__)

SELECTOR = f"{LABEL_MANAGED_BY}={MANAGED_BY},{LABEL_JOB_NAME}"

FOREIGN_SECONDS = 10.0
"""How often an object of another owner that has one of our names is looked at again."""

SYNC_SECONDS = 120.0
"""How long the first lists may take before the operator gives up, to be started again."""


class OwnedObjects:
    """The pods and Services of jobs, and what else they may have, reduced to what decisions need.

    Parameters
    ----------
    client : ApiClient
        The API server.
    features : tuple of str
        Which kinds of objects jobs may have beside pods and Services, of `FEATURES`.
    on_change : callable
        Told of each job of which something has changed.
    """

    def __init__(
        self, client: ApiClient, features: tuple[str, ...], on_change: Callable[[Key], None]
    ) -> None:
        self._client = client
        self.pods: Store[ObservedPod] = Store(is_final=has_ended)
        self.services: Store[None] = Store()
        extras: dict[str, Store[ObservedObject]] = {FEATURES[name].key: Store() for name in features}
        self.extras = extras
        self.stores: dict[str, Store[Any]] = {PODS: self.pods, SERVICES: self.services, **extras}
        """All of them, by what a kind of object is called in `KINDS`."""
        self._caches = {
            each: Cache(store, partial(self.reduce, each), on_change) for each, store in self.stores.items()
        }

    def put(self, resource: str, manifest: Mapping[str, Any]) -> None:
        """Take an object as it is now."""
        self._caches[resource].put(manifest)

    def watch(
        self,
        resource: str,
        namespace: str | None,
        *,
        on_relist: Callable[[], None],
        on_restored: Callable[[], None],
    ) -> ListWatch[Any]:
        """Return what keeps the objects of a kind in step, those of one namespace or of all of them."""
        return ListWatch(
            self._client,
            collection(resource, namespace),
            self._caches[resource],
            on_relist=on_relist,
            on_restored=on_restored,
            selector=SELECTOR,
            namespace=namespace,
        )

    def reduce(self, resource: str, manifest: Mapping[str, Any]) -> Entry[Any] | None:
        """Return what is kept of what a job owns; None if its labels do not make it a job's."""
        labels = manifest["metadata"].get("labels") or {}
        job = labels.get(LABEL_JOB_NAME)
        value: ObservedPod | ObservedObject | None = None
        if resource == PODS:
            value = observe_pod(manifest)
        elif resource in self.extras:
            value = observe_object(KINDS[resource], manifest)
        if not job or labels.get(LABEL_MANAGED_BY) != MANAGED_BY or (resource == PODS and value is None):
            return None
        key, uid = key_of(manifest), manifest["metadata"]["uid"]
        return Entry(key, uid, version_of(manifest), Key(key.namespace, job), owner_of(manifest), value)


class ForeignObjects:
    """Who has a name that a job wants, where that is not the job itself.

    Parameters
    ----------
    client : ApiClient
        The API server.
    jobs : FleetJobs
        The jobs there are: of one that is gone nothing is noted.
    owned : OwnedObjects
        Where an object goes that turns out to be a job's.
    on_change : callable
        Told of each job of which something has been found out.
    """

    def __init__(
        self, client: ApiClient, jobs: FleetJobs, owned: OwnedObjects, on_change: Callable[[Key], None]
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._owned = owned
        self._on_change = on_change
        self._known: dict[Key, dict[str, tuple[str, str]]] = {}  # job: {"Kind/name": (resource, name)}

    def of(self, key: Key) -> tuple[str, ...]:
        """Return the objects that have names of a job's, as ``Kind/name``."""
        return tuple(self._known.get(key, ()))

    def forget(self, key: Key) -> None:
        """Look no more after the names of a job that is gone."""
        self._known.pop(key, None)

    async def meet(self, key: Key, resource: str, name: str) -> None:
        """Find out who has a name that a job wants: we ourselves, unseen as yet, or somebody else."""
        shown = f"{KINDS[resource]}/{name}"
        found: Mapping[str, Any] | None = None
        try:
            found = await self._client.get(f"{collection(resource, key.namespace)}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
        if self._jobs.get(key) is None:
            return  # it was deleted meanwhile: nobody would forget what is noted of it now
        known = self._known.get(key, {})
        entry = None if found is None else self._owned.reduce(resource, found)
        if entry is not None and entry.job == key:
            # It is watched, so it will be seen to go, whoever owns it.
            self._owned.stores[resource].put(entry)
            known.pop(shown, None)
        elif found is None:
            known.pop(shown, None)
        elif shown in known:
            return
        else:
            self._known.setdefault(key, {})[shown] = (resource, name)
        self._on_change(key)

    async def check_forever(self) -> None:
        """Look at them again and again."""
        while True:
            await asyncio.sleep(FOREIGN_SECONDS)
            for key in list(self._known):
                try:
                    for resource, name in list(self._known.get(key, {}).values()):
                        await self.meet(key, resource, name)
                except ApiError as error:
                    logger.warning("looking at a foreign object: %s", error, extra={"job": str(key)})


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
        self._on_deleted = on_deleted
        self._listeners: list[Callable[[Key], None]] = []
        self.jobs = FleetJobs(client, events, on_change=self.notify, on_deleted=self._forget)
        self.owned = OwnedObjects(client, features, self.notify)
        self.foreign = ForeignObjects(client, self.jobs, self.owned, self.notify)
        self._serves, self._jobs_watched = asyncio.Event(), asyncio.Event()
        self.restored = asyncio.Event()
        """Set when the API server's history has gone back: whoever watches by it must begin anew."""
        self._scopes = {namespace: self._scope(namespace) for namespace in namespaces or (None,)}
        self._keepers: list[asyncio.Task[None]] = []

    def subscribe(self, listener: Callable[[Key], None]) -> None:
        """Have `listener` told of each job for which something has changed."""
        self._listeners.append(listener)

    def notify(self, key: Key) -> None:
        """Tell everyone that something of a job has changed."""
        for listener in self._listeners:
            listener(key)

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
            asyncio.create_task(self.jobs.list_forever(scopes), name="list FleetJobs"),
            asyncio.create_task(self.foreign.check_forever(), name="look at foreign objects"),
        ]
        for scope in scopes:
            served = self._notify_when(scope.until_seen, scope)
            self._keepers.append(asyncio.create_task(served, name="wait for a namespace"))
            for watch in scope.extras.values():
                seen = self._notify_when(watch.synced.wait, scope)
                self._keepers.append(asyncio.create_task(seen, name=f"wait for {watch.path}"))
            for watch in scope.watches():
                self._keepers.append(asyncio.create_task(watch.run(), name=f"watch {watch.path}"))
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

    async def _notify_when(self, seen: Callable[[], Awaitable[object]], scope: Scope) -> None:
        """Look at every job of a namespace again once more of it has been seen: it may come late."""
        await seen()
        if scope.shows_what_jobs_own:
            self._serves.set()
        for job in self.jobs:
            if scope.namespace in (None, job.metadata.namespace):
                self.notify(Key.of(job))
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Stop watching."""
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        await self.jobs.close()

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

    def note_job_watch(self, namespace: str | None, went_well: bool) -> None:
        """Note whether whoever watches FleetJobs could, at a namespace or at all of them."""
        self._scopes[namespace].jobs_were_watched(went_well=went_well)
        if went_well:
            self._jobs_watched.set()

    async def until_jobs_are_watched(self) -> None:
        """Wait until FleetJobs are watched somewhere."""
        await self._jobs_watched.wait()

    def scope_of(self, namespace: str) -> Scope:
        """Return what a namespace is looked at with."""
        return self._scopes[namespace if namespace in self._scopes else None]

    def extras(self, namespace: str) -> Iterator[tuple[Resource, Store[ObservedObject]]]:
        """Return what jobs of a namespace may have beside pods and Services, as far as it has been seen."""
        for key, watch in self.scope_of(namespace).extras.items():
            if watch.synced.is_set():
                yield RESOURCES[key], self.owned.extras[key]

    def _scope(self, namespace: str | None) -> Scope:
        def watches(resources: Iterable[str]) -> dict[str, ListWatch[Any]]:
            return {
                each: self.owned.watch(
                    each, namespace, on_relist=self.jobs.list_again, on_restored=self.restored.set
                )
                for each in resources
            }

        return Scope(namespace, watches((PODS, SERVICES)), watches(self.owned.extras))

    def _forget(self, key: Key) -> None:
        self.foreign.forget(key)
        if self._on_deleted is not None:
            self._on_deleted(key)
        self.notify(key)
