"""Benchmarks collective training against DistributedDataParallel on gloo, in steps per second.

``python -m benchmarks.collective --json`` trains a model of 25 million parameters with every system, with two
and with four trainers, in interleaved rounds as in `benchmarks.dense_sync`; ratios are computed within a
round. With ``--small``, the model has 1,000 parameters of 8 or 64 numbers, so that the cost per parameter
dominates. With ``--alone``, the benchmark instead compares a step of a single trainer with plain PyTorch.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import alone_systems
from benchmarks.running import Running, Shape, interleave, say, spread
from benchmarks.workload import MAX_BATCH, WIDTHS, count_parameters

__all__ = ["main"]

ABOUT = {
    "ddp": "DistributedDataParallel on gloo",
    "ddpnone": "the same, gradients set to None",
    "allreduce": "fleet.collective",
    "allreducehalf": "fleet.collective, bfloat16",
    "localsgd": "fleet.collective, LocalSGD, k = 8",
}
TRAINERS = (2, 4)
BATCHES = (64, 1)
WARM_UP_STEPS = 4

Rounds = dict[int, dict[str, list[float]]]
"""Steps per second of each round, by batch size and by system."""


def run(shape: Shape, systems: Sequence[str], batches: Sequence[int], rounds: int, steps: int) -> Rounds:
    """Measure every system once per round, in varying order and at alternating batch sizes."""
    running = {name: Running(name, shape) for name in systems}
    measured: Rounds = {batch: {name: [] for name in systems} for batch in batches}
    sizes = list(batches) * rounds
    for number, of_round in enumerate(interleave(running, sizes, steps, WARM_UP_STEPS, Running.measure)):
        of_size = measured[sizes[number]]
        for name, one in of_round.items():
            of_size[name].append(steps / one.seconds)
        shown = "  ".join(f"{name} {values[-1]:.2f}" for name, values in of_size.items())
        say(
            f"{shape.num_trainers} trainers, round {number + 1} of {len(sizes)}, batches of {sizes[number]}: "
            f"{shown} steps/s, load {os.getloadavg()[0]:.1f}"
        )
    return measured


def report(num_trainers: int, measured: Rounds, steps: int) -> dict[str, Any]:
    """Summarize steps per second by system, and the ratios to ddp within each round."""
    return {
        "trainers": num_trainers,
        "steps_per_round": steps,
        "load_average": os.getloadavg()[0],
        "batches": {
            str(batch): {
                name: {
                    "steps_per_second": spread(values),
                    "of_ddp": spread([a / b for a, b in zip(values, of_size["ddp"], strict=True)]),
                }
                for name, values in of_size.items()
            }
            for batch, of_size in measured.items()
        },
    }


def show(summary: Mapping[str, Any]) -> None:
    """Print the results for one number of trainers as a table."""
    print(f"{summary['trainers']} trainers, load {summary['load_average']:.1f}")
    for batch, of_size in summary["batches"].items():
        print(f"{f'  batches of {batch}':<44}{'steps/s':>22}{'of ddp, within a round':>26}")
        for name, row in of_size.items():
            print(f"    {ABOUT[name]:<40}{_shown(row['steps_per_second']):>22}{_shown(row['of_ddp']):>26}")


def run_alone(model: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Measure each way of training with one trainer once per round; return milliseconds per step."""
    running = {way: Running(f"{model}{way}", Shape(0, 1, ())) for way in alone_systems.WAYS}
    measured: dict[str, list[float]] = {way: [] for way in running}
    sizes = [MAX_BATCH] * rounds  # each trainer has its own batch
    for number, of_round in enumerate(interleave(running, sizes, steps, WARM_UP_STEPS, Running.measure)):
        for way, one in of_round.items():
            measured[way].append(one.seconds / steps * 1e3)
        shown = "  ".join(f"{way} {values[-1]:.2f}" for way, values in measured.items())
        say(f"1 trainer, {model}, round {number + 1} of {rounds}: {shown} ms, load {os.getloadavg()[0]:.1f}")
    return measured


