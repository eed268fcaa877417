"""Compares a table with a tenth of its rows in memory to a table that is fully in memory.

``python -m benchmarks.sparse_tier`` trains the network of ``examples/ctr`` on two tables in alternation, each
in a separate process. One has all rows in memory. The other uses `fleet.tables.LocalDisk` with a memory limit
(a cgroup, which needs root on Linux) of a tenth of the rows, in addition to the process, its ids and its
index. Each step looks up the distinct rows of a batch, runs the forward and backward pass, and updates the
rows with Adam, in one thread. In a second measurement, another thread looks up the rows of the next batch at
the same time, as servers do for ``fleet.prefetch``. Ids are Zipf-distributed. The benchmark also prints the
disk's rate of random 4 KiB reads.
"""

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.limited import PROGRAM_BYTES, Cgroup, Process, anonymous_bytes, random_reads
from fleet.tables import Constant, LocalDisk, Memory, Table, TableConfig, TableRows
from fleet.tables.rules import Adam

__all__ = ["ROW_BYTES", "main", "zipf_ranks"]

SLOTS: Final = 26
SAMPLES: Final = 1000
DIMENSION: Final = 10
SKEW: Final = 1.05
GOAL: Final = 0.5
ROW_BYTES: Final = 4 * (3 * DIMENSION + 1)
"""The size of a row: its values, the two slots of Adam, and the step of the last update."""
LOADED_AT_ONCE: Final = 1 << 16

Ids = NDArray[np.int64]


class Training:
    """A table and the network of ``examples/ctr`` in one process with one thread.

    Parameters
    ----------
    num_rows : int
        The number of rows, all of which exist before training.
    memory : int
        The bytes for rows in memory; 0 keeps all rows in memory.
    directory : str
        The directory of the file with the other rows.
    """

    def __init__(self, num_rows: int, memory: int, directory: str) -> None:
        torch.manual_seed(0)
        widths = (SLOTS * DIMENSION, 400, 400, 400, 1)
        layers: list[torch.nn.Module] = []
        for into, out in pairwise(widths):
            layers += [torch.nn.Linear(into, out), torch.nn.ReLU()]
        self._network = torch.nn.Sequential(*layers[:-1])
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=1e-3)
        self._target = torch.rand(SAMPLES, 1)
        self._random = np.random.default_rng(1)
        self._num_rows = num_rows
        storage = LocalDisk(memory, directory) if memory else Memory()
        config = TableConfig("tier", DIMENSION, Adam(), num_rows, Constant(0.0), storage=storage)
        self.table, self._step = Table(config), 0
        # Ids are hashes, so frequent rows are at random positions.
        self._names = self._random.permutation(num_rows).astype(np.int32)
        for begin in range(0, num_rows, LOADED_AT_ONCE):
            ids = np.arange(begin, min(begin + LOADED_AT_ONCE, num_rows))
            self.table.load(TableRows(ids, torch.zeros(ids.size, DIMENSION), {}))

    def turn(self, steps: int, *, ahead: bool = False) -> float:
        """Train for some steps and return the seconds taken; with `ahead`, look rows up one step early."""
        batches = [self._batch() for _ in range(steps)]
        begun = time.perf_counter()
        with ThreadPoolExecutor(1) as other:
            rows = self.table.look_up(batches[0][0])
            for number, (ids, positions) in enumerate(batches):
                coming = batches[number + 1][0] if number + 1 < steps else ids[:0]
                asked = other.submit(self.table.look_up, coming) if ahead else None
                gradient = self._compute(rows, positions)
                rows = asked.result() if asked is not None else rows  # a table allows one call at a time
                self._step += 1
                self.table.update(ids, gradient, self._step)
                rows = rows if asked is not None else self.table.look_up(coming)
        return time.perf_counter() - begun

    def _batch(self) -> tuple[Ids, Ids]:
        """Return the distinct ids of a batch, and the index of each sample's ids among them."""
        ranks = zipf_ranks(self._random, self._num_rows)
        distinct, positions = np.unique(self._names[ranks].astype(np.int64), return_inverse=True)
        return distinct, positions

    def _compute(self, rows: Tensor, positions: Ids) -> Tensor:
        """Run a step of the network and return the gradient of the rows."""
        leaf = rows.requires_grad_()
        self._optimizer.zero_grad()
        inputs = torch.nn.functional.embedding(torch.from_numpy(positions), leaf).view(SAMPLES, -1)
        (self._network(inputs) - self._target).square().mean().backward()
        self._optimizer.step()
        assert leaf.grad is not None
        return leaf.grad


