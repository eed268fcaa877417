"""Benchmarks how fast one core reads and updates rows of a table, and the memory of the rows.

``python -m benchmarks.sparse_rows`` measures, in one thread, batches of distinct random rows of a table in
which every row was updated. Each round includes every measurement once, and ratios are computed within a
round: look-ups relative to numpy's reads of the same rows (``take`` on a matrix of the rows), and updates
relative to numpy's reading, adding and writing back of rows and slots (``take``, ``+=``, assignment by
index). This is done with bounded, dense ids, such as hash buckets, and with arbitrary 64-bit ids.

The second part measures a server's share of a small and a large step: 25 and 20,000 existing rows of 16
numbers are looked up and updated by plain SGD through `TableStore`, as on a server in sync mode, which keeps
the previous rows.

The last part runs in a separate process: it updates some rows of a table of 10^9 rows with Adagrad, and
measures the time until the first update is complete and the memory per updated row.
"""

import argparse
import ctypes
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fleet.parameter_server.store import FailedStep
from fleet.parameter_server.table_store import RowUpdate, TableStore
from fleet.plan.tables import TablePlan
from fleet.tables import Constant, RowGradients, Table, TableConfig
from fleet.tables.rules import SGD, Adagrad, Adam, RowRule

__all__ = ["main"]

RULES: Final[Mapping[str, Callable[[], RowRule]]] = {"sgd": SGD, "adagrad": Adagrad, "adam": Adam}
LOOK_UP_GOAL: Final = 0.5
UPDATE_GOAL: Final = 0.5
MEMORY_GOAL: Final = 1.3
START_GOAL_SECONDS: Final = 2.0
BATCHES: Final = 20
"""The batches in a turn, each of different rows, so that the rows are not in the CPU caches."""
ADDED_AT_ONCE: Final = 50_000
SMALL_BATCHES: Final = (25, 20_000)
SMALL_DIMENSION: Final = 16
LARGE_IDS: Final = 10**9
LARGE_DIMENSION: Final = 16

Ids = NDArray[np.int64]


class Measured:
    """Times batches of operations on a table, and on matrices with the same rows.

    Parameters
    ----------
    rule : RowRule
    num_rows, dimension, batch : int
    bounded : bool
        True for consecutive ids from 0; False for arbitrary 64-bit ids.
    """

    def __init__(self, rule: RowRule, num_rows: int, dimension: int, batch: int, bounded: bool) -> None:
        self._random = np.random.default_rng(0)
        ids = self._random.permutation(num_rows)
        if not bounded:
            ids = np.unique(self._random.integers(-(2**63), 2**63 - 1, num_rows))
            self._random.shuffle(ids)
        limit = num_rows if bounded else None
        self._table = Table(TableConfig("measured", dimension, rule, limit, Constant(0.0)))
        for begin in range(0, ids.size, ADDED_AT_ONCE):
            part = ids[begin : begin + ADDED_AT_ONCE]
            self._table.update(part, torch.ones(part.size, dimension), 1)
        slots = sum(dimension if slot.per_element else 1 for slot in rule.slots)
        self._rows = np.ones((ids.size, dimension), dtype=np.float32)
        self._rows_and_slots = np.ones((ids.size, dimension + slots), dtype=np.float32)
        self._ids, self._batch = ids, batch
        self._gradient = torch.randn(batch, dimension)
        self._step = 1

    def turn(self) -> dict[str, float]:
        """Time each operation in turn; return the seconds per batch, by operation."""
        at = [self._random.choice(self._ids.size, self._batch, replace=False) for _ in range(BATCHES)]
        ids = [self._ids[each] for each in at]
        gradients = [self._gradient.clone() for _ in range(BATCHES)]
        return {
            "read": _seconds(lambda turn: self._rows.take(at[turn], axis=0)),
            "look_up": _seconds(lambda turn: self._table.look_up(ids[turn])),
            "write": _seconds(lambda turn: self._add(at[turn])),
            "update": _seconds(lambda turn: self._update(ids[turn], gradients[turn])),
        }

    def _add(self, at: Ids) -> None:
        rows = self._rows_and_slots.take(at, axis=0)
        rows += 1.0
        self._rows_and_slots[at] = rows

    def _update(self, ids: Ids, gradient: torch.Tensor) -> None:
        self._step += 1
        self._table.update(ids, gradient, self._step)


