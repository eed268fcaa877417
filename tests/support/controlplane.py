"""A real control plane for tests: etcd, the API server, controllers, a scheduler, and kwok as kubelet.

Everything listens on free ports of the loopback interface and keeps its files in one folder.
`ControlPlane.start` takes about six seconds. If a program is not ready in time, the error names it and shows
the end of its log.
"""

from __future__ import annotations

import base64
import functools
import secrets
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.support.administrator import Administrator
from tests.support.certificates import make_authority
from tests.support.daemons import Daemons
from tools import assets

if TYPE_CHECKING:
    from collections.abc import Sequence

STAGES = Path(__file__).parent / "kwok" / "stages.yaml"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok", "kubectl")


class ControlPlane:
    """A running control plane and its programs.

    Parameters
    ----------
    folder : Path
        The folder of its files and logs; created if it does not exist.
    nodes : int
        The number of kwok's simulated nodes.
    definitions : sequence of Path
        Manifests of CustomResourceDefinitions. They are created before the controllers start, because the
        garbage collector looks for new kinds of owners only every half minute.
    audit_log : Path, optional
        The file in which the API server logs the metadata of every completed request.
    scheduler_qps : int
        The scheduler's limit of requests per second; 50 is its own default.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 4,
        definitions: Sequence[Path] = (),
        audit_log: Path | None = None,
        scheduler_qps: int = 50,
    ) -> None:
        self.folder = folder
        self._audit_log = audit_log
        self._scheduler_qps = scheduler_qps
        self._definitions = definitions
        self._nodes = nodes
        self._data = folder / "etcd"
        self.programs: dict[str, Path] = {}
        self._tokens = {name: secrets.token_hex(16) for name in ("admin", "manager", "scheduler")}
        self._ports = dict(zip((*PROGRAMS, "etcd-peer"), free_ports(len(PROGRAMS) + 1), strict=True))
        self.admin = Administrator(
            f"https://127.0.0.1:{self._ports['kube-apiserver']}",
            self._tokens["admin"],
            certificate=folder / "certs" / "apiserver.crt",
            kubeconfig=folder / "kubeconfig",
        )
        self.authority = make_authority(folder / "authority")
        """The authority of client certificates that the API server accepts."""
        self.daemons = Daemons(folder)
        self.pods_log = folder / "pods.log"
        """The log of every container of every pod, in a container runtime's format; tests write it."""

    def start(self) -> None:
        """Start all programs; return once pods can be created and all nodes are ready."""
        self.programs = assets.find(PROGRAMS)
        (self.folder / "certs").mkdir(parents=True)
        try:
            self._start_etcd()
            self._start_api_server()
            self._define()
            self._start_controllers()
            self._start_nodes()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all programs, in the reverse of the order in which they were started."""
        self.daemons.stop()

    def restart_api_server(self) -> None:
        """Kill and restart the API server; clients must reconnect their watches."""
        self.daemons.kill("kube-apiserver")
        self._run_api_server()
        self.daemons.until(lambda: self.admin.is_answered("/readyz"), "the API server again")

    def back_up(self) -> Path:
        """Copy etcd's data while etcd is stopped; return the folder of the copy."""
        backup = self.folder / "backup"
        self.daemons.kill("etcd")
        shutil.copytree(self._data, backup)
        self._start_etcd()
        self.daemons.until(lambda: self.admin.is_answered("/readyz"), "etcd again")
        return backup

    def restore(self, backup: Path) -> None:
        """Restore etcd's data, including its revision, from a backup.

        The API server is restarted, too, as Kubernetes requires. The other programs continue.
        """
        for name in ("kube-apiserver", "etcd"):
            self.daemons.kill(name)
        shutil.rmtree(self._data)
        shutil.copytree(backup, self._data)
        self._start_etcd()
        self._run_api_server()
        self.daemons.until(lambda: self.admin.is_answered("/readyz"), "the API server after the restore")

    def _run(self, name: str, *arguments: str) -> None:
        self.daemons.run(name, self.programs[name], *arguments)

    def _start_etcd(self) -> None:
        client, peer = (
            f"http://127.0.0.1:{self._ports['etcd']}",
            f"http://127.0.0.1:{self._ports['etcd-peer']}",
        )
        self._run(
            "etcd",
            f"--data-dir={self._data}",
            "--name=test",
            "--log-level=error",
            "--unsafe-no-fsync=true",  # a test's data need not survive a crash
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=test={peer}",
        )

    def _start_api_server(self) -> None:
        certs = self.folder / "certs"
        (certs / "sa.key").write_text(_ec_private_key())
        (certs / "tokens.csv").write_text(
            f'{self._tokens["admin"]},admin,admin,"system:masters"\n'
            f"{self._tokens['manager']},system:kube-controller-manager,manager\n"
            f"{self._tokens['scheduler']},system:kube-scheduler,scheduler\n"
        )
        self._run_api_server()
        written = self.admin.certificate
        self.daemons.until(lambda: written.exists() and written.stat().st_size > 0, "its certificate")
        for name in ("manager", "scheduler"):
            self.admin.write_kubeconfig(self.folder / f"{name}.kubeconfig", self._tokens[name])
        self.admin.write_kubeconfig(self.admin.kubeconfig, self._tokens["admin"])
        self.daemons.until(lambda: self.admin.is_answered("/readyz"), "the API server")

    def _run_api_server(self) -> None:
        certs = self.folder / "certs"
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._ports['etcd']}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._ports['kube-apiserver']}",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={certs}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",  # as on OpenShift
            f"--token-auth-file={certs / 'tokens.csv'}",
            f"--client-ca-file={self.authority.certificate}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-key-file={certs / 'sa.key'}",
            f"--service-account-signing-key-file={certs / 'sa.key'}",
            *self._auditing(),
        )

    def _auditing(self) -> tuple[str, ...]:
        if self._audit_log is None:
            return ()
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived", "ResponseStarted"],
            "rules": [{"level": "Metadata"}],
        }
        path = self.folder / "audit-policy.yaml"
        path.write_text(yaml.safe_dump(policy))
        return f"--audit-policy-file={path}", f"--audit-log-path={self._audit_log}"

    def _define(self) -> None:
        for path in self._definitions:
            self.admin.kubectl("create", "-f", str(path))
            is_there = functools.partial(self._is_established, path)
            self.daemons.until(is_there, f"the definitions in {path.name}")

    def _is_established(self, path: Path) -> bool:
        # If there are no conditions yet, kubectl fails instead of waiting.
        waited = ["wait", "--for=condition=Established", "-f", str(path), "--timeout=30s"]
        return "error" not in self.admin.kubectl(*waited, check=False)

    def _start_controllers(self) -> None:
        certs = self.folder / "certs"
        self._run(
            "kube-controller-manager",
            f"--kubeconfig={self.folder / 'manager.kubeconfig'}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._ports['kube-controller-manager']}",
            "--use-service-account-credentials",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            f"--service-account-private-key-file={certs / 'sa.key'}",
            f"--root-ca-file={self.admin.certificate}",
        )
        scheduler = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {
                "kubeconfig": str(self.folder / "scheduler.kubeconfig"),
                "qps": self._scheduler_qps,
                "burst": 2 * self._scheduler_qps,
            },
        }
        config = self.folder / "scheduler.yaml"
        config.write_text(yaml.safe_dump(scheduler))
        self._run(
            "kube-scheduler",
            f"--config={config}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._ports['kube-scheduler']}",
        )

    def _start_nodes(self) -> None:
        self._run(
            "kwok",
            f"--kubeconfig={self.admin.kubeconfig}",
            f"--config={STAGES}",
            f"--config={self._write_logs_config()}",
            f"--server-address=127.0.0.1:{self._ports['kwok']}",
            f"--tls-cert-file={self.admin.certificate}",
            f"--tls-private-key-file={self.admin.certificate.with_suffix('.key')}",
            "--manage-all-nodes",
            "--node-ip=127.0.0.1",
            f"--node-port={self._ports['kwok']}",
            "--node-lease-duration-seconds=40",
            "--cidr=10.244.0.0/16",
        )
        for index in range(self._nodes):
            size = {"cpu": "64", "memory": "512Gi", "pods": "250"}
            self.admin.request(
                "POST",
                "/api/v1/nodes",
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": f"kwok-{index}", "labels": {"kubernetes.io/os": "linux"}},
                    "status": {
                        "allocatable": size,
                        "capacity": size,
                        "daemonEndpoints": {"kubeletEndpoint": {"Port": self._ports["kwok"]}},
                    },
                },
            )
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self.daemons.until(lambda: self.admin.is_answered(account), "the default service account")
        self.daemons.until(self._nodes_ready, "kwok's nodes")

    def _write_logs_config(self) -> Path:
        """Configure kwok to serve `pods_log` as the log of every container."""
        self.pods_log.touch()
        config = {
            "apiVersion": "kwok.x-k8s.io/v1alpha1",
            "kind": "ClusterLogs",
            "metadata": {"name": "logs"},
            "spec": {"logs": [{"logsFile": str(self.pods_log), "follow": True}]},
        }
        path = self.folder / "logs.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def _nodes_ready(self) -> bool:
        nodes = self.admin.request("GET", "/api/v1/nodes")["items"]
        return all(
            any(
                each["type"] == "Ready" and each["status"] == "True"
                for each in node["status"].get("conditions", ())
            )
            for node in nodes
        )


def free_ports(count: int) -> Sequence[int]:
    """Return ports of the loopback interface that are currently free."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


def _ec_private_key() -> str:
    """Return a new P-256 private key in SEC 1 format, without the public key."""
    number = (1 + secrets.randbelow(2**255)).to_bytes(32, "big")
    der = bytes.fromhex("30310201010420") + number + bytes.fromhex("a00a06082a8648ce3d030107")
    encoded = base64.b64encode(der).decode()
    lines = "\n".join(encoded[at : at + 64] for at in range(0, len(encoded), 64))
    return f"-----BEGIN EC PRIVATE KEY-----\n{lines}\n-----END EC PRIVATE KEY-----\n"