def zipf_ranks(random: np.random.Generator, num_rows: int) -> Ids:
    """Return a batch of Zipf-distributed ids, where id 0 is the most frequent."""
    share = 1.0 - SKEW
    drawn = random.random(SAMPLES * SLOTS) * (num_rows**share - 1.0) + 1.0
    ranks: Ids = np.minimum((drawn ** (1.0 / share)).astype(np.int64) - 1, num_rows - 1)
    return ranks


def serve(arguments: argparse.Namespace) -> None:
    """Run one of the two processes; each line on standard input requests one timed turn of training."""
    torch.set_num_threads(1)
    training = Training(arguments.rows, arguments.memory, arguments.directory)
    for line in sys.stdin:
        steps = int(line)  # a negative number requests look-ups one step ahead
        seconds = training.turn(abs(steps), ahead=steps < 0)
        print(json.dumps({"seconds": seconds, "bytes": anonymous_bytes()}), flush=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with each table in alternation; return samples per second, and the ratios within each round."""
    reads = {threads: random_reads(arguments.directory, threads) for threads in (1, 32)}
    rows, group = arguments.rows * ROW_BYTES, Cgroup("tier")
    memory = int(arguments.share * rows / 10)
    given = [
        "benchmarks.sparse_tier",
        "--serve",
        f"--rows={arguments.rows}",
        f"--directory={arguments.directory}",
    ]
    whole, tier = Process(given), Process([*given, f"--memory={memory}"], group)
    try:
        whole.turn(arguments.steps)
        tier.turn(arguments.steps)
        limit = tier.bytes - memory + PROGRAM_BYTES + rows // 10
        group.limit(limit)
        for _ in range(0, arguments.warm_steps, arguments.steps):
            tier.turn(arguments.steps)
        rounds = [
            [each.turn(steps) for steps in (arguments.steps, -arguments.steps) for each in (whole, tier)]
            for _ in range(arguments.rounds)
        ]
    finally:
        whole.close()
        tier.close()
        group.close()
    samples = arguments.steps * SAMPLES
    return {
        "benchmark": "sparse_tier",
        "rows": arguments.rows,
        "row_bytes": rows,
        "limit_bytes": limit,
        "random_reads_per_second": reads,
        "load_average": os.getloadavg()[0],
        "samples_per_second": [
            statistics.median(samples / each[which] for each in rounds) for which in range(4)
        ],
        "ratios": sorted(each[0] / each[1] for each in rounds),
        "ratios_ahead": sorted(each[2] / each[3] for each in rounds),
    }


def show(summary: dict[str, Any]) -> None:
    """Print the summary of the results."""
    beside, tenth = summary["limit_bytes"] - summary["row_bytes"] // 10, summary["row_bytes"] // 10
    print(f"{summary['rows']} rows of {ROW_BYTES} bytes; memory is limited to {tenth / 1e6:.0f} MB for rows,")
    print(f"a tenth, and {beside / 1e6:.0f} MB for the process, ids and index")
    for threads, reads in summary["random_reads_per_second"].items():
        print(f"random reads of 4 KiB a second, {threads} at once: {reads:.0f}")
    for name, speeds, ratios in (
        ("rows looked up before their step", summary["samples_per_second"][:2], summary["ratios"]),
        ("while the step before computes", summary["samples_per_second"][2:], summary["ratios_ahead"]),
    ):
        print(
            f"{name}: samples/s in memory {speeds[0]:.0f}, with a tenth of the rows in memory {speeds[1]:.0f}"
        )
        middle = statistics.median(ratios)
        print(f"  ratio within a round: {middle:.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}] (goal {GOAL})")
    print(f"load average {summary['load_average']:.1f}")


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_tier", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="steps per turn (default: %(default)s)")
    parser.add_argument(
        "--warm-steps", type=int, default=1000, help="steps before the first turn (default: %(default)s)"
    )
    parser.add_argument("--directory", default=".", help="a directory on the disk (default: the current one)")
    parser.add_argument(
        "--share", type=float, default=0.9, help="share of the tenth for rows; the rest caches pages"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    summary = measure(arguments)
    if arguments.json:
        print(json.dumps(summary))
    else:
        show(summary)


if __name__ == "__main__":
    main()
