"""Benchmarks small steps with many servers or trainers: processor time and steps per second.

``python -m benchmarks.request_price --json`` trains an unbounded table (200 look-ups of rows of 16 numbers
per step) with one linear layer, and the layer alone, in sync and async mode, and compares them with
torch.distributed.rpc and with the same script in one process. The systems of a shape are measured in rounds
with varying order. Processor time is the user and system time that the kernel reports for each process, per
step of one trainer. ``--before PYTHON`` adds the same modes of another tree; PYTHON is the interpreter of
that tree's environment. At the end, the price of a heartbeat is measured on idle jobs of the shapes in
``--heartbeats``. From these prices, the command computes what the larger jobs in ``--jobs`` would cost.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.running import END_SECONDS, Running, Shape, interleave, say, spread

__all__ = ["main"]

SHAPES: Final = "1x1,1x4,1x8,1x16,4x1,8x1,16x1"
SYSTEMS: Final = ("priceplain", "pricerpc", "pricesync", "priceasync")
_BEFORE: Final = "-before"
"""The suffix of a system that runs in another tree."""
_MODES: Final = ("pricesync", "priceasync")
WORKLOADS: Final = ("table", "dense")
WARM_UP_STEPS: Final = 30
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_BEAT_SECONDS: Final = 0.05
_TRAINING_BEAT_SECONDS: Final = 2.0
"""The default of FLEET_HEARTBEAT_SECONDS."""
_IDLE_SECONDS: Final = 6.0
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Price:
    """The measurements of one system in one round.

    Attributes
    ----------
    servers_ms : float
        Processor time of all servers for one step of one trainer, in milliseconds.
    trainer_ms : float
        Mean processor time of a trainer for one of its steps, in milliseconds.
    steps_per_second : float
        The steps per second of each trainer.
    """

    servers_ms: float
    trainer_ms: float
    steps_per_second: float


@dataclass(frozen=True)
class Held:
    """The resources that a process holds: threads, descriptors and memory."""

    threads: int
    descriptors: int
    megabytes: float


@dataclass(frozen=True)
class Cost:
    """The cost of a process in a large job, extrapolated from measurements of small jobs.

    Attributes
    ----------
    step_ms : float
        Processor time for one step of the job, in milliseconds.
    beats : float
        The share of one core that heartbeats of 2 seconds take.
    steps_per_second : float
        The rate at which steps and heartbeats saturate one core; a Python process seldom uses more.
    descriptors : int
    """

    step_ms: float
    beats: float
    steps_per_second: float
    descriptors: int


def cost_of(
    trainers: int, servers: int, cases: Mapping[str, Any], heartbeats: Mapping[str, Any]
) -> dict[str, Cost] | None:
    """Estimate the cost of a server and a trainer in a large job, for the workload ``table`` in sync mode.

    A server's cost grows with each trainer, and is lower per trainer if there are many: it is the price with
    one trainer and the most servers, times the savings of many trainers on one server. A trainer's cost is
    that of its first server, plus less for each further server. None is returned unless 1x1, a shape with one
    trainer and a shape with one server were measured.
    """
    found = {
        tuple(map(int, case.split()[0].split("x"))): row for case, row in cases.items() if "table" in case
    }
    found = {shape: row["pricesync"] for shape, row in found.items() if "pricesync" in row}
    many_servers = max((each for each in found if each[0] == 1), default=(1, 1))
    many_trainers = max((each for each in found if each[1] == 1), default=(1, 1))
    beats = [heartbeats.get(f"{each[0]}x{each[1]}") for each in (many_trainers, many_servers)]
    if (1, 1) not in found or (1, 1) in (many_servers, many_trainers) or None in beats:
        return None
    single, wide, tall = (found[each] for each in ((1, 1), many_servers, many_trainers))

    def further(of: Mapping[str, Any], role: str, more: int) -> float:
        more_descriptors: float = of[role]["descriptors"] - single[role]["descriptors"]
        return more_descriptors / more

    def median(of: Mapping[str, Any], field: str) -> float:
        return float(of[field]["median"])

    saved = min(1.0, median(tall, "servers_ms") / median(single, "servers_ms"))
    server_ms = trainers * saved * median(wide, "servers_ms") / many_servers[1]
    one_more = (median(wide, "trainer_ms") - median(single, "trainer_ms")) / (many_servers[1] - 1)
    trainer_ms = median(single, "trainer_ms") + (servers - 1) * one_more
    costs = {}
    for role, step_ms, peers, beat, more in (
        ("server", server_ms, trainers, beats[0], further(tall, "server", many_trainers[0] - 1)),
        ("trainer", trainer_ms, servers, beats[1], further(wide, "trainer", many_servers[1] - 1)),
    ):
        share = peers * (beat or {})[role] / 1e3 / _TRAINING_BEAT_SECONDS
        steps = max(0.0, 1.0 - share) * 1e3 / step_ms
        costs[role] = Cost(step_ms, share, steps, round(single[role]["descriptors"] + (peers - 1) * more))
    return costs


def parse_shapes(text: str) -> list[tuple[int, int]] | None:
    """Parse shapes such as ``1x8,8x1`` (trainers x servers); return None if any of them is invalid."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", each) for each in text.split(",") if each]
    return None if None in found else [(int(each[1]), int(each[2])) for each in found if each is not None]


