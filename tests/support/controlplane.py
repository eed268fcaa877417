"""A real control plane for tests: etcd, the API server, its controllers, the scheduler, and kwok as kubelet.

Everything listens on free ports of the loopback interface and keeps its files in one folder. Processes are
stopped by their own handles, and by the kernel should this process be killed. `ControlPlane.start` takes
about six seconds; whatever does not come up in time is named, with the end of its log.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import secrets
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.processes import cpu_seconds
from tools import assets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STAGES = Path(__file__).parent / "kwok" / "stages.yaml"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok", "kubectl")

START_SECONDS = 60.0
STOP_SECONDS = 5.0

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class ControlPlane:
    """One control plane.

    Parameters
    ----------
    folder : Path
        Where its files and logs go; made if it is not there.
    nodes : int
        How many nodes kwok pretends to have.
    definitions : sequence of Path
        Manifests of CustomResourceDefinitions. They are created before the controllers start, because the
        garbage collector looks for new kinds of owners only every half minute.
    audit_log : Path, optional
        Where the API server notes the metadata of every request that has been answered.
    scheduler_qps : int
        How many requests a second the scheduler may make; 50 is its own default.
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
        self._programs: dict[str, Path] = {}
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._tokens = {name: secrets.token_hex(16) for name in ("admin", "manager", "scheduler")}
        self._etcd, self._peer, self._api, self._manager, self._scheduler, self._kwok = free_ports(6)
        self.server = f"https://127.0.0.1:{self._api}"
        self.kubeconfig = folder / "kubeconfig"
        self.pods_log = folder / "pods.log"
        """What every container of every pod says, as a container runtime writes it: a test's own to fill."""

    def start(self) -> None:
        """Start everything; return when pods can be made and the nodes are ready."""
        self._programs = assets.find(PROGRAMS)
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
        """Stop everything that was started, the last first."""
        for _, process in reversed(self._processes):
            if process.poll() is None:
                process.terminate()
        for _, process in reversed(self._processes):
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def restart_api_server(self) -> None:
        """Kill the API server and start it again; whoever watched has to connect anew."""
        (process,) = [process for name, process in self._processes if name == "kube-apiserver"]
        process.kill()
        process.wait()
        self._processes = [each for each in self._processes if each[1] is not process]
        self._run_api_server()
        self._until(lambda: self._answers("/readyz"), "the API server again")

    def cpu_seconds(self) -> dict[str, float]:
        """Return how much CPU each of the programs that run has taken."""
        return {name: cpu_seconds(process.pid) for name, process in self._processes}

    def program(self, name: str) -> Path:
        """Return where one of the programs is."""
        return self._programs[name]

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl as the administrator; return what it prints, errors included if `check` is off."""
        ended = subprocess.run(
            [self._programs["kubectl"], "--kubeconfig", self.kubeconfig, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and ended.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {ended.stderr}")
        return ended.stdout + ("" if check else ended.stderr)

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """Send one request as the administrator.

        Raises
        ------
        urllib.error.HTTPError
            The answer is an error; its body has the server's own words.
        """
        request = urllib.request.Request(  # noqa: S310 the address is our own
            self.server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._tokens['admin']}", "Content-Type": content_type},
        )
        # No proxies, so that no thread walks through the environment, in which pytest names each test.
        direct = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls())
        with urllib.request.build_opener(*direct).open(request, timeout=30) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def write_kubeconfig(self, path: Path, token: str, namespace: str = "default") -> Path:
        """Write a kubeconfig for whoever has `token`."""
        ca = base64.b64encode(self._certificate.read_bytes()).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
            ],
            "users": [{"name": "test", "user": {"token": token}}],
            "clusters": [
                {"name": "test", "cluster": {"server": self.server, "certificate-authority-data": ca}}
            ],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def _start_etcd(self) -> None:
        client, peer = f"http://127.0.0.1:{self._etcd}", f"http://127.0.0.1:{self._peer}"
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            "--name=test",
            "--log-level=error",
            "--unsafe-no-fsync=true",  # a test's data may die with the machine
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
        self._until(self._has_certificate, "the API server's certificate")
        for name in ("manager", "scheduler"):
            self.write_kubeconfig(self.folder / f"{name}.kubeconfig", self._tokens[name])
        self.write_kubeconfig(self.kubeconfig, self._tokens["admin"])
        self._until(lambda: self._answers("/readyz"), "the API server")

    def _run_api_server(self) -> None:
        certs = self.folder / "certs"
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._api}",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={certs}",
            "--authorization-mode=Node,RBAC",
            f"--token-auth-file={certs / 'tokens.csv'}",
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
            self.kubectl("create", "-f", str(path))
            self._until(functools.partial(self._is_established, path), f"the definitions in {path.name}")

    def _is_established(self, path: Path) -> bool:
        # Asked too early, when there are no conditions yet, kubectl gives up instead of waiting.
        waited = ["wait", "--for=condition=Established", "-f", str(path), "--timeout=30s"]
        return "error" not in self.kubectl(*waited, check=False)

    def _start_controllers(self) -> None:
        certs = self.folder / "certs"
        self._run(
            "kube-controller-manager",
            f"--kubeconfig={self.folder / 'manager.kubeconfig'}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._manager}",
            "--use-service-account-credentials",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            f"--service-account-private-key-file={certs / 'sa.key'}",
            f"--root-ca-file={self._certificate}",
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
            f"--secure-port={self._scheduler}",
        )

    def _start_nodes(self) -> None:
        self._run(
            "kwok",
            f"--kubeconfig={self.kubeconfig}",
            f"--config={STAGES}",
            f"--config={self._write_logs_config()}",
            f"--server-address=127.0.0.1:{self._kwok}",
            f"--tls-cert-file={self._certificate}",
            f"--tls-private-key-file={self._certificate.with_suffix('.key')}",
            "--manage-all-nodes",
            "--node-ip=127.0.0.1",
            f"--node-port={self._kwok}",
            "--node-lease-duration-seconds=40",
            "--cidr=10.244.0.0/16",
        )
        for index in range(self._nodes):
            size = {"cpu": "64", "memory": "512Gi", "pods": "250"}
            self.request(
                "POST",
                "/api/v1/nodes",
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": f"kwok-{index}", "labels": {"kubernetes.io/os": "linux"}},
                    "status": {
                        "allocatable": size,
                        "capacity": size,
                        "daemonEndpoints": {"kubeletEndpoint": {"Port": self._kwok}},
                    },
                },
            )
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._until(lambda: self._answers(account), "the default service account")
        self._until(self._nodes_ready, "kwok's nodes")

    def _write_logs_config(self) -> Path:
        """Have kwok serve `pods_log` as the log of every container."""
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

    @property
    def _certificate(self) -> Path:
        return self.folder / "certs" / "apiserver.crt"

    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self._certificate))

    def _has_certificate(self) -> bool:
        return self._certificate.exists() and self._certificate.stat().st_size > 0

    def _answers(self, path: str) -> bool:
        try:
            self.request("GET", path)
        except json.JSONDecodeError:
            return True  # /readyz says "ok", not JSON
        except (OSError, urllib.error.URLError):
            return False
        return True

    def _nodes_ready(self) -> bool:
        nodes = self.request("GET", "/api/v1/nodes")["items"]
        return all(
            any(
                each["type"] == "Ready" and each["status"] == "True"
                for each in node["status"].get("conditions", ())
            )
            for node in nodes
        )

    def _run(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [self._programs[name], *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
        self._processes.append((name, process))

    def _until(self, probe: Callable[[], bool], what: str) -> None:
        """Poll, as these programs offer nothing to wait for; fail at once when one of them has ended."""
        deadline = time.monotonic() + START_SECONDS
        while not probe():
            for name, process in self._processes:
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended while {what} was awaited:\n{self._log(name)}")
            if time.monotonic() > deadline:
                name = self._processes[-1][0]
                raise AssertionError(f"waited {START_SECONDS:g} s in vain for {what}:\n{self._log(name)}")
            time.sleep(0.05)

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it is gone, however it went.

    A thread, not a process: start what should outlive a thread pool from the main one.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(count: int) -> Sequence[int]:
    """Return ports of the loopback interface that nobody listens on now."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


def _ec_private_key() -> str:
    """Return a new P-256 private key: SEC 1's ECPrivateKey without the public half, which Go works out."""
    number = (1 + secrets.randbelow(2**255)).to_bytes(32, "big")
    der = bytes.fromhex("30310201010420") + number + bytes.fromhex("a00a06082a8648ce3d030107")
    encoded = base64.b64encode(der).decode()
    lines = "\n".join(encoded[at : at + 64] for at in range(0, len(encoded), 64))
    return f"-----BEGIN EC PRIVATE KEY-----\n{lines}\n-----END EC PRIVATE KEY-----\n"
