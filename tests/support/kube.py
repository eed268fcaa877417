"""Access to an API server for tests: objects, annotations, and waits for expected states.

Requests use the package `kubernetes`, not the client of fleet_operator: that client is under test, and a
mistake in it must not hide itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from typing import TYPE_CHECKING, Any

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.watch import Watch

from fleet_operator.api.names import API_VERSION, LABEL_ATTEMPT, LABEL_JOB_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
    from pathlib import Path

__all__ = [
    "ApiException",
    "ApiServer",
    "Manifest",
    "Namespace",
    "attempt",
    "client_for",
    "condition",
    "fresh_namespace",
    "is_running",
    "runs_again",
    "told_of",
    "uids",
]

Manifest = dict[str, Any]

WAIT_SECONDS = 100.0
BUSY_TRIES = 30
"""The number of times that an API server may report a kind's storage as not ready."""


class ApiServer:
    """A client of an API server, with objects as plain mappings; errors raise ApiException."""

    def __init__(self, client: ApiClient) -> None:
        self._client = DynamicClient(client)

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Manifest:
        """Return the object or list at `path`."""
        return await self._ask("get", path, params)

    async def create(
        self, path: str, manifest: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Manifest:
        """Create an object in the collection at `path`."""
        return await self._ask("post", path, params, body=manifest)

    async def replace(self, path: str, manifest: Mapping[str, Any]) -> Manifest:
        """Replace the object at `path`."""
        return await self._ask("put", path, body=manifest)

    async def merge_patch(self, path: str, patch: Mapping[str, Any]) -> Manifest:
        """Merge `patch` into the object at `path`."""
        return await self._ask("patch", path, body=patch, content_type="application/merge-patch+json")

    async def delete(self, path: str, options: Mapping[str, Any] | None = None) -> Manifest:
        """Delete the object at `path`."""
        return await self._ask("delete", path, body={**(options or {})})

    async def changes(
        self, path: str, version: str, params: Mapping[str, str]
    ) -> AsyncGenerator[tuple[str, Manifest]]:
        """Yield the type and the object of each change to a collection since a version.

        A watch that ends, as watches do occasionally, is resumed from the last change or bookmark.
        """

        async def open_watch(**asked: Any) -> Any:
            query = [*params.items(), ("allowWatchBookmarks", "true")]
            return await self._client.request("get", path, query_params=query, serialize=False, **asked)

        async with Watch().stream(open_watch, resource_version=version) as events:
            async for event in events:
                if event["type"] != "BOOKMARK":
                    yield event["type"], event["raw_object"]

    async def _ask(
        self, verb: str, path: str, params: Mapping[str, str] | None = None, **asked: Any
    ) -> Manifest:
        query = [*(params or {}).items()]
        for left in reversed(range(BUSY_TRIES)):
            try:
                answer = await self._client.request(verb, path, query_params=query, serialize=False, **asked)
                break
            except ApiException as refused:
                # The definition has just been installed. Tests may expect any other response of 429.
                if (
                    left == 0
                    or refused.status != 429
                    or "storage is (re)initializing" not in str(refused.body)
                ):
                    raise
                await asyncio.sleep(float((refused.headers or {}).get("Retry-After", 1)))
        found: Manifest = await answer.json()
        return found


class Namespace:
    """A namespace of an API server, as seen by tests; an empty name selects the cluster scope."""

    def __init__(self, client: ApiServer, name: str) -> None:
        self.client = client
        self.name = name

    def path(self, plural: str, name: str = "", *, subresource: str = "") -> str:
        """Return the path of a collection or of an object in it."""
        groups = {
            "fleetjobs": f"/apis/{API_VERSION}",
            "networkpolicies": "/apis/networking.k8s.io/v1",
            "poddisruptionbudgets": "/apis/policy/v1",
            "podgroups.scheduling.volcano.sh": "/apis/scheduling.volcano.sh/v1beta1",
            "podgroups.scheduling.x-k8s.io": "/apis/scheduling.x-k8s.io/v1alpha1",
        }
        base, kind = groups.get(plural, "/api/v1"), plural.partition(".")[0]
        parts = [base, *(("namespaces", self.name) if self.name else ()), kind, name, subresource]
        return "/".join(part for part in parts if part)

    async def create_job(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Manifest:
        """Create a FleetJob in this namespace, with the same strict validation as kubectl."""
        document = {**manifest, "metadata": {**manifest["metadata"], "namespace": self.name}}
        asked = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return await self.client.create(self.path("fleetjobs"), document, asked)

    async def get(self, plural: str, name: str) -> Manifest:
        """Return an object by kind and name."""
        return await self.client.get(self.path(plural, name))

    async def all(self, plural: str, **params: str) -> list[Manifest]:
        """Return a list of all objects of a kind."""
        items: list[Manifest] = (await self.client.get(self.path(plural), params))["items"]
        return items

    async def delete(self, plural: str, name: str) -> None:
        """Delete an object, with its own grace period."""
        await self.client.delete(self.path(plural, name), {"propagationPolicy": "Background"})

    async def annotate(self, pod: str, **annotations: str | None) -> None:
        """Set the annotations that control a simulated pod, such as ``exit_code`` and ``hold``."""
        named = {f"fleet.test/{name.replace('_', '-')}": value for name, value in annotations.items()}
        await self.client.merge_patch(self.path("pods", pod), {"metadata": {"annotations": named}})

    async def end(self, *pods: str, exit_code: int = 0, message: str | None = None) -> None:
        """End simulated pods with an exit code and a message."""
        for pod in pods:
            await self.annotate(pod, exit_code=str(exit_code), message=message)

    async def until(
        self,
        plural: str,
        what: str,
        probe: Callable[[dict[str, Manifest]], bool],
        *,
        seconds: float = WAIT_SECONDS,
        **params: str,
    ) -> dict[str, Manifest]:
        """Wait until `probe` is true for all objects of a kind; return the objects by name.

        Every change is checked, so that short-lived states are noticed as well.
        """
        seen: dict[str, Manifest] = {}
        try:
            async with (
                asyncio.timeout(seconds),
                contextlib.aclosing(self._changes(plural, params)) as changes,
            ):
                async for seen in changes:
                    if probe(seen):
                        return seen
        except TimeoutError:
            pass
        shown = json.dumps({name: item.get("status") for name, item in seen.items()}, indent=1)
        raise AssertionError(f"waited {seconds:g} s in vain for {what}; the {plural} are: {shown[:4000]}")

    async def _changes(self, plural: str, params: Mapping[str, str]) -> AsyncGenerator[dict[str, Manifest]]:
        """Yield all objects of a kind now and after each change."""
        listed = await self.client.get(self.path(plural), params)
        objects = {item["metadata"]["name"]: item for item in listed["items"]}
        yield objects
        version = listed["metadata"]["resourceVersion"]
        async with contextlib.aclosing(self.client.changes(self.path(plural), version, params)) as changes:
            async for kind, item in changes:
                name = item["metadata"]["name"]
                if kind == "DELETED":
                    objects.pop(name, None)
                else:
                    objects[name] = item
                yield objects

    async def until_job(
        self, name: str, what: str, probe: Callable[[Manifest], bool], *, seconds: float = WAIT_SECONDS
    ) -> Manifest:
        """Wait until `probe` is true for a job, and return the job."""
        found = await self.until(
            "fleetjobs",
            f"{name}: {what}",
            lambda jobs: name in jobs and probe(jobs[name]),
            seconds=seconds,
            fieldSelector=f"metadata.name={name}",
        )
        return found[name]

    async def until_state(self, name: str, state: str, *, seconds: float = WAIT_SECONDS) -> Manifest:
        """Wait until a job is in the given state."""
        return await self.until_job(
            name, state, lambda job: job.get("status", {}).get("state") == state, seconds=seconds
        )

    async def until_pods(
        self,
        job: str,
        what: str,
        probe: Callable[[dict[str, Manifest]], bool],
        *,
        seconds: float = WAIT_SECONDS,
    ) -> dict[str, Manifest]:
        """Wait until `probe` is true for the pods of a job; return the pods by name."""
        return await self.until("pods", what, probe, seconds=seconds, labelSelector=f"{LABEL_JOB_NAME}={job}")

    async def until_running(self, job: str, *pods: str, seconds: float = WAIT_SECONDS) -> dict[str, Manifest]:
        """Wait until a job has exactly the given pods and all of them are running."""
        return await self.until_pods(
            job,
            f"{', '.join(pods)} running",
            lambda found: set(found) == set(pods) and all(is_running(each) for each in found.values()),
            seconds=seconds,
        )

    async def until_told(self, job: str, *reasons: str) -> list[tuple[str, str, str]]:
        """Wait until events with these reasons have been posted on a job; return all its events.

        The operator posts an event after it has written the status and the affected objects.
        """
        await self.until(
            "events",
            f"{job} to be told of {', '.join(reasons)}",
            lambda found: {*reasons} <= {each["reason"] for each in found.values()},
            fieldSelector=f"involvedObject.kind=FleetJob,involvedObject.name={job}",
        )
        return await self.events(job)

    async def events(self, job: str) -> list[tuple[str, str, str]]:
        """Return the type, reason and message of each event on a job, oldest first."""
        selector = f"involvedObject.kind=FleetJob,involvedObject.name={job}"
        found = await self.all("events", fieldSelector=selector)
        found.sort(key=lambda event: int(event["metadata"]["resourceVersion"]))
        return [(event["type"], event["reason"], event["message"]) for event in found]


@contextlib.asynccontextmanager
async def client_for(kubeconfig: Path) -> AsyncIterator[ApiServer]:
    """Open a client that authenticates as the user of a kubeconfig."""
    configuration = Configuration()
    await config.load_kube_config(str(kubeconfig), client_configuration=configuration)
    async with ApiClient(configuration) as client:
        yield ApiServer(client)


@contextlib.asynccontextmanager
async def fresh_namespace(client: ApiServer, name: str | None = None) -> AsyncIterator[Namespace]:
    """Yield a new namespace in which pods can be created, and delete it afterwards."""
    name = name or f"test-{uuid.uuid4().hex[:8]}"
    namespaces = "/api/v1/namespaces"
    await client.create(namespaces, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    fresh = Namespace(client, name)
    # Pods are rejected until the controller manager has created the namespace's account.
    await fresh.until("serviceaccounts", "the default account", lambda found: "default" in found)
    yield fresh
    await client.delete(f"{namespaces}/{name}")


def is_running(pod: Manifest) -> bool:
    """Return whether a pod is running and is not being deleted."""
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def attempt(pod: Manifest) -> str:
    """Return a pod's attempt, as ``{job restarts}.{replica restarts}``."""
    value: str = pod["metadata"]["labels"][LABEL_ATTEMPT]
    return value


def runs_again(pod: str, number: str) -> Callable[[dict[str, Manifest]], bool]:
    """Return a probe that checks whether a pod is running in the given attempt."""
    return lambda pods: pod in pods and attempt(pods[pod]) == number and is_running(pods[pod])


def uids(pods: Mapping[str, Manifest]) -> set[str]:
    """Return the uids of the given pods."""
    return {pod["metadata"]["uid"] for pod in pods.values()}


def condition(job: Manifest, kind: str) -> str | None:
    """Return the status of a job's condition."""
    conditions = job.get("status", {}).get("conditions", ())
    return next((each["status"] for each in conditions if each["type"] == kind), None)


def told_of(job: Manifest, kind: str) -> Manifest:
    """Return a job's condition of the given type; raise ValueError if there is not exactly one."""
    conditions: list[Manifest] = job["status"]["conditions"]
    (told,) = [each for each in conditions if each["type"] == kind]
    return told
