"""The operator in a cluster, installed from its Helm chart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.e2e.command import run

if TYPE_CHECKING:
    from tests.support.e2e.kubectl import Kubectl

CHART = Path("charts/fleet-operator")
INSTALL_SECONDS = 180.0
GONE_SECONDS = 60.0
"""The time limit for Kubernetes to delete the dependents of deleted objects."""


@dataclass
class Release:
    """An installation of the Helm chart in its own namespace."""

    helm: Path
    kubectl: Kubectl
    namespace: str
    name: str = "fleet"
    installed: bool = False

    @property
    def deployment(self) -> str:
        """The name of the operator's Deployment and Lease."""
        return f"{self.name}-fleet-operator"

    def install(self, image: str, *values: str, take_ownership: bool = False) -> None:
        """Install the chart with the given operator image; return once the operator is ready."""
        repository, _, tag = image.rpartition(":")
        self.installed = True
        sets = _sets(f"image.repository={repository}", f"image.tag={tag}", *values)
        flags = ("--take-ownership",) if take_ownership else ()
        self._helm("install", self.name, CHART, "--create-namespace", *sets, *flags, *self._waiting)

    def upgrade(self, *values: str) -> None:
        """Upgrade with changed values; return once the new operators are ready and the old ones are gone."""
        self._helm("upgrade", self.name, CHART, "--reuse-values", *_sets(*values), *self._waiting)

    def rollback(self) -> None:
        """Roll back to the previous revision; wait for the same conditions as `upgrade`."""
        self._helm("rollback", self.name, *self._waiting)

    def test(self) -> None:
        """Run the chart's own tests with ``helm test``."""
        self._helm("test", self.name, "--timeout", f"{INSTALL_SECONDS:.0f}s")

    def uninstall(self) -> None:
        """Uninstall the chart, and wait until all its objects and the Lease are gone."""
        if self.installed:
            self._helm("uninstall", self.name, "--cascade", "foreground", "--wait", "--timeout", "120s")
            self.kubectl.within(self.namespace)(
                *("wait", "--for=delete", f"lease/{self.deployment}", f"--timeout={GONE_SECONDS:.0f}s"),
                timeout=GONE_SECONDS + 30,
            )
            self.installed = False

    @property
    def _waiting(self) -> tuple[str, ...]:
        return ("--wait", "--timeout", f"{INSTALL_SECONDS:.0f}s")

    def _helm(self, *arguments: str | Path) -> None:
        run(
            *(self.helm, "--kubeconfig", self.kubectl.kubeconfig, "--namespace", self.namespace),
            *arguments,
            timeout=INSTALL_SECONDS + 60,
        )


def _sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]
