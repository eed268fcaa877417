"""The operator as a separate process that has only the permissions granted by the chart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from tests.support.controlplane import free_ports
from tests.support.daemons import die_with_parent
from tools import assets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.controlplane import ControlPlane

Manifest = dict[str, Any]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "fleet-operator"
CRD = ROOT / "crds" / "fleetjobs.fleetjob.dev.yaml"
POD_GROUPS = Path(__file__).parent / "podgroups.yaml"
NAMESPACE = "fleet-system"
ACCOUNT = "fleet-operator"
SERVING = "fleetjob.dev:operator"
"""The chart's role for operators."""
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
METRICS_READER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
"""A peer of a NetworkPolicy: the pods of another namespace, which may read the operator's metrics."""

TESTS_OWN = (
    "is being terminated",  # the namespace of a finished test
    "exceeded quota",  # caused by one test
    "violates PodSecurity",  # caused by another test
)
AWAY = ("Cannot connect to host", "Connection reset by peer", "Response payload is not completed")
AWAY_SECONDS = 10.0
"""The time after a start in which an API server may reject permitted requests, until it has read roles."""

READY_SECONDS = 100.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
STOP_SECONDS = 30.0


def install(control_plane: ControlPlane, features: Sequence[str] = ()) -> str:
    """Create the chart's objects other than the CRD and the Deployment; return the operator's token."""
    helm = assets.find(["helm"])["helm"]
    command = [
        str(helm),
        "template",
        ACCOUNT,
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--kube-version",
        assets.KUBERNETES,
    ]
    switches = [word for name in features for word in ("--set", f"features.{name}=true")]
    rendered = subprocess.run(
        [*command, "--set", f"serviceAccount.name={ACCOUNT}", *switches],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if rendered.returncode != 0:
        raise AssertionError(f"helm could not render the chart: {rendered.stderr}")
    left_out = ("CustomResourceDefinition", "Deployment", "Pod")
    documents = [
        each for each in yaml.safe_load_all(rendered.stdout) if each and each["kind"] not in left_out
    ]
    documents.append(_free_lease(ACCOUNT))
    control_plane.admin.kubectl("create", "namespace", NAMESPACE)
    control_plane.admin.kubectl("create", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump_all(documents))
    roles = {(each["kind"], each["metadata"]["name"]): each for each in documents if "rules" in each}
    for binding in (each for each in documents if "roleRef" in each):
        reference = binding["roleRef"]
        _await_rights(control_plane, binding, roles[reference["kind"], reference["name"]])
    return control_plane.admin.kubectl("create", "token", ACCOUNT, "-n", NAMESPACE, "--duration=2h").strip()


def grant_lease(control_plane: ControlPlane, name: str, account: str = ACCOUNT) -> None:
    """Grant a test's operator access to its own Lease, because the chart covers only the default one.

    The Lease already exists and is released: without one, the first operator would wait for a Lease duration.
    """
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    role = {
        "metadata": {"name": f"lease-{name}"},
        "rules": [
            {**leases, "resourceNames": [name], "verbs": ["get", "update"]},
            {**leases, "verbs": ["create"]},
        ],
    }
    binding = {
        "metadata": {"name": f"lease-{name}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": f"lease-{name}"},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}],
    }
    control_plane.admin.request("POST", LEASES, _free_lease(name))
    control_plane.admin.request("POST", f"{rbac}/roles", role)
    control_plane.admin.request("POST", f"{rbac}/rolebindings", binding)
    attributes = {"namespace": NAMESPACE, "group": "coordination.k8s.io", "resource": "leases", "name": name}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{NAMESPACE}:{account}",
            "resourceAttributes": {**attributes, "verb": "update"},
        },
    }
    deadline = time.monotonic() + READY_SECONDS
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    while not control_plane.admin.request("POST", path, review)["status"]["allowed"]:
        if time.monotonic() > deadline:
            raise AssertionError(f"{account} still may not update the Lease {name} after {READY_SECONDS:g} s")
        time.sleep(0.02)


def _free_lease(name: str) -> Manifest:
    """Return a released Lease, which an operator can acquire immediately."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"holderIdentity": "", "leaseDurationSeconds": 1},
    }


def refusals(log: str) -> list[str]:
    """Return the lines of an operator's log that report missing permissions, except expected ones."""
    lacking: list[str] = []
    now = away = datetime.min.replace(tzinfo=UTC)
    for line in log.splitlines():
        with contextlib.suppress(ValueError, IndexError):  # only the first line of a message has a time
            now = datetime.fromisoformat(line.split()[0])
        if any(sign in line for sign in AWAY):
            away = now
        if "forbidden" not in line or any(cause in line for cause in TESTS_OWN):
            continue
        if (now - away).total_seconds() > AWAY_SECONDS:
            lacking.append(line)
    return lacking