def processor_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds, with a resolution of one kernel tick (10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def held_by(pid: int) -> Held:
    """Return the threads, open file descriptors and resident memory of a process."""
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    tasks, descriptors = (len(list(Path(f"/proc/{pid}/{name}").iterdir())) for name in ("task", "fd"))
    return Held(tasks, descriptors, resident / 1e6)


def measure(running: Running, steps: int, batch: int) -> Price:
    """Run steps on a system's trainers; return processor times and steps per second."""
    pids = running.pids
    servers = [pid for name, pid in pids.items() if name.startswith("server")]
    trainers = [pid for name, pid in pids.items() if name.startswith("trainer")]
    with running.awake():
        before = [sum(map(processor_seconds, each)) for each in (servers, trainers)]
        made = running.make(steps, batch)
        after = [sum(map(processor_seconds, each)) for each in (servers, trainers)]
    all_steps = steps * len(trainers)
    of_servers, of_trainers = (1e3 * (b - a) / all_steps for a, b in zip(before, after, strict=True))
    return Price(of_servers, of_trainers, steps / made.seconds)


def beat(trainers: int, servers: int) -> dict[str, float]:
    """Return the processor time of one heartbeat in an idle job, in milliseconds.

    Returns
    -------
    dict of str to float
        ``server``: the time of a server per trainer. ``trainer``: the time of a trainer per server.
    """
    running = Running("pricesync_table", Shape(servers, trainers), heartbeat_seconds=_BEAT_SECONDS)
    try:
        running.start()
        running.await_ready()
        with running.awake():
            running.make(WARM_UP_STEPS, 1)
            before = {name: processor_seconds(pid) for name, pid in running.pids.items()}
            time.sleep(_IDLE_SECONDS)
            spent = {name: processor_seconds(pid) - before[name] for name, pid in running.pids.items()}
    finally:
        running.release()
        running.close(time.monotonic() + END_SECONDS)
    beats = trainers * servers * _IDLE_SECONDS / _BEAT_SECONDS
    return {
        role: 1e3 * sum(seconds for name, seconds in spent.items() if name.startswith(role)) / beats
        for role in ("server", "trainer")
    }


def run_shape(
    trainers: int, servers: int, systems: Sequence[str], workload: str, rounds: int, steps: int, python: str
) -> dict[str, Any]:
    """Measure the systems with one shape and workload; return each system's `Price` and resources."""
    running = {}
    for name in systems:
        system, _, tree = name.partition("-")
        alone = system == "priceplain"
        shape = Shape(0 if alone else servers, 1 if alone else trainers)
        interpreter = python if tree else sys.executable
        running[name] = Running(f"{system}_{workload}-{tree}", shape, python=interpreter)
    prices: dict[str, list[Price]] = {name: [] for name in systems}
    held: dict[str, dict[str, Held]] = {}
    for of_round in interleave(running, [1] * rounds, steps, WARM_UP_STEPS, measure):
        for name, price in of_round.items():
            prices[name].append(price)
        held = {
            name: {
                role: held_by(each.pids[f"{role}0"])
                for role in ("server", "trainer")
                if f"{role}0" in each.pids
            }
            for name, each in running.items()
        }
    result: dict[str, Any] = {
        name: {field: spread([getattr(one, field) for one in each]) for field in asdict(each[0])}
        | {role: asdict(one) for role, one in held[name].items()}
        for name, each in prices.items()
    }
    for name in _MODES:
        if name in prices and (before := name + _BEFORE) in prices:
            result[f"{name}: steps/s to before"] = spread(
                [
                    ours.steps_per_second / theirs.steps_per_second
                    for ours, theirs in zip(prices[name], prices[before], strict=True)
                ]
            )
    return result


def show(summary: Mapping[str, Any]) -> None:
    """Print the summary as a table."""
    print(
        f"{'trainers x servers':<32}{'servers ms':>11}{'trainer ms':>11}{'steps/s':>9}"
        "  server 0: threads, fds, MB"
    )
    for case, systems in summary["cases"].items():
        for name, row in systems.items():
            if "median" in row:
                print(f"{case} {name:<40}{row['median']:>8.2f}  [{row['p10']:.2f}-{row['p90']:.2f}]")
                continue
            figures = [row[each]["median"] for each in ("servers_ms", "trainer_ms", "steps_per_second")]
            server = row.get("server", row["trainer"])
            print(
                f"{f'{case} {name}':<32}{figures[0]:>11.2f}{figures[1]:>11.2f}{figures[2]:>9.1f}"
                f"  {server['threads']}, {server['descriptors']}, {server['megabytes']:.0f}"
            )
    for case, row in summary["heartbeats"].items():
        print(f"{case} heartbeat: {row['server']:.2f} ms of a server, {row['trainer']:.2f} ms of a trainer")
    for job, costs in summary["jobs"].items():
        for role, cost in costs.items():
            print(
                f"{job} on paper: a {role}: {cost['step_ms']:.1f} ms a step, heartbeats "
                f"{cost['beats']:.0%} of a core, so at most {cost['steps_per_second']:.1f} steps/s; "
                f"{cost['descriptors']} descriptors"
            )


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.request_price", description=__doc__)
    parser.add_argument("--shapes", default=SHAPES, help="trainers x servers (default: %(default)s)")
    parser.add_argument("--heartbeats", default="1x1,1x8,8x1", help="as --shapes (default: %(default)s)")
    parser.add_argument("--jobs", default="100x20,1000x100", help="as --shapes (default: %(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="(default: %(default)s)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="steps per system and round (default: 200)")
    parser.add_argument("--before", default="", metavar="PYTHON", help="the interpreter of another tree")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    shapes, beating, jobs = map(parse_shapes, (options.shapes, options.heartbeats, options.jobs))
    systems, workloads = options.systems.split(","), options.workloads.split(",")
    if (
        shapes is None
        or beating is None
        or jobs is None
        or not set(systems) <= set(SYSTEMS)
        or not set(workloads) <= set(WORKLOADS)
    ):
        parser.error(f"expected shapes as 1x8, systems of {SYSTEMS}, workloads of {WORKLOADS}")
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to end all processes
    if options.before:
        systems += [name + _BEFORE for name in _MODES if name in systems]
    cases: dict[str, Any] = {}
    for trainers, servers in shapes:
        for workload in workloads:
            case = f"{trainers}x{servers} {workload}"
            say(case)
            cases[case] = run_shape(
                trainers, servers, systems, workload, options.rounds, options.steps, options.before
            )
    heartbeats = {f"{each[0]}x{each[1]}": beat(*each) for each in beating}
    costs = {f"{each[0]}x{each[1]}": cost_of(*each, cases, heartbeats) for each in jobs}
    summary = {
        "benchmark": "request_price",
        "rounds": options.rounds,
        "steps_per_round": options.steps,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "cases": cases,
        "heartbeats": heartbeats,
        "jobs": {
            job: {role: asdict(one) for role, one in each.items()}
            for job, each in costs.items()
            if each is not None
        },
    }
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary)


if __name__ == "__main__":
    main()
