"""Benchmarks the operator against a bare client that creates the same objects.

``python -m benchmarks.operator --json`` starts kube-apiserver, etcd, the controllers, the scheduler and kwok
on this machine, and runs rounds of bursts for each size: the bare client creates the objects of N jobs as
fast as possible, and the operator creates the objects of N FleetJobs. The order of the two alternates between
rounds, and each begins when the control plane is at rest. The pipeline of API server, scheduler and kwok
limits both, so ratios are computed within a round. Times are measured from the start of a burst. The output
shows which of the goals in `benchmarks.goals` are met.

The sizes 1, 10 and 100 take about three minutes. ``--sizes 1000 --rounds 1`` takes about six minutes, and
``--sizes '' --idle 1000,5000`` about seven: the first ``--idle-running`` of the idle jobs run with four pods
each, and the others are suspended, because creating twenty thousand pods is slow on two cores.

``--sizes '' --large 1000`` takes about ten minutes. It measures a job of 700 servers and 1,000 trainers, a
collective job of 1,000 trainers, and eight of 200 trainers that restart simultaneously, while 1,000 small
jobs run (`benchmarks.large_jobs`). The time of each part and the CPU time of each program are printed when
the part ends. ``--large 0 --large-cases 1000+700`` measures only the first job, without small jobs.
"""

import argparse
import asyncio
import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import large_jobs
from benchmarks.audit import is_write, leases
from benchmarks.bare_client import NUM_PODS, NUM_REPLICAS
from benchmarks.goals import judge
from benchmarks.operated_plane import JOBS, PODS, SLOW_SECONDS, OperatedPlane, submit
from benchmarks.watched import GONE, Watched, behind
from fleet_operator.kubernetes.client import ApiClient, ApiError

__all__ = ["main"]

IDLE_SECONDS = 60.0
ENDED_AT_ONCE = 16
"""The maximum number of pods that are ending at a time."""

COALESCED_SECONDS = 3.0
"""Longer than the operator delays a status in which only counts have changed."""

QUIET_SECONDS = 5.0
"""The time for which writes are counted after a restarted operator has reconciled every job."""

RATIOS = ("created_per_s", "running_per_s", "running_p50_s", "running_p99_s", "control_plane_cpu_s")


async def burst(plane: OperatedPlane, system: str, namespace: str, num_jobs: int) -> dict[str, float]:
    """Create a burst of jobs with the bare client or the operator, and return the measurements."""
    async with (
        plane.namespace(namespace) as client,
        Watched(client, PODS.format(namespace)).watching() as pods,
        Watched(client, JOBS.format(namespace)).watching() as jobs,
    ):
        await plane.until_at_rest()
        before, calls = await plane.used(), plane.audit.calls()
        taken, started = plane.cpu_seconds(), asyncio.get_running_loop().time()
        if system == "bare":
            await asyncio.to_thread(plane.create_bare, namespace, num_jobs)
        else:
            await submit(client, namespace, range(num_jobs))
        await pods.until("Running", NUM_PODS * num_jobs, seconds=SLOW_SECONDS)
        found = speeds(pods.first, started) | {"control_plane_cpu_s": plane.cpu_seconds() - taken}
        if system == "fleet":
            await _finish(client, namespace, pods, jobs, num_jobs)
            await asyncio.sleep(COALESCED_SECONDS)
            await plane.until_idle(known=num_jobs)
            after = await plane.used()
            found |= {
                **lateness(pods, jobs),
                "writes_per_job": _writes(plane.audit.calls() - calls) / num_jobs,
                "cpu_seconds_per_job": (after.cpu_seconds - before.cpu_seconds) / num_jobs,
                "rss_mib": after.rss_bytes / 2**20,
            }
        return found


async def idle(plane: OperatedPlane, sizes: Sequence[int], num_running: int) -> dict[str, dict[str, Any]]:
    """Measure the cost of idle jobs, and the cost of an operator restart while they exist."""
    found: dict[str, dict[str, Any]] = {}
    await _restart(plane, num_jobs=0)  # so that memory used for bursts is not counted
    empty = (await plane.used()).rss_bytes
    namespace, there = "idle", 0
    async with (
        plane.namespace(namespace, last=True) as client,
        Watched(client, JOBS.format(namespace)).watching() as jobs,
    ):
        for size in sorted(sizes):
            runs = range(there, min(size, num_running))
            rests = range(max(there, num_running), size)
            await submit(client, namespace, runs)
            await submit(client, namespace, rests, suspend=True)
            there = size
            await jobs.until("Running", min(size, num_running), seconds=SLOW_SECONDS)
            await jobs.until("Suspended", max(0, size - num_running), seconds=SLOW_SECONDS)
            await asyncio.sleep(COALESCED_SECONDS)
            await plane.until_idle(known=size)
            before, calls = await plane.used(), plane.audit.calls()
            await asyncio.sleep(IDLE_SECONDS)
            asked, after = plane.audit.calls() - calls, await plane.used()
            found[str(size)] = {
                "jobs_running": min(size, num_running),
                "rss_mib": after.rss_bytes / 2**20,
                "kib_per_job": (after.rss_bytes - empty) / 1024 / size,
                "cpu_cores": (after.cpu_seconds - before.cpu_seconds) / IDLE_SECONDS,
                "calls": asked.total() - leases(asked),
                "calls_by_kind": dict(asked),
                **await _restart(plane, num_jobs=size),
            }
    return found


