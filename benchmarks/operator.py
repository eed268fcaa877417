"""How fast the operator is, beside a bare client that creates the same objects on the same API server.

``python -m benchmarks.operator --json`` starts kube-apiserver, etcd, the controllers, the scheduler and kwok
on this machine, and for each size runs rounds of bursts: the bare client creates the objects of N jobs as
fast as it can, then N FleetJobs are created and the operator makes theirs. The pipeline of API server,
scheduler and kwok is the limit for both, so ratios are taken within a round. Seconds count from the start of
a burst.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.bare_client import NUM_PODS, NUM_REPLICAS, job_manifest
from benchmarks.pipes import hear
from fleet_operator.cluster.client import ApiClient
from fleet_operator.cluster.connection import from_kubeconfig
from tests.support.controlplane import ControlPlane, die_with_parent
from tests.support.operator_process import CRD, NAMESPACE, OperatorProcess, install

__all__ = ["main"]

BURST_SECONDS = 900.0
IDLE_SECONDS = 60.0
SUBMITTED_AT_ONCE = 16
JOBS = "/apis/fleetjob.dev/v1alpha1/namespaces/{}/fleetjobs"
PODS = "/api/v1/namespaces/{}/pods"


class Watched:
    """The objects of a collection: when each was first seen, and when it was first seen in each phase."""

    def __init__(self, client: ApiClient, path: str) -> None:
        self._client = client
        self._path = path
        self._changed = asyncio.Event()
        self.first: dict[str, dict[str, float]] = {}  # name: {phase: seconds of the monotonic clock}

    async def run(self) -> None:
        """Watch until cancelled; a watch that the server ends goes on where it was."""
        version = "0"
        while True:
            params = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
            async with self._client.stream(self._path, params, silence_seconds=120) as lines:
                async for line in lines:
                    event = json.loads(line)
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        item, now = event["object"], time.monotonic()
        status = item.get("status", {})
        phase = "Gone" if event["type"] == "DELETED" else status.get("phase") or status.get("state")
        seen = self.first.setdefault(item["metadata"]["name"], {"Seen": now})
        seen.setdefault(phase or "Seen", now)
        self._changed.set()

    async def until(self, phase: str, number: int) -> list[float]:
        """Wait until so many objects have been in a phase; return when each first was, in order."""
        async with asyncio.timeout(BURST_SECONDS):
            while sum(phase in seen for seen in self.first.values()) < number:
                self._changed.clear()
                await self._changed.wait()
        return sorted(seen[phase] for seen in self.first.values() if phase in seen)


class Bench:
    """The control plane with its operator and the bare client."""

    def __init__(self, folder: Path) -> None:
        self._audit = folder / "audit.log"
        self.plane = ControlPlane(
            folder / "plane", nodes=24, definitions=[CRD], audit_log=self._audit, scheduler_qps=200
        )
        self.plane.start()
        config = self.plane.write_kubeconfig(folder / "kubeconfig", install(self.plane), NAMESPACE)
        self.operator = OperatorProcess(folder, config, FLEET_OPERATOR_LOG_LEVEL="warning")
        self.operator.start()
        self._bare = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare_client", str(self.plane.kubeconfig)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        self._hear("ready")
        self._num_bursts = 0

    def close(self) -> None:
        """End everything."""
        self._bare.kill()
        self._bare.wait()
        self.operator.stop()
        self.plane.stop()

    async def burst(self, system: str, num_jobs: int) -> dict[str, Any]:
        """Have the jobs of one burst made by the bare client or by the operator; return what was measured."""
        self._num_bursts += 1
        namespace = f"burst-{self._num_bursts}"
        async with ApiClient(from_kubeconfig(self.plane.kubeconfig)) as client:
            await self._make(client, namespace)
            pods, jobs = Watched(client, PODS.format(namespace)), Watched(client, JOBS.format(namespace))
            watching = [asyncio.create_task(each.run()) for each in (pods, jobs)]
            before, writes = self._used(), self._writes()
            started = time.monotonic()
            try:
                if system == "bare":
                    await asyncio.to_thread(self._create_bare, namespace, num_jobs)
                else:
                    await _submit(client, namespace, num_jobs)
                made = await pods.until("Seen", NUM_PODS * num_jobs)
                running = await pods.until("Running", NUM_PODS * num_jobs)
                found = _speeds(pods, made[-1] - started, running[-1] - started, started)
                if system == "fleet":
                    found |= await _finish(client, namespace, pods, jobs, num_jobs)
                    used = self._used()
                    found |= {
                        "rss_mib": used["rss"] / 2**20,
                        "cpu_seconds_per_job": (used["cpu"] - before["cpu"]) / num_jobs,
                        "writes_per_job": (self._writes() - writes) / num_jobs,
                    }
                return found
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.gather(*watching, return_exceptions=True)
                await client.delete(f"/api/v1/namespaces/{namespace}", {})
                await _until_gone(client, namespace)

    async def idle(self, num_jobs: int) -> dict[str, Any]:
        """Measure what jobs cost that run and change nothing, and a start of the operator among them."""
        namespace = f"idle-{num_jobs}"
        async with ApiClient(from_kubeconfig(self.plane.kubeconfig)) as client:
            await self._make(client, namespace)
            jobs = Watched(client, JOBS.format(namespace))
            watching = asyncio.create_task(jobs.run())
            await _submit(client, namespace, num_jobs)
            await jobs.until("Running", num_jobs)
            before, writes = self._used(), self._writes()
            await asyncio.sleep(IDLE_SECONDS)
            after, idle_writes = self._used(), self._writes() - writes
            self.operator.stop()
            writes, started = self._writes(), time.monotonic()
            await asyncio.to_thread(self.operator.start)
            restart = time.monotonic() - started
            await asyncio.sleep(5)  # in which it would write, had it anything to write
            restart_writes = self._writes() - writes
            watching.cancel()
            await client.delete(f"/api/v1/namespaces/{namespace}", {})
            await _until_gone(client, namespace)
            return {
                "rss_mib": after["rss"] / 2**20,
                "cpu_cores": (after["cpu"] - before["cpu"]) / IDLE_SECONDS,
                "writes": idle_writes,
                "restart_seconds": restart,
                "writes_after_restart": restart_writes,
            }

    def _create_bare(self, namespace: str, num_jobs: int) -> None:
        assert self._bare.stdin is not None
        self._bare.stdin.write(f"{namespace} {num_jobs}\n")
        self._bare.stdin.flush()
        self._hear("done")

    def _hear(self, word: str) -> None:
        assert self._bare.stdout is not None
        heard = hear(self._bare.stdout, "the bare client")
        if heard != word:
            raise SystemExit(
                f"the bare client said {heard!r}, expected {word!r}; what it printed above says why"
            )

    def _used(self) -> dict[str, float]:
        """Return the operator's memory in bytes and its CPU seconds, as it tells them itself."""
        lines = dict(
            line.rsplit(" ", 1)
            for line in (self.operator.get("/metrics") or "").splitlines()
            if not line.startswith("#")
        )
        return {
            "rss": float(lines["process_resident_memory_bytes"]),
            "cpu": float(lines["process_cpu_seconds_total"]),
        }

    def _writes(self) -> int:
        """Return how often the operator has written so far, events included and its lease not."""
        written = 0
        with self._audit.open() as log:
            for line in log:
                call = json.loads(line)
                resource = call.get("objectRef", {}).get("resource")
                ours = call["user"]["username"].startswith(f"system:serviceaccount:{NAMESPACE}:")
                if ours and resource != "leases" and call["verb"] not in ("get", "list", "watch"):
                    written += 1
        return written

    async def _make(self, client: ApiClient, namespace: str) -> None:
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await client.create("/api/v1/namespaces", manifest)
        accounts = Watched(client, f"/api/v1/namespaces/{namespace}/serviceaccounts")
        watching = asyncio.create_task(accounts.run())
        await accounts.until("Seen", 1)
        watching.cancel()


