"""What is known of a Kubernetes cluster: every FleetJob, and all that has the label of one.

Pods, Services and what else jobs may have (`extras`) are watched here; FleetJobs are watched by kopf.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fleet_operator.cluster.foreign import ForeignObjects
from fleet_operator.cluster.interface import Key
from fleet_operator.cluster.jobs import FleetJobs
from fleet_operator.cluster.owned import OwnedObjects
from fleet_operator.cluster.resources import PODS, RESOURCES, SERVICES
from fleet_operator.cluster.scope import Scope
from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from fleet_operator.cluster.client import ApiClient
    from fleet_operator.cluster.events import EventRecorder
    from fleet_operator.cluster.resources import Resource
    from fleet_operator.cluster.store import Store
    from fleet_operator.cluster.watch import ListWatch
    from fleet_operator.plan.model import ObservedObject

SYNC_SECONDS = 120.0
"""How long the first lists may take before the operator gives up, to be started again."""


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
