"""Steps per second of dense synchronous training with two trainers, beside the alternatives.

``python -m benchmarks.dense_sync --json`` trains one model of 25 million parameters with every system, in
interleaved rounds: the processes of all systems live from beginning to end, and those that are not being
measured are stopped (SIGSTOP), as some poll without a pause even when they have nothing to do. So every
system meets the same state of the machine, and ratios are taken within a round. Every process computes with
one thread.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.running import Running, Shape, interleave, say, spread
from benchmarks.workload import NUM_PARAMETERS, WIDTHS

__all__ = ["main"]

NUM_TRAINERS = 2
NUM_SERVERS = {
    "compute": 0,
    "ddp": 0,
    "rpc-1": 1,
    "rpc-2": 2,
    "grpc-1": 1,
    "grpc-2": 2,
    "fleet-1": 1,
    "fleet-2": 2,
}
ABOUT = {
    "compute": "compute only, no communication",
    "ddp": "DistributedDataParallel on gloo",
    "rpc-1": "torch.distributed.rpc, 1 server",
    "rpc-2": "torch.distributed.rpc, 2 servers",
    "grpc-1": "tuned grpcio streams, 1 server",
    "grpc-2": "tuned grpcio streams, 2 servers",
    "fleet-1": "fleet.parameter_server, 1 server",
    "fleet-2": "fleet.parameter_server, 2 servers",
}
RATIOS = [
    ("fleet-1", "rpc-1"),
    ("fleet-2", "rpc-2"),
    ("fleet-1", "grpc-1"),
    ("fleet-2", "grpc-2"),
    ("fleet-1", "ddp"),
    ("fleet-2", "ddp"),
    ("fleet-1", "compute"),
    ("fleet-2", "compute"),
]
WARM_UP_STEPS = 3


def run(systems: Sequence[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Measure every system once per round, in an order that changes; return steps per second by system."""
    running = {name: Running(name, Shape(NUM_SERVERS[name], NUM_TRAINERS, WIDTHS)) for name in systems}
    measured: dict[str, list[float]] = {name: [] for name in systems}
    for number, of_round in enumerate(interleave(running, rounds, steps, WARM_UP_STEPS)):
        for name, one in of_round.items():
            measured[name].append(steps / one.seconds)
        shown = "  ".join(f"{name} {values[-1]:.1f}" for name, values in measured.items())
        say(f"round {number + 1} of {rounds}: {shown} steps/s")
    return measured


def report(measured: dict[str, list[float]], steps: int) -> dict[str, Any]:
    """Summarize: steps per second by system, and the ratios within each round."""
    ratios = {
        f"{ours}/{other}": spread([a / b for a, b in zip(measured[ours], measured[other], strict=True)])
        for ours, other in RATIOS
        if ours in measured and other in measured
    }
    return {
        "benchmark": "dense_sync",
        "parameters": NUM_PARAMETERS,
        "trainers": NUM_TRAINERS,
        "rounds": len(next(iter(measured.values()))),
        "steps_per_round": steps,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "steps_per_second": {name: spread(values) | {"rounds": values} for name, values in measured.items()},
        "ratios": ratios,
    }


def show(summary: dict[str, Any]) -> None:
    """Print the summary as two tables."""
    print(f"{'steps/s':<36}{'median':>8}{'p10':>8}{'p90':>8}")
    for name, row in summary["steps_per_second"].items():
        print(f"{ABOUT[name]:<36}{row['median']:>8.2f}{row['p10']:>8.2f}{row['p90']:>8.2f}")
    if summary["ratios"]:
        print(f"\n{'ratio within a round':<36}{'median':>8}{'p10':>8}{'p90':>8}")
    for name, row in summary["ratios"].items():
        print(f"{name:<36}{row['median']:>8.2f}{row['p10']:>8.2f}{row['p90']:>8.2f}")


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dense_sync", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="steps per system and round (default: 10)")
    parser.add_argument("--systems", default=",".join(NUM_SERVERS), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    systems = options.systems.split(",")
    unknown = [name for name in systems if name not in NUM_SERVERS]
    if unknown or len(set(systems)) != len(systems):
        parser.error(
            f"--systems is {options.systems!r}; expected each at most once, of {', '.join(NUM_SERVERS)}"
        )
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that every process is ended
    summary = report(run(systems, options.rounds, options.steps), options.steps)
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary)


if __name__ == "__main__":
    main()
