"""Access to a cluster: kubectl for changes, and the package `kubernetes` for reads."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tests.support.e2e.command import CommandError, run
from tests.support.kube import Namespace, client_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.support.kube import ApiServer

T = TypeVar("T")

REQUEST_SECONDS = 60.0
"""The time limit for a request to the API server on a busy machine."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl for one cluster and, optionally, one namespace."""

    program: Path
    kubeconfig: Path
    namespace: str | None = None

    def __call__(
        self, *arguments: str | Path, timeout: float = REQUEST_SECONDS, stdin: str | None = None
    ) -> str:
        """Run a kubectl command and return its output.

        Raises
        ------
        CommandError
            The command failed, or took longer than `timeout` seconds.
        """
        return run(*self._command(*arguments), timeout=timeout, stdin=stdin)

    def within(self, namespace: str) -> Kubectl:
        """Return a `Kubectl` for another namespace of the same cluster."""
        return Kubectl(self.program, self.kubeconfig, namespace)

    def get(self, plural: str, **params: str) -> list[dict[str, Any]]:
        """Return all objects of a kind, in the namespace if one is set, else in the whole cluster."""
        return self._ask(lambda server: Namespace(server, self.namespace or "").all(plural, **params))

    def names(self, resource: str) -> set[str]:
        """Return all objects of one or more kinds, each as ``kind/name``."""
        return set(self("get", resource, "-o", "name").split())

    def inventory(self) -> set[str]:
        """Return every object in the namespace, except Events and the namespace's default objects."""

        async def look(server: ApiServer) -> set[str]:
            found = set()
            groups = (await server.get("/apis"))["groups"]
            for base in (
                "/api/v1",
                *(f"/apis/{each['preferredVersion']['groupVersion']}" for each in groups),
            ):
                group = "".join(f".{each}" for each in base.split("/")[2:-1])
                for kind in (await server.get(base))["resources"]:
                    plural = kind["name"]
                    if kind["namespaced"] and "list" in kind["verbs"] and plural != "events":
                        listed = await server.get(f"{base}/namespaces/{self.namespace}/{plural}")
                        named = f"{kind['singularName'] or kind['kind'].lower()}{group}"
                        found |= {f"{named}/{each['metadata']['name']}" for each in listed["items"]}
            return found - {"configmap/kube-root-ca.crt", "serviceaccount/default"}

        return self._ask(look)

    def wait_until(
        self, plural: str, name: str, holds: Callable[[dict[str, Any]], bool], *, timeout: float, what: str
    ) -> dict[str, Any]:
        """Wait for the first version of an object for which `holds` is true, and return it.

        Raises
        ------
        AssertionError
            The wait exceeded `timeout` seconds; the message contains `what` and the last status.
        """

        async def wait(server: ApiServer) -> dict[str, dict[str, Any]]:
            return await Namespace(server, self.namespace or "").until(
                plural,
                f"{name} {what}",
                lambda found: name in found and holds(found[name]),
                seconds=timeout,
                fieldSelector=f"metadata.name={name}",
            )

        return self._ask(wait)[name]

    def _ask(self, work: Callable[[ApiServer], Awaitable[T]]) -> T:
        async def ask() -> T:
            async with client_for(self.kubeconfig) as server:
                return await work(server)

        return asyncio.run(ask())

    def everything(self) -> str:
        """Return the pods, events and logs of the namespace, to explain a failure."""
        parts = [
            self._told("get", "fleetjobs,pods,services", "-o", "wide"),
            self._told("describe", "fleetjobs,pods"),
            self._told("get", "events", "--sort-by=.lastTimestamp"),
        ]
        with contextlib.suppress(CommandError):
            parts += [
                self._told("logs", name, "--all-containers", "--tail=80")
                for name in sorted(self.names("pods"))
            ]
        return "\n".join(parts)

    def _told(self, *arguments: str) -> str:
        try:
            answer = self(*arguments)
        except CommandError as error:
            answer = str(error)
        return f"--- kubectl {' '.join(arguments)}\n{answer}"

    def _command(self, *arguments: str | Path) -> list[str | Path]:
        place = ["--namespace", self.namespace] if self.namespace else []
        return [self.program, "--kubeconfig", self.kubeconfig, *place, *arguments]