async def _restart(plane: OperatedPlane, num_jobs: int) -> dict[str, float]:
    """Restart the operator; return the time until every job is reconciled, and the number of writes."""
    await asyncio.to_thread(plane.operator.stop)
    calls, started = plane.audit.calls(), asyncio.get_running_loop().time()
    await asyncio.to_thread(plane.operator.start)
    await plane.until_idle(known=num_jobs, passes=num_jobs)
    seconds = asyncio.get_running_loop().time() - started
    await asyncio.sleep(QUIET_SECONDS)
    used = await plane.used()
    return {
        "restart_seconds": seconds,
        "restart_writes": _writes(plane.audit.calls() - calls),
        "restart_rss_mib": used.rss_bytes / 2**20,
        "restart_cpu_seconds": used.cpu_seconds,
    }


def _writes(calls: "Mapping[str, int]") -> int:
    """Count the write requests, including those for Events but not those for the Lease."""
    return sum(number for call, number in calls.items() if is_write(call) and not call.endswith(" leases"))


async def _finish(client: ApiClient, namespace: str, pods: Watched, jobs: Watched, num_jobs: int) -> None:
    """End all trainers successfully; once a job has succeeded, end its servers too.

    At most ENDED_AT_ONCE pods are ending at a time, so that no pod waits for long in kwok's queue.
    """
    waiting = asyncio.PriorityQueue[tuple[int, str]]()
    for job in jobs.first:
        for index in range(NUM_REPLICAS):
            waiting.put_nowait((1, f"{job}-trainer-{index}"))

    async def end() -> None:
        patch = {"metadata": {"annotations": {"fleet.test/exit-code": "0"}}}
        while True:
            _, pod = await waiting.get()
            try:
                await client.merge_patch(f"{PODS.format(namespace)}/{pod}", patch)
                await pods.until_one(pod, "Succeeded", GONE, seconds=SLOW_SECONDS)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND or "-pserver-" not in pod:
                    raise  # otherwise the operator has already deleted the server's pod
            waiting.task_done()

    async def end_servers_too() -> None:
        served: set[str] = set()
        while len(served) < num_jobs:
            await jobs.until("Succeeded", len(served) + 1, seconds=SLOW_SECONDS)
            succeeded = {name for name, seen in jobs.first.items() if "Succeeded" in seen} - served
            served |= succeeded
            for job, index in itertools.product(succeeded, range(NUM_REPLICAS)):
                waiting.put_nowait((0, f"{job}-pserver-{index}"))  # before the trainers of other jobs
        await waiting.join()

    async with asyncio.TaskGroup() as group:
        ending = [group.create_task(end()) for _ in range(ENDED_AT_ONCE)]
        await end_servers_too()
        for task in ending:
            task.cancel()


def speeds(pods: Mapping[str, Mapping[str, float]], started: float) -> dict[str, float]:
    """Return the rates at which pods were created and started running, in pods per second.

    Parameters
    ----------
    pods : mapping
        The times at which each pod was created and became running, by name.
    started : float
        The time at which the burst began.
    """
    made = max(seen["Seen"] for seen in pods.values()) - started
    running = {job: max(moments) - started for job, moments in _by_job(pods, "Running").items()}
    return {
        "created_s": made,
        "created_per_s": len(pods) / made,
        "running_per_s": len(pods) / max(running.values()),
        "running_p50_s": percentile(list(running.values()), 50),
        "running_p99_s": percentile(list(running.values()), 99),
    }