def _await_rights(control_plane: ControlPlane, binding: Manifest, role: Manifest) -> None:
    """Wait until the API server enforces new roles and bindings."""
    rule = role["rules"][0]
    resource = ".".join(filter(None, (rule["resources"][0], rule["apiGroups"][0])))
    where = ["--all-namespaces"] if binding["kind"] == "ClusterRoleBinding" else ["-n", NAMESPACE]
    account = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
    question = ["auth", "can-i", rule["verbs"][0], resource, *where, "--as", account]
    deadline = time.monotonic() + READY_SECONDS
    while not control_plane.admin.kubectl(*question, check=False).startswith("yes"):
        if time.monotonic() > deadline:
            raise AssertionError(f"kubectl {' '.join(question)}: still no after {READY_SECONDS:g} s")
        time.sleep(0.05)


class Spawned(Protocol):
    """The part of `subprocess.Popen`'s interface that these tests use."""

    def poll(self) -> int | None:
        """Return the exit status, or None while the process is running."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; raise subprocess.TimeoutExpired after a timeout."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process unless it has ended."""

    def kill(self) -> None:
        """Kill the process immediately."""


class OperatorProcess:
    """An operator that runs as a separate process.

    Parameters
    ----------
    folder : Path
        The folder of the operator's log.
    kubeconfig : Path
        The kubeconfig with the operator's identity.
    """

    def __init__(self, folder: Path, kubeconfig: Path, **environment: str) -> None:
        self.log = folder / "operator.log"
        self.kubeconfig = kubeconfig
        self.port = free_ports(1)[0]
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "FLEET_OPERATOR_HTTP_HOST": "127.0.0.1",
            "FLEET_OPERATOR_HTTP_PORT": str(self.port),
            "FLEET_OPERATOR_LOG_LEVEL": "debug",
            "FLEET_OPERATOR_IDENTITY": f"test-{self.port}",  # stays the same after a restart, like a pod's
            **environment,
        }
        self.program: tuple[str, ...] = ("fleet_operator.startup",)
        """The module to run, and its arguments."""
        self._process: Spawned | None = None

    def tell(self, **environment: str) -> None:
        """Change the operator's settings for the next start."""
        self._environment |= environment

    @property
    def runs(self) -> bool:
        """True if the process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the operator, and wait until it is ready."""
        self._process = self._spawn()
        self.until_ready()

    def until_ready(self) -> None:
        """Wait until the operator reports that it is ready."""
        deadline = time.monotonic() + READY_SECONDS
        while self.get("/readyz") != "ok\n":
            if self._running.poll() is not None:
                raise AssertionError(f"the operator ended:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"the operator was not ready within {READY_SECONDS:g} s:\n{self.tail()}")
            time.sleep(0.05)

    def get(self, path: str) -> str | None:
        """Return the body of the operator's HTTP response, or None if there is an error or no response."""
        try:
            with _DIRECT.open(f"http://127.0.0.1:{self.port}{path}", timeout=STOP_SECONDS) as answer:
                text: str = answer.read().decode()
                return text
        except (OSError, urllib.error.URLError):
            return None

    def leads(self) -> bool | None:
        """Return whether the operator's metrics show it as the leader, or None if they are unavailable."""
        found = re.search(r"^fleet_operator_leader (\S+)", self.get("/metrics") or "", re.MULTILINE)
        return None if found is None else float(found[1]) == 1

    async def until_leading(self, *, holds: bool = True, seconds: float = READY_SECONDS) -> None:
        """Wait until the operator's metrics show it as the leader or, if requested, as not leading."""
        async with asyncio.timeout(seconds):
            while await asyncio.to_thread(self.leads) is not holds:  # noqa: ASYNC110 there is only the asking
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        """Kill the operator with SIGKILL, as the kernel does when memory runs out."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Terminate the operator as the kubelet does; return its exit status."""
        return self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Pause the operator's process, as if its machine were overloaded."""
        self._running.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the paused process."""
        self._running.send_signal(signal.SIGCONT)

    def tail(self) -> str:
        """Return the last part of the operator's log."""
        return self.log.read_text(errors="replace")[-5000:]

    def _spawn(self) -> Spawned:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *self.program],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )

    def _end(self, number: signal.Signals) -> int:
        process = self._running
        process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)
            raise AssertionError(
                f"the operator did not end within {STOP_SECONDS:g} s:\n{self.tail()}"
            ) from None

    @property
    def _running(self) -> Spawned:
        if self._process is None:
            raise RuntimeError("the operator was not started")
        return self._process
