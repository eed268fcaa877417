"""Performance goals of the operator, and a comparison of measurements with them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["judge"]

RUNNING_RATIO = 0.85
RUNNING_P50_RATIO = 1.2
SUCCEEDED_P50_SECONDS = 0.1
SUCCEEDED_P99_SECONDS = 0.3
BEHIND_SECONDS = 1.0
WRITES_PER_JOB = 12
CPU_SECONDS_PER_JOB = 0.03
RSS_MIB_AT_1000 = 110
KIB_PER_JOB = 50
RESTART_SECONDS_AT_5000 = 30
LARGE_RUNNING_RATIO = 0.75
LARGE_HALT_SECONDS = 0.1
LARGE_RSS_MIB = 110
RENEWAL_SECONDS = 10  # how long the holder keeps the Lease without a renewal


@dataclass(frozen=True)
class Verdict:
    """A goal with its measurement, and whether the goal is met."""

    goal: str
    measured: float
    met: bool


def judge(
    bursts: Mapping[str, Any], idle: Mapping[str, Any], large: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Compare a run's measurements with the goals; return a verdict on each measured goal.

    Parameters
    ----------
    bursts, idle : mapping
        The measurements by number of jobs, as the benchmark prints them.
    large : mapping, optional
        The measurements of large jobs by size.
    """
    verdicts = [each for size, found in bursts.items() for each in _of_burst(int(size), found)]
    verdicts += [each for size, found in idle.items() for each in _of_idle(int(size), found)]
    verdicts += [
        each
        for name, found in (large or {}).items()
        if isinstance(found, Mapping)
        for each in _of_large(name, found)
    ]
    return [asdict(each) for each in verdicts]


def _of_burst(size: int, found: Mapping[str, Any]) -> Iterator[Verdict]:
    fleet, ratios = found["fleet"], found["ratios"]
    jobs = f"{size} jobs" if size > 1 else "1 job"
    ended = f"{jobs}: Succeeded after the last pod"
    if size >= 10:
        yield _at_least(f"{jobs}: pods Running/s, of bare", ratios["running_per_s"], RUNNING_RATIO)
        yield _at_most(f"{jobs}: CPU seconds a job", fleet["cpu_seconds_per_job"], CPU_SECONDS_PER_JOB)
    if size == 100:
        yield _at_most(f"{jobs}: created to Running p50, of bare", ratios["running_p50_s"], RUNNING_P50_RATIO)
    yield _at_most(f"{ended}, p50 s", fleet["succeeded_p50_s"], SUCCEEDED_P50_SECONDS)
    yield _at_most(f"{ended}, p99 s", fleet["succeeded_p99_s"], SUCCEEDED_P99_SECONDS)
    yield _at_most(f"{jobs}: status behind the pods, longest s", fleet["behind_longest_s"], BEHIND_SECONDS)
    yield _at_most(f"{jobs}: writes a job", fleet["writes_per_job"], WRITES_PER_JOB)


def _of_idle(size: int, found: Mapping[str, Any]) -> Iterator[Verdict]:
    jobs = f"{size} idle jobs"
    yield _at_most(f"{jobs}: API calls in a minute", found["calls"], 0)
    if size >= 1000:  # with fewer jobs, connections and caches dominate
        yield _at_most(f"{jobs}: KiB a job", found["kib_per_job"], KIB_PER_JOB)
    yield _at_most(f"{jobs}: writes after a restart", found["restart_writes"], 0)
    if size <= 1000:
        yield _at_most(f"{jobs}: MiB resident", found["rss_mib"], RSS_MIB_AT_1000)
    yield _at_most(f"{jobs}: steady after a restart, s", found["restart_seconds"], RESTART_SECONDS_AT_5000)


def _of_large(name: str, found: Mapping[str, Any]) -> Iterator[Verdict]:
    if "running_of_bare" in found:
        yield _at_least(f"{name}: pods Running/s, of bare", found["running_of_bare"], LARGE_RUNNING_RATIO)
    yield _at_most(f"{name}: longest halt of the loop, s", found["longest_computation_s"], LARGE_HALT_SECONDS)
    yield _at_most(f"{name}: MiB resident at most", found["most_rss_mib"], LARGE_RSS_MIB)
    yield _at_most(f"{name}: s without a renewal", found["longest_without_renewal_s"], RENEWAL_SECONDS)


def _at_least(goal: str, measured: float, bound: float) -> Verdict:
    return Verdict(f"{goal}: at least {bound:g}", measured, measured >= bound)


def _at_most(goal: str, measured: float, bound: float) -> Verdict:
    return Verdict(f"{goal}: at most {bound:g}", measured, measured <= bound)