def lateness(pods: Watched, jobs: Watched) -> dict[str, float]:
    """Return the delays before job statuses reported that jobs had succeeded and that pods were running."""
    trainers = {name: seen for name, seen in pods.first.items() if "-trainer-" in name}
    late = [
        jobs.first[job]["Succeeded"] - max(moments) for job, moments in _by_job(trainers, "Succeeded").items()
    ]
    lag = behind(_by_job(pods.first, "Running"), jobs.said)
    return {
        "succeeded_p50_s": percentile(late, 50),
        "succeeded_p99_s": percentile(late, 99),
        "behind_p50_s": percentile(lag.seconds, 50),
        "behind_p99_s": percentile(lag.seconds, 99),
        "behind_longest_s": max(lag.seconds),
        "behind_most_pods": lag.most_pods,
    }


def _by_job(pods: Mapping[str, Mapping[str, float]], phase: str) -> dict[str, list[float]]:
    """Return the times at which pods reached a phase, grouped by job."""
    moments: dict[str, list[float]] = {}
    for name, seen in pods.items():
        moments.setdefault(name.rsplit("-", 2)[0], []).append(seen[phase])
    return moments


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of one or more values."""
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def report(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Return the median of each measurement, and of its ratio to the bare client in the same round."""
    medians = {
        system: {key: median(each[system][key] for each in rounds) for key in rounds[0][system]}
        for system in ("bare", "fleet")
    }
    ratios = {key: median(each["fleet"][key] / each["bare"][key] for each in rounds) for key in RATIOS}
    return {**medians, "ratios": ratios, "rounds": len(rounds)}


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the requested measurements on a single control plane."""
    num_pods = NUM_PODS * max(*options.sizes, min(options.idle_running, max(options.idle, default=0)), 1)
    measures_large = options.large is not None
    if measures_large:
        num_pods = max(num_pods, NUM_PODS * options.large + large_jobs.MOST_PODS)
    plane = OperatedPlane(folder, num_pods=num_pods, sampled=measures_large)
    found: dict[str, Any] = {"load_before": os.getloadavg()[0], "bursts": {}, "idle": {}, "large": {}}
    try:
        plane.start()
        for size in options.sizes:
            rounds = []
            for number in range(options.rounds):
                order = ("bare", "fleet") if number % 2 == 0 else ("fleet", "bare")
                names = {system: f"{system}-{size}-{number}" for system in order}
                rounds.append({system: await burst(plane, system, names[system], size) for system in names})
            found["bursts"][str(size)] = report(rounds)
        if options.idle:
            found["idle"] = await idle(plane, options.idle, options.idle_running)
        if measures_large:
            say = functools.partial(print, file=sys.stderr, flush=True)
            found["large"] = await large_jobs.large(plane, options.large, options.large_cases, say)
    finally:
        plane.close()
    return {**found, "goals": judge(found["bursts"], found["idle"], found["large"])}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Return the results as lines of text."""
    for size, measured in found["bursts"].items():
        yield f"{size} jobs at once, median of {measured['rounds']} rounds"
        for key, value in measured["fleet"].items():
            bare, ratio = measured["bare"].get(key), measured["ratios"].get(key)
            beside = f"{bare:12.3f} bare" if bare is not None else ""
            yield f"  {key:22}{value:12.3f}{beside}" + (f"{ratio:8.2f} of bare" if ratio is not None else "")
    for size, measured in found["idle"].items():
        yield f"{size} idle jobs, {measured['jobs_running']} running and the others suspended"
        for key, value in measured.items():
            yield f"  {key:22}" + (f"{value:12.3f}" if isinstance(value, float | int) else f"  {value}")
    if found.get("large"):
        yield from large_jobs.lines(found["large"])
    for verdict in found["goals"]:
        yield f"{'met ' if verdict['met'] else 'NOT '} {verdict['measured']:10.3f}  {verdict['goal']}"


def _sizes(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def _cases(text: str) -> list[str]:
    cases = [each for each in text.split(",") if each]
    if unknown := sorted({*cases} - {*large_jobs.CASES}):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; expected {', '.join(large_jobs.CASES)}")
    return cases


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.operator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=_sizes, default=[1, 10, 100], help="bursts of so many jobs; '': none")
    parser.add_argument("--rounds", type=int, default=3, help="of each size")
    parser.add_argument("--idle", type=_sizes, default=[], help="numbers of idle jobs: 1000,5000")
    parser.add_argument(
        "--idle-running", type=int, default=1000, help="how many of them run, with their pods"
    )
    parser.add_argument(
        "--large", type=int, metavar="NUM_SMALL", help="large jobs beside so many small ones; 0: beside none"
    )
    parser.add_argument(
        "--large-cases",
        type=_cases,
        default=list(large_jobs.CASES),
        help=f"which large jobs: {','.join(large_jobs.CASES)}; all by default",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
