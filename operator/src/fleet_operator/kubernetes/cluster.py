"""The Kubernetes cluster: reads come from the informer cache, writes go to the API server.

The response to a write counts as an event, so a write need not wait for the watch. A deletion is different,
because the server may respond with the pod's state before the deletion. Until the watch confirms the
deletion, `observe` returns None.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fleet_operator.api import FleetJob, FleetJobStatus, Gang, JobProgress, Role, read_job
from fleet_operator.api.names import API_VERSION, KIND, KUEUE, PLURAL, pod_name, service_name
from fleet_operator.build import ClusterHosts
from fleet_operator.cluster import KEY_BYTES, ConflictError, Key
from fleet_operator.kubernetes.client import FEATURES, KINDS, PODS, SERVICES, ApiError, collection
from fleet_operator.kubernetes.events import Subject
from fleet_operator.kubernetes.kueue import NOTHING_SAID
from fleet_operator.kubernetes.refusals import Refusal, Refusals, is_for_good, is_over_quota, needs_somebody
from fleet_operator.plan.model import (
    CreatePod,
    CreateService,
    DeleteJob,
    DeleteObject,
    DeletePod,
    DeleteService,
    EnsureObject,
    Event,
    ObjectRef,
    Observed,
    ObservedObject,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fleet_operator.build import Hosts
    from fleet_operator.kubernetes.client import ApiClient, Resource
    from fleet_operator.kubernetes.events import EventRecorder
    from fleet_operator.kubernetes.indexer import Entry
    from fleet_operator.kubernetes.informer_cache import ClusterView
    from fleet_operator.kubernetes.kueue import Admission
    from fleet_operator.kubernetes.progress import ProgressReader
    from fleet_operator.plan.model import Action, ObservedPod

UNSEEN_SECONDS = 5.0
"""How long a deletion may remain unconfirmed before the pod counts as existing again."""

_NOT_THE_AUTHORS = (SERVICES, FEATURES["networkPolicies"].key)
"""Resources without content from a job's manifest: the manifest cannot be the cause of a refusal."""

_WRITTEN_BY_AUTHORS = (PODS, FEATURES["checkpointClaims"].key)
"""Resources that are built from a template, which may contain misspelt fields."""


