"""The real Kueue manager, running against a test control plane."""

from __future__ import annotations

import base64
import functools
import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.controlplane import free_ports
from tools import assets
from tools.assets.programs import KUEUE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.controlplane import ControlPlane

API = "kueue.x-k8s.io/v1beta2"
WEBHOOKS = ("workload", "clusterqueue", "cohort", "localqueue", "resourceflavor", "pod")
"""The webhooks of the kinds that exist here; the others are for kinds of jobs that are not installed."""
LEFT_ALONE = ("kube-system", "kueue-system", "fleet-system")
_SCRIPT = """
mount -t tmpfs none /etc
mkdir -p /etc/kueue/metrics
cp -r "$0" /etc/kueue/metrics/certs
exec setpriv --pdeathsig KILL "$@"
"""
IN_OWN_ETC = ("unshare", "--map-root-user", "--mount", "sh", "-ec", _SCRIPT)
"""The command that gives a program a private /etc, where Kueue reads the certificate of its metrics."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def definitions() -> Path:
    """Return the folder of Kueue's CRDs and webhooks in Go's module cache.

    Raises
    ------
    MissingError
        The module is not in the cache. Building Kueue on this machine puts it there.
    """
    module = f"sigs.k8s.io/kueue@v{KUEUE}"
    environ = {**os.environ, "GOPROXY": "off", "GOFLAGS": "-mod=mod"}
    try:
        told = subprocess.run(
            ["go", "mod", "download", "-json", module],
            env=environ,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise assets.MissingError(
            f"the definitions of Kueue's kinds are not in Go's cache of modules ({error}); "
            f"`go mod download {module}` puts them there"
        ) from error
    return Path(json.loads(told.stdout)["Dir"]) / "config" / "components"


class Kueue:
    """Kueue's manager, a process on this machine that serves Kueue's webhooks.

    Parameters
    ----------
    plane : ControlPlane
        A running control plane.
    folder : Path
        The folder of the manager's configuration and certificates.
    program : Path
        The manager's executable.
    components : Path
        The folder of Kueue's definitions.
    **configuration
        Further fields of the manager's configuration.
    """

    def __init__(
        self, plane: ControlPlane, folder: Path, program: Path, components: Path, **configuration: Any
    ) -> None:
        self.plane = plane
        self._more = configuration
        self._folder = folder
        self._program = program
        self._components = components
        self._health, self._webhook = free_ports(2)

    def start(self) -> None:
        """Start the manager; return once it responds and its webhooks are installed."""
        admin = self.plane.admin
        for path in sorted((self._components / "crd" / "bases").glob("*.yaml")):
            admin.kubectl("create", "-f", str(path))
            is_there = functools.partial(self._is_established, path)
            self.plane.daemons.until(is_there, f"the definition in {path.name}")
        admin.kubectl("create", "namespace", "kueue-system")
        certificates = self.plane.authority.issue(self._folder / "certs")
        config = self._folder / "kueue.yaml"
        config.write_text(yaml.safe_dump(self._configuration(certificates)))
        self.plane.daemons.run(
            "kueue",
            Path("/usr/bin/env"),
            *IN_OWN_ETC,
            str(certificates),
            str(self._program),
            f"--config={config}",
            f"--kubeconfig={admin.kubeconfig}",
            "--feature-gates=VisibilityOnDemand=false",
        )
        self.plane.daemons.until(self._answers, "Kueue")
        admin.kubectl("create", "-f", "-", stdin=yaml.safe_dump_all(self._webhooks(certificates)))

    def _is_established(self, path: Path) -> bool:
        waited = ["wait", "--for=condition=Established", "-f", str(path), "--timeout=30s"]
        return "error" not in self.plane.admin.kubectl(*waited, check=False)

    def _configuration(self, certificates: Path) -> dict[str, Any]:
        selector = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [*LEFT_ALONE]}
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self._health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": self._webhook, "certDir": str(certificates)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "clientConnection": {"qps": 100, "burst": 200},
            "integrations": {"frameworks": ["pod"]},
            "managedJobsNamespaceSelector": {"matchExpressions": [selector]},
            **self._more,
        }

    def _webhooks(self, certificates: Path) -> list[Any]:
        bundle = base64.b64encode((certificates / "ca.crt").read_bytes()).decode()
        written = (self._components / "webhook" / "manifests.yaml").read_text()
        documents = list(yaml.safe_load_all(written))
        for document in documents:
            kept = [each for each in document["webhooks"] if each["name"].split(".")[0][1:] in WEBHOOKS]
            for each in kept:
                url = f"https://127.0.0.1:{self._webhook}{each['clientConfig']['service']['path']}"
                each["clientConfig"] = {"url": url, "caBundle": bundle}
            document["webhooks"] = kept
        return documents

    def _answers(self) -> bool:
        try:
            with _DIRECT.open(f"http://127.0.0.1:{self._health}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def make_queue(
        self,
        namespace: str,
        cpu: str,
        *,
        name: str = "research",
        node_labels: Mapping[str, str] | None = None,
        topology: str | None = None,
        check: str | None = None,
    ) -> None:
        """Create a queue in a namespace, with its own quota and flavor; urgent jobs may preempt others.

        Optionally, its pods must be close in a topology, and its jobs must pass an admission check.
        """
        own = f"{name}-{namespace}"
        flavor: dict[str, Any] = {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": own}}
        if node_labels:
            flavor["spec"] = {"nodeLabels": dict(node_labels)}
        if topology:
            flavor["spec"]["topologyName"] = topology
        quota = {"name": own, "resources": [{"name": "cpu", "nominalQuota": cpu}]}
        cluster: dict[str, Any] = {
            "apiVersion": API,
            "kind": "ClusterQueue",
            "metadata": {"name": own},
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [{"coveredResources": ["cpu"], "flavors": [quota]}],
            },
        }
        if check:
            cluster["spec"]["admissionChecksStrategy"] = {"admissionChecks": [{"name": check}]}
        local = {
            "apiVersion": API,
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterQueue": own},
        }
        self.plane.admin.kubectl("create", "-f", "-", stdin=yaml.safe_dump_all([flavor, cluster, local]))

    def make_check(self, name: str) -> None:
        """Create an admission check whose result the test decides."""
        spec = {"controllerName": "example.com/test"}
        manifest = {"apiVersion": API, "kind": "AdmissionCheck", "metadata": {"name": name}, "spec": spec}
        self.plane.admin.kubectl("create", "-f", "-", stdin=yaml.safe_dump(manifest))
        active = {
            "type": "Active",
            "status": "True",
            "reason": "Active",
            "message": "a test decides",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        patch = json.dumps({"status": {"conditions": [active]}})
        self.plane.admin.kubectl(
            "patch", "admissioncheck", name, "--subresource=status", "--type=merge", f"--patch={patch}"
        )

    def make_topology(self, name: str, label: str) -> None:
        """Create a topology of two racks by labelling each half of the nodes as one rack."""
        nodes = [
            each["metadata"]["name"] for each in self.plane.admin.request("GET", "/api/v1/nodes")["items"]
        ]
        for number, node in enumerate(nodes):
            self.plane.admin.kubectl("label", "--overwrite", "node", node, f"{label}=rack-{number % 2}")
        manifest = {
            "apiVersion": API,
            "kind": "Topology",
            "metadata": {"name": name},
            "spec": {"levels": [{"nodeLabel": label}]},
        }
        self.plane.admin.kubectl("create", "-f", "-", stdin=yaml.safe_dump(manifest))

    def make_priority(self, name: str, value: int) -> None:
        """Create a priority class, with which jobs can preempt others."""
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
        manifest = {**kind, "metadata": {"name": name}, "value": value, "preemptionPolicy": "Never"}
        self.plane.admin.kubectl("create", "-f", "-", stdin=yaml.safe_dump(manifest))