async def _submit(client: ApiClient, namespace: str, num_jobs: int) -> None:
    slots = asyncio.Semaphore(SUBMITTED_AT_ONCE)

    async def submit(name: str) -> None:
        async with slots:
            await client.create(JOBS.format(namespace), job_manifest(name, namespace))

    await asyncio.gather(*(submit(f"job-{index}") for index in range(num_jobs)))


async def _finish(
    client: ApiClient, namespace: str, pods: Watched, jobs: Watched, num_jobs: int
) -> dict[str, Any]:
    """Let all trainers end; return how long after a job's last one its status said so."""
    slots = asyncio.Semaphore(SUBMITTED_AT_ONCE)

    async def end(pod: str) -> None:
        async with slots:
            patch = {"metadata": {"annotations": {"fleet.test/exit-code": "0"}}}
            await client.merge_patch(f"{PODS.format(namespace)}/{pod}", patch)

    await asyncio.gather(*(end(pod) for pod in list(pods.first) if "-trainer-" in pod))
    await jobs.until("Succeeded", num_jobs)
    late = []
    for name, seen in jobs.first.items():
        ended = [pods.first[f"{name}-trainer-{index}"]["Succeeded"] for index in range(NUM_REPLICAS)]
        late.append(seen["Succeeded"] - max(ended))
    return {"succeeded_p50_s": _percentile(late, 50), "succeeded_p99_s": _percentile(late, 99)}