class KubernetesCluster:
    """A Kubernetes cluster, read through an informer cache and changed through its API server.

    Parameters
    ----------
    client : ApiClient
        The API server.
    view : ClusterView
        The informer cache.
    events : EventRecorder
        Records events for people.
    metrics_readers : sequence of mapping
        The readers of the metrics of jobs with a NetworkPolicy, as its peers.
    metrics_open : bool
        Whether any client may read the metrics of jobs that do not require that policy.
    progress : ProgressReader, optional
        Reads the progress of jobs.
    monotonic : callable
        Returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        client: ApiClient,
        view: ClusterView,
        events: EventRecorder,
        *,
        metrics_readers: Sequence[Mapping[str, Any]] = (),
        metrics_open: bool = False,
        progress: ProgressReader | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._view = view
        self._events = events
        self._metrics_readers = tuple(metrics_readers)
        self._metrics_open = metrics_open
        self._progress = progress
        self._refusals = Refusals()
        self._leaving = UnseenDeletions(monotonic)
        view.subscribe(self._tidy)

    def job(self, key: Key) -> FleetJob | None:
        """Return the newest known version of a job, or None if the job is gone."""
        return self._view.jobs.get(key)

    def observe(self, job: FleetJob) -> Observed | None:
        """Return the objects of `job`, or None while the cache is incomplete or older than our own writes."""
        key = Key.of(job)
        if not self._view.scope_of(key.namespace).shows_what_jobs_own:
            return None
        foreign, left_over = list(self._view.foreign.of(key)), list[str]()

        def note_other(entry: Entry[Any], kind: str) -> None:
            (left_over if _is_left_over(entry, job) else foreign).append(f"{kind}/{entry.key.name}")

        pods: list[ObservedPod] = []
        for entry in self._view.owned.pods.of_job(key):
            pod, owned = entry.value, _is_owned(entry, job)
            if owned and pod.deleted_at is None and pod.uid in self._leaving:
                return None
            pods.append(pod if pod.owned == owned else replace(pod, owned=owned))
            if not owned:
                note_other(entry, "Pod")
        service = self._view.owned.services.get(Key(key.namespace, service_name(key.name)))
        own_service = service is not None and _is_owned(service, job)
        if service is not None and not own_service:
            note_other(service, "Service")
        objects = dict[ObjectRef, ObservedObject]()
        unserved = {(each.api_version, each.kind) for each in FEATURES.values()}
        for resource, store in self._view.extras(key.namespace):
            unserved.discard((resource.api_version, resource.kind))
            for extra in store.of_job(key):
                # Only claims may outlive their job, and these have no owner.
                retained = extra.owner is None and resource == FEATURES["checkpointClaims"]
                if retained or _is_owned(extra, job):
                    objects[ObjectRef(resource.api_version, resource.kind, extra.key.name)] = extra.value
                else:
                    note_other(extra, resource.kind)
        if (admission := self._admission(key, job, pods)) is None:
            return None
        progress: JobProgress | None = None
        first = self._view.owned.pods.get(Key(key.namespace, pod_name(key.name, Role.TRAINER, 0)))
        if self._progress is not None and first is not None and _is_owned(first, job):
            progress = self._progress.of(key, first.uid)
        return Observed(
            pods=tuple(pods),
            departed=self._departed(key, job),
            service=own_service,
            objects=objects,
            metrics_readers=self._metrics_readers,
            metrics_open=self._metrics_open,
            unserved=frozenset(unserved),
            foreign=tuple(dict.fromkeys(foreign)),
            left_over=tuple(left_over),
            refused=self._refusals.for_now(job),
            over_quota=self._refusals.is_over_quota(job),
            rejected=self._refusals.for_good(job),
            progress=progress,
            queue_message=admission.message,
            deactivated=not admission.active,
            new_key=secrets.token_hex(KEY_BYTES),
        )

    def _admission(self, key: Key, job: FleetJob, pods: Iterable[ObservedPod]) -> Admission | None:
        """Return the admission state of a job's Kueue group, or None while it is unknown.

        The state matters in two cases. While pods are gated, it gives the reason. If a group has lost its
        pods, Kueue may have stopped it while no operator was running.
        """
        if self._view.admissions is None or job.gang is not Gang.KUEUE:
            return NOTHING_SAID
        kept = [pod for pod in pods if pod.deleted_at is None]
        is_gated = any(gate.startswith(KUEUE) for pod in kept for gate in pod.gates)
        status, begun = job.status, any(each.created for each in job.status.ledger.roles.values())
        is_over = status.finished or job.spec.suspend or status.ledger.deactivated is not None
        is_lost = begun and not kept and not is_over
        if not is_gated and not is_lost:
            self._view.admissions.forget(key)
            return NOTHING_SAID
        said = self._view.admissions.of(key, job.gang_name(job.status.job_restarts))
        return NOTHING_SAID if said is None and is_gated else said

    def _departed(self, key: Key, job: FleetJob) -> tuple[ObservedPod, ...]:
        """Return each replica's latest deleted pod in its final state; forget earlier ones."""
        departed = self._view.owned.pods.departed(key)
        latest: dict[str, ObservedPod] = {}
        for entry in departed:
            pod = entry.value
            wanted = _is_owned(entry, job) and pod.attempt.job >= job.status.job_restarts
            known = latest.get(pod.name)
            if wanted and not job.status.finished and (known is None or known.attempt < pod.attempt):
                latest[pod.name] = pod
        kept = {pod.uid for pod in latest.values()}
        self._view.owned.pods.let_go(key, [entry.uid for entry in departed if entry.uid not in kept])
        return tuple(latest.values())

    def hosts(self, job: FleetJob) -> Hosts:
        """Return the mapping from the job's replicas to their DNS names."""
        return ClusterHosts(job)

    async def write_status(self, job: FleetJob, status: FleetJobStatus) -> FleetJob:
        """Replace the job's status; raise ConflictError if `job` is out of date."""
        metadata = job.metadata
        # For this subresource, the API server takes the status alone. The uid and the version are
        # preconditions: a job that was created again under the same name is a conflict.
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
            await self._view.jobs.refresh(job)
            raise ConflictError(str(error)) from error
        return self._view.jobs.put(answer, tells=False) or read_job(answer)

    async def apply(self, job: FleetJob, action: Action) -> None:
        """Execute an action, which is safe to repeat."""
        match action:
            case CreateService(manifest):
                await self._create(job, SERVICES, manifest)
            case CreatePod(manifest=manifest, brings_key=brings_key):
                made = await self._create(job, PODS, manifest)
                if brings_key and not made:
                    raise ConflictError(f"pod {manifest['metadata']['name']} already exists, and has the key")
            case DeletePod():
                await self._delete_pod(job, action)
            case DeleteService(name):
                await self._delete_seen(job, SERVICES, name)
            case EnsureObject(manifest):
                await self._create(job, _resource_of(ObjectRef.of(manifest)).key, manifest)
            case DeleteObject(ref):
                await self._delete_seen(job, _resource_of(ref).key, ref.name)
            case DeleteJob(uid):
                await self._delete_job(job, uid)

    async def record(self, job: FleetJob, event: Event) -> None:
        """Record a Kubernetes event; log failures instead of raising them."""
        await self._events.record(Subject(*Key.of(job), job.metadata.uid or ""), event)

    async def _create(self, job: FleetJob, resource: str, manifest: Mapping[str, Any]) -> bool:
        """Create an object; return False if an object with its name already exists."""
        key, name = Key.of(job), manifest["metadata"]["name"]
        before = self._refusals.last(key)
        try:
            answer = await self._client.create(
                collection(resource, key.namespace),
                manifest,
                field_validation="Strict" if resource in _WRITTEN_BY_AUTHORS else None,
            )
        except ApiError as error:
            if error.reason == "AlreadyExists":
                self._refusals.created(key, before)
                await self._view.foreign.meet(key, resource, name)
                return False
            if resource not in _NOT_THE_AUTHORS and is_for_good(error, KINDS[resource], name):
                told = f"{KINDS[resource]} {name}: {error}"
                self._refusals.rejected(job, Refusal.of(job, name, told))
                self._view.notify(key)  # the next pass removes the entry if the job is deleted
                raise ConflictError(told) from error  # the next pass decides again
            # The entry of a deleted job would never be removed.
            if needs_somebody(error) and self._view.jobs.get(key) is not None:
                over_quota = resource == PODS and is_over_quota(error, name)
                refusal = Refusal.of(job, name, str(error), over_quota=over_quota)
                self._refusals.refused(key, refusal, before)
            raise
        self._refusals.created(key, before)
        self._view.owned.put(resource, answer)
        return True

    async def _delete_pod(self, job: FleetJob, action: DeletePod) -> None:
        options = _only(action.uid, action.version)
        if action.grace_period_seconds is not None:
            options["gracePeriodSeconds"] = action.grace_period_seconds
        answer = await self._delete_own(job, PODS, action.name, options)
        if answer is None:
            return
        if answer.get("kind") == "Pod" and answer["metadata"].get("deletionTimestamp"):
            self._view.owned.put(PODS, answer)
        else:
            self._leaving.add(action.uid)

    async def _delete_seen(self, job: FleetJob, resource: str, name: str) -> None:
        """Delete an object, other than a pod, at its last observed version if the job owns it."""
        entry = self._view.owned.stores[resource].get(Key(job.metadata.namespace, name))
        if entry is not None and _is_owned(entry, job):
            await self._delete_own(job, resource, name, _only(entry.uid, str(entry.version)))

    async def _delete_job(self, job: FleetJob, uid: str) -> None:
        try:
            await self._delete(_job_path(job), _only(uid, job.metadata.resource_version))
        except ConflictError:
            await self._view.jobs.refresh(job)
            raise

    async def _delete_own(
        self, job: FleetJob, resource: str, name: str, options: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Delete an object; on a conflict, also refresh the cache, because the watch may lag."""
        try:
            return await self._delete(f"{collection(resource, job.metadata.namespace)}/{name}", options)
        except ConflictError:
            await self._view.foreign.meet(Key.of(job), resource, name)
            raise

    async def _delete(self, path: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Delete an object; return the response, None if it is gone, or raise ConflictError."""
        try:
            return await self._client.delete(path, options)
        except ApiError as error:
            if error.status == 409:  # the object is another one or has changed
                raise ConflictError(str(error)) from error
            if error.status != 404:
                raise
            return None

    def _tidy(self, key: Key) -> None:
        if self._view.jobs.get(key) is None:
            self._refusals.forget(key)
            self._view.owned.pods.let_go(key)  # the garbage collector may delete them after their job


def metrics_readers(
    namespace: str, others: Sequence[Mapping[str, Any]] = ()
) -> tuple[Mapping[str, Any], ...]:
    """Return the NetworkPolicy peers that may read jobs' metrics: the operator's namespace and `others`.

    Parameters
    ----------
    namespace : str
        The operator's own namespace; every namespace has its name as a label.
    others : sequence of mapping
        Further peers of a NetworkPolicy.
    """
    own = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    return (own, *others)


def _only(uid: str, version: str | None) -> dict[str, Any]:
    """Return DeleteOptions that restrict a deletion to this object and, if given, to this version."""
    preconditions = {"uid": uid} if version is None else {"uid": uid, "resourceVersion": version}
    return {"preconditions": preconditions, "propagationPolicy": "Background"}


def _resource_of(ref: ObjectRef) -> Resource:
    return next(
        each for each in FEATURES.values() if (each.api_version, each.kind) == (ref.api_version, ref.kind)
    )


def _is_owned(entry: Entry[Any], job: FleetJob) -> bool:
    """Return whether a job owns an object, judged by the job's uid."""
    return entry.owner is not None and entry.owner.uid == job.metadata.uid


def _is_left_over(entry: Entry[Any], job: FleetJob) -> bool:
    """Return whether an object that `job` does not own belongs to a deleted job with the same name."""
    return entry.owner is not None and entry.owner.kind == KIND and entry.owner.name == job.metadata.name


def _job_path(job: FleetJob) -> str:
    return f"{collection(PLURAL, job.metadata.namespace)}/{job.metadata.name}"


class UnseenDeletions:
    """The uids of pods that the operator has deleted but the cache may still contain.

    Parameters
    ----------
    monotonic : callable
        Returns seconds of a monotonic clock.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._until: dict[str, float] = {}

    def add(self, uid: str) -> None:
        """Record that the operator has just deleted a pod."""
        now = self._monotonic()
        self._until = {each: until for each, until in self._until.items() if until > now}
        self._until[uid] = now + UNSEEN_SECONDS

    def __contains__(self, uid: str) -> bool:
        """Return whether the operator deleted a pod within the last `UNSEEN_SECONDS`."""
        return self._until.get(uid, 0.0) > self._monotonic()
