"""Benchmarks dense synchronous training with two trainers against alternatives, in steps per second.

``python -m benchmarks.dense_sync --json`` trains a model of 25 million parameters with every system, in
interleaved rounds: the processes of all systems run from beginning to end, and those that are not being
measured are stopped (SIGSTOP), because some poll continuously even when idle. All systems thus encounter the
same state of the machine, and ratios are computed within a round. Every process computes with one thread.
Rounds with batches of 64 samples, where computation dominates a step, alternate with rounds of one sample,
where communication dominates.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.running import Running, Shape, interleave, say, spread
from benchmarks.workload import MAX_BATCH, NUM_PARAMETERS, WIDTHS

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
    "tls-1": 1,
    "tls-2": 2,
    "cross-1": 1,
    "cross-2": 2,
    "bf16-2": 2,
    "shared-1": 1,
    "shared-2": 2,
    "both-2": 2,
}
ABOUT = {
    "compute": "compute only, no communication",
    "ddp": "DistributedDataParallel on gloo",
    "rpc-1": "torch.distributed.rpc, 1 server",
    "rpc-2": "torch.distributed.rpc, 2 servers",
    "grpc-1": "tuned grpcio streams, 1 server",
    "grpc-2": "tuned grpcio streams, 2 servers",
    "fleet-1": "ours, TCP, 1 server",
    "fleet-2": "ours, TCP, 2 servers",
    "tls-1": "ours, TCP with TLS, 1 server",
    "tls-2": "ours, TCP with TLS, 2 servers",
    "cross-1": "ours, TCP, cross_step, 1 server",
    "cross-2": "ours, TCP, cross_step, 2 servers",
    "bf16-2": "ours, TCP, bfloat16, 2 servers",
    "shared-1": "ours, shared memory, 1 server",
    "shared-2": "ours, shared memory, 2 servers",
    "both-2": "ours, shared memory, cross_step, 2 servers",
}
RATIOS = [
    (f"{ours}-{servers}", other if other in NUM_SERVERS else f"{other}-{servers}")
    for ours, others in {
        "fleet": ("rpc", "grpc", "ddp", "compute"),
        "cross": ("rpc", "grpc", "ddp", "compute"),
        "tls": ("fleet",),
        "bf16": ("ddp",),
        "shared": ("compute",),
        "both": ("compute",),
    }.items()
    for other in others
    for servers in (1, 2)
]
DEFAULT = ("compute", "ddp", "rpc-1", "rpc-2", "grpc-2", "fleet-2", "cross-2", "shared-2", "both-2")
"""The default systems; the processes of all systems together, each of at least 0.5 GB, exceed 24 GB."""
BATCHES = (64, 1)
WARM_UP_STEPS = 3

Rounds = dict[int, dict[str, list[float]]]
"""Steps per second of each round, by batch size and by system."""


def run(systems: Sequence[str], batches: Sequence[int], rounds: int, steps: int) -> Rounds:
    """Measure every system once per round, in varying order and at alternating batch sizes."""
    running = {name: Running(name, Shape(NUM_SERVERS[name], NUM_TRAINERS, WIDTHS)) for name in systems}
    measured: Rounds = {batch: {name: [] for name in systems} for batch in batches}
    sizes = list(batches) * rounds
    for number, of_round in enumerate(interleave(running, sizes, steps, WARM_UP_STEPS, Running.measure)):
        of_size = measured[sizes[number]]
        for name, one in of_round.items():
            of_size[name].append(steps / one.seconds)
        shown = "  ".join(f"{name} {values[-1]:.1f}" for name, values in of_size.items())
        say(f"round {number + 1} of {len(sizes)}, batches of {sizes[number]}: {shown} steps/s")
    return measured


def report(measured: Rounds, steps: int) -> dict[str, Any]:
    """Summarize steps per second by system and batch size, and the ratios for each batch size and overall."""
    within = {
        (batch, f"{ours}/{other}"): [a / b for a, b in zip(of_size[ours], of_size[other], strict=True)]
        for batch, of_size in measured.items()
        for ours, other in RATIOS
        if ours in of_size and other in of_size
    }
    pairs = dict.fromkeys(pair for _, pair in within)
    return {
        "benchmark": "dense_sync",
        "parameters": NUM_PARAMETERS,
        "trainers": NUM_TRAINERS,
        "rounds": len(next(iter(next(iter(measured.values())).values()))),
        "steps_per_round": steps,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "steps_per_second": {
            str(batch): {name: spread(values) | {"rounds": values} for name, values in of_size.items()}
            for batch, of_size in measured.items()
        },
        "ratios": {str(batch): {pair: spread(within[batch, pair]) for pair in pairs} for batch in measured}
        | {
            "all": {
                pair: spread([each for batch in measured for each in within[batch, pair]]) for pair in pairs
            }
        },
    }


def show(summary: dict[str, Any]) -> None:
    """Print the summary as tables."""
    for batch, of_size in summary["steps_per_second"].items():
        print(f"{f'steps/s, batches of {batch}':<40}{'median':>8}{'p10':>8}{'p90':>8}")
        for name, row in of_size.items():
            print(f"{ABOUT[name]:<40}{row['median']:>8.2f}{row['p10']:>8.2f}{row['p90']:>8.2f}")
        print()
    for batch, pairs in summary["ratios"].items():
        if pairs:
            which = f"batches of {batch}" if batch != "all" else "all rounds"
            print(f"{f'ratio within a round, {which}':<40}{'median':>8}{'p10':>8}{'p90':>8}")
        for name, row in pairs.items():
            print(f"{name:<40}{row['median']:>8.2f}{row['p10']:>8.2f}{row['p90']:>8.2f}")


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dense_sync", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="per size of batches (default: 10)")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="sizes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps per system and round (default: 10)")
    parser.add_argument(
        "--systems", default=",".join(DEFAULT), help=f"of {', '.join(NUM_SERVERS)} (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    systems = options.systems.split(",")
    unknown = [name for name in systems if name not in NUM_SERVERS]
    if unknown or len(set(systems)) != len(systems):
        parser.error(
            f"--systems is {options.systems!r}; expected each at most once, of {', '.join(NUM_SERVERS)}"
        )
    batches = [int(size) for size in options.batches.split(",") if size.isdecimal()]
    if len(batches) != len(set(options.batches.split(","))) or not all(
        1 <= size <= MAX_BATCH for size in batches
    ):
        parser.error(f"--batches is {options.batches!r}; expected different sizes of 1 to {MAX_BATCH}")
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to end all processes
    summary = report(run(systems, batches, options.rounds, options.steps), options.steps)
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary)


if __name__ == "__main__":
    main()
