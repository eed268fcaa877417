"""kubectl, for one cluster: typed answers, waits with a deadline, and all about a namespace at once."""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.e2e.command import CommandError, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

REQUEST_SECONDS = 60.0
"""How long a request to the API server may take on a machine that has much else to do."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a kubeconfig, and a namespace unless it is about the whole cluster."""

    program: Path
    kubeconfig: Path
    namespace: str | None = None

    def __call__(
        self, *arguments: str | Path, timeout: float = REQUEST_SECONDS, stdin: str | None = None
    ) -> str:
        """Return the output of one command.

        Raises
        ------
        CommandError
            It failed, or took longer than `timeout` seconds.
        """
        return run(*self._command(*arguments), timeout=timeout, stdin=stdin)

    def within(self, namespace: str) -> Kubectl:
        """Return the same for `namespace`."""
        return Kubectl(self.program, self.kubeconfig, namespace)

    def get(self, resource: str, name: str | None = None, *arguments: str) -> Any:
        """Return one object, or without a name the list of all."""
        named = [name] if name else []
        answer = json.loads(self("get", resource, *named, *arguments, "-o", "json"))
        return answer if name else answer["items"]

    def names(self, resource: str) -> set[str]:
        """Return all objects of one or more kinds, each as ``kind/name``."""
        return set(self("get", resource, "-o", "name").split())

    def inventory(self) -> set[str]:
        """Return every object in the namespace but Events, which tell of the past, and its own two."""
        kinds = self("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        asked = ",".join(kind for kind in kinds if kind.split(".")[0] != "events")
        found = set(self("get", asked, "-o", "name").split())
        return found - {"configmap/kube-root-ca.crt", "serviceaccount/default"}

    def wait_until(
        self, resource: str, name: str, holds: Callable[[dict[str, Any]], bool], *, timeout: float, what: str
    ) -> dict[str, Any]:
        """Return the first version of an object for which `holds` is true.

        Raises
        ------
        CommandError
            None came within `timeout` seconds; the message says `what` was waited for, and the last status.
        """
        last: dict[str, Any] = {}
        for last in self._versions(resource, name, timeout):
            if holds(last):
                return last
        raise CommandError(
            f"waited {timeout:.0f} s for {resource}/{name} {what}; "
            f"its last status: {json.dumps(last.get('status'))}"
        )

    def _versions(self, resource: str, name: str, timeout: float) -> Iterator[dict[str, Any]]:
        """Yield an object as it is now and after each change, until the time is over."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with self._watch(resource, name) as output, selectors.DefaultSelector() as selector:
                selector.register(output, selectors.EVENT_READ)
                while selector.select(max(0.0, deadline - time.monotonic())):
                    line = output.readline()
                    if not line:
                        break  # the watch has ended, as watches do now and then
                    yield self.get(resource, name)
            time.sleep(0.2)

    @contextlib.contextmanager
    def _watch(self, resource: str, name: str) -> Iterator[Any]:
        command = self._command("get", resource, name, "--watch", "--no-headers", "-o", "name")
        with subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        ) as process:
            try:
                yield process.stdout
            finally:
                process.kill()

    def everything(self) -> str:
        """Return what a person would look at first when something has gone wrong in the namespace."""
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