async def _until_gone(client: ApiClient, namespace: str) -> None:
    """Wait until nothing of a burst is left that the next one would wait for."""
    async with asyncio.timeout(BURST_SECONDS):
        while (await client.get(PODS.format(namespace), {"limit": "1"}))["items"]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _speeds(pods: Watched, made: float, running: float, started: float) -> dict[str, Any]:
    num_pods = len(pods.first)
    last: dict[str, float] = {}  # job: when the last of its pods ran
    for name, seen in pods.first.items():
        job = name.rsplit("-", 2)[0]
        last[job] = max(last.get(job, 0.0), seen["Running"] - started)
    return {
        "created_s": made,
        "created_per_s": num_pods / made,
        "running_per_s": num_pods / running,
        "running_p50_s": _percentile(list(last.values()), 50),
        "running_p99_s": _percentile(list(last.values()), 99),
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def report(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return the median of each figure, and of each ratio to the bare client of the same round."""
    medians = {
        system: {key: median(each[system][key] for each in rounds) for key in rounds[0][system]}
        for system in ("bare", "fleet")
    }
    ratios = {
        key: median(each["fleet"][key] / each["bare"][key] for each in rounds)
        for key in ("created_per_s", "running_per_s", "running_p50_s", "running_p99_s")
    }
    return {**medians, "ratios": ratios, "rounds": len(rounds)}


def _sizes(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator", description=__doc__)
    parser.add_argument("--jobs", type=_sizes, default=[1, 10, 100, 1000], help="sizes of bursts: 1,10,100")
    parser.add_argument("--idle", type=_sizes, default=[1000, 5000], help="numbers of idle jobs; '' for none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            found: dict[str, Any] = {"bursts": {}, "idle": {}}
            for size in options.jobs:
                rounds = [
                    {system: asyncio.run(bench.burst(system, size)) for system in ("bare", "fleet")}
                    for _ in range(options.rounds)
                ]
                found["bursts"][str(size)] = report(rounds)
                if not options.json:
                    print(f"{size} jobs: {json.dumps(found['bursts'][str(size)], indent=1)}", flush=True)
            for size in options.idle:
                found["idle"][str(size)] = asyncio.run(bench.idle(size))
                if not options.json:
                    print(f"{size} idle jobs: {json.dumps(found['idle'][str(size)], indent=1)}", flush=True)
        finally:
            bench.close()
    if options.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
