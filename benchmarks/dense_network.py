"""Benchmarks network-bound dense synchronous training against DistributedDataParallel.

``python -m benchmarks.dense_network --json`` runs each process on its own host, a network namespace, and
limits each host's link in both directions. A system is compared with the minimum time that the links allow:
with parameters of M bytes and links of B bytes per second, a step takes M/B with as many servers as trainers,
2 M/B with half as many servers, and 2 (N - 1) / N x M/B for a ring all-reduce between N trainers. The systems
are measured in interleaved rounds, as in `benchmarks.dense_sync`; each round has one uncounted step at its
end, which finishes work that the previous step has deferred. The benchmark needs root and iproute2, and
removes everything that it creates.
"""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, limit_seconds, memory_bytes, parse_cases
from benchmarks.counters import Segments, Trace, segments_of_all
from benchmarks.network import INTERFACE, network, report_leftovers, unmet_needs
from benchmarks.running import Running, Shape, interleave, say, spread
from benchmarks.workload import WIDTHS, count_parameters

__all__ = ["main"]

ABOUT = {
    "compute": "compute only, no communication",
    "ddp": "DistributedDataParallel on gloo",
    "ddphalf": "the same, gradients as bfloat16",
    "fleet": "ours",
    "tls": "ours, with TLS",
    "cross": "ours, cross_step",
    "bf16": "ours, bfloat16",
    "allreduce": "ours, collective",
    "allreducehalf": "ours, collective, bfloat16",
    "localsgd": "ours, collective, LocalSGD, k = 8",
}
SERVED = ("fleet", "tls", "cross", "bf16")
DEFAULT_SYSTEMS = ("ddp", "fleet", "cross", "bf16")
DEFAULT_CASES = "4+4@400,2+2@400,8+8@200,4+2@400,4+4@1000x64"
WARM_UP_STEPS = 2
MEMORY = Path("/proc/meminfo")
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True)
class Round:
    """The measurements of one system in one round."""

    seconds: float
    """The time of a step."""
    segments: Segments
    """The TCP segments of all steps, summed over the hosts."""


Rounds = dict[str, list[Round]]
"""The measurements of each round, by system."""


def run(
    case: Case, systems: Sequence[str], widths: tuple[int, ...], rounds: int, steps: int, trace: Trace | None
) -> Rounds:
    """Measure every system once per round, in varying order, on a network made for the case."""
    measured: Rounds = {name: [] for name in systems}

    def measure(running: Running, steps: int, batch: int) -> Round:
        with running.awake():
            running.make(1, batch)
            traced = (
                trace.of(running.pids, case, running.name, len(measured[running.name])) if trace else None
            )
            before = segments_of_all(running.pids)
            with traced or nullcontext():
                seconds = running.make(steps, batch).seconds
            return Round(seconds / steps, segments_of_all(running.pids) - before)

    with network(case.num_trainers + case.num_servers, case.mbit_per_second) as hosts:
        running = {
            name: Running(
                name, Shape(case.num_servers if name in SERVED else 0, case.num_trainers, widths), hosts
            )
            for name in systems
        }
        with closing(interleave(running, [case.batch] * rounds, steps, WARM_UP_STEPS, measure)) as each:
            for number, of_round in enumerate(each):
                for name, one in of_round.items():
                    measured[name].append(one)
                shown = "  ".join(f"{name} {one.seconds:.3f}" for name, one in of_round.items())
                say(f"{case}, round {number + 1} of {rounds}: {shown} s/step")
    return measured


def report(case: Case, measured: Rounds, parameter_bytes: int, steps: int) -> dict[str, Any]:
    """Summarize a case: seconds per step, and their ratios to the lower bound and to ddp."""
    rows: dict[str, Any] = {}
    for name, rounds in measured.items():
        limit = limit_seconds(name, case, parameter_bytes)
        sent = sum((one.segments for one in rounds), Segments(0, 0))
        rows[name] = {
            "limit_seconds": limit,
            "seconds": spread([one.seconds for one in rounds]) | {"rounds": [one.seconds for one in rounds]},
            "of_limit": spread([limit / one.seconds for one in rounds]),
            "resent_segments_per_step": sent.resent / (steps * len(rounds)),
            "resent_share": sent.resent / max(1, sent.sent),
        }
        if "ddp" in measured:
            pairs = zip(measured["ddp"], rounds, strict=True)
            rows[name]["speed_to_ddp"] = spread([ddp.seconds / one.seconds for ddp, one in pairs])
    return {
        "case": str(case),
        "parameter_bytes": parameter_bytes,
        "rounds": len(next(iter(measured.values()))),
        "steps_per_round": steps,
        "load_average": os.getloadavg()[0],
        "systems": rows,
    }


