"""Benchmarks a step of the quick start's model, built with fluid's layers or with torch.nn.

``python -m benchmarks.fluid --json`` runs both models as programs with an executor: in one process, and with
one trainer and one server in sync mode. The systems are measured in rounds with varying order. Ratios are
computed within each round, of the median time of a step and of the processor time of all processes, which is
less sensitive to other load. The goal is a ratio of at most 1.3.
"""

import argparse
import json
import os
import signal
import sys
from statistics import median
from typing import Any, Final

from benchmarks.request_price import processor_seconds
from benchmarks.running import Running, Shape, interleave, say, spread
from benchmarks.workload import MAX_BATCH

__all__ = ["main"]

WARM_UP_STEPS: Final = 100
SHAPES: Final = {"local": Shape(0, 1), "1+1": Shape(1, 1)}
SYSTEMS: Final = ("layers", "module")
"""The model built with fluid's layers, and the same model as a torch.nn module."""
KINDS: Final = ("step", "processor")


def run(rounds: int, steps: int) -> dict[str, list[tuple[float, ...]]]:
    """Return the measurements named in `KINDS`, by system and round."""
    running = {
        f"{where} {system}": Running(f"fluid{system}-{where}", shape)
        for where, shape in SHAPES.items()
        for system in SYSTEMS
    }
    measured: dict[str, list[tuple[float, ...]]] = {name: [] for name in running}
    sizes = [MAX_BATCH] * rounds
    for number, of_round in enumerate(interleave(running, sizes, steps, WARM_UP_STEPS, measure)):
        for name, one in of_round.items():
            measured[name].append(one)
        say(f"round {number + 1} of {rounds} is over")
    return measured


def measure(system: Running, steps: int, batch: int) -> tuple[float, ...]:
    """Run steps of a system; return the median wall time and the processor time of a step."""
    before = sum(map(processor_seconds, system.pids.values()))
    made = system.measure(steps, batch)
    processor = sum(map(processor_seconds, system.pids.values())) - before
    return 1e3 * median(made.step_seconds), 1e3 * processor / steps


def report(measured: dict[str, list[tuple[float, ...]]], steps: int) -> dict[str, Any]:
    """Summarize milliseconds by system, and the ratios of fluid's layers to torch.nn within each round."""
    ratios = {
        f"{where} layers/module {kind}": [
            layers[at] / module[at]
            for layers, module in zip(*(measured[f"{where} {each}"] for each in SYSTEMS), strict=True)
        ]
        for where in SHAPES
        for at, kind in enumerate(KINDS)
    }
    return {
        "benchmark": "fluid",
        "rounds": len(next(iter(measured.values()))),
        "steps_per_round": steps,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "milliseconds": {
            f"{name} {kind}": spread([each[at] for each in rounds])
            for name, rounds in measured.items()
            for at, kind in enumerate(KINDS)
        },
        "ratios": {name: spread(values) for name, values in ratios.items()},
    }


def show(summary: dict[str, Any]) -> None:
    """Print the summary as a table."""
    for part, unit in (("milliseconds", "ms"), ("ratios", "x")):
        for name, row in summary[part].items():
            print(f"{name:<36}{row['median']:>8.3f} {unit:<3}[{row['p10']:.3f}-{row['p90']:.3f}]")


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fluid", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=500, help="steps per system and round (default: 500)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to end all processes
    summary = report(run(options.rounds, options.steps), options.steps)
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary)


if __name__ == "__main__":
    main()
