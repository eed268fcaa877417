"""Benchmarks the latency of a synchronous step of a tiny model, which mostly communicates.

``python -m benchmarks.dense_latency --json`` prints the median and the 99th percentile of a step with two
trainers and two servers, for fleet and for torch.distributed.rpc, in interleaved rounds as in
`benchmarks.dense_sync`. ``--grid`` measures 1, 2, 4 and 8 trainers with 1, 2 and 4 servers, one combination
after another.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

from benchmarks.running import Running, Shape, interleave, say, spread
from benchmarks.workload import MAX_BATCH, TINY_WIDTHS, count_parameters

__all__ = ["main"]

PAIR = {"rpc 2x2": Shape(2, 2, TINY_WIDTHS), "fleet 2x2": Shape(2, 2, TINY_WIDTHS)}
GRID = {
    f"fleet {servers}x{trainers}": Shape(servers, trainers, TINY_WIDTHS)
    for servers in (1, 2, 4)
    for trainers in (1, 2, 4, 8)
}
WARM_UP_STEPS = 50


def run(shapes: Mapping[str, Shape], rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return the median and 99th percentile of the step time in milliseconds, by system and round."""
    running = {name: Running(name.replace(" ", "-"), shape) for name, shape in shapes.items()}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in shapes}
    sizes = [MAX_BATCH] * rounds
    for number, of_round in enumerate(interleave(running, sizes, steps, WARM_UP_STEPS, Running.measure)):
        for name, one in of_round.items():
            measured[name].append(percentiles(one.step_seconds))
        say(f"round {number + 1} of {rounds} is over")
    return measured


def percentiles(step_seconds: Sequence[float]) -> tuple[float, float]:
    """Return the median and 99th percentile of step times, in milliseconds."""
    cuts = quantiles(step_seconds, n=100, method="inclusive")
    return 1e3 * cuts[49], 1e3 * cuts[98]


def report(measured: Mapping[str, list[tuple[float, float]]], steps: int) -> dict[str, Any]:
    """Summarize milliseconds by system, and the ratios of fleet to rpc within each round."""
    names = ("p50", "p99")
    summary: dict[str, Any] = {
        "benchmark": "dense_latency",
        "parameter_bytes": 4 * count_parameters(TINY_WIDTHS),
        "rounds": len(next(iter(measured.values()))),
        "steps_per_round": steps,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "milliseconds": {
            name: {kind: spread([each[which] for each in rounds]) for which, kind in enumerate(names)}
            for name, rounds in measured.items()
        },
    }
    rpc, ours = (measured.get(f"{system} 2x2") for system in ("rpc", "fleet"))
    if rpc and ours:
        summary["ratios"] = {
            f"fleet/rpc {kind}": spread([a[which] / b[which] for a, b in zip(ours, rpc, strict=True)])
            for which, kind in enumerate(names)
        }
    return summary


def show(summary: dict[str, Any]) -> None:
    """Print the summary as tables."""
    print(f"{'ms per step (servers x trainers)':<36}{'p50':>8}{'p99':>8}")
    for name, row in summary["milliseconds"].items():
        print(f"{name:<36}{row['p50']['median']:>8.2f}{row['p99']['median']:>8.2f}")
    for name, row in summary.get("ratios", {}).items():
        print(f"{name:<36}{row['median']:>8.2f}  [{row['p10']:.2f}-{row['p90']:.2f}]")


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dense_latency", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="steps per system and round (default: 300)")
    parser.add_argument("--grid", action="store_true", help="1 to 8 trainers, 1 to 4 servers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 2:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 and 2 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to end all processes
    if options.grid:  # one after another, because all processes together exceed 24 GB
        measured: dict[str, list[tuple[float, float]]] = {}
        for name, shape in GRID.items():
            say(f"{name} (servers x trainers)")
            measured |= run({name: shape}, options.rounds, options.steps)
    else:
        measured = run(PAIR, options.rounds, options.steps)
    summary = report(measured, options.steps)
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary)


if __name__ == "__main__":
    main()
