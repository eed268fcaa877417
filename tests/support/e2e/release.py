"""The operator on a cluster, by its Helm chart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.e2e.command import run

if TYPE_CHECKING:
    from tests.support.e2e.kubectl import Kubectl

CHART = Path("charts/fleet-operator")
INSTALL_SECONDS = 180.0


@dataclass
class Release:
    """One installation of the chart in a namespace of its own."""

    helm: Path
    kubectl: Kubectl
    namespace: str
    name: str = "fleet"
    installed: bool = False

    @property
    def deployment(self) -> str:
        """The name of the operator's Deployment."""
        return f"{self.name}-fleet-operator"

    def install(self, image: str) -> None:
        """Install the chart with the operator's `image`, and return once the operator is ready."""
        repository, _, tag = image.rpartition(":")
        self.installed = True
        self._helm(
            *("install", self.name, CHART, "--create-namespace"),
            *("--set", f"image.repository={repository},image.tag={tag}"),
            # The cluster may not be ours: it keeps nothing of the tests, not even the definition.
            *("--set", "crd.keep=false"),
            *("--wait", "--timeout", f"{INSTALL_SECONDS:.0f}s"),
        )

    def uninstall(self) -> None:
        """Uninstall it and wait until all of it is gone; a second call does nothing."""
        if self.installed:
            self._helm("uninstall", self.name, "--cascade", "foreground", "--wait", "--timeout", "120s")
            # The operators' own, which the chart's notes say how to remove.
            self.kubectl("-n", self.namespace, "delete", "lease", self.deployment, "--ignore-not-found")
            self.installed = False

    def _helm(self, *arguments: str | Path) -> None:
        run(
            *(self.helm, "--kubeconfig", self.kubectl.kubeconfig, "--namespace", self.namespace),
            *arguments,
            timeout=INSTALL_SECONDS + 60,
        )
