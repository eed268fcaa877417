"""The control plane of the operator's benchmarks, with the operator, a bare client and an audit log."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.audit import AuditLog
from benchmarks.bare_client import SMALL, Size, job_manifest
from benchmarks.pipes import hear
from benchmarks.watched import Watched
from fleet_operator.kubernetes.client import ApiClient, ApiError
from fleet_operator.kubernetes.login import from_kubeconfig
from tests.support.controlplane import ControlPlane
from tests.support.daemons import die_with_parent
from tests.support.operator_process import CRD, NAMESPACE, OperatorProcess, install

__all__ = ["JOBS", "PODS", "SLOW_SECONDS", "OperatedPlane", "Used", "submit"]

SLOW_SECONDS = 3600.0
"""The time limit of every wait; even a busy machine stays below this unless there is a fault."""

AT_REST_CORES = 0.25
"""The maximum CPU use of a control plane at rest."""

AT_REST_SECONDS = 2
"""The time for which the CPU use must stay below the limit."""

SUBMITTED_AT_ONCE = 16
PODS_OF_A_NODE = 200
JOBS = "/apis/fleetjob.dev/v1alpha1/namespaces/{}/fleetjobs"
PODS = "/api/v1/namespaces/{}/pods"
SERVICES = "/api/v1/namespaces/{}/services"


@dataclass(frozen=True)
class Used:
    """The resources that the operator has used so far."""

    rss_bytes: float
    cpu_seconds: float


class OperatedPlane:
    """A control plane with a running operator.

    Parameters
    ----------
    folder : Path
        The folder of logs and data.
    num_pods : int
        The maximum number of pods at a time.
    sampled : bool
        True if the operator samples itself, which takes a hundredth of a core.
    """

    def __init__(self, folder: Path, *, num_pods: int, sampled: bool = False) -> None:
        self._folder = folder
        self._sampled = sampled
        self.samples = folder / "samples.jsonl"
        audit_log = folder / "audit.log"
        self.audit = AuditLog(audit_log, f"system:serviceaccount:{NAMESPACE}:")
        self.plane = ControlPlane(
            folder / "plane",
            nodes=max(24, num_pods // PODS_OF_A_NODE + 1),
            definitions=[CRD],
            audit_log=audit_log,
            scheduler_qps=200,
        )
        self._bare: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start all programs; return once the operator is ready."""
        self.plane.start()
        config = self.plane.admin.write_kubeconfig(
            self._folder / "kubeconfig", install(self.plane), NAMESPACE
        )
        told = {"FLEET_OPERATOR_LOG_LEVEL": "warning", "FLEET_OPERATOR_FEATURES": "networkPolicies"}
        self.operator = OperatorProcess(self._folder, config, **told)
        if self._sampled:
            self.operator.program = ("benchmarks.sampled_operator", str(self.samples))
        self.operator.start()
        self._bare = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare_client", str(self.plane.admin.kubeconfig)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        self._hear("ready")

    def close(self) -> None:
        """Stop all programs."""
        if self._bare is not None:
            self._bare.kill()
            self._bare.wait()
            self.operator.stop()
        self.plane.stop()

    async def until_at_rest(self) -> None:
        """Wait until the control plane has no clean-up work left."""
        quiet, taken = 0, 0.0
        try:
            async with asyncio.timeout(SLOW_SECONDS):
                while quiet < AT_REST_SECONDS:
                    before = self.cpu_seconds()
                    await asyncio.sleep(1)
                    taken = self.cpu_seconds() - before
                    quiet = quiet + 1 if taken < AT_REST_CORES else 0
        except TimeoutError:
            raise SystemExit(
                f"the control plane takes {taken:.2f} cores after {SLOW_SECONDS:g} s without work;"
                f" expected less than {AT_REST_CORES:g}: end what else uses it, and start again"
            ) from None

    def cpu_seconds(self) -> float:
        """Return the total CPU time of the control plane's programs, without the operator."""
        return sum(self.plane.daemons.cpu_seconds().values())

    def create_bare(self, namespace: str, num_jobs: int, size: Size = SMALL) -> None:
        """Create the objects of `num_jobs` identical jobs with the bare client."""
        assert self._bare is not None
        assert self._bare.stdin is not None
        self._bare.stdin.write(f"{namespace} {num_jobs} {size.servers} {size.trainers}\n")
        self._bare.stdin.flush()
        self._hear("done")

    def _hear(self, word: str) -> None:
        assert self._bare is not None
        assert self._bare.stdout is not None
        heard = hear(self._bare.stdout, "the bare client")
        if heard != word:
            raise SystemExit(f"the bare client said {heard!r}, expected {word!r}; see its output above")

    @asynccontextmanager
    async def namespace(self, name: str, *, last: bool = False, known: int = 0) -> AsyncIterator[ApiClient]:
        """Create a namespace and yield a client; afterwards, delete the namespace unless `last` is true.

        Parameters
        ----------
        name : str
        last : bool
            True if the namespace stays until the plane is closed.
        known : int
            The number of jobs in other namespaces.
        """
        async with ApiClient(from_kubeconfig(self.plane.admin.kubeconfig)) as client:
            manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await client.create("/api/v1/namespaces", manifest)
            async with Watched(client, f"/api/v1/namespaces/{name}/serviceaccounts").watching() as accounts:
                await accounts.until("Seen", 1, seconds=60)
            yield client
            if last:
                return
            for path in (JOBS, PODS, SERVICES):  # jobs first, otherwise the operator recreates their pods
                await _delete_all(client, path.format(name))
            await client.delete(f"/api/v1/namespaces/{name}", {})
            await self.until_idle(known=known)

    async def used(self) -> Used:
        """Return the resources that the operator has used so far, read from its metrics."""
        told = await self._told()
        return Used(told["process_resident_memory_bytes"], told["process_cpu_seconds_total"])

    async def until_idle(self, *, known: int, passes: int = 0) -> None:
        """Wait until the operator tracks the given number of jobs and has no pending work."""
        async with asyncio.timeout(SLOW_SECONDS):
            while True:
                told = await self._told()
                ended = told['fleet_operator_reconcile_duration_seconds_count{result="done"}']
                jobs = sum(number for name, number in told.items() if name.startswith("fleet_operator_jobs{"))
                if jobs == known and ended >= passes and told["fleet_operator_queue_depth"] == 0:
                    return
                await asyncio.sleep(0.25)

    async def _told(self) -> "dict[str, float]":
        """Return the values of all the operator's metrics; a missing metric counts as 0."""
        text = await asyncio.to_thread(self.operator.get, "/metrics") or ""
        found = re.findall(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)
        return _Metrics({name: float(value) for name, value in found})


class _Metrics(dict[str, float]):
    def __missing__(self, name: str) -> float:
        return 0.0


async def submit(
    client: ApiClient, namespace: str, jobs: Iterable[int], size: Size = SMALL, **spec: Any
) -> None:
    """Create numbered jobs of one size concurrently, with additional fields in their spec."""
    slots = asyncio.Semaphore(SUBMITTED_AT_ONCE)

    async def create(name: str) -> None:
        manifest = job_manifest(name, namespace, size)
        manifest["spec"] |= spec
        try:
            await client.create(JOBS.format(namespace), manifest)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        for number in jobs:
            await slots.acquire()
            group.create_task(create(f"job-{number}"))


async def _delete_all(client: ApiClient, path: str) -> None:
    """Delete all objects of a collection; retry if the server times out."""
    async with asyncio.timeout(SLOW_SECONDS):
        while (await client.get(path, {"limit": "1"}))["items"]:
            try:
                await client.delete(path, {"gracePeriodSeconds": 0, "propagationPolicy": "Background"})
            except ApiError as error:
                if not error.transient:
                    raise
