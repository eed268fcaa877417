"""An in-memory API server with collections, versions, watches, and faults that tests select."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from fleet_operator.kubernetes.client import FEATURES, ApiClient, ApiError
from fleet_operator.kubernetes.login import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

Manifest = dict[str, Any]

COLLECTIONS = {
    *("pods", "services", "events", "fleetjobs", "workloads"),
    *(each.plural for each in FEATURES.values()),
}


class FakeApi(ApiClient):
    """An in-memory API server; `requests` contains all requests in order.

    A namespaced object has the path ``/…/namespaces/NAMESPACE/PLURAL/NAME``; lists and watches work for one
    namespace and for all.
    """

    def __init__(self) -> None:
        super().__init__(Connection("https://fake"))
        self.objects: dict[str, Manifest] = {}
        self.requests: list[tuple[str, str]] = []
        self.selectors: dict[tuple[str, str], str | None] = {}  # by verb and path
        self.managers: list[str | None] = []  # the field managers of patches
        self.validations: list[tuple[str, str | None]] = []  # the fieldValidation of each creation
        self.refusals: dict[tuple[str, str], ApiError] = {}  # errors for the next matching requests
        self.version = 100
        self.forgotten = 0  # watches from older versions get status 410
        self.terminating = False  # True to keep deleted pods until `vanish`, as a cluster does
        self.posted = asyncio.Event()  # set when a request has created an object
        self._error: Manifest | None = None
        self._history: list[tuple[int, str, str, Manifest]] = []
        self._changed = asyncio.Event()
        self._cut = asyncio.Event()

    def put(self, path: str, manifest: Mapping[str, Any]) -> Manifest:
        """Add or replace an object, as if another client had done so."""
        self.version += 1
        kind = "MODIFIED" if path in self.objects else "ADDED"
        stored = copy.deepcopy(dict(manifest))
        *_, namespace, _, name = path.split("/")
        stored["metadata"] = {
            "uid": f"uid-{self.version}",
            **self.objects.get(path, {}).get("metadata", {}),
            **stored.get("metadata", {}),
            "namespace": namespace,
            "name": name,
            "resourceVersion": str(self.version),
        }
        self.objects[path] = stored
        self._tell(kind, path, stored)
        return copy.deepcopy(stored)

    def vanish(self, path: str) -> None:
        """Remove an object, as if another client had done so."""
        self.version += 1
        gone = self.objects.pop(path)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", path, gone)

    def bookmark(self) -> None:
        """Send a bookmark event to all watches."""
        self._tell("BOOKMARK", "", {"metadata": {"resourceVersion": str(self.version)}})

    def forget(self) -> None:
        """Discard the history of changes, as a compaction of etcd does, and end all watches."""
        self.version += 1
        self.forgotten = self.version
        self._history.clear()
        self.cut()

    def back_up(self) -> tuple[int, dict[str, Manifest]]:
        """Return a copy of all data for `restore`."""
        return self.version, copy.deepcopy(self.objects)

    def restore(self, backup: tuple[int, dict[str, Manifest]]) -> None:
        """Restore the data and versions of a backup, and end all watches."""
        self.version, self.objects = backup[0], copy.deepcopy(backup[1])
        self._history.clear()
        self.cut()

    def fail_watch(self, code: int, message: str) -> None:
        """Send an error event to one watch."""
        self._error = {"code": code, "message": message}
        self._wake()

    def cut(self) -> None:
        """Close all connections."""
        self._cut.set()
        self._cut = asyncio.Event()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Manifest:
        """Handle a GET of an object or a collection."""
        self._note("GET", path)
        if path in self.objects:
            return copy.deepcopy(self.objects[path])
        if path.rpartition("/")[2] not in COLLECTIONS:
            raise ApiError(404, "NotFound", f"{path} not found")
        params = params or {}
        self.selectors["GET", path] = params.get("labelSelector")
        fields = [each.split("=") for each in params.get("fieldSelector", "").split(",") if each]
        found = sorted(
            each
            for each, held in self.objects.items()
            if _within(each, path) and all(_field(held, field) == value for field, value in fields)
        )
        start, limit = int(params.get("continue") or 0), int(params.get("limit") or 500)
        more = str(start + limit) if start + limit < len(found) else ""
        return {
            "metadata": {"resourceVersion": str(self.version), "continue": more},
            "items": [copy.deepcopy(self.objects[each]) for each in found[start : start + limit]],
        }

    async def create(
        self,
        path: str,
        manifest: Mapping[str, Any],
        *,
        field_validation: str | None = None,
    ) -> Manifest:
        """Handle a POST to a collection."""
        self._note("POST", path)
        self.validations.append((path, field_validation))
        metadata = manifest["metadata"]
        name = metadata.get("name") or f"{metadata['generateName']}{self.version}"
        if f"{path}/{name}" in self.objects:
            raise ApiError(409, "AlreadyExists", f'"{name}" already exists')
        self.posted.set()
        return self.put(f"{path}/{name}", manifest)

    async def replace(self, path: str, manifest: Mapping[str, Any]) -> Manifest:
        """Handle a PUT of an object or of its status."""
        self._note("PUT", path)
        target = path.removesuffix("/status")
        if target not in self.objects:
            raise ApiError(404, "NotFound", f"{target} not found")
        known = self.objects[target]
        if manifest["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        return self.put(target, {**known, "status": manifest["status"]} if path != target else manifest)

    async def merge_patch(
        self, path: str, patch: Mapping[str, Any], *, manager: str | None = None
    ) -> Manifest:
        """Handle a merge PATCH of top-level fields."""
        self._note("PATCH", path)
        self.managers.append(manager)
        if path not in self.objects:
            raise ApiError(404, "NotFound", f"{path} not found")
        return self.put(path, {**self.objects[path], **patch})

    async def apply(
        self, path: str, manifest: Mapping[str, Any], *, manager: str, force: bool = False
    ) -> Manifest:
        """Handle a server-side apply PATCH, assuming that no other manager owns any field."""
        del force
        self._note("PATCH", path)
        self.managers.append(manager)
        return self.put(path, manifest)

    async def delete(self, path: str, options: Mapping[str, Any]) -> Manifest:
        """Handle a DELETE of an object."""
        self._note("DELETE", path)
        known = self.objects.get(path)
        if known is None:
            raise ApiError(404, "NotFound", f"{path} not found")
        for field, wanted in options.get("preconditions", {}).items():
            if known["metadata"][field] != wanted:
                raise ApiError(409, "Conflict", f"the {field} in the precondition does not match")
        before = copy.deepcopy(known)
        if self.terminating:
            known["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
            return self.put(path, known)
        self.vanish(path)
        return before

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, silence_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Handle a watch request."""
        self._note("WATCH", path)
        self.selectors["WATCH", path] = params.get("labelSelector")
        if int(params["resourceVersion"]) < self.forgotten:
            raise ApiError(410, "Expired", "too old resource version")
        yield self._events(path, int(params["resourceVersion"]))

    async def _events(self, path: str, version: int) -> AsyncIterator[bytes]:
        cut = self._cut
        sent = 0
        while not cut.is_set():
            changed = self._changed
            if self._error is not None:
                error, self._error = self._error, None
                yield json.dumps({"type": "ERROR", "object": error}).encode()
            for at, kind, where, manifest in self._history[sent:]:
                sent += 1
                if at > version and (not where or _within(where, path)):
                    yield json.dumps({"type": kind, "object": manifest}).encode()
            waits = [asyncio.ensure_future(each.wait()) for each in (changed, cut)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        raise aiohttp.ServerDisconnectedError

    def _tell(self, kind: str, path: str, manifest: Manifest) -> None:
        self._history.append((self.version, kind, path, copy.deepcopy(manifest)))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _note(self, verb: str, path: str) -> None:
        self.requests.append((verb, path))
        if (refusal := self.refusals.pop((verb, path), None)) is not None:
            raise refusal


def _field(manifest: Mapping[str, Any], path: str) -> Any:
    """Return a field of an object by its path, as a field selector names it."""
    return functools.reduce(lambda held, name: held[name], path.split("."), manifest)


def _within(path: str, collection: str) -> bool:
    """Return whether an object belongs to a collection, which may cover one namespace or all namespaces."""
    prefix, _, plural = collection.rpartition("/")
    holder = path.rpartition("/")[0]
    return holder == collection or (
        "namespaces" not in prefix
        and holder.startswith(f"{prefix}/namespaces/")
        and holder.endswith(f"/{plural}")
    )
