"""What jobs own, as far as it has been seen: all that has the label of a job, by kind."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fleet_operator.api.names import LABEL_JOB_NAME, LABEL_MANAGED_BY, MANAGED_BY
from fleet_operator.cluster.cache import Cache
from fleet_operator.cluster.interface import Key
from fleet_operator.cluster.observe import observe_object, observe_pod
from fleet_operator.cluster.resources import FEATURES, KINDS, PODS, SERVICES, collection
from fleet_operator.cluster.store import Entry, Store, key_of, owner_of, version_of
from fleet_operator.cluster.watch import ListWatch
from fleet_operator.plan.pods import has_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleet_operator.cluster.client import ApiClient
    from fleet_operator.plan.model import ObservedObject, ObservedPod

SELECTOR = f"{LABEL_MANAGED_BY}={MANAGED_BY},{LABEL_JOB_NAME}"


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