def _seconds(work: Callable[[int], object]) -> float:
    """Return the median processor time of a batch."""
    took = []
    for turn in range(BATCHES):
        begun = time.thread_time()
        work(turn)
        took.append(time.thread_time() - begun)
    return float(np.median(took))


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure look-ups and updates; return one row of results for each kind of ids."""
    shape = (arguments.rows, arguments.dimension, arguments.batch)
    kinds = {"bounded ids": True, "any 64-bit id": False}
    measured = {kind: Measured(RULES[arguments.rule](), *shape, bounded) for kind, bounded in kinds.items()}
    for each in measured.values():
        each.turn()
    turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(arguments.rounds):
        for kind, each in measured.items():
            turns[kind].append(each.turn())
    return [{"ids": kind, **_summary(found, arguments.batch)} for kind, found in turns.items()]


def _summary(turns: list[dict[str, float]], batch: int) -> dict[str, Any]:
    return {
        "rows_per_second": {
            name: batch / float(np.median([turn[name] for turn in turns])) for name in turns[0]
        },
        "look_up_to_read": _spread([turn["read"] / turn["look_up"] for turn in turns]),
        "update_to_write": _spread([turn["write"] / turn["update"] for turn in turns]),
    }


def _spread(ratios: list[float]) -> list[float]:
    """Return the median, the 10th percentile and the 90th percentile."""
    return [float(each) for each in np.percentile(ratios, [50, 10, 90])]


def small(num_rows: int, rounds: int) -> list[dict[str, Any]]:
    """Measure look-ups and updates of a `TableStore`; return one row of results for each number of ids."""
    config = TableConfig("measured", SMALL_DIMENSION, SGD(), None, Constant(0.0))
    store = TableStore([TablePlan(0, config, group=0)], FailedStep("this process"))
    random, hyper_parameters = np.random.default_rng(0), (dict(SGD().defaults()),)
    known = np.unique(random.integers(-(2**63), 2**63 - 1, num_rows))
    for begin in range(0, known.size, ADDED_AT_ONCE):
        part = known[begin : begin + ADDED_AT_ONCE]
        ones = torch.ones(part.size, SMALL_DIMENSION)
        store.apply(RowUpdate(0, RowGradients(part, ones), hyper_parameters, ()))
    found = []
    for count in (each for each in SMALL_BATCHES if each <= known.size):
        batches = [np.sort(random.choice(known, count, replace=False)) for _ in range(BATCHES)]
        gradients = torch.randn(count, SMALL_DIMENSION)
        updates = [
            RowUpdate(0, RowGradients(ids, gradients), hyper_parameters, (), keeps=True) for ids in batches
        ]
        turns = [_store_seconds(store, updates) for _ in range(rounds)]
        found.append(
            {
                "rows": count,
                "microseconds": {
                    name: 1e6 * float(np.median([turn[name] for turn in turns])) for name in turns[0]
                },
            }
        )
    return found


def _store_seconds(store: TableStore, updates: Sequence[RowUpdate]) -> dict[str, float]:
    return {
        "look_up": _seconds(lambda turn: store.rows(0, updates[turn].gradient.ids)),
        "step": _seconds(lambda turn: store.apply(updates[turn])),
    }


def large(touched: int) -> dict[str, Any]:
    """Update some rows of a table of 10^9 rows; return the seconds and the bytes used."""
    random = np.random.default_rng(0)
    # The update of another table first loads torch's lazy modules.
    Table(TableConfig("small", 1, Adagrad())).update(np.arange(9), torch.ones(9, 1), 1)
    begun_bytes, begun = _resident(), time.perf_counter()
    table = Table(TableConfig("large", LARGE_DIMENSION, Adagrad(), LARGE_IDS, Constant(0.0)))
    table.update(np.arange(1), torch.ones(1, LARGE_DIMENSION), 1)
    start_seconds = time.perf_counter() - begun
    step = 1
    while len(table) < touched:
        step += 1
        ids = np.unique(random.integers(0, LARGE_IDS, min(ADDED_AT_ONCE, touched - len(table))))
        table.update(ids, torch.ones(ids.size, LARGE_DIMENSION), step)
    least = 2 * 4 * LARGE_DIMENSION + 16
    resident = _resident() - begun_bytes
    return {
        "touched": len(table),
        "start_seconds": start_seconds,
        "seconds": time.perf_counter() - begun,
        "bytes_a_row": table.nbytes / len(table),
        "resident_bytes_a_row": resident / len(table),
        "memory_ratio": resident / len(table) / least,
    }


def _resident() -> int:
    """Return this process's memory in bytes, without freed memory that the allocator keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _in_a_process_of_its_own(touched: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.sparse_rows", "--large-only", "--touched", str(touched)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def show(summary: Mapping[str, Any]) -> None:
    """Print the summary as tables."""
    print(f"{'rows a second, millions':<20}{'read':>10}{'look up':>10}{'add':>10}{'update':>10}")
    for row in summary["speed"]:
        rates = "".join(f"{rate / 1e6:>10.1f}" for rate in row["rows_per_second"].values())
        print(f"{row['ids']:<20}{rates}")
    print(f"\n{'ratio within a round':<20}{'look-ups to reads':>24}{'updates to additions':>24}")
    for row in summary["speed"]:
        ratios = [row["look_up_to_read"], row["update_to_write"]]
        print(f"{row['ids']:<20}" + "".join(f"{f'{m:.2f} [{a:.2f}-{b:.2f}]':>24}" for m, a, b in ratios))
    print(f"{'goal':<20}{f'{LOOK_UP_GOAL}':>24}{f'{UPDATE_GOAL}':>24}")
    print(f"\n{f'rows of {SMALL_DIMENSION}, SGD':<20}{'look up, us':>14}{'step, us':>14}")
    for row in summary["small"]:
        taken = row["microseconds"]
        print(f"{row['rows']:<20}{taken['look_up']:>14.1f}{taken['step']:>14.1f}")
    found = summary["large"]
    print(
        f"\n{LARGE_IDS} x {LARGE_DIMENSION}, Adagrad, {found['touched']} rows updated: first update after "
        f"{found['start_seconds']:.3f} s (goal {START_GOAL_SECONDS:g}); {found['resident_bytes_a_row']:.0f} "
        f"resident bytes a row, {found['memory_ratio']:.2f} x (row + slots + 16) (goal {MEMORY_GOAL})"
    )


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_rows", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=10)
    parser.add_argument("--batch", type=int, default=26_000)
    parser.add_argument("--rule", choices=RULES, default="adagrad")
    parser.add_argument("--touched", type=int, default=1_000_000, help="rows updated of a table of 10^9")
    parser.add_argument("--large-only", action="store_true", help="only that table, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.large_only:
        print(json.dumps(large(arguments.touched)))
        return
    summary = {
        "benchmark": "sparse_rows",
        "speed": speed(arguments),
        "small": small(arguments.rows, arguments.rounds),
        "large": _in_a_process_of_its_own(arguments.touched),
    }
    if arguments.json:
        print(json.dumps(summary))
    else:
        show(summary)


if __name__ == "__main__":
    main()
