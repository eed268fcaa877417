"""Benchmarks how close a network-bound embedding table comes to the limit set by the link rate.

``python -m benchmarks.sparse_network --json`` runs the communication workload of `benchmarks.sparse` on the
network of `benchmarks.dense_network`: every process has its own host, whose link is limited in each
direction. In sync mode, a trainer's step requests the distinct rows of its batch by id, receives the rows,
and sends a gradient with the id of each row. These phases follow one another, so a step takes at least as
long as the busiest link needs for all of them: ids of 8 bytes, and rows in both directions, at the payload
rate. The benchmark needs root and iproute2, and removes everything that it creates.

The actual traffic is lower: ids are sent as gaps, and a link's token bucket passes some bytes without delay
(`benchmarks.network.BUCKET`) in each direction. On slow links, the ratio may therefore exceed 1.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np

from benchmarks.cases import Case, parse_cases
from benchmarks.network import network, report_leftovers, unmet_needs
from benchmarks.running import Running, Shape, interleave, say, spread
from benchmarks.sparse_systems import DIMENSION, id_batches
from fleet.tables import Placement

__all__ = ["main"]

ABOUT = {"rows": "ours, sync", "rowsasync": "ours, async"}
DEFAULT_CASES = "2+2@400"
BATCH = 1000
WARM_UP_STEPS = 2
PAYLOAD: Final = 0.956
"""The fraction of a link's rate that is payload, with frames of 1,500 bytes."""
GOAL: Final = 0.9
ROW_AND_ID_BYTES: Final = 4 * DIMENSION + 8

Rounds = dict[str, list[float]]
"""Seconds per step of each round, by system."""


def run(case: Case, systems: Sequence[str], rounds: int, steps: int) -> Rounds:
    """Measure every system once per round, in varying order, on a network made for the case."""
    measured: Rounds = {name: [] for name in systems}
    with network(case.num_trainers + case.num_servers, case.mbit_per_second) as hosts:
        shape = Shape(case.num_servers, case.num_trainers, ())
        running = {name: Running(name, shape, hosts) for name in systems}
        each = interleave(running, [BATCH] * rounds, steps, WARM_UP_STEPS, Running.measure)
        with closing(each) as found:
            for number, of_round in enumerate(found, start=1):
                for name, one in of_round.items():
                    measured[name].append(one.seconds / steps)
                shown = "  ".join(f"{name} {values[-1]:.4f}" for name, values in measured.items())
                say(f"{case}, round {number} of {rounds}: {shown} s/step")
    return measured


def most_rows(num_trainers: int, num_servers: int) -> float:
    """Return the mean number of distinct rows per step on the busiest link of any process."""
    batches = [[np.unique(batch) for batch in id_batches(trainer)] for trainer in range(num_trainers)]
    of_trainers = [np.mean([ids.size for ids in each]) for each in batches]
    of_servers = np.zeros(num_servers)
    for each in batches:
        for ids in each:
            for server, at in Placement.over(num_servers).positions(ids).items():
                of_servers[server] += at.size / len(each)
    return float(max(*of_trainers, *of_servers))


def limit_seconds(case: Case, rows: float) -> float:
    """Return the minimum time of a step whose busiest link carries the rows in both directions."""
    return rows * 2 * ROW_AND_ID_BYTES * 8 / (case.mbit_per_second * 1e6 * PAYLOAD)


def report(case: Case, measured: Rounds, rows: float, steps: int) -> dict[str, Any]:
    """Summarize a case: the seconds per step, and the lower bound as a fraction of them."""
    limit = limit_seconds(case, rows)
    return {
        "case": str(case),
        "rows_per_step": rows,
        "limit_seconds": limit,
        "steps_per_round": steps,
        "load_average": os.getloadavg()[0],
        "systems": {
            name: {
                "seconds": spread(seconds) | {"rounds": seconds},
                "of_limit": spread([limit / one for one in seconds]),
            }
            for name, seconds in measured.items()
        },
    }


def show(summary: Mapping[str, Any]) -> None:
    """Print the results of one case as a table."""
    title = f"{summary['case']}: {summary['rows_per_step']:.0f} distinct rows a step"
    print(f"{title:<44}{'limit s':>9}{'s/step':>9}{f'of limit (goal {GOAL})':>24}")
    for name, row in summary["systems"].items():
        of_limit = "{median:.2f} [{p10:.2f}-{p90:.2f}]".format(**row["of_limit"])
        print(
            f"{ABOUT[name]:<44}{summary['limit_seconds']:>9.4f}{row['seconds']['median']:>9.4f}{of_limit:>24}"
        )
    print()


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_network", description=__doc__)
    parser.add_argument(
        "--cases", default=DEFAULT_CASES, help="trainers+servers@Mbit/s, … (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=8, help="per case (default: 8)")
    parser.add_argument("--steps", type=int, default=20, help="per system and round (default: 20)")
    parser.add_argument("--systems", default="rows", help=f"of {', '.join(ABOUT)} (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        cases = parse_cases(options.cases)
    except ValueError as error:
        parser.error(f"--cases: {error}")
    if any(case.batch != 1 for case in cases):
        parser.error(f"--cases is {options.cases!r}; expected no size of batches: they have {BATCH} samples")
    systems = options.systems.split(",")
    if any(name not in ABOUT for name in systems) or len(set(systems)) != len(systems):
        parser.error(f"--systems is {options.systems!r}; expected each at most once, of {', '.join(ABOUT)}")
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 or more")
    if (unmet := unmet_needs()) is not None:
        raise SystemExit(f"benchmarks.sparse_network: {unmet}")
    for number in (signal.SIGINT, signal.SIGTERM):  # to end all processes and remove the network
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    if (left := report_leftovers()) is not None:
        say(left)
    summaries = []
    for case in cases:
        measured = run(case, systems, options.rounds, options.steps)
        rows = most_rows(case.num_trainers, case.num_servers)
        summaries.append(report(case, measured, rows, options.steps))
        if not options.json:
            show(summaries[-1])
    if options.json:
        print(json.dumps({"benchmark": "sparse_network", "cores": os.cpu_count(), "cases": summaries}))


if __name__ == "__main__":
    main()
