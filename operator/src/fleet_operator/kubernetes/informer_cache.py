"""The cached state of a Kubernetes cluster: all FleetJobs, and all objects whose labels refer to one.

This module watches pods, Services and additional objects (`extras`); kopf watches FleetJobs. No watch reports
an object that belongs to another owner but has a name that a job needs: such objects are looked up.
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
from fleet_operator.kubernetes.kueue import Admissions
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
"""The interval between look-ups of a foreign object, which has a name that a job needs but another owner."""

KUEUE_FEATURE = "kueue"

SYNC_SECONDS = 120.0
"""How long the initial lists may take before the operator exits to be restarted."""


class OwnedObjects:
    """The cached pods, Services and additional objects of jobs, reduced to the data that decisions use.

    Parameters
    ----------
    client : ApiClient
        The API server.
    features : tuple of str
        The enabled additional kinds, of `FEATURES`.
    on_change : callable
        Called with each job whose objects have changed.
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
        """The store of each kind of object, by its key in `KINDS`."""
        self._caches = {
            each: Cache(store, partial(self.reduce, each), on_change) for each, store in self.stores.items()
        }

    def put(self, resource: str, manifest: Mapping[str, Any]) -> None:
        """Store an object's current state."""
        self._caches[resource].put(manifest)

    def watch(
        self,
        resource: str,
        namespace: str | None,
        *,
        on_relist: Callable[[], None],
        on_restored: Callable[[], None],
    ) -> ListWatch[Any]:
        """Return a reflector for one kind of object, in one namespace or in all namespaces."""
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
        """Return the cache entry for an object, or None if its labels refer to no job."""
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
    """Objects whose names a job needs, but which belong to other owners.

    Parameters
    ----------
    client : ApiClient
        The API server.
    jobs : FleetJobs
        The known jobs; nothing is recorded for a deleted one.
    owned : OwnedObjects
        The cache for an object that turns out to belong to a job.
    on_change : callable
        Called with each job whose objects have been looked up.
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
        """Return the objects that occupy names this job needs, as ``Kind/name``."""
        return tuple(self._known.get(key, ()))

    def forget(self, key: Key) -> None:
        """Forget the objects recorded for a deleted job."""
        self._known.pop(key, None)

    async def meet(self, key: Key, resource: str, name: str) -> None:
        """Look up an existing object; cache it if this job owns it, otherwise record it as foreign."""
        shown = f"{KINDS[resource]}/{name}"
        found: Mapping[str, Any] | None = None
        try:
            found = await self._client.get(f"{collection(resource, key.namespace)}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
        if self._jobs.get(key) is None:
            return  # the job was deleted meanwhile, so its entry would never be removed
        known = self._known.get(key, {})
        entry = None if found is None else self._owned.reduce(resource, found)
        if entry is not None and entry.job == key:
            # The object is watched, so its deletion will be observed for any owner.
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
        """Look up the recorded foreign objects again periodically."""
        while True:
            await asyncio.sleep(FOREIGN_SECONDS)
            for key in list(self._known):
                try:
                    for resource, name in list(self._known.get(key, {}).values()):
                        await self.meet(key, resource, name)
                except ApiError as error:
                    logger.warning("looking at a foreign object: %s", error, extra={"job": str(key)})


class NotSyncedError(OperatorError):
    """The initial lists did not arrive in time; the message names the missing lists."""


class ClusterView:
    """A cache of the cluster's state, which notifies listeners of changed jobs.

    Parameters
    ----------
    client : ApiClient
        The API server.
    events : EventRecorder
        Records events about FleetJobs that cannot be parsed.
    namespaces : tuple of str
        The watched namespaces; all of them if empty.
    features : tuple of str
        The enabled additional kinds, of `FEATURES`, and ``kueue`` to read Kueue's Workloads.
    on_deleted : callable, optional
        Called with each deleted FleetJob.
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
        self.owned = OwnedObjects(client, tuple(each for each in features if each in FEATURES), self.notify)
        self.foreign = ForeignObjects(client, self.jobs, self.owned, self.notify)
        self.admissions = Admissions(client, self.notify) if KUEUE_FEATURE in features else None
        """The admission states that Kueue reports; None unless the feature ``kueue`` is enabled."""
        self._serves, self._jobs_watched = asyncio.Event(), asyncio.Event()
        self.restored = asyncio.Event()
        """Set when the API server's history has been rolled back: every watch must then start over."""
        self._scopes = {namespace: self._scope(namespace) for namespace in namespaces or (None,)}
        self._keepers: list[asyncio.Task[None]] = []

    def subscribe(self, listener: Callable[[Key], None]) -> None:
        """Register a callback that is called for each changed job."""
        self._listeners.append(listener)

    def notify(self, key: Key) -> None:
        """Notify all listeners that a job has changed."""
        for listener in self._listeners:
            listener(key)

    async def start(self) -> None:
        """Start the watches; return when all existing objects are listed.

        A namespace in which a list was refused, for example because the namespace was deleted, does not delay
        the start if another one can be served. It is served as soon as it has been listed.

        Raises
        ------
        NotSyncedError
            The lists did not arrive within `SYNC_SECONDS`.
        """
        scopes = self._scopes.values()
        self._keepers = [
            asyncio.create_task(self.jobs.list_forever(scopes), name="list FleetJobs"),
            asyncio.create_task(self.foreign.check_forever(), name="look at foreign objects"),
        ]
        if self.admissions is not None:
            looks = self.admissions.look_forever()
            self._keepers.append(asyncio.create_task(looks, name="look at Workloads of Kueue"))
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
                f"not listed within {SYNC_SECONDS:g} s: {', '.join(missing)}; the log shows why"
            ) from None

    async def _notify_when(self, seen: Callable[[], Awaitable[object]], scope: Scope) -> None:
        """Wait for `seen`, then notify the listeners of each job in a scope; never return."""
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
        """True if every initial list has arrived or was refused, and at least one scope is complete."""
        return self._serves.is_set() and all(each.answered for each in self._scopes.values())

    def ended(self) -> list[str]:
        """Return the names of the watches that have ended unexpectedly."""
        ended = [task for task in self._keepers if task.done() and not task.cancelled()]
        return [f"{task.get_name()} ({task.exception()})" for task in ended]

    def failing(self) -> Iterator[tuple[str, str | None, float]]:
        """Yield each watched resource, its namespace, and the number of seconds its watch has been failing.

        The namespace is None for a watch of all namespaces.
        """
        for namespace, scope in self._scopes.items():
            yield from ((resource, namespace, seconds) for resource, seconds in scope.failing())

    def note_job_watch(self, namespace: str | None, went_well: bool) -> None:
        """Record whether an attempt to watch FleetJobs succeeded, in one namespace or in all."""
        self._scopes[namespace].jobs_were_watched(went_well=went_well)
        if went_well:
            self._jobs_watched.set()

    async def until_jobs_are_watched(self) -> None:
        """Wait until a watch of FleetJobs is open in at least one namespace."""
        await self._jobs_watched.wait()

    def scope_of(self, namespace: str) -> Scope:
        """Return the scope that covers a namespace."""
        return self._scopes[namespace if namespace in self._scopes else None]

    def extras(self, namespace: str) -> Iterator[tuple[Resource, Store[ObservedObject]]]:
        """Yield each kind of additional object whose list in a namespace has arrived, with its store."""
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
        if self.admissions is not None:
            self.admissions.forget(key)
        if self._on_deleted is not None:
            self._on_deleted(key)
        self.notify(key)