def report_alone(model: str, measured: Mapping[str, Sequence[float]], steps: int) -> dict[str, Any]:
    """Summarize milliseconds per step, and the ratios to plain PyTorch within each round."""
    device = alone_systems.device()
    return {
        "model": model,
        "device": device.type,
        "samples": alone_systems.num_samples(device),
        "steps_per_round": steps,
        "load_average": os.getloadavg()[0],
        "ways": {
            way: {
                "milliseconds": spread(values),
                "of_plain": spread([a / b for a, b in zip(values, measured["plain"], strict=True)]),
            }
            for way, values in measured.items()
        },
    }


def show_alone(summary: Mapping[str, Any]) -> None:
    """Print the results of one model with a single trainer as a table."""
    about = alone_systems.MODELS[summary["model"]]
    head = f"1 trainer, {about}, on {summary['device']}, load {summary['load_average']:.1f}"
    print(f"{head:<58}{'ms a step':>24}{'of the first, within a round':>32}")
    for way, row in summary["ways"].items():
        print(
            f"  {alone_systems.WAYS[way]:<56}{_shown(row['milliseconds']):>24}{_shown(row['of_plain']):>32}"
        )


def _shown(row: Mapping[str, float]) -> str:
    return f"{row['median']:.2f} [{row['p10']:.2f}-{row['p90']:.2f}]"


def read_options() -> tuple[argparse.Namespace, list[str], list[int], list[int]]:
    """Return the options, the systems, the batch sizes and the numbers of trainers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collective", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="per size of batches (default: 10)")
    parser.add_argument("--steps", type=int, default=8, help="per system and round (default: 8)")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="sizes (default: %(default)s)")
    parser.add_argument(
        "--trainers", default=",".join(map(str, TRAINERS)), help="numbers of them (default: %(default)s)"
    )
    parser.add_argument(
        "--systems", default=",".join(ABOUT), help="beside ddp, of them (default: %(default)s)"
    )
    parser.add_argument(
        "--small", action="store_true", help="train 1,000 small parameters instead (default: no)"
    )
    parser.add_argument(
        "--alone", action="store_true", help="measure one trainer, and none of those (default: no)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    systems = ["ddp", *(name for name in options.systems.split(",") if name != "ddp")]
    if any(name not in ABOUT for name in systems) or len(set(systems)) != len(systems):
        parser.error(f"--systems is {options.systems!r}; expected each at most once, of {', '.join(ABOUT)}")
    numbers: dict[str, list[int]] = {}
    for flag, most in (("batches", MAX_BATCH), ("trainers", 16)):
        texts = getattr(options, flag).split(",")
        numbers[flag] = [int(text) for text in texts if text.isdecimal() and 1 <= int(text) <= most]
        if len(set(numbers[flag])) != len(texts):
            parser.error(f"--{flag} is {getattr(options, flag)!r}; expected different numbers of 1 to {most}")
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 or more")
    return options, systems, numbers["batches"], numbers["trainers"]


def main() -> None:
    """Run the benchmark with the command-line options."""
    options, systems, batches, trainers = read_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to end all processes
    summaries = []
    widths = alone_systems.SMALL if options.small else WIDTHS
    for model in alone_systems.MODELS if options.alone else ():
        alone = run_alone(model, options.rounds, options.steps)
        summaries.append(report_alone(model, alone, options.steps))
        if not options.json:
            show_alone(summaries[-1])
    for number in () if options.alone else trainers:
        shape = Shape(0, number, widths)
        measured = run(shape, systems, batches, options.rounds, options.steps)
        summaries.append(report(number, measured, options.steps))
        if not options.json:
            show(summaries[-1])
    if options.json:
        about: dict[str, Any] = {"benchmark": "collective", "cores": os.cpu_count()}
        about |= {"alone": True} if options.alone else {"parameters": count_parameters(widths)}
        print(json.dumps(about | {"rounds": options.rounds, "results": summaries}))


if __name__ == "__main__":
    main()
