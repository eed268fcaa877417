"""Benchmarks a click-through-rate model in samples per second, with several numbers of trainers.

``python -m benchmarks.ctr --json`` trains the model of ``examples/ctr`` on random batches of 1000 samples:
with plain PyTorch in one process, and with 1, 2 and 4 trainers and one parameter server, where each trainer
has its own batches. The systems are measured in interleaved rounds, as in `benchmarks.sparse`, and ratios are
computed within a round. Each process has one torch thread.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.ctr_systems import WIDTHS
from benchmarks.running import Running, Shape, interleave, say, spread

__all__ = ["main"]

ABOUT = {"ctr": "ours, sync", "ctrasync": "ours, async"}
ALONE = "ctrtorch"
NUM_SERVERS = 1
BATCH = 1000
WARM_UP_STEPS = 5

Rounds = dict[str, list[float]]
"""Samples per second of each round, by system and number of trainers, joined by a hyphen."""


def run(systems: Sequence[str], trainers: Sequence[int], rounds: int, steps: int) -> Rounds:
    """Measure every system with every number of trainers, once per round and in varying order."""
    shapes = {ALONE: Shape(0, 1, WIDTHS)} | {
        f"{name}-{number}": Shape(NUM_SERVERS, number, WIDTHS) for name in systems for number in trainers
    }
    running = {name: Running(name, shape) for name, shape in shapes.items()}
    measured: Rounds = {name: [] for name in running}
    each = interleave(running, [BATCH] * rounds, steps, WARM_UP_STEPS, Running.measure)
    for number, of_round in enumerate(each, start=1):
        for name, one in of_round.items():
            measured[name].append(shapes[name].num_trainers * BATCH * steps / one.seconds)
        shown = "  ".join(f"{name} {values[-1]:.0f}" for name, values in measured.items())
        say(f"round {number} of {rounds}: {shown} samples/s")
    return measured


def report(measured: Rounds, steps: int) -> dict[str, Any]:
    """Summarize samples per second, and the ratios to plain PyTorch within each round."""
    return {
        "benchmark": "ctr",
        "batch": BATCH,
        "servers": NUM_SERVERS,
        "steps_per_round": steps,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "samples_per_second": {
            name: spread(values) | {"rounds": values} for name, values in measured.items()
        },
        "to_torch": {
            name: spread([ours / torch for ours, torch in zip(values, measured[ALONE], strict=True)])
            for name, values in measured.items()
        },
    }


def show(summary: dict[str, Any]) -> None:
    """Print the summary as a table."""
    print(f"{'samples/s':<36}{'median':>10}{'p10':>10}{'p90':>10}{'x torch':>22}")
    for name, row in summary["samples_per_second"].items():
        system, _, trainers = name.partition("-")
        about = "PyTorch alone, one process"
        if system != ALONE:
            about = f"{ABOUT[system]}, {trainers} trainer{'s' if trainers != '1' else ''}"
        ratio = "{median:.2f} [{p10:.2f}-{p90:.2f}]".format(**summary["to_torch"][name])
        print(f"{about:<36}{row['median']:>10.0f}{row['p10']:>10.0f}{row['p90']:>10.0f}{ratio:>22}")


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ctr", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="per system and round (default: 20)")
    parser.add_argument("--trainers", default="1,2,4", help="numbers of them (default: %(default)s)")
    parser.add_argument(
        "--systems", default=",".join(ABOUT), help=f"of {', '.join(ABOUT)} (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    systems, trainers = options.systems.split(","), options.trainers.split(",")
    if len(set(systems)) != len(systems) or not set(systems) <= set(ABOUT):
        parser.error(f"--systems is {options.systems!r}; expected each at most once, of {', '.join(ABOUT)}")
    if len(set(trainers)) != len(trainers) or not all(each.isdecimal() and int(each) for each in trainers):
        parser.error(f"--trainers is {options.trainers!r}; expected numbers of 1 or more, each once")
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to end all processes
    summary = report(
        run(systems, [int(each) for each in trainers], options.rounds, options.steps), options.steps
    )
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary)


if __name__ == "__main__":
    main()
