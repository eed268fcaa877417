"""Benchmarks jobs with many pods: start-up time, and the operator's stalls, memory and Lease.

Jobs of each size are created by the bare client and by the operator, like the bursts of small jobs. Then
eight collective jobs of 200 trainers lose one trainer each at the same time, and restart.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.bare_client import Size
from benchmarks.operated_plane import JOBS, PODS, SLOW_SECONDS, OperatedPlane, submit
from benchmarks.watched import Watched

__all__ = ["CASES", "MOST_PODS", "large"]

SIZES = {"1000+700": Size(servers=700, trainers=1000), "collective-1000": Size(servers=0, trainers=1000)}
RESTARTING = Size(servers=0, trainers=200)
NUM_RESTARTING = 8
RESTARTS = f"{NUM_RESTARTING}-restarts-of-200"
CASES = (*SIZES, RESTARTS)
"""The cases, each of which can be measured separately."""
MOST_PODS = max(*(each.pods for each in SIZES.values()), NUM_RESTARTING * RESTARTING.pods)

MIB = 2**20


@dataclass(frozen=True)
class Samples:
    """The operator's measurements of itself since a given time; see `benchmarks.sampled_operator`."""

    path: Path
    since: float

    def worst(self) -> dict[str, float]:
        """Return the longest stall, the most CPU time within a stall, and the maximum memory."""
        lines = (json.loads(line) for line in self.path.read_text().splitlines())
        taken = [each for each in lines if each["at"] >= self.since]
        return {
            "longest_halt_s": max(each["halt"] for each in taken),
            "longest_computation_s": max(min(each["halt"], each["cpu"]) for each in taken),
            "rss_mib": taken[-1]["rss"] / MIB,
            "most_rss_mib": max(each["rss"] for each in taken) / MIB,
        }


async def large(
    plane: OperatedPlane, num_small: int, cases: Sequence[str], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure large jobs while a number of small jobs are running.

    Parameters
    ----------
    plane : OperatedPlane
        The control plane, whose operator must sample itself.
    num_small : int
        The number of small jobs that are running throughout.
    cases : sequence of str
        The cases to measure, from `CASES`.
    tell : callable
        Called with a line of text after each part; a part may take minutes.
    """
    found: dict[str, Any] = {"small_jobs": num_small}
    if not num_small:
        return found | await _measured(plane, num_small, cases, tell)
    async with (
        plane.namespace("small", last=True) as client,
        Watched(client, JOBS.format("small")).watching() as jobs,
    ):
        await submit(client, "small", range(num_small))
        await jobs.until("Running", num_small, seconds=SLOW_SECONDS)
        await plane.until_idle(known=num_small)
        tell(f"{num_small} small jobs run")
        found["rss_before_mib"] = (await plane.used()).rss_bytes / MIB
        return found | await _measured(plane, num_small, cases, tell)


async def _measured(
    plane: OperatedPlane, num_small: int, cases: Sequence[str], tell: Callable[[str], None]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in cases:
        if name == RESTARTS:
            found[name] = await _restarted(plane, num_small)
        else:
            size, namespace = SIZES[name], name.replace("+", "-")
            bare = await _created(plane, "bare", f"bare-{namespace}", size, num_small)
            tell(f"{name}, by the bare client: {_shown(bare)}")
            fleet = await _created(plane, "fleet", f"fleet-{namespace}", size, num_small)
            ratio = fleet["running_per_s"] / bare["running_per_s"]
            found[name] = {**fleet, "bare_running_per_s": bare["running_per_s"], "running_of_bare": ratio}
        tell(f"{name}: {_shown(found[name])}")
    return found


def _shown(found: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in found.items())


async def _cpu(plane: OperatedPlane, before: Mapping[str, float]) -> dict[str, float]:
    """Return the CPU time that each program has used, in total or since an earlier result."""
    taken = {**plane.plane.daemons.cpu_seconds(), "operator": (await plane.used()).cpu_seconds}
    return {f"cpu_{name}_s": seconds - before.get(f"cpu_{name}_s", 0.0) for name, seconds in taken.items()}


async def _created(
    plane: OperatedPlane, system: str, namespace: str, size: Size, num_small: int
) -> dict[str, float]:
    async with (
        plane.namespace(namespace, known=num_small) as client,
        Watched(client, PODS.format(namespace)).watching() as pods,
        Watched(client, JOBS.format(namespace)).watching() as jobs,
    ):
        await plane.until_at_rest()
        samples, calls, cpu = Samples(plane.samples, time.time()), plane.audit.calls(), await _cpu(plane, {})
        started = asyncio.get_running_loop().time()
        if system == "bare":
            await asyncio.to_thread(plane.create_bare, namespace, 1, size)
        else:
            await submit(client, namespace, range(1), size)
        last = (await pods.until("Running", size.pods, seconds=SLOW_SECONDS))[-1] - started
        found = {"running_per_s": size.pods / last, "running_s": last, **await _cpu(plane, cpu)}
        if system == "bare":
            return found
        [said] = await jobs.until("Running", 1, seconds=SLOW_SECONDS)
        writes = sum((plane.audit.calls() - calls).values())
        return found | {
            "status_behind_s": said - started - last,
            "calls": writes,
            **samples.worst(),
            "longest_without_renewal_s": _longest_gap(plane.audit.renewals, samples.since),
        }


async def _restarted(plane: OperatedPlane, num_small: int) -> dict[str, float]:
    """Fail one trainer of each job, and wait until all pods have been replaced and are running."""
    namespace = "restarts"
    async with (
        plane.namespace(namespace, known=num_small) as client,
        Watched(client, JOBS.format(namespace)).watching() as jobs,
    ):
        await submit(client, namespace, range(NUM_RESTARTING), RESTARTING)
        await jobs.until("Running", NUM_RESTARTING, seconds=SLOW_SECONDS)
        await plane.until_at_rest()
        jobs.forget()
        samples, cpu = Samples(plane.samples, time.time()), await _cpu(plane, {})
        started = asyncio.get_running_loop().time()
        patch = {"metadata": {"annotations": {"fleet.test/exit-code": "1"}}}
        for job in range(NUM_RESTARTING):
            await client.merge_patch(f"{PODS.format(namespace)}/job-{job}-trainer-7", patch)
        await jobs.until("Restarting", NUM_RESTARTING, seconds=SLOW_SECONDS)
        ran = (await jobs.until("Running", NUM_RESTARTING, seconds=SLOW_SECONDS))[-1]
        return {
            "restarted_s": ran - started,
            **await _cpu(plane, cpu),
            **samples.worst(),
            "longest_without_renewal_s": _longest_gap(plane.audit.renewals, samples.since),
        }


def _longest_gap(renewals: Sequence[float], since: float) -> float:
    """Return the longest time in seconds between two renewals of the Lease since a given time."""
    taken = [moment for moment in renewals if moment >= since]
    return max((later - moment for moment, later in pairwise(taken)), default=0.0)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Return the results as lines of text."""
    yield f"large jobs beside {found['small_jobs']} small ones"
    for name, measured in found.items():
        if isinstance(measured, Mapping):
            yield f"  {name}"
            yield from (f"    {key:26}{value:12.3f}" for key, value in measured.items())