def show(summary: Mapping[str, Any]) -> None:
    """Print the results of one case as a table."""
    title = f"{summary['case']}: {summary['parameter_bytes'] / 1e6:.1f} MB of parameters"
    print(f"{title:<44}{'limit s':>9}{'s/step':>9}{'of limit':>22}{'x ddp':>22}{'resent/step':>20}")
    for name, row in summary["systems"].items():
        again = f"{row['resent_segments_per_step']:.0f} ({100 * row['resent_share']:.2f} %)"
        print(
            f"{ABOUT[name]:<44}{row['limit_seconds']:>9.3f}{row['seconds']['median']:>9.3f}"
            f"{_shown(row['of_limit']):>22}{_shown(row.get('speed_to_ddp')):>22}{again:>20}"
        )
    print()


def _shown(row: Mapping[str, float] | None) -> str:
    return f"{row['median']:.2f} [{row['p10']:.2f}-{row['p90']:.2f}]" if row else ""


def read_options() -> tuple[argparse.Namespace, list[Case], list[str], tuple[int, ...]]:
    """Return the options, cases, systems and layer widths; raise SystemExit if one is invalid."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dense_network", description=__doc__)
    parser.add_argument(
        "--cases",
        default=DEFAULT_CASES,
        help="trainers+servers@Mbit/s, and x the size of batches where it is not 1 (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="per case (default: 5)")
    parser.add_argument("--steps", type=int, default=4, help="per system and round (default: 4)")
    parser.add_argument(
        "--systems",
        default=",".join(DEFAULT_SYSTEMS),
        help=f"of {', '.join(ABOUT)} (default: %(default)s)",
    )
    parser.add_argument(
        "--widths", default=",".join(map(str, WIDTHS)), help="of the layers (default: %(default)s)"
    )
    parser.add_argument("--trace", metavar="FILE", help="write what each link carries every 100 ms, as CSV")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        cases = parse_cases(options.cases)
    except ValueError as error:
        parser.error(f"--cases: {error}")
    systems = options.systems.split(",")
    if any(name not in ABOUT for name in systems) or len(set(systems)) != len(systems):
        parser.error(f"--systems is {options.systems!r}; expected each at most once, of {', '.join(ABOUT)}")
    widths = tuple(int(width) for width in options.widths.split(",") if width.isdecimal() and int(width) > 0)
    if len(widths) != len(options.widths.split(",")) or len(widths) < 2:
        parser.error(f"--widths is {options.widths!r}; expected two numbers or more, as 1024,2048,1000")
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 or more")
    return options, cases, systems, widths


def check_memory(case: Case, systems: Sequence[str], parameter_bytes: int) -> None:
    """Raise an error for cases that need more memory than this machine has."""
    needed = sum(memory_bytes(name, case, parameter_bytes) for name in systems)
    found = re.search(r"MemAvailable:\s+(\d+) kB", MEMORY.read_text())
    if found is not None and needed > (available := 1024 * int(found[1])):
        raise SystemExit(
            f"{case} with {', '.join(systems)} takes about {needed / 1e9:.0f} GB of memory, and "
            f"{available / 1e9:.0f} GB are available: measure fewer --systems at once, or smaller --widths"
        )


def main() -> None:
    """Run the benchmark with the command-line options."""
    options, cases, systems, widths = read_options()
    if (unmet := unmet_needs()) is not None:
        raise SystemExit(f"benchmarks.dense_network: {unmet}")
    for number in (signal.SIGINT, signal.SIGTERM):  # to end all processes and remove the network
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    if (left := report_leftovers()) is not None:
        say(left)
    parameter_bytes = 4 * count_parameters(widths)
    for case in cases:
        check_memory(case, systems, parameter_bytes)
    summaries = []
    with ExitStack() as stack:
        trace = None
        if options.trace is not None:
            trace = Trace(stack.enter_context(Path(options.trace).open("w", newline="")), INTERFACE)
        for case in cases:
            measured = run(case, systems, widths, options.rounds, options.steps, trace)
            summaries.append(report(case, measured, parameter_bytes, options.steps))
            if not options.json:
                show(summaries[-1])
    if options.json:
        about = {
            "benchmark": "dense_network",
            "cores": os.cpu_count(),
            "congestion_control": CONGESTION_CONTROL.read_text().strip(),
        }
        print(json.dumps(about | {"cases": summaries}))


if __name__ == "__main__":
    main()
