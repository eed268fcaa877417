"""Benchmarks an embedding table with two trainers and one server against alternatives, in steps per second.

``python -m benchmarks.sparse --json`` trains a table of a million rows of ten numbers, with 26
Zipf-distributed ids per sample and batches of 1000 samples, with every system, in interleaved rounds as in
`benchmarks.dense_sync`. Communication alone is measured first, then training with three layers of 400 units,
which are local to each trainer.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.running import Running, Shape, interleave, say, spread
from benchmarks.sparse_systems import DIMENSION, ROWS, SLOTS

__all__ = ["main"]

NUM_TRAINERS = 2
NUM_SERVERS = {"rowslocal": 0, "rowsrpc": 1, "rowsgrpc": 1, "rows": 1, "rowsasync": 1}
ABOUT = {
    "rowslocal": "a table of each trainer's own, the limit",
    "rowsrpc": "torch.distributed.rpc",
    "rowsgrpc": "grpcio, unary calls of raw bytes",
    "rows": "ours, sync",
    "rowsasync": "ours, async",
}
LAYERS = {"communication": (), "layers": (SLOTS * DIMENSION, 400, 400, 400, 1)}
RATIOS = [(ours, other) for ours in ("rows", "rowsasync") for other in ("rowsrpc", "rowsgrpc", "rowslocal")]
BATCH = 1000
WARM_UP_STEPS = 10

Rounds = dict[str, dict[str, list[float]]]
"""Steps per second of each round, by workload and by system."""


def run(systems: Sequence[str], workloads: Sequence[str], rounds: int, steps: int) -> Rounds:
    """Measure every system once per round, in varying order, for each workload in turn."""
    measured: Rounds = {}
    for workload in workloads:
        of_workload = measured[workload] = {name: [] for name in systems}
        shapes = {name: Shape(NUM_SERVERS[name], NUM_TRAINERS, LAYERS[workload]) for name in systems}
        running = {name: Running(name, shape) for name, shape in shapes.items()}
        for number, of_round in enumerate(
            interleave(running, [BATCH] * rounds, steps, WARM_UP_STEPS, Running.measure), start=1
        ):
            for name, one in of_round.items():
                of_workload[name].append(steps / one.seconds)
            shown = "  ".join(f"{name} {values[-1]:.1f}" for name, values in of_workload.items())
            say(f"{workload}, round {number} of {rounds}: {shown} steps/s")
    return measured


def report(measured: Rounds, steps: int) -> dict[str, Any]:
    """Summarize, for each workload, steps per second by system and the ratios within each round."""
    return {
        "benchmark": "sparse",
        "rows": ROWS,
        "dimension": DIMENSION,
        "ids_per_sample": SLOTS,
        "batch": BATCH,
        "trainers": NUM_TRAINERS,
        "steps_per_round": steps,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "steps_per_second": {
            workload: {name: spread(values) | {"rounds": values} for name, values in of_workload.items()}
            for workload, of_workload in measured.items()
        },
        "ratios": {
            workload: {
                f"{ours}/{other}": spread(
                    [a / b for a, b in zip(of_workload[ours], of_workload[other], strict=True)]
                )
                for ours, other in RATIOS
                if ours in of_workload and other in of_workload
            }
            for workload, of_workload in measured.items()
        },
    }


def show(summary: dict[str, Any]) -> None:
    """Print the summary as tables."""
    for workload, of_workload in summary["steps_per_second"].items():
        print(f"{f'steps/s, {workload}':<48}{'median':>8}{'p10':>8}{'p90':>8}")
        for name, row in of_workload.items():
            print(f"{ABOUT[name]:<48}{row['median']:>8.1f}{row['p10']:>8.1f}{row['p90']:>8.1f}")
        for pair, row in summary["ratios"][workload].items():
            print(f"{pair:<48}{row['median']:>8.2f}{row['p10']:>8.2f}{row['p90']:>8.2f}")
        print()


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="per workload (default: 8)")
    parser.add_argument("--steps", type=int, default=40, help="steps per system and round (default: 40)")
    parser.add_argument(
        "--workloads", default=",".join(LAYERS), help=f"of {', '.join(LAYERS)} (default: %(default)s)"
    )
    parser.add_argument(
        "--systems", default=",".join(NUM_SERVERS), help=f"of {', '.join(NUM_SERVERS)} (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    systems, workloads = options.systems.split(","), options.workloads.split(",")
    for name, given, known in (("systems", systems, NUM_SERVERS), ("workloads", workloads, LAYERS)):
        if len(set(given)) != len(given) or not set(given) <= set(known):
            parser.error(
                f"--{name} is {','.join(given)!r}; expected each at most once, of {', '.join(known)}"
            )
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to end all processes
    summary = report(run(systems, workloads, options.rounds, options.steps), options.steps)
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary)


if __name__ == "__main__":
    main()
